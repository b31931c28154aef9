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
        ({"oversampling_factor": 1.5}, "staleness_threshold", 0.5),
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


def test_the_default_schedule_leaves_the_bytes_of_a_run_as_they_were(spec: RunSpec) -> None:
    assert b"schedule" not in spec.model_dump_json().encode()


def test_another_schedule_is_signed_with_the_run(spec: RunSpec) -> None:
    root = SigningKey(bytes(range(32)))
    keys = spec.keys.model_copy(update={"root": (root.key_id,)})
    changed = spec.model_copy(update={"schedule": Schedule(selection=Selection.READY_FIRST), "keys": keys})
    envelope = seal(changed, PayloadType.RUN_SPEC, root)
    assert open_run_spec(envelope, pinned=envelope.digest).spec.schedule.selection is Selection.READY_FIRST
