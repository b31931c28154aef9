"""Schedules: how far inference may run ahead, which groups a step takes, how stale groups are treated, how workers swap policies.

One rule and a few choices express the asynchronous modes of other RL frameworks; docs/scheduler.md maps each. The
settings have the names that users of those frameworks know, and a preset is a set of values for them. The rule itself
is in step.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from fractions import Fraction
from math import floor
from typing import Any, Self

from pydantic import Field, model_validator

from prime_protocol import limits
from prime_protocol.envelope import WireModel


class Selection(StrEnum):
    """Order in which batches take accepted groups."""

    IN_ORDER = "in_order"
    """Order of slots: step n takes slots nR to (n + 1)R - 1 and waits for each. Only this keeps every group at most k behind."""
    READY_FIRST = "ready_first"
    """Order of acceptance, regardless of slots."""
    LOWEST_SLOT_FIRST = "lowest_slot_first"
    """Order of slots among the accepted groups: it waits for none."""
    LOWEST_VERSION_FIRST = "lowest_version_first"
    """Order of policies among the accepted groups, the oldest first."""
    FRESHEST_FIRST = "freshest_first"
    """Order of policies among the accepted groups, the newest first, then of slots."""
    VERSION_FIFO = "version_fifo"
    """Order of policies among the groups that are begun, then of slots: it waits for the groups of the oldest policy."""
    WINDOW = "window"
    """Order of acceptance, but only among the lowest `window_steps` steps' worth of untrained slots."""


class StalePolicy(StrEnum):
    """Treatment of an accepted group that is more than `max_off_policy_steps` behind the step that would train it."""

    KEEP = "keep"
    """Training on it like on any other."""
    DROP = "drop_and_refill"
    """Removal; its slot is leased again on a newer policy."""
    WAIT = "wait"
    """Patience: a batch waits for every group that is begun and would be too old for the next batch. None is dropped."""
    MASK = "mask"
    """Masking: it counts as part of its batch, but its tokens do not contribute to the loss."""


class StalenessFrom(StrEnum):
    """Policy from which staleness counts, for a completion that spans several. Time in a queue always counts."""

    START = "start"
    """Leased policy."""
    OLDEST = "oldest"
    """Oldest policy that sampled one of its tokens."""
    END = "end"
    """Policy that sampled its last token."""


class SwapPolicy(StrEnum):
    """Treatment of unfinished completions when a newer policy arrives at a worker."""

    DRAIN = "drain"
    """Draining: finish them with the old policy, then swap."""
    ABORT_AND_RESUME = "abort_and_resume"
    """Interruption: stop, swap, and continue from the prompt and the tokens so far, with a new forward pass."""
    KEEP_KV = "keep_kv"
    """Swap in flight: later tokens attend to the keys and values that the old policy computed."""
    KEEP_AND_RECOMPUTE = "keep_and_recompute"
    """Swap in flight, with the existing keys and values recomputed by the new policy."""
    ABORT_AND_REQUEUE = "abort_and_requeue"
    """Return of the lease: hand it back, swap, and ask for new work."""

    @property
    def spans_policies(self) -> bool:
        """Whether one completion may hold tokens of several policies."""
        return self in (SwapPolicy.ABORT_AND_RESUME, SwapPolicy.KEEP_KV, SwapPolicy.KEEP_AND_RECOMPUTE)


def _is_none(value: object) -> bool:
    return value is None


class Schedule(WireModel):
    """Asynchronous mode of a run. Defaults: in order, at most `async_level` behind, drained at a swap.

    Example: Schedule.model_validate({"preset": "verl_partial", "trigger_parameter_sync_step": 2}).
    """

    preset: str | None = Field(default=None, max_length=limits.NAME_CHARS_MAX)
    """Name of the preset that gave the other values. For display only."""
    staleness_threshold: float | None = Field(default=None, ge=0.0, le=64.0)
    """eta: groups of (1 + eta) steps may be in flight beyond those of earlier policies. None: the run's async_level."""
    max_run_ahead: int | None = Field(default=None, ge=0, le=64, exclude_if=_is_none)
    """Steps that may be shipped and not yet published. Beyond, no group is begun and no batch is fixed. Replaces eta."""
    max_inflight_groups: int | None = Field(default=None, ge=1, le=limits.STEP_GROUPS_MAX, exclude_if=_is_none)
    """Groups that may be leased or wait for a verdict at once. None: no bound."""
    oversampling_factor: float | None = Field(default=None, gt=0.0, le=64.0, exclude_if=_is_none)
    """The same bound as a multiple of groups_per_step."""
    trigger_parameter_sync_step: int = Field(default=1, ge=1, le=limits.STEP_GROUPS_MAX)
    """K: batches of one step, each fetched and trained separately; a policy is published after the last one."""
    require_batches: int = Field(default=1, ge=1, le=limits.STEP_GROUPS_MAX)
    """Mini-batches in each of those batches, with one optimizer step each."""
    selection: Selection = Field(default=Selection.IN_ORDER, strict=False)
    window_steps: int = Field(default=2, ge=1, le=1_024)
    """Number of steps whose slots `selection = "window"` chooses from."""
    max_off_policy_steps: int | None = Field(default=None, ge=0, le=limits.STEP_MAX)
    """Number of policies by which a group may be behind the step that trains it before it is stale. None: no group is stale."""
    staleness_from: StalenessFrom = Field(default=StalenessFrom.START, strict=False)
    stale: StalePolicy = Field(default=StalePolicy.KEEP, strict=False)
    swap: SwapPolicy = Field(default=SwapPolicy.DRAIN, strict=False)
    leases_per_slot_max: int = Field(default=1, ge=1, le=8)
    """Workers that may hold one slot. Above 1, idle workers also get a straggler's groups; the first accepted bundle counts."""
    straggler_factor: float = Field(default=2.0, ge=1.0, le=1e3)
    """Multiple of the usual time for leases of its size after which a lease is a straggler."""
    slow_factor: float | None = Field(default=None, ge=1.0, le=1e3)
    """Factor by which a worker must be slower than the average to get only groups that are not needed yet, as many as it
    can finish in time. None: speed decides nothing."""
    group_rollouts_min: int | None = Field(default=None, ge=1, le=limits.LEASE_ROLLOUTS_MAX)
    """Minimum number of scored completions of a group that is trained on. None: all of them."""

    @model_validator(mode="before")
    @classmethod
    def _translate(cls, fields: Any) -> Any:
        return translated(fields) if isinstance(fields, Mapping) else fields

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.stale is not StalePolicy.KEEP and self.max_off_policy_steps is None:
            raise ValueError(f"stale = {self.stale.value!r} needs max_off_policy_steps: from where on a group is stale")
        if self.max_inflight_groups is not None and self.oversampling_factor is not None:
            raise ValueError("max_inflight_groups and oversampling_factor set the same; give one of them")
        if self.max_run_ahead is not None:
            if self.staleness_threshold is not None:
                raise ValueError(
                    "max_run_ahead and staleness_threshold both bound how far groups are begun ahead; give one"
                )
            if self.max_inflight_groups is None and self.oversampling_factor is None:
                raise ValueError("max_run_ahead needs max_inflight_groups or oversampling_factor")
            if self.selection is Selection.IN_ORDER:
                raise ValueError("max_run_ahead needs another selection than in_order, for example ready_first")
        return self

    @property
    def batches_per_step(self) -> int:
        """Number of batches of one step, K."""
        return self.trigger_parameter_sync_step

    def inflight_max(self, groups_per_step: int) -> int | None:
        """Return the number of groups that may be in progress at once; None: no bound."""
        if self.oversampling_factor is not None:
            return max(1, floor(groups_per_step * Fraction(str(self.oversampling_factor))))
        return self.max_inflight_groups

    def slots_ahead(self, groups_per_step: int, *, async_level: int) -> int:
        """Return the number of groups that may be begun beyond those of earlier policies."""
        if self.max_run_ahead is not None:
            return groups_per_step * (1 + self.max_run_ahead) + (self.inflight_max(groups_per_step) or 0)
        return slots_ahead(
            async_level if self.staleness_threshold is None else self.staleness_threshold, groups_per_step
        )

    def async_level(self, groups_per_step: int, *, otherwise: int) -> int:
        """Return the run's async_level: its own value `otherwise`, unless this schedule determines it."""
        if self.max_run_ahead is None and self.staleness_threshold is None:
            return otherwise
        return -(-self.slots_ahead(groups_per_step, async_level=otherwise) // groups_per_step) - 1

    @property
    def is_default(self) -> bool:
        """Whether all settings have their default values."""
        return self == Schedule()


def slots_ahead(staleness: float, groups_per_step: int) -> int:
    """Return floor(R * (1 + eta)): groups that may be begun beyond those of earlier policies. Exact for decimal fractions.

    Example, verl's rollout_num: slots_ahead(0.5, 4 * 32) is 192, minus the samples left over from earlier policies.
    """
    return floor(groups_per_step * (1 + Fraction(str(staleness))))


# Names in other frameworks


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "prime_rl": {},
    "prime_rl_lag1": {
        "max_run_ahead": 1,
        "oversampling_factor": 2.0,
        "selection": Selection.READY_FIRST,
        "max_off_policy_steps": 8,
        "stale": StalePolicy.DROP,
        "swap": SwapPolicy.KEEP_KV,
    },
    "verl_on_policy": {"staleness_threshold": 0.0, "selection": Selection.READY_FIRST},
    "verl_stream": {
        "staleness_threshold": 0.0,
        "trigger_parameter_sync_step": 4,
        "selection": Selection.READY_FIRST,
    },
    "verl_stale": {
        "staleness_threshold": 0.5,
        "trigger_parameter_sync_step": 4,
        "selection": Selection.READY_FIRST,
    },
    "verl_partial": {
        "staleness_threshold": 0.5,
        "trigger_parameter_sync_step": 4,
        "selection": Selection.READY_FIRST,
        "staleness_from": StalenessFrom.END,
        "swap": SwapPolicy.ABORT_AND_RESUME,
    },
    "verl_v1": {
        "staleness_threshold": 1.0,
        "selection": Selection.LOWEST_VERSION_FIRST,
        "max_off_policy_steps": 7,
        "stale": StalePolicy.DROP,
        "swap": SwapPolicy.ABORT_AND_RESUME,
    },
    "nemo_async": {"staleness_threshold": 1.0},
    "nemo_ready_first": {"staleness_threshold": 1.0, "selection": Selection.LOWEST_SLOT_FIRST},
    "nemo_weight_fifo": {
        "staleness_threshold": 1.0,
        "selection": Selection.VERSION_FIFO,
        "max_off_policy_steps": 1,
        "stale": StalePolicy.DROP,
    },
    "nemo_windowed": {
        "staleness_threshold": 1.0,
        "selection": Selection.LOWEST_SLOT_FIRST,
        "max_off_policy_steps": 1,
        "stale": StalePolicy.DROP,
    },
    "areal": {
        "staleness_threshold": 4.0,
        "selection": Selection.LOWEST_SLOT_FIRST,
        "staleness_from": StalenessFrom.OLDEST,
        "swap": SwapPolicy.ABORT_AND_RESUME,
    },
    "skyrl": {
        "staleness_threshold": 4.0,
        "selection": Selection.READY_FIRST,
        "staleness_from": StalenessFrom.OLDEST,
        "swap": SwapPolicy.ABORT_AND_RESUME,
    },
}
"""Values that differ from the defaults. `prime_rl` is the default with k = async_level."""

_SAME: Mapping[str, tuple[str, Callable[[float], float]]] = {
    "max_trajectory_age_steps": ("staleness_threshold", float),  # NeMo-RL, asynchronous GRPO
    "generation_lead_steps": ("staleness_threshold", float),  # the same
    "max_lookahead_versions": ("staleness_threshold", float),  # NeMo-RL, sampler in_order
    "max_async_level": ("staleness_threshold", float),  # prime-rl until 2025
    "max_staleness_steps": ("staleness_threshold", float),  # SkyRL
    "max_head_offpolicyness": ("staleness_threshold", float),  # AReaL
    "num_warmup_batches": ("staleness_threshold", float),  # verl V1
    "parameter_sync_step": ("trigger_parameter_sync_step", int),  # verl V1
    "max_off_policy_threshold": ("max_off_policy_steps", lambda policies: int(policies) - 1),  # verl V1
    "max_concurrent_rollouts": ("max_inflight_groups", int),  # AReaL: its rollout is a group
    "num_parallel_generation_workers": ("max_inflight_groups", int),  # SkyRL
    "max_inflight_prompts": ("max_inflight_groups", int),  # NeMo-RL
}
"""Other names of a setting, with the conversion of their values."""
_STALE = {"drop": StalePolicy.DROP, "wait": StalePolicy.WAIT}
"""Values of verl V1's max_off_policy_strategy."""
_WINDOWS: Mapping[str, tuple[str, ...]] = {
    "nemo_ready_first": ("staleness_threshold",),
    "nemo_weight_fifo": ("staleness_threshold", "max_off_policy_steps"),
    "nemo_windowed": ("max_off_policy_steps",),
}
"""NeMo-RL's samplers as presets, with what max_staleness_versions sets in each."""
_INSTEAD: Mapping[str, str] = {
    "max_inflight": "counts completions: set max_inflight_groups to it divided by run.rollouts_per_group",
    "max_inflight_rollouts": "counts completions: set max_inflight_groups to it divided by run.rollouts_per_group",
    "initial_inflight": "seeds a controller of engine load: workers measure their own; max_inflight_groups bounds all of them",
    "min_inflight": "belongs to a controller of engine load: workers measure their own; max_inflight_groups bounds all of them",
    "tasks_per_minute": "is a rate: bound the groups in progress by max_inflight_groups",
    "batch_size": "counts completions: set run.groups_per_step to it divided by run.rollouts_per_group",
    "group_size": "is the size of a group: set run.rollouts_per_group",
    "rollouts_per_example": "is the size of a group: set run.rollouts_per_group",
    "constant_trainer_batch_size": "replaces completions without a signal: set gates.signal in [coordinator.curriculum], which "
    "replaces groups of equal rewards (docs/algorithms.md)",
    "failsafe_min_members": "trains a part of a group early: a group here is trained, dropped or begun again whole",
    "continue_prob": "adds completions to a group without success: a group here has run.rollouts_per_group",
    "strict_async_level": "forces a lag: a worker here uses the newest policy that it has",
    "token_batch_size": "counts tokens: a batch is a number of groups, run.groups_per_step; the trainer packs by tokens",
    "sample_full_batch": "replaces groups without signal: set online_difficulty_filtering (docs/algorithms.md)",
    "clear_kv_cache_on_weight_sync": "is a swap: set swap to abort_and_resume if it is true, and to keep_kv otherwise",
    "consumer_batch_size": "counts groups of a step: set run.groups_per_step",
    "queue_size": "bounds a queue: the groups that are begun and not trained are bounded by staleness_threshold",
    "num_prompts_per_step": "counts groups of a step: set run.groups_per_step",
    "rollout_level_dispatch": "dispatches completions: whole groups are leased",
    "sync_refill_failed_groups": "concerns failed groups: they are leased again",
    "max_buffered_rollouts": "counts groups: set staleness_threshold to it divided by run.groups_per_step, minus 1",
    "min_groups_for_streaming_train": "is a part of a step: divide the step by trigger_parameter_sync_step",
    "warmup_lookahead_versions": "changes during the run: use max_lookahead_versions, which is fixed",
    "warmup_generation_lead_steps": "changes during the run: use generation_lead_steps, which is fixed",
}
"""Names that have no equal here, with what to set instead."""
_WRITTEN = {name for name, field in Schedule.model_fields.items() if field.exclude_if is None}
"""Fields that every signed schedule has. With all of them, the preset fills in nothing: its values may change later."""
_SWAPS = ("partial_rollout", "in_flight_weight_updates", "recompute_kv_cache_after_weight_updates")


def translated(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Translate other frameworks' names and fill in a preset's values. Raises ValueError."""
    given = dict(fields)
    for name in given.keys() & _INSTEAD.keys():
        raise ValueError(f"{name} {_INSTEAD[name]}")
    preset = given.get("preset")
    if preset is not None and (not isinstance(preset, str) or preset not in PRESETS):
        raise ValueError(f"preset {preset!r:.40} is unknown; known are {', '.join(PRESETS)}")
    _translate_samplers(given, preset)
    for name, (target, convert) in _SAME.items():
        if name in given:
            _put(given, name, target, convert(_number(name, given.pop(name))))
    if any(name in given for name in _SWAPS):
        if "swap" in given:
            raise ValueError(f"swap and {', '.join(name for name in _SWAPS if name in given)} set the same; give one")
        flags = {name: given.pop(name, False) for name in _SWAPS}
        if not all(isinstance(flag, bool) for flag in flags.values()):
            raise ValueError(f"{', '.join(_SWAPS)} must be true or false")
        given["swap"] = _swap_of(*flags.values())
    if preset is not None and not given.keys() >= _WRITTEN:
        values = dict(PRESETS[preset])
        if given.get("max_inflight_groups") is not None:
            values.pop("oversampling_factor", None)
        given = {**values, **given}
    return given


def _translate_samplers(given: dict[str, Any], preset: str | None) -> None:
    """Translate the settings whose meaning depends on the sampler, and those that are words."""
    if "max_off_policy_strategy" in given:
        strategy = given.pop("max_off_policy_strategy")
        if strategy not in _STALE:
            raise ValueError(f"max_off_policy_strategy must be one of {', '.join(_STALE)}")
        _put(given, "max_off_policy_strategy", "stale", _STALE[strategy])
    if "sample_freshest_first" in given:
        freshest = given.pop("sample_freshest_first")
        if not isinstance(freshest, bool):
            raise ValueError("sample_freshest_first must be true or false")
        if freshest:
            _put(given, "sample_freshest_first", "selection", Selection.FRESHEST_FIRST)
    if "max_staleness_versions" in given:
        if preset is None or preset not in _WINDOWS:
            raise ValueError(f"max_staleness_versions depends on the sampler: give preset = {' or '.join(_WINDOWS)}")
        versions = _number("max_staleness_versions", given.pop("max_staleness_versions"))
        for target in _WINDOWS[preset]:
            value = float(versions) if target == "staleness_threshold" else int(versions)
            _put(given, "max_staleness_versions", target, value)


def _put(given: dict[str, Any], name: str, target: str, value: object) -> None:
    if target in given:
        raise ValueError(f"{name} and another setting both set {target}; give one of them")
    given[target] = value


def _number(name: str, value: object) -> int | float:
    """Return a value that is a number; a whole one for settings that are whole numbers here."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= limits.COUNT_MAX:
        raise ValueError(f"{name} must be a number")
    is_whole = name == "max_staleness_versions" or _SAME[name][0] != "staleness_threshold"
    if is_whole and value != int(value):
        raise ValueError(f"{name} must be a whole number")
    return value


def _swap_of(partial_rollout: bool, in_flight: bool, recompute: bool) -> SwapPolicy:
    if partial_rollout and in_flight:
        raise ValueError("partial_rollout aborts and resumes, in_flight_weight_updates does not; give one of them")
    if recompute and not in_flight:
        raise ValueError("recompute_kv_cache_after_weight_updates needs in_flight_weight_updates = true")
    if partial_rollout:
        return SwapPolicy.ABORT_AND_RESUME
    if in_flight:
        return SwapPolicy.KEEP_AND_RECOMPUTE if recompute else SwapPolicy.KEEP_KV
    return SwapPolicy.DRAIN
