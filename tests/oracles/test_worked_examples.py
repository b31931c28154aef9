"""The worked examples of the frameworks' documentation."""

from __future__ import annotations

import pytest
from tests.node.coordinator_world import make_run

from prime_protocol.schedule import slots_ahead
from prime_protocol.step import Admission


def test_a_trajectory_of_version_10_may_train_steps_10_and_11_and_not_12() -> None:
    """NeMo-RL, async GRPO guide, max_trajectory_age_steps = 1."""
    rule = make_run(async_level=1, groups_per_step=1, schedule={"preset": "nemo_async"}).spec.admission
    assert [rule.admits_slot(step, 10) for step in (10, 11, 12)] == [True, True, False]
    assert [rule.check_trained(step, 10) is None for step in (10, 11, 12)] == [True, True, False]


@pytest.mark.parametrize("age", [1, 2, 4])
def test_what_is_begun_and_not_trained_fits_into_nemos_buffer(age: int) -> None:
    """NeMo-RL sizes its replay buffer for prompts per step x age x 2."""
    prompts = 8
    rule = make_run(groups_per_step=prompts, async_level=age, schedule={"staleness_threshold": age}).spec.admission
    outstanding = max(rule.slots_end(version) - version * prompts for version in range(20))
    assert outstanding == prompts * (age + 1) <= prompts * age * 2


@pytest.mark.parametrize("age", [1, 2, 3])
def test_what_nemos_code_allows_is_a_part_of_what_its_documentation_allows(age: int) -> None:
    """In its code a version other than the first does not serve its own step, so a step can stay without rollouts forever
    (NeMo-RL #3238). Here, a step's own version may serve it if it lacks rollouts."""
    rule = Admission(groups_per_step=1, slots_ahead=1 + age, is_in_order=True)
    for version in range(6):
        theirs = range(age + 1) if version == 0 else range(version + 1, version + age + 1)
        assert all(rule.admits_slot(target, version) for target in theirs)
        assert rule.admits_slot(version, version)


@pytest.mark.parametrize(
    ("eta", "sync", "require", "mini_batch", "left_over", "rollout_num"),
    [
        (0.5, 4, 1, 32, 0, 192),
        (0.5, 4, 1, 32, 40, 152),
        (0.3, 4, 4, 32, 0, 665),
        (0.1, 1, 1, 10, 0, 11),
        (1, 2, 1, 8, 3, 29),
    ],
)
def test_verls_formula_of_how_many_samples_a_policy_begins(
    eta: float, sync: int, require: int, mini_batch: int, left_over: int, rollout_num: int
) -> None:
    """rollout_num = (1 + staleness_threshold) * (K * require_batches * ppo_mini_batch_size) - num_staleness_sample."""
    size = sync * require * mini_batch
    rule = Admission(size, slots_ahead(eta, size), is_in_order=False)
    version = 7
    first = version * size + left_over  # what is left over was begun before, and is not trained
    assert sum(rule.admits_slot(slot, version) for slot in range(first, first + 3 * size)) == rollout_num


@pytest.mark.parametrize("eta", [0, 0.1, 0.25, 0.3, 0.5, 1, 1.7, 2, 3.5])
def test_the_rule_is_the_published_formula(eta: float) -> None:
    """v >= max(0, ceil((m + 1) / R - 1 - eta)), in whole numbers: tenths of a step are tenths."""
    tenths = round(eta * 20)
    for size in (1, 3, 10, 32):
        rule = Admission(size, slots_ahead(eta, size), is_in_order=False)
        for slot in range(5 * size):
            oldest = max(0, -(-(20 * (slot + 1) - 20 * size - tenths * size) // (20 * size)))
            assert [rule.admits_slot(slot, version) for version in range(-1, 8)] == [v >= oldest for v in range(-1, 8)]
