"""Output of the tracker: rows, lines of the timeline, Prometheus. This file decides nothing.

metrics.jsonl    a row per step, with the broadcast's time and the closeness to a scheduler without cost
timeline.jsonl   a line per span: leases, verdicts, batches, policies and when each worker could use them;
                 `prime-node trace` draws it

Names of verl's fully asynchronous trainer have the same meaning here; a sample is a group, a trajectory a completion. Times in
a row are in seconds. Counts `since the start` restart with the coordinator.

The time to available is how long after its publication a policy could be used, as workers report it: b in the rule for the
async level. A policy that takes b seconds to arrive and T to train needs k >= 1 + b / T. These reports are not verified, so
each worker has one report per policy, and the statistics are ranks: the longest of several claims changes none of them.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import Any

from prime_node.coordinator.curriculum_config import CurriculumConfig
from prime_node.coordinator.measure.history import RunHistory
from prime_node.coordinator.measure.tracker import Span, SpanKind, StepLog, Tracker
from prime_node.coordinator.measure.zero_overhead import WaitingRules, Work, published_at
from prime_node.coordinator.state import events as ev
from prime_node.coordinator.state.effects import Effect
from prime_node.coordinator.state.records import Ban, State
from prime_node.observe import Recorder, Recorders
from prime_node.ports.metrics import Metrics
from prime_protocol.telemetry import HeldOutFigures

POLICIES_MAX = 64
"""Newest policies that are remembered."""
MOST = 0.9
"""Share of the workers in the longer of the two times. With two or more workers, the slowest is never in it."""
OUTLIER_FACTOR = 4.0
"""Maximum of a claim in the histogram, in medians, because the histogram's sum includes all workers."""


@dataclass(frozen=True, slots=True)
class Spread:
    """The times of one policy. Example: Spread(policy_version=41, workers=3, median_s=0.4, most_s=0.5)."""

    policy_version: int
    workers: int
    """Workers that have reported."""
    median_s: float
    """Median; the lower one of two."""
    most_s: float
    """Time by which nine of ten workers could use it."""


class TimesToAvailable:
    """The times in heartbeats."""

    def __init__(self) -> None:
        self._seconds: dict[int, dict[str, float]] = {}
        """Seconds by policy, then by worker."""

    def heard(self, worker: str, policy_version: int, after_ms: int) -> bool:
        """Record a report. Return True for a worker's first report about a policy that is remembered."""
        if policy_version not in self._seconds and len(self._seconds) == POLICIES_MAX:
            oldest = min(self._seconds)
            if policy_version < oldest:
                return False
            del self._seconds[oldest]
        known = self._seconds.setdefault(policy_version, {})
        if worker in known:
            return False
        known[worker] = after_ms / 1_000
        return True

    def spreads(self) -> list[Spread]:
        """Return the spread of each policy, the newest last."""
        return [self._spread(version) for version in sorted(self._seconds)]

    def most_s(self, policy_version: int) -> float | None:
        """Return the time by which nine of ten workers could use it; None without reports."""
        return self._spread(policy_version).most_s if policy_version in self._seconds else None

    def clipped_s(self, policy_version: int, seconds: float) -> float:
        """Return a recorded claim, limited to OUTLIER_FACTOR medians."""
        return min(seconds, OUTLIER_FACTOR * self._spread(policy_version).median_s)

    def _spread(self, policy_version: int) -> Spread:
        found = sorted(self._seconds[policy_version].values())
        median_s, most_s = median_low(found), found[int(MOST * (len(found) - 1))]
        return Spread(policy_version, len(found), median_s, max(median_s, most_s))

    def as_rows(self, count: int) -> list[dict[str, Any]]:
        """Return the rows of the newest policies, for the status."""
        return [
            {
                "policy_version": spread.policy_version,
                "workers": spread.workers,
                "median_s": round(spread.median_s, 3),
                "most_s": round(spread.most_s, 3),
            }
            for spread in self.spreads()[-count:]
        ]


def coordinator_row(log: StepLog, *, head: int, num_generated: int, num_dropped: int) -> dict[str, float]:
    """Return the row of a step. `num_generated` groups were accepted since the run began.

    `num_dropped` groups were dropped as stale since the start.
    """
    row = {
        "step": log.step,
        "rollouter/idle_ratio": log.idle_ratio,
        "fully_async/rollouter/active_time": log.seconds * (1.0 - log.idle_ratio),
        "fully_async/rollouter/version_time": log.seconds,
        "fully_async/count/current_param_version": head,
        "fully_async/count/total_generated_samples": num_generated,
        "fully_async/count/staleness_samples": log.num_ready + log.num_leased,
        "fully_async/count/dropped_stale_samples": num_dropped,
        "fully_async/monitor/active_tasks_size": log.num_leased,
        "fully_async/monitor/queue/mq_queue_size": log.num_ready,
        "fully_async/monitor/queue/pending_queue_size": log.num_open,
        "workers_mean": log.workers_mean,
        **_spread("queue_age_seconds", log.queue_seconds),
        **_spread("check_seconds", log.check_seconds),
        **_processing_time(log.generate_seconds),
    }
    if log.rewards:
        row["reward_mean"] = statistics.fmean(log.rewards)
    num_trained = log.lags.total()
    if num_trained:
        row["lag_mean"] = sum(lag * count for lag, count in log.lags.items()) / num_trained
        row["lag_max"] = max(log.lags)
    for base, counts in (("dropped", log.dropped), ("refused", log.refused), ("wasted", log.wasted)):
        row |= {f"{base}/{name}": count for name, count in sorted(counts.items())}
    return row | {f"lag/{lag}": count for lag, count in sorted(log.lags.items())}


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    return {f"{name}_mean": statistics.fmean(values), f"{name}_max": max(values)} if values else {}


def _processing_time(seconds: Sequence[float]) -> dict[str, float]:
    if not seconds:
        return {}
    ordered = sorted(seconds)
    marks = {f"tp{share}": ordered[min(len(ordered) - 1, len(ordered) * share // 100)] for share in (50, 95, 99)}
    found = {"avg": statistics.fmean(ordered), "min": ordered[0], "max": ordered[-1], **marks}
    return {f"fully_async/processing_time/{name}": value for name, value in found.items()}


STEPS_COMPARED = 4
"""Newest steps over which the closeness is computed."""
POLICIES_REMEMBERED = 64
CLOCKS_APART_MS_MAX = 2_000
"""Tolerated difference between the trainer's clock and ours."""
WORKS_MAX = 20_000
"""Maximum of works in a replay of these steps; beyond it, the closeness is not computed during the run."""


@dataclass(slots=True)
class Observer:
    """Recorder of the tracker's results. `rows` gets a step's numbers, `timeline` the spans."""

    tracker: Tracker
    metrics: Metrics
    rows: Recorder = field(default_factory=Recorders)
    timeline: Recorder = field(default_factory=Recorders)
    train_seconds: dict[int, float] = field(default_factory=dict)
    """Requested step -> training time of the newest finished step, as the trainer reported it."""
    availability: TimesToAvailable = field(default_factory=TimesToAvailable)
    """Times from a policy's publication until workers could use it."""
    swaps: TimesToAvailable = field(default_factory=TimesToAvailable)
    """Times that workers needed to swap to a policy."""
    _made_ms: dict[int, int] = field(default_factory=dict)
    """Policy -> when the trainer signed it."""
    _steps: deque[StepLog] = field(default_factory=lambda: deque(maxlen=STEPS_COMPARED))
    _num_stale: int = 0
    history: RunHistory | None = None
    """The history that the page shows, if there is a page."""
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)
    """The pools whose shares a step's row has."""

    def note(self, event: ev.Event, effects: Sequence[Effect], state: State, at_ms: int) -> None:
        """Process an event after it was applied, with its effects."""
        spans, done = self.tracker.note(event, effects, state, at_ms)
        for span in spans:
            self._tell(span, state)
        if done is not None:
            self._tell_step(done, state)

    def made(self, policy_version: int, at_ms: int) -> None:
        """Record when the trainer signed a policy, by its manifest."""
        self._made_ms[policy_version] = at_ms
        while len(self._made_ms) > POLICIES_REMEMBERED:
            del self._made_ms[min(self._made_ms)]

    def usable(
        self, worker: str, policy_version: int, after_s: float, at_ms: int, *, swap_s: float | None = None
    ) -> None:
        """Record a worker's report of when it could use a policy, and how long its engine took to swap to it.

        Ignore impossible values.
        """
        made_ms = self._made_ms.get(policy_version)
        if made_ms is None or made_ms + after_s * 1_000 > at_ms + CLOCKS_APART_MS_MAX:
            return
        if not self.availability.heard(worker, policy_version, round(after_s * 1_000)):
            return
        self.metrics.observe("prime_policy_usable_seconds", self.availability.clipped_s(policy_version, after_s))
        if swap_s is not None and swap_s <= after_s and self.swaps.heard(worker, policy_version, round(swap_s * 1_000)):
            self.metrics.observe("prime_policy_swap_seconds", self.swaps.clipped_s(policy_version, swap_s))
        available_ms = made_ms + round(after_s * 1_000)
        self.timeline.record(
            kind="usable", begin_ms=made_ms, end_ms=available_ms, worker=worker, policy_version=policy_version
        )

    def trained(self, asked_step: int, seconds: float) -> None:
        """Record the training time that the trainer reports. Repeated reports change nothing."""
        self.train_seconds[asked_step] = seconds
        _keep_newest(self.train_seconds)

    def evaluated(self, held_out: HeldOutFigures) -> None:
        """Record the trainer's held-out figures of a policy. Repeated reports change nothing."""
        figures = {
            f"eval_{name}{suffix}": value
            for name, one in (("greedy", held_out.greedy), ("sampled", held_out.sampled))
            if one is not None
            for suffix, value in (("", one.mean), ("_low", one.low), ("_high", one.high))
        }
        if figures and self.history is not None:
            self.history.record(policy_version=held_out.policy_version, **figures, eval_by="trainer")

    def credited(self, worker: str, num_tokens: int) -> None:
        """Record the tokens that a receipt credits."""
        if self.history is not None and num_tokens:
            self.history.credited(worker, num_tokens)

    def banned(self, worker: str, ban: Ban, state: State) -> None:
        """Record a ban in the history."""
        if self.history is not None:
            name = state.workers[worker].name if worker in state.workers else ""
            self.history.record(
                kind="ban", end_ms=ban.at_ms, worker=worker, name=name, step=ban.step, outcome=ban.reason
            )

    def closeness(self, state: State) -> float | None:
        """Return the replayed time over the measured time of the newest steps; None before enough is known."""
        works = [work for step in self._steps for work in step.works]
        known = self.train_seconds.values()
        if len(self._steps) < STEPS_COMPARED or not known or not 0 < len(works) <= WORKS_MAX:
            return None
        delays = [delay for step in self._steps if (delay := self.availability.most_s(step.step)) is not None]
        mode = WaitingRules(state.rules.admission, state.rules.batches_per_step)
        if sum(work.num_groups for work in works) < mode.admission.groups_per_step:
            return None
        replayed_s = _steady_step_seconds(
            works,
            mode,
            workers=max(1, round(sum(step.workers_mean for step in self._steps) / len(self._steps))),
            train_seconds=sum(known) / len(known),
            available_seconds=sum(delays) / len(delays) if delays else 0.0,
        )
        measured_s = sum(step.seconds for step in self._steps) / len(self._steps)
        return replayed_s / max(measured_s, 1e-9)

    def _tell(self, span: Span, state: State) -> None:
        if span.kind is SpanKind.CHECK:
            self.metrics.observe("prime_check_seconds", span.seconds)
        elif span.kind is SpanKind.LEASE and span.outcome != "redeemed":
            self.metrics.add("prime_leases_wasted_total", outcome=span.outcome)
        known = state.workers.get(span.worker)
        self.timeline.record(
            kind=str(span.kind),
            begin_ms=span.begin_ms,
            end_ms=span.end_ms,
            outcome=span.outcome,
            worker=span.worker,
            name="" if known is None else known.name,
            step=span.step,
            policy_version=span.policy_version,
            first_slot=span.slots[0] if span.slots else -1,
            num_groups=len(span.slots),
        )

    def _tell_step(self, done: StepLog, state: State) -> None:
        self._steps.append(done)
        self._num_stale += done.dropped["stale"]
        for lag, count in done.lags.items():
            for _ in range(count):
                self.metrics.observe("prime_group_lag", lag)
        for name, values in (("queue", done.queue_seconds), ("generate", done.generate_seconds)):
            for value in values:
                self.metrics.observe(f"prime_group_{name}_seconds", value)
        for reason, count in done.dropped.items():
            self.metrics.add("prime_groups_dropped_total", count, reason=reason)
        row = coordinator_row(
            done, head=state.head, num_generated=state.num_accepted_groups, num_dropped=self._num_stale
        )
        for name, measured in (("broadcast_seconds", self.availability), ("swap_seconds", self.swaps)):
            if (most_s := measured.most_s(done.step)) is not None:
                row[name] = most_s
        closeness = self.closeness(state)
        if closeness is not None:
            row["closeness"] = closeness
        if (train_s := self.train_seconds.get(done.step + 1)) is not None:
            row["train_seconds"] = train_s
        curriculum = state.curriculum
        self.rows.record(**row, **self.curriculum.shares(curriculum), **curriculum.counts)


def _steady_step_seconds(
    works: list[Work], mode: WaitingRules, *, workers: int, train_seconds: float, available_seconds: float
) -> float:
    """Return the time per step in a full pipeline, from the last of three rounds of the same work."""
    size = mode.admission.groups_per_step
    again: list[Work] = []
    slot = 0
    for work in works * 3:
        again.append(Work(slot, work.num_groups, work.seconds))
        slot += work.num_groups
    num_steps = slot // size
    times = published_at(
        again,
        mode,
        workers=workers,
        train_seconds=lambda step: train_seconds,
        available_seconds=available_seconds,
        num_steps=num_steps,
    )
    first = num_steps * 2 // 3
    return (times[-1] - times[first - 1]) / (num_steps - first)


def _keep_newest(found: dict[int, float]) -> None:
    while len(found) > 2 * STEPS_COMPARED:
        del found[min(found)]
