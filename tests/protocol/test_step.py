from __future__ import annotations

from itertools import product

from prime_protocol import step
from prime_protocol.step import Admission, StepFault


def admits(number: int, version: int, k: int) -> bool:
    """Return the rule's definition."""
    return version >= 0 and 0 <= number - version <= k


def test_a_policy_serves_its_own_step_and_the_next_k() -> None:
    for number, version, k, groups in product(range(12), range(-3, 14), range(5), (1, 4)):
        rule = Admission(groups_per_step=groups, slots_ahead=groups * (k + 1), is_in_order=True)
        assert rule.admits_step(number, version) == admits(number, version, k)


def test_the_newest_step_is_the_edge_of_the_rule() -> None:
    for number, k in product(range(12), range(5)):
        newest = step.newest_step(number, k)
        assert admits(newest, number, k)
        assert not admits(newest + 1, number, k)
        assert step.lag(newest, number) == k


def test_check_agrees_with_the_definition_on_every_small_case() -> None:
    """A rollout is admissible if the rule admits it, its policy exists, and its step is not trained yet."""
    for number, version, k, now in product(range(9), range(-2, 10), range(4), range(7)):
        fault = step.check_step(number, version, async_level=k, current_step=now)
        admissible = admits(number, version, k) and number >= now and version <= now
        assert (fault is None) == admissible, (number, version, k, now)
        if number < now or number - version > k:
            assert fault is StepFault.STALE
        elif not admissible:
            assert fault is StepFault.FUTURE


def test_a_rollout_from_a_future_step_is_refused() -> None:
    assert step.check_step(6, 4, async_level=2, current_step=4) is None
    assert step.check_step(7, 5, async_level=2, current_step=4) is StepFault.FUTURE


def test_a_policy_that_does_not_exist_yet_is_refused() -> None:
    assert step.check_step(5, 5, async_level=2, current_step=4) is StepFault.FUTURE


def test_a_rollout_for_a_trained_step_is_stale() -> None:
    assert step.check_step(3, 3, async_level=2, current_step=4) is StepFault.STALE


def test_out_of_order_a_policy_may_be_any_that_exists_and_a_step_any_that_it_may_begin() -> None:
    for number, version, now, ahead in product(range(9), range(-2, 8), range(5), (4, 6, 8, 13)):
        rule = Admission(groups_per_step=4, slots_ahead=ahead, is_in_order=False)
        admissible = 0 <= version <= now and number * 4 < version * 4 + ahead
        fault = rule.check(number, version, current_step=now)
        assert fault is (None if admissible else StepFault.FUTURE), (number, version, now, ahead)
