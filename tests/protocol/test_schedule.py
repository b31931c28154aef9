"""Schedules: presets, the names of other frameworks, and contradictory settings."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from prime_protocol.envelope import PayloadType, seal
from prime_protocol.identity import SigningKey
from prime_protocol.run_spec import RunSpec, open_run_spec
from prime_protocol.schedule import PRESETS, Schedule, Selection, StalePolicy, SwapPolicy


@pytest.fixture
def spec(sample: Any) -> RunSpec:
    spec: RunSpec = sample.run.spec
    return spec


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_its_values_and_survives_the_wire(preset: str) -> None:
    schedule = Schedule.model_validate({"preset": preset})
    for name, value in PRESETS[preset].items():
        assert getattr(schedule, name) == value
    assert Schedule.model_validate_json(schedule.model_dump_json()) == schedule


def test_a_signed_schedule_keeps_its_values_when_its_preset_changes() -> None:
    written = Schedule().model_dump() | {
        "preset": "prime_rl_lag1",
        "staleness_threshold": 1.0,
        "selection": "ready_first",
    }
    read = Schedule.model_validate(written)
    assert (read.max_run_ahead, read.oversampling_factor, read.staleness_threshold) == (None, None, 1.0)
    bounded = Schedule.model_validate({"preset": "prime_rl_lag1", "max_inflight_groups": 8})
    assert Schedule.model_validate_json(bounded.model_dump_json()) == bounded
    assert (bounded.oversampling_factor, bounded.max_run_ahead) == (None, 1)


def test_a_setting_overrides_its_preset() -> None:
    schedule = Schedule.model_validate(
        {"preset": "verl_partial", "staleness_threshold": 0.25, "partial_rollout": False}
    )
    assert (schedule.staleness_threshold, schedule.swap) == (0.25, SwapPolicy.DRAIN)
    assert schedule.selection is Selection.READY_FIRST


@pytest.mark.parametrize(
    ("settings", "name", "value"),
    [
        ({"max_trajectory_age_steps": 3}, "staleness_threshold", 3.0),
        ({"max_staleness_steps": 2}, "staleness_threshold", 2.0),
        ({"max_head_offpolicyness": 8}, "staleness_threshold", 8.0),
        ({"max_async_level": 1}, "staleness_threshold", 1.0),
        ({"generation_lead_steps": 2}, "staleness_threshold", 2.0),
        ({"max_lookahead_versions": 2}, "staleness_threshold", 2.0),
        ({"num_warmup_batches": 1}, "staleness_threshold", 1.0),
        ({"parameter_sync_step": 4}, "trigger_parameter_sync_step", 4),
        ({"max_off_policy_threshold": 8}, "max_off_policy_steps", 7),
        ({"max_off_policy_strategy": "drop", "max_off_policy_threshold": 1}, "stale", StalePolicy.DROP),
        ({"max_off_policy_strategy": "wait", "max_off_policy_threshold": 1}, "stale", StalePolicy.WAIT),
        ({"max_concurrent_rollouts": 64}, "max_inflight_groups", 64),
        ({"num_parallel_generation_workers": 64}, "max_inflight_groups", 64),
        ({"max_inflight_prompts": 32}, "max_inflight_groups", 32),
        ({"preset": "nemo_ready_first", "max_staleness_versions": 3}, "staleness_threshold", 3.0),
        ({"preset": "nemo_ready_first", "max_staleness_versions": 3}, "max_off_policy_steps", None),
        ({"preset": "nemo_weight_fifo", "max_staleness_versions": 3}, "staleness_threshold", 3.0),
        ({"preset": "nemo_weight_fifo", "max_staleness_versions": 3}, "max_off_policy_steps", 3),
        ({"preset": "nemo_windowed", "max_staleness_versions": 3}, "max_off_policy_steps", 3),
        ({"preset": "nemo_windowed", "sample_freshest_first": True}, "selection", Selection.FRESHEST_FIRST),
        ({"preset": "nemo_windowed", "sample_freshest_first": False}, "selection", Selection.LOWEST_SLOT_FIRST),
        ({"oversampling_factor": 1.5}, "staleness_threshold", None),
        ({"partial_rollout": True}, "swap", SwapPolicy.ABORT_AND_RESUME),
        ({"in_flight_weight_updates": False}, "swap", SwapPolicy.DRAIN),
        ({"in_flight_weight_updates": True}, "swap", SwapPolicy.KEEP_KV),
        (
            {"in_flight_weight_updates": True, "recompute_kv_cache_after_weight_updates": True},
            "swap",
            SwapPolicy.KEEP_AND_RECOMPUTE,
        ),
        ({"max_off_policy_steps": 8, "stale": "drop_and_refill"}, "stale", StalePolicy.DROP),
    ],
)
def test_the_names_of_other_frameworks_are_understood(settings: dict[str, Any], name: str, value: object) -> None:
    assert getattr(Schedule.model_validate(settings), name) == value


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"preset": "verl"}, "unknown; known are prime_rl"),
        ({"max_trajectory_age_steps": 1, "staleness_threshold": 1.0}, "both set staleness_threshold"),
        ({"max_trajectory_age_steps": "2"}, "must be a number"),
        ({"partial_rollout": True, "swap": "drain"}, "set the same"),
        ({"partial_rollout": "yes"}, "true or false"),
        ({"partial_rollout": True, "in_flight_weight_updates": True}, "give one of them"),
        ({"recompute_kv_cache_after_weight_updates": True}, "needs in_flight_weight_updates"),
        ({"stale": "mask"}, "needs max_off_policy_steps"),
        ({"staleness_treshold": 1.0}, "Extra inputs"),
        ({"staleness_threshold": -0.5}, "greater than or equal to 0"),
        ({"max_inflight": 64}, "counts completions: set max_inflight_groups"),
        ({"token_batch_size": 65_536}, "counts tokens: a batch is a number of groups"),
        ({"sample_full_batch": True}, "set online_difficulty_filtering"),
        ({"batch_size": 512}, "counts completions: set run.groups_per_step"),
        ({"group_size": 8}, "set run.rollouts_per_group"),
        ({"rollouts_per_example": 8}, "set run.rollouts_per_group"),
        ({"initial_inflight": 8}, "workers measure their own"),
        ({"constant_trainer_batch_size": True}, "set gates.signal in .coordinator.curriculum."),
        ({"failsafe_min_members": 4}, "a group here is trained, dropped or begun again whole"),
        ({"continue_prob": 0.5}, "a group here has run.rollouts_per_group"),
        ({"strict_async_level": True}, "a worker here uses the newest policy"),
        ({"clear_kv_cache_on_weight_sync": True}, "set swap to abort_and_resume if it is true"),
        ({"consumer_batch_size": 64}, "set run.groups_per_step"),
        ({"num_prompts_per_step": 64}, "set run.groups_per_step"),
        ({"queue_size": 64}, "bounded by staleness_threshold"),
        ({"rollout_level_dispatch": True}, "whole groups are leased"),
        ({"sync_refill_failed_groups": True}, "they are leased again"),
        ({"max_buffered_rollouts": 64}, "divided by run.groups_per_step, minus 1"),
        ({"warmup_lookahead_versions": 4}, "use max_lookahead_versions"),
        ({"max_staleness_versions": 1}, "give preset = nemo_ready_first or"),
        ({"max_off_policy_strategy": "keep"}, "one of drop, wait"),
        ({"sample_freshest_first": 1}, "true or false"),
        ({"sample_freshest_first": True, "selection": "window"}, "both set selection"),
        ({"max_inflight_prompts": 1.5}, "whole number"),
        ({"max_inflight_groups": 8, "oversampling_factor": 1.0}, "set the same"),
        ({"max_run_ahead": 1, "selection": "ready_first"}, "needs max_inflight_groups or"),
        ({"max_run_ahead": 1, "max_inflight_groups": 8}, "needs another selection"),
        ({"preset": "prime_rl_lag1", "staleness_threshold": 1.0}, "give one"),
    ],
)
def test_contradicting_settings_are_reported(settings: dict[str, Any], what: str) -> None:
    with pytest.raises(ValidationError, match=what):
        Schedule.model_validate(settings)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"schedule": {"staleness_threshold": 0.5}}, "async_level must be 1"),
        ({"schedule": {"trigger_parameter_sync_step": 4}}, "cannot be divided into 4"),
        ({"schedule": {"group_rollouts_min": 5_000}}, "less than or equal"),
        ({"schedule": {"group_rollouts_min": 4_096}}, "above rollouts_per_group"),
    ],
)
def test_a_schedule_fits_its_run(spec: RunSpec, changes: dict[str, Any], what: str) -> None:
    with pytest.raises(ValidationError, match=what):
        RunSpec.model_validate({**spec.model_dump(), **changes})


def test_prime_rls_capacity_does_not_depend_on_its_asynchronous_level() -> None:
    both = Schedule.model_validate({"max_async_level": 2, "oversampling_factor": 2.0})
    assert both.staleness_threshold == 2.0
    assert (both.inflight_max(6), both.slots_ahead(6, async_level=0)) == (12, 18)
    assert Schedule.model_validate({"max_async_level": 1, "oversampling_factor": 1.0}).inflight_max(6) == 6
    assert Schedule.model_validate({"oversampling_factor": 0.01}).inflight_max(6) == 1


def test_a_run_ahead_and_its_capacity_bound_the_slots(spec: RunSpec) -> None:
    schedule = Schedule.model_validate({"preset": "prime_rl_lag1", "oversampling_factor": 1.5})
    changes = {"schedule": schedule.model_dump(), "groups_per_step": 6}
    bounded = RunSpec.model_validate({**spec.model_dump(), **changes, "async_level": 3})
    assert bounded.admission.slots_ahead == 6 * 2 + 9
    assert bounded.admission.lag_leased == 3
    with pytest.raises(ValidationError, match=r"async_level must be 3, for schedule\.max_run_ahead is 1"):
        RunSpec.model_validate({**spec.model_dump(), **changes, "async_level": 1})


def test_a_bound_that_is_not_given_leaves_the_bytes_of_a_schedule_as_they_were() -> None:
    assert (
        not {"max_run_ahead", "max_inflight_groups", "oversampling_factor"}
        & Schedule(window_steps=3).model_dump().keys()
    )


def test_the_default_schedule_leaves_the_bytes_of_a_run_as_they_were(spec: RunSpec) -> None:
    assert b"schedule" not in spec.model_dump_json().encode()


def test_another_schedule_is_signed_with_the_run(spec: RunSpec) -> None:
    root = SigningKey(bytes(range(32)))
    keys = spec.keys.model_copy(update={"root": (root.key_id,)})
    changed = spec.model_copy(update={"schedule": Schedule(selection=Selection.READY_FIRST), "keys": keys})
    envelope = seal(changed, PayloadType.RUN_SPEC, root)
    assert open_run_spec(envelope, pinned=envelope.digest).spec.schedule.selection is Selection.READY_FIRST
