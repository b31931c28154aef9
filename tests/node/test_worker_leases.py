"""Leases: what of an offered one the worker believes, and how many it asks for."""

from __future__ import annotations

import asyncio
import json

import pytest
from tests.node.memory_coordinator import MemoryCoordinator
from tests.node.worker_world import COORDINATOR, STRANGER, WORKER, JumpClock, make_run

from prime_node.worker.leases import Pace, open_lease
from prime_protocol.envelope import Envelope, PayloadType, seal
from prime_protocol.errors import ErrorCode, LimitExceeded, PeerError
from prime_protocol.messages import LeaseRequest
from prime_protocol.run_spec import PinnedRun

RUN = make_run()


def offer(**changes: object) -> tuple[Envelope, LeaseRequest, PinnedRun]:
    """A lease as the coordinator gives it, with some fields changed before it was signed."""
    asked = LeaseRequest(policy_version=0, policy_digest="0" * 64, rollouts_max=8)
    signer = changes.pop("signer", COORDINATOR)
    coordinator = MemoryCoordinator(RUN, JumpClock())
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
    with pytest.raises(PeerError) as caught:
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
    with pytest.raises(PeerError, match="vocabulary"):
        open_lease(envelope, asked, run=pinned, worker=WORKER.key_id)


def test_a_machine_that_was_held_up_once_does_not_refuse_work_for_ever() -> None:
    pace = Pace()
    pace.measured(rollouts=8, tokens=64, seconds=1e6)
    refusals = 0
    while not pace.fits(8, seconds_left=100.0):
        pace.doubt()
        refusals += 1
        assert refusals < 20


def test_a_slow_machine_asks_for_what_it_can_finish() -> None:
    pinned, pace = make_run(lease_seconds=100.0), Pace()
    assert pace.rollouts_max(pinned, wanted=128) == 128
    pace.measured(rollouts=128, tokens=1_280, seconds=256.0)
    assert pace.rollouts_max(pinned, wanted=128) == 20
    assert not pace.fits(128, seconds_left=100.0)
    assert pace.fits(20, seconds_left=100.0)
    pace.measured(rollouts=1, tokens=1, seconds=10_000.0)
    assert pace.rollouts_max(pinned, wanted=128) == pinned.spec.rollouts_per_group
