"""Schedules: how far inference may run ahead, which groups a step takes, what becomes of old ones, what a swap does.

One rule and a few choices express the asynchronous modes of the frameworks in this field; docs/scheduler.md maps each. The
settings have the names that their users know, and a preset is nothing but values for them. The rule itself is in step.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from fractions import Fraction
from math import ceil, floor
from typing import Any, Self

from pydantic import Field, model_validator

from prime_protocol import limits
from prime_protocol.envelope import WireModel


class Selection(StrEnum):
    """Which accepted groups the next batch takes."""

    IN_ORDER = "in_order"
    """Step n takes slots nR to (n + 1)R - 1 and waits for each. The only one under which no group is ever more than k behind."""
    READY_FIRST = "ready_first"
    """Those that were accepted first, whatever their slots."""
    LOWEST_VERSION_FIRST = "lowest_version_first"
    """Those of the oldest policy first."""
    WINDOW = "window"
    """Ready first, but among the lowest `window_steps` steps' worth of slots that are not trained yet."""


class StalePolicy(StrEnum):
    """What becomes of an accepted group that is more than `max_off_policy_steps` behind the step that would train it."""

    KEEP = "keep"
    """It is trained on like any other."""
    DROP = "drop_and_refill"
    """It is thrown away, and its slot is leased again on a newer policy."""
    WAIT = "wait"
    """It does not come to that: a batch waits for every group that would be too old for the next one."""
    MASK = "mask"
    """It counts as part of its batch, and nothing is learnt from its tokens."""


class StalenessFrom(StrEnum):
    """Which policy of a completion that spans several its staleness is counted from. Waiting in a queue counts in any case."""

    START = "start"
    """The policy that was leased."""
    OLDEST = "oldest"
    """The oldest that sampled a token of it."""
    END = "end"
    """The one that sampled its last token."""


class SwapPolicy(StrEnum):
    """What a worker does with completions that are unfinished when a newer policy arrives."""

    DRAIN = "drain"
    """Finish them with the old one, then swap."""
    ABORT_AND_RESUME = "abort_and_resume"
    """Stop, swap, and go on from the prompt and the tokens so far, forwarded anew."""
    KEEP_KV = "keep_kv"
    """Swap under way. Later tokens see the keys and values that the old policy computed."""
    KEEP_AND_RECOMPUTE = "keep_and_recompute"
    """Swap under way, and compute the keys and values of what is there with the new policy."""
    ABORT_AND_REQUEUE = "abort_and_requeue"
    """Hand the lease back, swap, and ask for new work."""

    @property
    def spans_policies(self) -> bool:
        """True where one completion may hold tokens of several policies."""
        return self in (SwapPolicy.ABORT_AND_RESUME, SwapPolicy.KEEP_KV, SwapPolicy.KEEP_AND_RECOMPUTE)


class Schedule(WireModel):
    """The asynchronous mode of a run. The defaults: in order, at most `async_level` behind, drained at a swap.

    Example: Schedule.model_validate({"preset": "verl_partial", "trigger_parameter_sync_step": 2}).
    """

    preset: str | None = Field(default=None, max_length=limits.NAME_CHARS_MAX)
    """Where the other values came from. For people: nothing is decided by it."""
    staleness_threshold: float | None = Field(default=None, ge=0.0, le=64.0)
    """eta: groups of (1 + eta) steps may have been begun beyond those of earlier policies. None: the run's async_level."""
    trigger_parameter_sync_step: int = Field(default=1, ge=1, le=limits.STEP_GROUPS_MAX)
    """K: batches of one step, each fetched and trained by itself; a policy is published after the last one."""
    require_batches: int = Field(default=1, ge=1, le=limits.STEP_GROUPS_MAX)
    """Mini-batches in each of those batches: one optimizer step each."""
    selection: Selection = Field(default=Selection.IN_ORDER, strict=False)
    window_steps: int = Field(default=2, ge=1, le=1_024)
    """How many steps' worth of slots `selection = "window"` chooses from."""
    max_off_policy_steps: int | None = Field(default=None, ge=0, le=limits.STEP_MAX)
    """Beyond this many policies behind the step that trains it, a group is stale. None: nothing is."""
    staleness_from: StalenessFrom = Field(default=StalenessFrom.START, strict=False)
    stale: StalePolicy = Field(default=StalePolicy.KEEP, strict=False)
    swap: SwapPolicy = Field(default=SwapPolicy.DRAIN, strict=False)
    leases_per_slot_max: int = Field(default=1, ge=1, le=8)
    """Above 1: an idle worker is leased a straggler's groups too, and the first accepted bundle counts."""
    straggler_factor: float = Field(default=2.0, ge=1.0, le=1e3)
    """A lease is a straggler once it has taken this many times what leases of its size take."""
    slow_factor: float | None = Field(default=None, ge=1.0, le=1e3)
    """A worker this many times slower than the average is leased groups that are not needed yet, as many as it can finish in
    time. None: speed decides nothing."""
    group_rollouts_min: int | None = Field(default=None, ge=1, le=limits.LEASE_ROLLOUTS_MAX)
    """A group is trained on if at least this many of its completions could be scored. None: all of them."""

    @model_validator(mode="before")
    @classmethod
    def _translate(cls, fields: Any) -> Any:
        return translated(fields) if isinstance(fields, Mapping) else fields

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.stale is not StalePolicy.KEEP and self.max_off_policy_steps is None:
            raise ValueError(f"stale = {self.stale.value!r} needs max_off_policy_steps: from where on a group is stale")
        return self

    @property
    def batches_per_step(self) -> int:
        return self.trigger_parameter_sync_step

    @property
    def is_default(self) -> bool:
        return self == Schedule()


def slots_ahead(staleness: float, groups_per_step: int) -> int:
    """floor(R * (1 + eta)): groups that may have been begun beyond those of earlier policies. Exact for decimal fractions.

    Example, verl's rollout_num: slots_ahead(0.5, 4 * 32) is 192, less the samples left over from earlier policies.
    """
    return floor(groups_per_step * (1 + Fraction(str(staleness))))


def lag_of(staleness: float) -> int:
    """How many policies a group may be behind its step if batches are taken in order: the async_level that fits."""
    return ceil(Fraction(str(staleness)))


# The names of others


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "prime_rl": {},
    "prime_rl_lag1": {
        "staleness_threshold": 1.0,
        "selection": Selection.READY_FIRST,
        "max_off_policy_steps": 8,
        "staleness_from": StalenessFrom.OLDEST,
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
    "nemo_async": {"staleness_threshold": 1.0},
    "areal": {
        "staleness_threshold": 4.0,
        "selection": Selection.READY_FIRST,
        "staleness_from": StalenessFrom.OLDEST,
        "swap": SwapPolicy.ABORT_AND_RESUME,
    },
}
"""Values that differ from the defaults. `prime_rl` is the default with k = async_level."""

_SAME: Mapping[str, tuple[str, Callable[[float], float]]] = {
    "max_trajectory_age_steps": ("staleness_threshold", float),  # NeMo-RL
    "max_async_level": ("staleness_threshold", float),  # prime-rl
    "max_staleness_steps": ("staleness_threshold", float),  # SkyRL
    "max_head_offpolicyness": ("staleness_threshold", float),  # AReaL
    "oversampling_factor": ("staleness_threshold", lambda factor: factor - 1.0),  # so many times R groups in flight
}
"""Another name for a setting, and how its value is said here."""
_SWAPS = ("partial_rollout", "in_flight_weight_updates", "recompute_kv_cache_after_weight_updates")


def translated(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The same settings under the names above; a preset's values are filled in. Raises ValueError."""
    given = dict(fields)
    for name, (target, convert) in _SAME.items():
        if name in given:
            value = given.pop(name)
            if target in given:
                raise ValueError(f"{name} and another setting both say {target}; give one of them")
            if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= limits.COUNT_MAX:
                raise ValueError(f"{name} is a number")
            given[target] = convert(value)
    if any(name in given for name in _SWAPS):
        if "swap" in given:
            raise ValueError(f"swap and {', '.join(name for name in _SWAPS if name in given)} say the same; give one")
        flags = {name: given.pop(name, False) for name in _SWAPS}
        if not all(isinstance(flag, bool) for flag in flags.values()):
            raise ValueError(f"{', '.join(_SWAPS)} are true or false")
        given["swap"] = _swap_of(*flags.values())
    preset = given.get("preset")
    if preset is not None:
        if not isinstance(preset, str) or preset not in PRESETS:
            raise ValueError(f"preset {preset!r:.40} is unknown; there are {', '.join(PRESETS)}")
        given = {**PRESETS[preset], **given}
    return given


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
