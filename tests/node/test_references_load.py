"""Comparing unseeded rewards must not delay other bundles' verdicts too long, however slowly a validator samples."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tests.node.references_world import RUN, sampled
from tests.node.table_engine import STOP_TOKEN, table_weights
from tests.node.validator_world import TableScorer, generate, make_bundle, make_lease, make_validator
from tests.time_world import VirtualClock

from prime_node.coordinator.check_queue import CheckQueue
from prime_node.ports.engine import GenerateRequest, ScoreRequest
from prime_node.validator import references
from prime_node.validator.loop import run_validator as run_validator
from prime_node.validator.references import ReferencePace, choose_groups, sample_references
from prime_protocol.assignment import Lease, Sampling
from prime_protocol.digest import digest_of
from prime_protocol.replies import CheckTask, HoldingReply, NotYet
from prime_protocol.requests import BundleRequest, CheckRequest, CheckResultRequest, HoldingRequest
from prime_protocol.rollout import Completion, FinishReason
from prime_protocol.verify import Prefill

FORWARD_PASS_S = 0.5


class SlowScorer(TableScorer):
    """Scorer that needs this long to sample as many completions as a bundle has, to the last token."""

    def __init__(self, clock: VirtualClock, bundle_s: float) -> None:
        super().__init__()
        self._clock, self._bundle_s = clock, bundle_s
        self.seeds: Counter[int] = Counter()

    async def generate(self, requests: Sequence[GenerateRequest], sampling: Sampling) -> list[Completion]:
        lease = make_lease()
        if not {one.seed for one in requests} <= {seed for group in lease.groups for seed in group.seeds}:
            self.seeds.update(one.seed for one in requests)  # of references, not of measuring the pace
        share = (
            len(requests) * sampling.completion_tokens_max / lease.num_rollouts / lease.sampling.completion_tokens_max
        )
        await self._clock.sleep(self._bundle_s * share)
        return await super().generate(requests, sampling)

    async def prefill(self, requests: Sequence[ScoreRequest], sampling: Sampling) -> Prefill:
        await self._clock.sleep(FORWARD_PASS_S)
        return await super().prefill(requests, sampling)


class QueuePort:
    """Fake of ports.transport.ValidatorPort over the coordinator's own queue."""

    def __init__(self, parcels: Sequence[bytes], clock: VirtualClock, check_s: float) -> None:
        self.stop = asyncio.Event()
        self.results: dict[str, CheckResultRequest | None] = {}
        self._clock, self._queue = clock, CheckQueue(check_s, attempts_max=3)
        self._parcels = {digest_of(parcel): parcel for parcel in parcels}
        for bundle in self._parcels:
            self._queue.add(bundle, 0)

    async def check(self, request: CheckRequest) -> CheckTask | NotYet:
        for overdue in self._queue.overdue(self._clock.monotonic_s()):
            self._settle(overdue, None)
        bundle = self._queue.take(request.policy_versions, self._clock.monotonic_s())
        if bundle is None:
            return NotYet(reason="nothing to check", retry_after_s=0.5)
        left_ms = round(self._queue.check_s * 1_000)
        return CheckTask(bundle=bundle, lease=make_lease(), deadline_ms=0, left_ms=left_ms)

    async def holding(self, request: HoldingRequest) -> HoldingReply:
        return HoldingReply()

    async def bundle(self, request: BundleRequest) -> bytes:
        return self._parcels[request.bundle]

    async def put_logprobs(self, bundle: str, logprobs_T: npt.NDArray[np.float32]) -> str:
        raise AssertionError("this run's trainer uses the claimed logprobs")

    async def check_result(self, request: CheckResultRequest) -> None:
        self._settle(request.bundle, request)

    def _settle(self, bundle: str, result: CheckResultRequest | None) -> None:
        self.results.setdefault(bundle, result)
        self._queue.settled([bundle])
        if len(self.results) == len(self._parcels):
            self.stop.set()


@pytest.mark.parametrize(
    ("bundle_s", "unseeded", "seeded", "check_s", "compared_min"),
    [
        (25.0, 4, 12, 30.0, 0),
        pytest.param(40.0, 15, 30, 30.0, 0, marks=pytest.mark.slow),
        pytest.param(25.0, 4, 12, 120.0, 1, marks=pytest.mark.slow),
        pytest.param(2.0, 5, 10, 30.0, 2, marks=pytest.mark.slow),
        (0.1, 5, 10, 30.0, 5),
    ],
)
async def test_however_slowly_references_are_sampled_every_honest_bundle_has_its_verdict(
    bundle_s: float, unseeded: int, seeded: int, check_s: float, compared_min: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def at_once(work: Callable[..., Any], *args: Any) -> Any:  # threads would take real time
        return work(*args)

    monkeypatch.setattr(asyncio, "to_thread", at_once)
    lease = make_lease()
    parcels = [await sampled(1, lease, created_at_ms=number) for number in range(unseeded)]
    parcels += [make_bundle(lease, await generate(lease), created_at_ms=number) for number in range(seeded)]
    random.Random(1).shuffle(parcels)
    clock = VirtualClock()
    port, scorer = QueuePort(parcels, clock, check_s), SlowScorer(clock, bundle_s)
    validator = make_validator(port, scorer)  # type: ignore[arg-type]
    validator.run, validator.comparisons.secret, validator.clock = RUN, bytes(32), clock
    await run_validator(validator, port.stop)
    verdicts = [result for result in port.results.values() if result is not None]
    assert len(verdicts) == unseeded + seeded, "one that was given up is unverifiable"
    assert all(result.verdict.accepted for result in verdicts)
    assert set(scorer.seeds.values()) <= {1}, "no reference is sampled twice"
    assert sum(bool(result.evidence and result.evidence.sums) for result in verdicts) >= compared_min
    assert validator.deadlines_ms == {}
    assert validator.comparisons.pace.backlog_s == pytest.approx(0.0)


async def test_references_that_are_sampled_in_pieces_are_whole_completions_of_the_policy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(references, "TURN_TOKENS", 3)
    lease, scorer = make_lease(), TableScorer()
    await scorer.load(table_weights(0), policy_version=0)
    chosen = choose_groups(lease, spec=RUN.spec, bundle="5", secret=bytes(32))
    found = await sample_references(chosen, lease.sampling, scorer.generate)
    assert set(found) == {0, 1}
    lengths = Counter[int]()
    for index, completions in found.items():
        prompt = lease.groups[index].prompt_token_ids
        for one in completions:
            lengths[len(one.token_ids)] += 1
            judged = await scorer.prefill([ScoreRequest(prompt, one.token_ids, None)], lease.sampling)
            np.testing.assert_allclose(judged.logprobs_T, one.logprobs, atol=1e-5)
            assert STOP_TOKEN not in one.token_ids[:-1]
            assert (one.finish is FinishReason.STOP) == (one.token_ids[-1] == STOP_TOKEN)
            assert one.finish is FinishReason.STOP or len(one.token_ids) == lease.sampling.completion_tokens_max
    assert min(lengths) <= 3 < max(lengths), "some end in the first piece, some go on"


async def test_the_pace_is_measured_by_tokens_whose_number_no_text_changes() -> None:
    class Counting(TableScorer):
        async def generate(self, requests: Sequence[GenerateRequest], sampling: Sampling) -> list[Completion]:
            found = await super().generate(requests, sampling)
            self.lengths = {len(one.token_ids) for one in found}
            await clock.sleep(2.0)
            return found

    clock, lease, pace, engine = VirtualClock(), long_lease(128), ReferencePace(), Counting()
    began_s = clock.seconds
    await engine.load(table_weights(0), policy_version=0)
    await pace.measure(lease, engine, clock)
    assert (engine.lengths, pace.step_s, clock.seconds - began_s) == ({8}, 0.25, 2.0)
    await pace.measure(lease, engine, clock)
    assert clock.seconds - began_s == 2.0, "it is known for a while"


def test_as_many_groups_are_compared_as_fit_before_the_deadline_after_those_before_them() -> None:
    chosen = {index: [GenerateRequest((1,), index)] for index in (3, 1, 2)}
    pace = ReferencePace(step_s=0.01)  # 3 s a group of 100 tokens, with the work between them

    def planned(left_s: float) -> list[int]:
        found = pace.planned(chosen, tokens_max=100, left_s=left_s, turns_max=4)
        return [] if found is None else list(found.chosen)

    assert [planned(left_s) for left_s in (5.2, 6.1, 9.1, 60.0)] == [[3], [3, 1], [3, 1, 2], [3, 1, 2]]
    pace.backlog_s = 4.0
    assert [planned(left_s) for left_s in (6.1, 9.1, 13.1)] == [[], [3], [3, 1, 2]]
    pace.backlog_s = 0.0
    assert planned(5.0) == [], "four turns would be more than half of it"


def long_lease(tokens: int) -> Lease:
    lease = make_lease()
    return lease.model_copy(update={"sampling": lease.sampling.model_copy(update={"completion_tokens_max": tokens})})
