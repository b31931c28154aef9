"""The journal: applies events to the state at once, and makes them durable in groups.

`record` never waits. One writer task takes all events that arrived during its last write and appends them in one transaction,
so that they share the cost of a durable write. A handler awaits `synced` before it answers. So no answer leaves before
everything that it may depend on is durable.

Invariant: the store always holds a prefix of the events in the state. If the store fails, the state stays ahead of it, so the
journal fails permanently too and the daemon ends. A restart continues from the prefix, and no peer got an answer beyond it. The
same holds if `tick` raises: it may have applied half of the event, and the log does not contain it.

Snapshots come from a copy of the state that follows the log in a thread (state_copy.py). So neither answers nor ticks wait for
them. With each snapshot, the events that it replaces are archived (journal_archive.py).

A settled receipt becomes a line of the ledger (prime_protocol/ledger.py) in the transaction of the event that settled it. The
receipt of a pending bundle is made when its worker asks for it (api/receipts.py): most bundles have a verdict before that.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from prime_node.coordinator.journal_archive import JournalArchive, open_archive
from prime_node.coordinator.journal_segments import LedgerPoint
from prime_node.coordinator.ledger import load_chain, settled_last_ms
from prime_node.coordinator.state import events as ev
from prime_node.coordinator.state import invariants
from prime_node.coordinator.state.effects import BundleForgotten, Effect, Settled
from prime_node.coordinator.state.records import PendingBundle, State
from prime_node.coordinator.state.tick import tick
from prime_node.coordinator.state_copy import StateCopy
from prime_node.ports.clock import Clock
from prime_node.ports.store import LoggedEvent, Store, StoredReceipt
from prime_protocol.envelope import Envelope
from prime_protocol.errors import ErrorCode, RemoteError, TransientFault
from prime_protocol.ledger import LedgerChain
from prime_protocol.verdict import BundleStatus

log = logging.getLogger(__name__)

WRITE_S_MIN = 0.005
"""Shortest time from one write of the store to the next. Each costs as much as a lease; under load several handlers share one."""


class Journal:
    """The state with its log. Created by `open_journal`."""

    def __init__(
        self,
        store: Store,
        state: State,
        *,
        number: int,
        clock: Clock,
        sign_receipt: Callable[[Settled, int], Envelope],
        ledger: LedgerChain,
        archive: JournalArchive,
        said_ms: int,
        snapshot_events: int,
    ) -> None:
        """Date no statement before `said_ms`: the newest time of the ledger's last line, its last head and a lease."""
        self.state = state
        self.ledger = ledger
        """The ledger. Read only. It is durable once `synced` returns."""
        self._store = store
        self._clock = clock
        self._sign_receipt = sign_receipt
        self._said_ms = said_ms
        self._snapshot_events = snapshot_events
        self._number = number
        self._durable = number
        self._snapshot = number
        self._events: list[LoggedEvent] = []
        self._receipts: list[StoredReceipt] = []
        self._lines: list[str] = []
        self._forgotten: list[str] = []
        self._wanted = asyncio.Event()
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._num_begun = self._num_ended = 0
        """Writes."""
        self._noted: deque[tuple[int, asyncio.Future[None]]] = deque()
        """Writes with the receipts of pending bundles for which someone waits."""
        self._signed: dict[str, int] = {}
        """Pending bundles whose receipts are signed, with the number of the write that stores each."""
        self._archive = archive
        self._written = LedgerPoint(ledger.num_entries, ledger.digest)
        """End of the ledger after the last durable event."""
        self._copy = StateCopy(state, number)
        self._uncopied: list[LoggedEvent] = []
        """Durable events that the copy lacks."""
        self._saving: asyncio.Task[None] | None = None
        """Task of the newest snapshot."""
        self._asked: deque[tuple[int, asyncio.Future[None]]] = deque()
        """Event numbers for whose snapshot someone waits."""
        self._failed = False
        self._fault: BaseException | None = None
        self._closing = False

    @property
    def number(self) -> int:
        """Number of the last event."""
        return self._number

    def record(self, event: ev.Event) -> list[Effect]:
        """Apply an event now and queue it for the log. The caller carries out the effects, except for deleting bundles."""
        if self._failed or self._closing:
            raise _unavailable()
        at_ms = self._clock.now_ms()
        try:
            effects = tick(self.state, event, at_ms)
        except BaseException as error:
            self._failed, self._fault = True, error
            self._wanted.set()
            raise
        if isinstance(event, ev.LeaseGranted):  # dated by the clock; its receipts must not be dated before it
            self._said_ms = max(self._said_ms, at_ms)
        self._number += 1
        self._events.append(LoggedEvent(self._number, at_ms, ev.event_to_json(event)))
        for settled in (effect for effect in effects if isinstance(effect, Settled)):
            if settled.status is not BundleStatus.PENDING:
                self._signed.pop(settled.bundle, None)
                self._note(settled)
        self._forgotten += [effect.bundle for effect in effects if isinstance(effect, BundleForgotten)]
        self._wanted.set()
        return effects

    async def note_pending(self, pending: Iterable[PendingBundle]) -> None:
        """Sign receipts of pending bundles, each once, and return once they are stored.

        Raise RemoteError(UNAVAILABLE) if that fails.
        """
        if self._failed or self._closing:
            raise _unavailable()
        last = 0
        for one in pending:
            if one.bundle not in self._signed:
                self._note(Settled(one.bundle, one.lease, one.num_rollouts, 0, BundleStatus.PENDING))
                self._signed[one.bundle] = self._num_begun + 1
            last = max(last, self._signed[one.bundle])
        if last > self._num_ended:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._noted.append((last, future))
            self._wanted.set()
            await future

    @property
    def durable(self) -> int:
        """Number of the last durable event."""
        return self._durable

    @property
    def is_synced(self) -> bool:
        """Whether every event so far is durable."""
        return not self._failed and self._durable == self._number

    async def synced(self) -> None:
        """Return once every event so far is durable. Raise RemoteError(UNAVAILABLE) if that has become impossible.

        Whether this coordinator may still answer is another question (`Decisions.may_answer`).
        """
        if self._failed:
            raise _unavailable()
        if self._durable < self._number:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((self._number, future))
            await future

    async def write(self, forget: Callable[[Sequence[str]], None]) -> None:
        """Run the writer task. Call `forget` with bundles that may be deleted. Return after `close`, with all events durable."""
        try:
            loop, began_s = asyncio.get_running_loop(), -WRITE_S_MIN
            while True:
                await self._wanted.wait()
                if not (self._failed or self._closing):
                    await asyncio.sleep(began_s + WRITE_S_MIN - loop.time())  # at once if that has passed
                self._wanted.clear()
                began_s = loop.time()
                if self._fault is not None:
                    raise TransientFault(
                        "the coordinator's state may be wrong after an error; restart it"
                    ) from self._fault
                await self._write_once(forget)
                if self._saving is not None and self._saving.done():
                    self._saving.result()  # raises what ended it
                if self._closing and not self._events and not self._receipts:
                    await self._save_last()
                    return
                if self._is_snapshot_due() and (self._saving is None or self._saving.done()):
                    self._saving = asyncio.create_task(self._save())
                    self._saving.add_done_callback(lambda _: self._wanted.set())
        except BaseException:
            self._failed = True
            if self._saving is not None:
                self._saving.cancel()
            for _, future in (*self._waiting, *self._noted, *self._asked):
                if not future.done():
                    future.set_exception(_unavailable())
            raise

    def said_ms(self) -> int:
        """Return the time for a statement. It never goes back, even if the machine's clock does.

        Statements are compared by these times, and those of an honest coordinator must not contradict each other.
        """
        self._said_ms = max(self._said_ms, self._clock.now_ms())
        return self._said_ms

    def next_ms(self) -> int:
        """Return the time for a ledger head or line: later than every statement before it.

        So a longer ledger always has a later date, also one of a copy (StoredLedger), whose head has that of its last line.
        """
        self._said_ms = max(self._said_ms + 1, self._clock.now_ms())
        return self._said_ms

    async def save_snapshot(self) -> None:
        """Save a snapshot now, so that a restart replays few events. Raise RemoteError(UNAVAILABLE) if that is impossible."""
        if self._failed or self._closing:
            raise _unavailable()
        if self._snapshot < self._number:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._asked.append((self._number, future))
            self._wanted.set()
            await future

    def close(self) -> None:
        """Refuse further events and let the writer finish."""
        self._closing = True
        self._wanted.set()

    def _note(self, settled: Settled) -> None:
        is_line, lease = settled.status is not BundleStatus.PENDING, settled.lease
        envelope = self._sign_receipt(settled, self.next_ms() if is_line else self.said_ms())
        text = envelope.to_bytes().decode()
        stored = StoredReceipt(settled.bundle, lease.lease_id, lease.worker, lease.step, settled.status, text)
        self._receipts.append(stored)
        if is_line:
            self._lines.append(self.ledger.add(envelope.payload).decode())

    async def _write_once(self, forget: Callable[[Sequence[str]], None]) -> None:
        written, receipts, lines, forgotten = self._events, self._receipts, self._lines, self._forgotten
        self._events, self._receipts, self._lines, self._forgotten = [], [], [], []
        number, end = self._number, LedgerPoint(self.ledger.num_entries, self.ledger.digest)
        self._num_begun += 1
        if written or receipts:
            await self._store.append(written, _latest(receipts), lines)
            self._uncopied += written
            self._written = end
        self._durable = number
        _release(self._waiting, number)
        self._num_ended = self._num_begun
        _release(self._noted, self._num_ended)
        if forgotten:
            forget(forgotten)

    def _is_snapshot_due(self) -> bool:
        is_asked = bool(self._asked) and self._snapshot < self._durable
        return is_asked or self._durable - self._snapshot >= self._snapshot_events

    async def _save(self) -> None:
        """Save a snapshot of all durable events, while others are appended."""
        events, self._uncopied, end = self._uncopied, [], self._written
        payload = await asyncio.to_thread(self._copy.snapshot_after, events)
        segment, kept_from = await self._archive.next_segment(events, payload, end)
        await self._store.save_snapshot(self._copy.number, payload, segment, kept_from=kept_from)
        self._snapshot = self._copy.number
        _release(self._asked, self._snapshot)

    async def _save_last(self) -> None:
        if self._saving is not None:
            await self._saving
        if self._snapshot < self._durable:
            await self._save()
        _release(self._asked, self._durable)


async def open_journal(
    store: Store,
    restored: tuple[int, State],
    *,
    clock: Clock,
    sign_receipt: Callable[[Settled, int], Envelope],
    snapshot_events: int,
    shown_ms: int = 0,
    archive_days: float = 0.0,
    archive_bytes_max: float = 0.0,
) -> Journal:
    """Open the journal after `restore_state`. `shown_ms` is the time of the ledger's last head.

    What the archive keeps is bounded by days and by bytes; 0 of either keeps none.
    """
    number, state = restored
    invariants.check_invariants(state)
    chain = await load_chain(store, state.rules.run)
    archive = await open_archive(
        store, State(state.rules), run=state.rules.run, days=archive_days, bytes_max=archive_bytes_max
    )
    log.info("state restored at event %d: policy %d, %d workers", number, state.head, len(state.workers))
    return Journal(
        store,
        state,
        number=number,
        clock=clock,
        sign_receipt=sign_receipt,
        ledger=chain,
        archive=archive,
        said_ms=max(shown_ms, await settled_last_ms(store), _leased_last_ms(state)),
        snapshot_events=snapshot_events,
    )


def _leased_last_ms(state: State) -> int:
    """Return the newest date of a lease for which a bundle may still come or wait; 0 if there is none."""
    waiting = (pending.lease for pending in state.bundles.values())
    ended = (lease for worker in state.workers.values() for lease in worker.ended)
    return max((lease.issued_at_ms for lease in (*state.leases.values(), *waiting, *ended)), default=0)


def _release(waiting: deque[tuple[int, asyncio.Future[None]]], number: int) -> None:
    """Wake those who wait for what has numbers up to this one."""
    while waiting and waiting[0][0] <= number:
        _, future = waiting.popleft()
        if not future.done():
            future.set_result(None)


def _latest(receipts: list[StoredReceipt]) -> list[StoredReceipt]:
    """Return the last receipt of each bundle: no peer has seen the earlier ones."""
    return list({receipt.bundle: receipt for receipt in receipts}.values())


def _unavailable() -> RemoteError:
    return RemoteError(ErrorCode.UNAVAILABLE, "the coordinator is stopping", retry_after_s=2.0)
