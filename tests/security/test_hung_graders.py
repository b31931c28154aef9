"""A bundle whose answers hang or slow an environment costs a validator minutes, however many failures the run tolerates."""

from __future__ import annotations

import asyncio

import pytest
from tests.node.validator_world import (
    LengthEnvironment,
    LetterTokenizer,
    MemoryCheckQueue,
    TableScorer,
    generate,
    make_bundle,
    make_lease,
    make_validator,
)
from tests.node.worker_world import make_run

from prime_node.ports.environment import EnvironmentGone, EnvironmentSilent
from prime_node.validator.loop import LATE_S_MAX, run_validator
from prime_node.validator.scoring import HANGS_MAX, score_rollouts
from prime_protocol.schedule import Schedule

TOLERANT = make_run(rollouts_per_group=16, schedule=Schedule(group_rollouts_min=2))


class Hanging(LengthEnvironment):
    """Environment that fails in a given way on the first `count` answers."""

    def __init__(self, count: int, error: Exception) -> None:
        self._left, self._error, self.calls = count, error, 0

    def score(self, index: int, completion: str, *, finished: bool) -> float:
        self.calls += 1
        if self._left:
            self._left -= 1
            raise self._error
        return super().score(index, completion, finished=finished)


@pytest.mark.parametrize("error", [EnvironmentSilent("it hangs"), EnvironmentGone("it was ended")])
async def test_a_bundle_costs_a_few_time_limits_though_the_run_tolerates_failures(error: Exception) -> None:
    lease, world = make_lease(), Hanging(28, error)
    scored = await score_rollouts(lease, await generate(lease), {"toy": world}, LetterTokenizer(), spec=TOLERANT.spec)
    assert not scored.enough
    assert world.calls == HANGS_MAX


@pytest.mark.parametrize(("count", "error"), [(HANGS_MAX - 1, EnvironmentSilent("it hangs")), (14, ValueError("odd"))])
async def test_failures_that_the_run_tolerates_lose_no_bundle(count: int, error: Exception) -> None:
    lease, world = make_lease(), Hanging(count, error)
    scored = await score_rollouts(lease, await generate(lease), {"toy": world}, LetterTokenizer(), spec=TOLERANT.spec)
    assert scored.enough
    assert len(scored.unscored) == count


@pytest.mark.parametrize(("is_lost", "late_s", "is_judged"), [
    (True, LATE_S_MAX + 60, False), (True, 0, True), (False, LATE_S_MAX + 60, True),
])  # fmt: skip
async def test_scoring_ends_when_the_bundle_has_long_been_given_away(
    is_lost: bool, late_s: float, is_judged: bool
) -> None:
    stop, lease = asyncio.Event(), make_lease()
    queue = MemoryCheckQueue([(lease, make_bundle(lease, await generate(lease)))], stop)
    queue.deadline_ms, queue.left_ms = 0, 10**9  # it stops when it has handed out the bundle
    (bundle,) = queue.bundles
    calls = 0

    class Slow(LengthEnvironment):
        def score(self, index: int, completion: str, *, finished: bool) -> float:
            nonlocal calls
            calls += 1
            if calls == 2:
                validator.deadlines_ms[bundle] = validator.clock.now_ms() - int(late_s * 1_000)
                validator.lost |= {bundle} if is_lost else set()
            return super().score(index, completion, finished=finished)

    validator = make_validator(queue, TableScorer(), environment=Slow)
    await run_validator(validator, stop)
    assert (bundle in queue.results) is is_judged
    assert (calls == 32) is is_judged
    assert not validator.lost
