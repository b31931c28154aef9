"""The bounded history of a run: numbers of each step, held-out figures, tokens by worker, and recent events.

It is a recorder of the observer's rows and spans. It is saved as one private document now and then, and restored at the start; a
crash loses the newest seconds. The numbers are for people: the ledger counts what a worker contributed.
"""

from __future__ import annotations

import json
import logging
import math
from collections import Counter, deque
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from prime_node.ports.clock import Clock
from prime_node.ports.documents import Documents

log = logging.getLogger(__name__)

DOCUMENT = "history.json"
STEPS_MAX = 2_000
"""Steps in the history. Above it, every second one of the older steps is dropped."""
STEPS_IN_FULL = 500
"""Newest steps of which none is dropped."""
EVALUATIONS_MAX = 500
EVENTS_MAX = 256
"""Recent events of each kind: rare ones, and frequent ones."""
WORKERS_MAX = 20_000
"""Workers whose tokens are counted. Above twice as many, those with the fewest are dropped."""
SAVE_S = 30.0
"""Seconds between two saves."""
SERIES: Mapping[str, str] = {
    "reward": "reward_mean",
    "broadcast": "broadcast_seconds",
    "swap": "swap_seconds",
    "seconds": "fully_async/rollouter/version_time",
    "train": "train_seconds",
    "generate": "fully_async/processing_time/avg",
    "check": "check_seconds_mean",
    "queue": "queue_age_seconds_mean",
    "idle": "rollouter/idle_ratio",
    "lag": "lag_mean",
    "closeness": "closeness",
    "workers": "workers_mean",
}
"""Name in the history -> name in the observer's row."""
FREQUENT = ("lease", "check", "usable")


class _Saved(BaseModel):
    model_config = ConfigDict(extra="allow", allow_inf_nan=False)


class _SavedStep(_Saved):
    __pydantic_extra__: dict[str, int | float | None]
    step: int


class _SavedEvaluation(_Saved):
    policy: int | None
    by: str | None


class _SavedEvent(_Saved):
    number: int
    kind: str


class _SavedHistory(_Saved):
    """Form of the saved document."""

    steps: list[_SavedStep]
    evaluations: list[_SavedEvaluation]
    tokens: dict[str, int]
    events: list[_SavedEvent]


class RunHistory:
    """The history of one run. `record` takes the rows of observe.Recorder."""

    def __init__(self, private: Documents, clock: Clock) -> None:
        self.evaluations: deque[dict[str, Any]] = deque(maxlen=EVALUATIONS_MAX)
        self.tokens: Counter[str] = Counter()
        """Tokens that receipts credit, by worker."""
        self._private, self._clock = private, clock
        self._steps: list[dict[str, float | None]] = []
        self._rare: deque[dict[str, Any]] = deque(maxlen=EVENTS_MAX)
        self._frequent: deque[dict[str, Any]] = deque(maxlen=EVENTS_MAX)
        self._number = clock.now_ms()
        """Number of the newest event. It grows over restarts, since it begins with the time."""
        self._changes = self._saved_changes = 0
        self._saved_s = clock.monotonic_s()

    @property
    def number(self) -> int:
        """Number of the newest event."""
        return self._number

    @property
    def last_step(self) -> int:
        """The newest step with a row; -1 before the first."""
        return int(self._steps[-1]["step"] or 0) if self._steps else -1

    def record(self, **fields: Any) -> None:
        """Add a row of the observer: a span, an evaluation or a step."""
        self._changes += 1
        if "kind" in fields:
            self._add_event(fields)
        elif any(name.startswith("eval_") for name in fields):
            self._add_evaluation(fields)
        elif "step" in fields:
            self._add_step(fields)

    def close(self) -> None:
        """Do nothing: the daemon saves the history."""

    def credited(self, worker: str, num_tokens: int) -> None:
        """Count the tokens that a receipt credits."""
        self._changes += 1
        self.tokens[worker] += num_tokens
        if len(self.tokens) > 2 * WORKERS_MAX:
            self.tokens = Counter(dict(self.tokens.most_common(WORKERS_MAX)))

    def columns(self, after: int = -1) -> dict[str, list[float | None]]:
        """Return the rows of the steps after `after` as columns. Example: {"step": [3, 4], "reward": [0.4, 0.5], ...}."""
        rows = [row for row in self._steps if (row["step"] or 0) > after]
        return {name: [row.get(name) for row in rows] for name in ("step", "at", *SERIES)}

    def events(self, since: int, most: int = 2 * EVENTS_MAX) -> list[dict[str, Any]]:
        """Return at most `most` events with numbers above `since`, oldest first: rare ones, and the newest of the others."""
        rare = [event for event in self._rare if event["number"] > since][-most:]
        others = [event for event in self._frequent if event["number"] > since][-most:]
        kept = others[max(0, len(rare) + len(others) - most) :]
        return sorted([*rare, *kept], key=lambda event: int(event["number"]))

    async def restore(self) -> None:
        """Read the saved history. A broken one is logged and ignored."""
        try:
            found = _SavedHistory.model_validate_json(await self._private.read(DOCUMENT))
        except KeyError:
            return
        except ValidationError as error:
            log.warning("the saved history of the run is unreadable and begins again: %s", error)
            return
        self._steps = [step.model_dump() for step in found.steps[-STEPS_MAX:]]
        self.tokens = Counter(found.tokens)
        self.evaluations.extend(evaluation.model_dump() for evaluation in found.evaluations)
        for event in found.events:
            (self._frequent if event.kind in FREQUENT else self._rare).append(event.model_dump())
        self._number = max([self._number, *(event.number for event in found.events)])

    async def save(self, *, at_once: bool = False) -> None:
        """Save the history if it has changed, at most every SAVE_S seconds. A full disk is logged."""
        now_s = self._clock.monotonic_s()
        if self._changes == self._saved_changes or (now_s - self._saved_s < SAVE_S and not at_once):
            return
        self._saved_s, self._saved_changes = now_s, self._changes
        document = {
            "steps": self._steps,
            "evaluations": list(self.evaluations),
            "tokens": dict(self.tokens.most_common(WORKERS_MAX)),
            "events": self.events(0),
        }
        try:
            await self._private.write(DOCUMENT, json.dumps(document, separators=(",", ":")).encode())
        except OSError as error:
            log.error("the history of the run cannot be saved: %s", error)

    def _add_event(self, fields: Mapping[str, Any]) -> None:
        self._number += 1
        event = {"number": self._number, **{name: value for name, value in fields.items() if value not in ("", -1)}}
        (self._frequent if fields["kind"] in FREQUENT else self._rare).append(event)

    def _add_evaluation(self, fields: Mapping[str, Any]) -> None:
        policy, judge = fields.get("policy_version"), fields.get("eval_by")
        if any((one["policy"], one["by"]) == (policy, judge) for one in self.evaluations):
            return  # it was recorded before
        figures = {
            name.removeprefix("eval_"): _number_of(value)
            for name, value in fields.items()
            if name.removeprefix("eval_").partition("_")[0] in ("greedy", "sampled") and "/" not in name
        }
        if figures:
            self.evaluations.append({"policy": policy, "by": judge, "at": self._clock.now_ms(), **figures})
            self._add_event({"kind": "evaluation", "end_ms": self._clock.now_ms(), "policy_version": policy})

    def _add_step(self, fields: Mapping[str, Any]) -> None:
        step = int(fields["step"])
        row: dict[str, float | None] = {"step": step, "at": self._clock.now_ms()}
        row |= {name: _number_of(fields.get(source)) for name, source in SERIES.items()}
        while self._steps and (self._steps[-1]["step"] or 0) >= step:
            self._steps.pop()
        self._steps.append(row)
        if len(self._steps) > STEPS_MAX:
            older, newer = self._steps[:-STEPS_IN_FULL], self._steps[-STEPS_IN_FULL:]
            self._steps = [*older[::2], *newer]


def _number_of(value: Any) -> float | None:
    """Return a number of at most six significant digits; None for anything else."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(f"{value:.6g}")
