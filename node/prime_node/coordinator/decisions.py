"""The state of a running coordinator, and the one way in which it changes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from prime_node.coordinator.check_queue import CheckQueue
from prime_node.coordinator.evaluating import Evaluations
from prime_node.coordinator.journal import Journal
from prime_node.coordinator.measure.observer import Observer
from prime_node.coordinator.state import events as ev
from prime_node.coordinator.state.effects import Effect, Evaluated, Settled, Woken, WorkerWasBanned
from prime_node.coordinator.state.records import State
from prime_node.coordinator.state.scheduler import is_work_left
from prime_node.coordinator.waiting import Notifications
from prime_node.ports.clock import Clock
from prime_node.ports.leadership import Leadership
from prime_node.ports.metrics import Metrics
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.verdict import BundleStatus

log = logging.getLogger(__name__)

TERM_RETRY_S = 0.5
"""Time after which a client may repeat a request whose answer came after the end of the coordinator's term."""


class Decisions:
    """The state, changed by events alone. A decision takes effect at once and carries out its effects."""

    def __init__(
        self,
        journal: Journal,
        clock: Clock,
        observer: Observer,
        notifications: Notifications,
        checks: CheckQueue,
        evaluations: Evaluations,
        metrics: Metrics,
        *,
        leadership: Leadership | None,
    ) -> None:
        self.banned: asyncio.Queue[str] = asyncio.Queue()
        """Workers whose ban dossier has to be written (dossiers.py)."""
        self.state: State = journal.state
        """The state. Read only; `decide` changes it."""
        self._journal = journal
        self._clock = clock
        self._observer = observer
        self._notifications = notifications
        self._checks = checks
        self._evaluations = evaluations
        self._metrics = metrics
        self._leadership = leadership

    @property
    def number(self) -> int:
        """Number of the last event."""
        return self._journal.number

    def decide(self, event: ev.Event) -> None:
        """Apply an event. It is durable once `synced` returns, which every answer waits for."""
        effects = self._journal.record(event)
        self._observer.note(event, effects, self.state, self._clock.now_ms())
        for effect in effects:
            self._carry_out(effect, event)

    async def synced(self) -> None:
        """Return once every event so far is durable. Raise RemoteError(UNAVAILABLE) if that has become impossible."""
        await self._journal.synced()

    async def note_pending(self, bundles: Iterable[str]) -> None:
        """Store the receipts of those of these bundles that are pending. Raise RemoteError(UNAVAILABLE) if that fails."""
        if pending := [self.state.bundles[bundle] for bundle in bundles if bundle in self.state.bundles]:
            await self._journal.note_pending(pending)

    async def answerable(self) -> None:
        """Return once an answer may be given: all that it may depend on is durable. Raise RemoteError(UNAVAILABLE)."""
        await self._journal.synced()
        if not self.may_answer():
            raise RemoteError(
                ErrorCode.UNAVAILABLE, "the coordinator may have been replaced", retry_after_s=TERM_RETRY_S
            )

    def is_answerable(self) -> bool:
        """Return whether `answerable` would return at once."""
        return self._journal.is_synced and self.may_answer()

    def may_answer(self) -> bool:
        """Return whether no other coordinator can lead at this moment, so that an answer or a deletion does no harm."""
        return self._leadership is None or self._leadership.may_answer()

    def _carry_out(self, effect: Effect, event: ev.Event) -> None:
        match effect:
            case Woken(is_offer=True):
                self._notifications.offer(effect.topic, self._is_work_left)
            case Woken():
                self._notifications.publish(effect.topic)
            case Settled() if not isinstance(event, ev.EscrowReleased):  # those were counted before
                self._follow_bundle(effect)
            case Evaluated():
                row = self._evaluations.row_of(self.state.results[effect.policy_version])
                self._observer.rows.record(policy_version=effect.policy_version, **row)
            case WorkerWasBanned():
                self._observer.banned(effect.worker, effect.ban, self.state)
                log.warning("worker %s is banned: %s", effect.worker, effect.ban.reason)
                self.banned.put_nowait(effect.worker)

    def _is_work_left(self) -> bool:
        return is_work_left(self.state)

    def _follow_bundle(self, effect: Settled) -> None:
        if effect.status is BundleStatus.PENDING:
            self._checks.add(effect.bundle, effect.lease.policy_version)
            return
        self._checks.settled([effect.bundle])
        outcome = str(effect.reason or "accepted")
        if effect.reason is None:
            self._observer.credited(effect.lease.worker, effect.num_tokens - effect.credited_before)
        self._metrics.add("prime_rollouts_total", effect.num_rollouts, outcome=outcome)
        if effect.reason is not None:
            log.info(
                "rejected bundle %s of %s for step %d: %s %s",
                effect.bundle[:12],
                effect.lease.worker,
                effect.lease.step,
                effect.reason,
                effect.detail,
            )
