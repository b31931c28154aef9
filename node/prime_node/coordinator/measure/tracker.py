"""The tracker: derives from the state machine's events what happened between two policies. Pure; it decides nothing.

Soft state: a restart begins it again, so the report of that step lacks what was in progress then. It processes an event after
`tick` has applied it, with its effects. It never searches all leases: the cost of an event depends on what the event ends.
Memory is bounded like the state's: by open leases, pending bundles, waiting groups, and workers.

A worker generates its leases in turn. The time of each counts from its grant or from the worker's last bundle, whichever is
later. `tick` measures a worker's speed in the same way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from prime_node.coordinator.measure.zero_overhead import Work
from prime_node.coordinator.state import events as ev
from prime_node.coordinator.state.effects import Effect, LeaseEnded, Settled
from prime_node.coordinator.state.records import LeaseEnd, LeaseRecord, State
from prime_protocol.verdict import BundleStatus


class SpanKind(StrEnum):
    """Kind of an interval or a moment."""

    LEASE = "lease"
    """A worker held and generated a lease."""
    CHECK = "check"
    """A bundle waited for its verdict."""
    BATCH = "batch"
    """The trainer got a batch, at this moment."""
    POLICY = "policy"
    """A policy was published, at this moment."""


@dataclass(frozen=True, slots=True)
class Span:
    """A line of the timeline. Example: Span(SpanKind.LEASE, 1_000, 1_700, "redeemed", "12D3...", 4, 3, (128, 129))."""

    kind: SpanKind
    begin_ms: int
    end_ms: int
    outcome: str = ""
    """End of a lease, or verdict of a check."""
    worker: str = ""
    step: int = -1
    policy_version: int = -1
    slots: tuple[int, ...] = ()

    @property
    def seconds(self) -> float:
        """The length of the span."""
        return (self.end_ms - self.begin_ms) / 1_000


class _Held(NamedTuple):
    worker: str
    step: int
    policy_version: int
    slots: tuple[int, ...]
    granted_ms: int


class _Waiting(NamedTuple):
    """An accepted group that no batch has taken."""

    since_ms: int
    lease: Span


@dataclass(slots=True)
class StepLog:
    """Log of the time in which the trainer made one policy from another."""

    step: int
    began_ms: int | None = None
    """Start of the step; None: before the tracker began."""
    ended_ms: int = 0
    busy_ms: float = 0.0
    """Sum of the times in which workers held a lease."""
    present_ms: float = 0.0
    """Sum of the times in which workers took part."""
    lags: Counter[int] = field(default_factory=Counter)
    """Policies behind the step -> groups trained."""
    queue_seconds: list[float] = field(default_factory=list)
    """Seconds from verdict to batch, per trained group."""
    generate_seconds: list[float] = field(default_factory=list)
    """Seconds of its lease, per trained group."""
    check_seconds: list[float] = field(default_factory=list)
    """Seconds from arrival to verdict, per judged bundle."""
    works: list[Work] = field(default_factory=list)
    """Trained leases, for the replay."""
    rewards: list[float] = field(default_factory=list)
    """Reward of each scored completion in the trained groups."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Accepted groups that were dropped, by reason."""
    refused: Counter[str] = field(default_factory=Counter)
    """Rejected bundles, by reason."""
    wasted: Counter[str] = field(default_factory=Counter)
    """Leases that ended without a bundle, by how they ended."""
    num_ready: int = 0
    """Accepted groups without a batch when the policy was published."""
    num_leased: int = 0
    """Groups that were leased or waited for a verdict then."""
    num_open: int = 0
    """Groups that waited to be leased then."""

    @property
    def seconds(self) -> float:
        """The length of the step."""
        return (self.ended_ms - (self.began_ms or 0)) / 1_000

    @property
    def idle_ratio(self) -> float:
        """The share of the workers' time in which they held no lease."""
        return 1.0 - self.busy_ms / self.present_ms if self.present_ms > 0 else 0.0

    @property
    def workers_mean(self) -> float:
        """The mean number of active workers."""
        return self.present_ms / 1_000 / max(self.seconds, 1e-3)


class Tracker:
    """Tracker of all events in order, starting from the given state."""

    def __init__(self, state: State) -> None:
        self._now_ms = 0
        self._step = max(0, state.head)
        """Step in progress."""
        self._logs: dict[int, StepLog] = {}
        """Logs of this step and of later ones, because the trainer fetches its batches ahead."""
        self.held: dict[str, _Held] = {}
        self._holding: Counter[str] = Counter()
        """Worker -> number of leases that it holds; workers with none are absent."""
        self._num_active = 0
        self._arrived_ms: dict[str, int] = {}
        """Worker -> arrival of its last bundle; removed some time after the state has forgotten the worker."""
        self.judged: dict[str, Span] = {}
        """Pending bundle -> its lease."""
        self._waiting: dict[int, _Waiting] = {}
        """Waiting groups by slot."""
        for lease in state.leases.values():
            self._hold(lease.lease_id, _held(lease))
        for pending in state.bundles.values():
            self.judged[pending.bundle] = self._span(_held(pending.lease), pending.arrived_at_ms, "redeemed")

    def note(
        self, event: ev.Event, effects: Sequence[Effect], state: State, at_ms: int
    ) -> tuple[list[Span], StepLog | None]:
        """Return the spans that ended with the event and, if it published a policy, the log of the step."""
        self._pass_time(at_ms)
        spans: list[Span] = []
        done: StepLog | None = None
        match event:
            case ev.LeaseGranted():
                self._hold(event.lease_id, _held(state.leases[event.lease_id]))
            case ev.BundleArrived():
                spans.append(self._arrive(event.bundle, state.bundles[event.bundle].lease, at_ms))
            case ev.VerdictGiven():
                spans += self._judge(event, effects, state, at_ms)
            case ev.BatchFixed():
                spans.append(Span(SpanKind.BATCH, at_ms, at_ms, step=event.step))
                self._take(event.step, state, at_ms)
            case ev.GroupsDropped():
                self._drop("stale", event.slots)
            case ev.GroupsLost():
                self._drop("damaged", event.slots)
            case ev.GroupsRated():
                for rating in event.ratings:
                    if rating.filtered is not None:
                        self._drop(f"too_{rating.filtered}", (rating.slot,))
            case ev.ManifestPublished():
                spans.append(Span(SpanKind.POLICY, at_ms, at_ms, policy_version=event.policy_version))
                done = self._publish(state, at_ms)
            case _:
                pass
        for effect in effects:
            match effect:
                case LeaseEnded():
                    spans += self._let_go(effect.lease, at_ms)
                case Settled(status=BundleStatus.REFUSED):
                    self.judged.pop(effect.bundle, None)  # with its worker, without a verdict of its own
                    self._take_back(effect.lease, state)
        if len(self._arrived_ms) > 2 * len(state.workers) + 16:
            self._arrived_ms = {key: at_ms for key, at_ms in self._arrived_ms.items() if key in state.workers}
        self._num_active = state.num_active
        return spans, done

    def _log(self, step: int) -> StepLog:
        return self._logs.setdefault(step, StepLog(step))

    def _pass_time(self, at_ms: int) -> None:
        passed_ms, log = max(0, at_ms - self._now_ms), self._log(self._step)
        log.busy_ms += passed_ms * min(len(self._holding), self._num_active)
        log.present_ms += passed_ms * self._num_active
        self._now_ms = max(self._now_ms, at_ms)

    def _hold(self, lease_id: str, held: _Held) -> None:
        self.held[lease_id] = held
        self._holding[held.worker] += 1

    def _arrive(self, bundle: str, lease: LeaseRecord, at_ms: int) -> Span:
        if self.held.pop(lease.lease_id, None) is not None:  # otherwise it had lapsed
            self._release(lease.worker)
        span = self._span(_held(lease), at_ms, "redeemed")
        self._arrived_ms[lease.worker] = at_ms
        self.judged[bundle] = span
        return span

    def _judge(self, event: ev.VerdictGiven, effects: Sequence[Effect], state: State, at_ms: int) -> list[Span]:
        lease = self.judged.pop(event.bundle)
        # The state machine rejects some bundles that the validator accepted: copies, and those that complete the evidence for a
        # ban.
        settled = (one for one in effects if isinstance(one, Settled) and one.bundle == event.bundle)
        reason = next((one.reason for one in settled), None)
        outcome = "accepted" if reason is None else str(reason)
        check = Span(
            SpanKind.CHECK,
            lease.end_ms,
            at_ms,
            outcome,
            lease.worker,
            lease.step,
            lease.policy_version,
            lease.slots,
        )
        step = state.steps.get(lease.step)
        for slot in lease.slots if reason is None and step is not None else ():
            if step is not None and slot in step.accepted and step.accepted[slot].bundle == event.bundle:
                self._waiting[slot] = _Waiting(at_ms, lease)
        log = self._log(self._step)
        log.check_seconds.append(check.seconds)
        if reason is not None:
            log.refused[outcome] += 1
        return [check]

    def _take(self, number: int, state: State, at_ms: int) -> None:
        size, log = state.rules.groups_per_step, self._log(number)
        for slot in state.batches[number][-1]:
            group = state.steps[slot // size].accepted[slot]
            waited = self._waiting.pop(slot, None)
            log.lags[number - group.counted_from(state.rules.staleness_from)] += 1
            log.rewards += [one for place, one in enumerate(group.rewards) if place not in group.unscored]
            if waited is None:
                continue
            log.queue_seconds.append((at_ms - waited.since_ms) / 1_000)
            log.generate_seconds.append(waited.lease.seconds)
            if slot == waited.lease.slots[0]:
                log.works.append(Work(slot, len(waited.lease.slots), waited.lease.seconds))

    def _drop(self, reason: str, slots: tuple[int, ...]) -> None:
        for slot in slots:
            self._waiting.pop(slot, None)
        self._log(self._step).dropped[reason] += len(slots)

    def _take_back(self, lease: LeaseRecord, state: State) -> None:
        """Drop the groups of a rejected bundle that had been accepted before."""
        step = state.step_of(lease)
        accepted = {} if step is None else step.accepted
        lost = tuple(
            slot
            for slot in lease.slots
            if slot not in accepted
            and (waited := self._waiting.get(slot)) is not None
            and (waited.lease.worker, waited.lease.slots) == (lease.worker, lease.slots)
        )
        if lost:
            self._drop("taken_back", lost)

    def _publish(self, state: State, at_ms: int) -> StepLog | None:
        log = self._logs.pop(self._step)
        self._step = state.head
        self._log(self._step).began_ms = at_ms
        if log.began_ms is None:
            return None
        log.ended_ms = at_ms
        log.num_ready = state.num_ready
        log.num_leased = sum(len(step.held) for step in state.steps.values())
        log.num_open = sum(len(step.open) for step in state.steps.values())
        return log

    def _let_go(self, lease: LeaseRecord, at_ms: int) -> list[Span]:
        """End a lease without a bundle."""
        held = self.held.pop(lease.lease_id, None)
        if held is None:
            return []
        self._release(held.worker)
        outcome = str(lease.end or LeaseEnd.LAPSED)
        self._log(self._step).wasted[outcome] += 1
        return [self._span(held, at_ms, outcome)]

    def _release(self, worker: str) -> None:
        self._holding[worker] -= 1
        if self._holding[worker] <= 0:
            del self._holding[worker]

    def _span(self, held: _Held, at_ms: int, outcome: str) -> Span:
        begun_ms = max(held.granted_ms, self._arrived_ms.get(held.worker, 0))
        return Span(
            SpanKind.LEASE,
            min(begun_ms, at_ms),
            at_ms,
            outcome,
            held.worker,
            held.step,
            held.policy_version,
            held.slots,
        )


def _held(lease: LeaseRecord) -> _Held:
    return _Held(lease.worker, lease.step, lease.policy_version, lease.slots, lease.issued_at_ms)
