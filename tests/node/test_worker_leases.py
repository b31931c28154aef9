"""Leases: the worker's checks of an offered one, and the number that it requests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

import pytest
from tests.node.memory_coordinator import MemoryCoordinator
from tests.node.table_engine import TableEngine, table_weights
from tests.node.worker_world import COORDINATOR, STRANGER, WORKER, make_run
from tests.time_world import VirtualClock

from prime_node.ports.engine import GenerateRequest
from prime_node.worker.generating import open_lease
from prime_node.worker.pace import GenerationPace, rehearse
from prime_protocol.assignment import Sampling
from prime_protocol.envelope import Envelope, PayloadType, seal
from prime_protocol.errors import ErrorCode, LimitExceeded, RemoteError
from prime_protocol.requests import LeaseRequest
from prime_protocol.rollout import Completion
from prime_protocol.run_spec import PinnedRun
from prime_protocol.telemetry import Speed

RUN = make_run()


def offer(**changes: object) -> tuple[Envelope, LeaseRequest, PinnedRun]:
    """Return a lease as the coordinator gives it, with some fields changed before signing."""
    signer = changes.pop("signer", COORDINATOR)
    coordinator = MemoryCoordinator(RUN, VirtualClock())
    policy = coordinator.publish_policy(table_weights(0))
    asked = LeaseRequest(policy_version=0, policy_digest=policy.digest, rollouts_max=8)
    coordinator.known = True
    envelope = asyncio.run(_lease(coordinator, asked))
    fields = json.loads(envelope.payload) | changes
    return seal(json.dumps(fields).encode(), PayloadType.LEASE, signer), asked, RUN  # type: ignore[arg-type]


async def _lease(coordinator: MemoryCoordinator, asked: LeaseRequest) -> Envelope:
    reply = await coordinator.lease(asked)
    assert isinstance(reply, Envelope)
    return reply


def test_an_honest_lease_is_taken() -> None:
    envelope, asked, pinned = offer()
    assert open_lease(envelope, asked, run=pinned, worker=WORKER.key_id).num_rollouts == 8


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"signer": STRANGER}, ErrorCode.BAD_SIGNATURE),
        ({"run": "1" * 64}, ErrorCode.LEASE_FOREIGN),
        ({"worker": STRANGER.key_id}, ErrorCode.LEASE_FOREIGN),
        ({"policy_version": 1}, ErrorCode.MALFORMED),
        ({"policy_digest": "1" * 64}, ErrorCode.MALFORMED),
        ({"step": 3}, ErrorCode.MALFORMED),
        ({"sampling": {"temperature": 0.5, "completion_tokens_max": 8, "stop_token_ids": [15]}}, ErrorCode.MALFORMED),
        ({"unknown": 1}, ErrorCode.UNKNOWN_FIELD),
    ],
)
def test_a_lease_that_is_not_ours_or_not_the_runs_is_not_taken(changes: dict[str, object], code: ErrorCode) -> None:
    envelope, asked, pinned = offer(**changes)
    with pytest.raises(RemoteError) as caught:
        open_lease(envelope, asked, run=pinned, worker=WORKER.key_id)
    assert caught.value.code is code


def test_a_lease_for_more_than_we_offered_is_not_taken() -> None:
    envelope, asked, pinned = offer()
    with pytest.raises(LimitExceeded):
        open_lease(envelope, asked.model_copy(update={"rollouts_max": 7}), run=pinned, worker=WORKER.key_id)


def test_a_prompt_outside_the_vocabulary_is_not_taken() -> None:
    group = {
        "slot": 0,
        "problem": {"environment": "toy", "index": 0},
        "prompt_token_ids": [RUN.spec.vocab_size],
        "seeds": [1, 2, 3, 4],
    }
    envelope, asked, pinned = offer(groups=[group])
    with pytest.raises(RemoteError, match="vocabulary"):
        open_lease(envelope, asked, run=pinned, worker=WORKER.key_id)


def test_a_machine_that_was_delayed_once_does_not_refuse_work_forever() -> None:
    pace = GenerationPace()
    pace.measured(rollouts=8, tokens=64, seconds=1e6)
    refusals = 0
    while not pace.fits(8, seconds_left=100.0):
        pace.doubt()
        refusals += 1
        assert refusals < 20


def test_a_slow_machine_asks_for_what_it_can_finish() -> None:
    pinned, pace = make_run(lease_seconds=100.0), GenerationPace()
    assert pace.rollouts_max(pinned, wanted=128) == 128
    pace.measured(rollouts=128, tokens=1_280, seconds=256.0)
    assert pace.rollouts_max(pinned, wanted=128) == 20
    assert not pace.fits(128, seconds_left=100.0)
    assert pace.fits(20, seconds_left=100.0)
    pace.measured(rollouts=1, tokens=1, seconds=10_000.0)
    assert pace.rollouts_max(pinned, wanted=128) == pinned.spec.rollouts_per_group


@pytest.mark.parametrize("ahead", [0, 1, 2, 8])
def test_a_lease_that_waits_for_those_ahead_of_it_still_fits(ahead: int) -> None:
    pinned, pace = make_run(lease_seconds=100.0), GenerationPace()
    pace.measured(rollouts=128, tokens=1_280, seconds=12.8)
    asked = pace.rollouts_max(pinned, wanted=1_000, leases_ahead=ahead)
    assert 50 < asked <= 400
    assert pace.fits(asked, seconds_left=100.0 - ahead * asked * 0.1)


def test_the_next_lease_is_fetched_ahead_while_leases_take_less_than_fifty_round_trips() -> None:
    pace = GenerationPace()
    assert not pace.fetches_ahead
    pace.measured(rollouts=8, tokens=80, seconds=1.0)
    assert not pace.fetches_ahead, "no round trip was measured"
    for asked_s in (0.03, 10.0, 10.0):  # the coordinator held two requests open
        pace.asked(asked_s)
    assert pace.fetches_ahead
    for _ in range(9):
        pace.measured(rollouts=8, tokens=80, seconds=2.0)
    assert not pace.fetches_ahead


def test_a_rehearsal_counts_until_work_does() -> None:
    pinned, pace = make_run(lease_seconds=100.0), GenerationPace()
    assert pace.claim(download_bytes_per_s=0.0) is None
    pace.rehearsed(tokens=64, seconds=8.0, rollout_tokens=16)
    assert pace.rollouts_max(pinned, wanted=128) == 20
    assert pace.claim(download_bytes_per_s=1e6) == Speed(
        rollout_ms=2_000, tokens_per_s=8, download_bytes_per_s=1_000_000
    )
    assert pace.fits(1_000, seconds_left=1.0), "completions may be far shorter: it is tried"
    pace.measured(rollouts=10, tokens=100, seconds=1.0)
    assert pace.rollouts_max(pinned, wanted=128) == 128


async def test_a_machine_that_takes_too_long_for_a_rehearsal_is_known_to_be_at_least_so_slow() -> None:
    pinned, pace, clock = make_run(), GenerationPace(), VirtualClock()

    class Stuck(TableEngine):
        async def generate(self, requests: Sequence[GenerateRequest], sampling: Sampling) -> list[Completion]:
            await asyncio.get_running_loop().create_future()
            raise AssertionError("unreachable")

    await rehearse(Stuck(), pinned.spec, pace, clock=clock, too_long=clock.sleep(10.0))
    claim = pace.claim(download_bytes_per_s=0.0)
    assert claim is not None
    assert claim.rollout_ms == pytest.approx(1e3 * 10.0 / 16, rel=0.01)
