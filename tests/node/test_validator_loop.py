"""The validator's loop: one forward pass after another, rewards at the same time, and no failure that stops it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from tests.node.table_engine import table_weights
from tests.node.validator_world import (
    OTHER_POLICY,
    LengthEnvironment,
    MemoryCheckQueue,
    TableScorer,
    generate,
    make_bundle,
    make_lease,
    make_validator,
)

from prime_node.cli.lifetime import FINAL_CODES
from prime_node.cli.outcome import outcome_of
from prime_node.patience import causes_of
from prime_node.ports.engine import EngineDied, EngineMismatch, ScoreRequest, require_finite
from prime_node.ports.environment import Environment
from prime_node.ports.transport import Unreachable
from prime_node.validator.config import ValidatorConfig
from prime_node.validator.loop import run_validator
from prime_node.validator.scoring_workers import ScoringWorkers
from prime_protocol.assignment import Lease, Problem, Sampling
from prime_protocol.errors import ErrorCode, LocalError, RemoteError
from prime_protocol.verdict import RejectReason
from prime_protocol.verify import Prefill
from prime_protocol.weights import Weights


async def make_queue(
    stop: asyncio.Event, versions: Sequence[int], *, first_problem: int | None = None
) -> MemoryCheckQueue:
    leases = [make_lease(version) for version in versions]
    if first_problem is not None:
        leases[0] = moved(leases[0], first_problem)
    return MemoryCheckQueue(
        [(lease, make_bundle(lease, await generate(lease, table_weights(v)), created_at_ms=number))
         for number, (lease, v) in enumerate(zip(leases, versions, strict=True))],
        stop,
    )  # fmt: skip


async def test_each_bundle_is_judged_by_its_own_policy_and_a_policy_is_loaded_once_in_a_row(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    stop, scorer = asyncio.Event(), TableScorer()
    queue = await make_queue(stop, [0, 0, 1, 1, 0])
    validator = make_validator(queue, scorer)
    await run_validator(validator, stop)
    assert all(result.verdict.accepted for result in queue.results.values())
    assert len(queue.results) == 5
    assert scorer.loaded == [0, 1, 0]
    assert [line for line in caplog.messages if "judged" in line] == ["bundles judged: 1 accepted"], "one a while"


async def test_an_absent_or_confused_coordinator_costs_time_only() -> None:
    stop = asyncio.Event()
    queue = await make_queue(stop, [0, 0])
    queue.failures = [Unreachable("refused"), RemoteError(ErrorCode.UNAVAILABLE, "starting"), Unreachable("cut")]
    await run_validator(make_validator(queue, TableScorer()), stop)
    assert len(queue.results) == 2


async def test_without_proofs_samples_of_another_policy_pass_and_no_policy_is_loaded() -> None:
    stop, scorer = asyncio.Event(), TableScorer()
    lease = make_lease()
    forged = make_bundle(lease, await generate(lease, OTHER_POLICY))
    queue = MemoryCheckQueue([(lease, forged)], stop)
    validator = make_validator(queue, scorer)
    validator.config = ValidatorConfig(unsafe_skip_proofs=True)
    await run_validator(validator, stop)
    (result,) = queue.results.values()
    assert result.verdict.accepted
    assert len(result.rewards) == lease.num_rollouts
    assert scorer.loaded == []


async def test_without_proofs_what_the_lease_alone_decides_is_still_refused() -> None:
    stop = asyncio.Event()
    lease = make_lease()
    rollouts = await generate(lease)
    queue = MemoryCheckQueue([(lease, make_bundle(lease, replace(rollouts, seeds_N=rollouts.seeds_N + 1)))], stop)
    validator = make_validator(queue, TableScorer())
    validator.config = ValidatorConfig(unsafe_skip_proofs=True)
    await run_validator(validator, stop)
    (result,) = queue.results.values()
    assert result.verdict.reason is RejectReason.WRONG_ASSIGNMENT


async def test_a_task_whose_deadline_has_passed_is_left_to_the_next_validator() -> None:
    stop = asyncio.Event()
    queue = await make_queue(stop, [0])
    queue.deadline_ms = 0
    await run_validator(make_validator(queue, TableScorer()), stop)
    assert queue.results == {}


async def test_a_validator_whose_clock_is_fast_judges_in_the_time_that_is_left() -> None:
    stop = asyncio.Event()
    queue = await make_queue(stop, [0])
    queue.deadline_ms, queue.left_ms = 0, 30_000
    await run_validator(make_validator(queue, TableScorer()), stop)
    assert [result.verdict.accepted for result in queue.results.values()] == [True]


async def test_a_validator_names_the_bundles_that_it_has_until_their_verdicts() -> None:
    stop = asyncio.Event()
    queue = await make_queue(stop, [0, 0])
    validator = make_validator(queue, TableScorer())
    policy = validator.policy

    async def slow(version: int) -> Weights:
        await validator.clock.sleep(60.0)
        return await policy(version)

    validator.policy = slow
    bundles = {bundle for _, bundle in queue.tasks}
    await run_validator(validator, stop)
    assert len(queue.named) >= 12
    assert set().union(*queue.named) == bundles
    assert validator.deadlines_ms == {}


async def test_a_bundle_that_another_validator_has_is_not_judged() -> None:
    stop = asyncio.Event()
    queue = await make_queue(stop, [0, 0])
    validator = make_validator(queue, TableScorer())
    policy, lost = validator.policy, queue.tasks[1][1]
    queue.lost = {lost}

    async def slow(version: int) -> Weights:
        await validator.clock.sleep(60.0)
        stop.set()
        return await policy(version)

    validator.policy = slow
    await run_validator(validator, stop)
    assert lost not in queue.results
    assert len(queue.results) == 1
    assert validator.lost == set()


async def test_a_bundle_that_was_lost_and_is_handed_out_here_again_is_judged() -> None:
    """A coordinator that restarts hands out all bundles again."""
    stop = asyncio.Event()
    queue = await make_queue(stop, [0, 0])
    validator = make_validator(queue, TableScorer())
    policy, again = validator.policy, queue.tasks[1]
    queue.lost = {again[1]}

    async def slow(version: int) -> Weights:
        await validator.clock.sleep(30.0)
        if queue.lost:
            assert validator.lost == queue.lost
            queue.lost = set()
            queue.tasks.append(again)
        await validator.clock.sleep(30.0)
        return await policy(version)

    validator.policy = slow
    await run_validator(validator, stop)
    assert again[1] in queue.results
    assert len(queue.results) == 2


class StubbornEnvironment(LengthEnvironment):
    """Environment whose grader hangs on some problems until the test releases it."""

    def __init__(self, hangs_on: int, let_go: threading.Event) -> None:
        self._hangs_on, self._let_go = hangs_on, let_go
        self.calls = 0

    def score(self, index: int, completion: str, *, finished: bool) -> float:
        self.calls += 1
        if index == self._hangs_on and not self._let_go.wait(30):
            raise TimeoutError
        return super().score(index, completion, finished=finished)


async def test_a_grader_that_hangs_holds_up_neither_forward_passes_nor_other_verdicts() -> None:
    stop, let_go = asyncio.Event(), threading.Event()
    queue = await make_queue(stop, [0, 0], first_problem=7)
    hanging, *others = queue.tasks
    queue.on_result = lambda result: let_go.set()  # the second one's verdict is what ends the first one's hanging
    validator = make_validator(queue, TableScorer(), environment=lambda: StubbornEnvironment(7, let_go))
    await run_validator(validator, stop)
    first, second = queue.results
    assert (first, second) == (others[0][1], hanging[1])
    assert all(result.verdict.accepted for result in queue.results.values())
    assert [result.evidence for result in queue.results.values()] == [None, None]


async def test_a_bundle_that_is_handed_out_again_while_its_grader_hangs_takes_no_second_lane() -> None:
    stop, let_go = asyncio.Event(), threading.Event()
    queue = await make_queue(stop, [0, 0], first_problem=7)
    (lease, bundle), *others = queue.tasks
    queue.tasks[:] = [(lease, bundle), (lease, bundle), *others]
    queue.on_result = lambda result: let_go.set()
    await run_validator(make_validator(queue, TableScorer(), environment=lambda: StubbornEnvironment(7, let_go)), stop)
    assert list(queue.results) == [others[0][1], bundle]
    assert all(result.verdict.accepted for result in queue.results.values())


async def test_where_no_second_set_of_environments_can_be_started_the_first_does_all_the_work() -> None:
    stop, made = asyncio.Event(), list[StubbornEnvironment]()
    queue = await make_queue(stop, [0, 0, 0])
    let_go = threading.Event()

    def make() -> dict[str, Environment]:
        if made:
            let_go.set()
            raise LocalError("the environments did not start within 120 s")
        made.append(StubbornEnvironment(queue.tasks[0][0].groups[0].problem.index, let_go))
        return {"toy": made[0]}

    validator = make_validator(queue, TableScorer())
    validator.scoring_workers = ScoringWorkers(make, workers_max=3)
    await run_validator(validator, stop)
    assert len(queue.results) == 3
    assert all(result.verdict.accepted for result in queue.results.values())


def moved(lease: Lease, index: int) -> Lease:
    """The same lease about another problem."""
    changes = {"problem": Problem(environment="toy", index=index), "prompt_token_ids": (index,)}
    return lease.model_copy(update={"groups": tuple(g.model_copy(update=changes) for g in lease.groups)})


class ForgetfulScorer(TableScorer):
    """Scorer whose first loads do nothing."""

    def __init__(self, failures: int) -> None:
        super().__init__()
        self._failures = failures

    async def load(self, weights: Weights, *, policy_version: int) -> None:
        if self._failures:
            self._failures -= 1
            raise EngineMismatch("the weights did not arrive")
        await super().load(weights, policy_version=policy_version)


async def test_a_scorer_that_does_not_take_a_policy_is_loaded_again() -> None:
    stop, scorer = asyncio.Event(), ForgetfulScorer(1)
    queue = await make_queue(stop, [0, 0])
    await run_validator(make_validator(queue, scorer), stop)
    assert all(result.verdict.accepted for result in queue.results.values())
    assert scorer.loaded == [0]


async def test_a_scorer_that_never_computes_a_policy_judges_no_bundle_and_is_reported() -> None:
    stop = asyncio.Event()
    queue = await make_queue(stop, [0])
    validator = make_validator(queue, ForgetfulScorer(99))
    with pytest.raises(ExceptionGroup) as raised:
        await run_validator(validator, stop)
    (fault,) = causes_of(raised.value)
    assert isinstance(fault, LocalError)
    assert "computes policy 0 wrongly" in str(fault)
    assert queue.results == {}
    assert validator.held.version == -1


class DyingScorer(TableScorer):
    """Scorer whose processes end during its first forward passes."""

    def __init__(self, deaths: int) -> None:
        super().__init__()
        self._deaths = deaths

    async def prefill(self, requests: Sequence[ScoreRequest], sampling: Sampling) -> Prefill:
        if self._deaths:
            self._deaths -= 1
            raise EngineDied("its processes ended")
        return await super().prefill(requests, sampling)


async def test_a_bundle_during_which_the_scorer_dies_is_left_to_others_and_the_validator_judges_the_next() -> None:
    stop, scorer = asyncio.Event(), DyingScorer(1)
    queue = await make_queue(stop, [0, 0])
    queue.on_result = lambda _: stop.set()
    validator = make_validator(queue, scorer)
    await run_validator(validator, stop)
    (result,) = queue.results.values()
    assert result.verdict.accepted
    assert scorer.loaded == [0, 0], "a load starts its processes again"
    assert not validator.deadlines_ms, "the coordinator is no longer told that the bundle is here"


class FaultyScorer(TableScorer):
    """Scorer whose first forward passes hold a value that is not finite, as with faulty memory."""

    def __init__(self, name: str, value: float, faults: int) -> None:
        super().__init__()
        self._name, self._value, self._faults = name, value, faults

    async def prefill(self, requests: Sequence[ScoreRequest], sampling: Sampling) -> Prefill:
        found = await super().prefill(requests, sampling)
        if self._faults:
            self._faults -= 1
            found.arrays()[self._name][3] = self._value
        return found


@pytest.mark.parametrize("name", ["logprobs_T", "margins_T"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
async def test_a_validator_whose_own_numbers_are_not_finite_blames_no_worker(name: str, value: float) -> None:
    stop = asyncio.Event()
    queue = await make_queue(stop, [0, 0])
    validator = make_validator(queue, FaultyScorer(name, value, 99))
    with pytest.raises(ExceptionGroup) as raised:
        await run_validator(validator, stop)
    (fault,) = causes_of(raised.value)
    assert "test the machine's memory" in str(fault)
    assert queue.results == {}
    code, _ = outcome_of(raised.value) or (0, "")
    assert code not in FINAL_CODES, "a service ended for ever, since a new process may find the machine in order"


async def test_a_passing_fault_of_the_scorer_costs_a_second_forward_pass() -> None:
    stop, scorer = asyncio.Event(), FaultyScorer("logprobs_T", np.nan, 1)
    queue = await make_queue(stop, [0])
    await run_validator(make_validator(queue, scorer), stop)
    assert [result.verdict.accepted for result in queue.results.values()] == [True]
    assert scorer.loaded == [0, 0], "the policy is loaded again before the second pass"


async def test_hidden_states_that_are_not_finite_are_the_machine_s_fault() -> None:
    bits = np.array([[0x3F80, 0x7F7F], [0x3F80, 0x0000]], np.uint16)
    sound = Prefill(np.zeros(2, np.float32), np.zeros(2, np.float32), hidden_TD=bits)
    assert require_finite(sound) is sound
    for faulty in (0x7F80, 0xFF80, 0x7FC0):
        with pytest.raises(EngineMismatch, match="hidden_TD"):
            require_finite(replace(sound, hidden_TD=np.where(bits == 0x7F7F, np.uint16(faulty), bits)))
