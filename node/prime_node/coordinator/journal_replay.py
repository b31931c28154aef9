"""The archived journal folded again: state, ledger and batches must follow from its events. The first row that does not is named.

The state machine is the one that the coordinator runs (state/tick.py). Checked are:

    (1) the segments: their chain of digests, and that no event is missing between them
    (2) the state after each segment, and the newest snapshot, by digest
    (3) each batch: its slots are those that `choose_batch` takes in the state in which it was chosen, and a published batch
        holds these groups; groups that were dropped as too old were. What was chosen by other rules (CHOICE_RULES) is counted
    (4) each line of the ledger since then: its receipt is the one that the event settles; chain and signed head agree

What was before the oldest segment is not known here. The events themselves are the coordinator's word: peers sign bundles, not
events.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from prime_node import __version__
from prime_node.coordinator.api.receipts import receipt_of
from prime_node.coordinator.assignments import Assigner
from prime_node.coordinator.journal_segments import DamagedSegment, LedgerPoint, OpenSegment, decode_segment
from prime_node.coordinator.state import events as ev
from prime_node.coordinator.state import snapshot
from prime_node.coordinator.state.batches import CHOICE_RULES, choose_batch, next_step, stale_slots
from prime_node.coordinator.state.effects import Settled
from prime_node.coordinator.state.records import State
from prime_node.coordinator.state.rules import rules_of
from prime_node.coordinator.state.tick import tick
from prime_node.coordinator.state_copy import json_pieces
from prime_node.ports.documents import Documents, batch_name
from prime_node.ports.store import DamagedRow, LoggedEvent, Store
from prime_protocol import limits
from prime_protocol.digest import digest_of, digest_of_all
from prime_protocol.envelope import PayloadType, open_envelope, parse_json
from prime_protocol.errors import LocalError, RemoteError
from prime_protocol.key_ring import Role
from prime_protocol.ledger import LedgerChain, LedgerHead
from prime_protocol.replies import TrainBatch
from prime_protocol.run_spec import PinnedRun
from prime_protocol.verdict import BundleStatus, Receipt

_LINES_MAX = 1_000
"""Lines of the ledger that are read at once."""


class RowFault(Exception):
    """The first row that does not follow. Example: RowFault("line 17 of the ledger", "...")."""

    def __init__(self, row: str, detail: str) -> None:
        super().__init__(f"{row}: {detail}")
        self.row, self.detail = row, detail


@dataclass(slots=True)
class JournalReport:
    """What was folded, and what followed."""

    first: int = 0
    """Number of the first event."""
    last: int = 0
    num_segments: int = 0
    num_lines: int = 0
    """Lines of the ledger that follow from these events."""
    num_batches: int = 0
    num_published: int = 0
    """Batches among them that were compared with their published document."""
    other_rules: dict[int, int] = field(default_factory=dict)
    """Version of the rules of choice -> batches, and groups dropped as too old, that another release chose by them."""
    state: str = ""
    """Digest of the state after the last event."""
    ledger: LedgerPoint = field(default_factory=lambda: LedgerPoint(0, ""))
    notes: list[str] = field(default_factory=list)


@dataclass(slots=True)
class JournalReplay:
    """One reading of a store's archive."""

    store: Store
    run: PinnedRun
    assigner: Assigner
    head: LedgerHead | None
    """Last head of the ledger that the coordinator signed."""
    published: Documents
    """Documents that mirrors copy, with the batches of a run that promises re-execution."""
    report: JournalReport = field(default_factory=JournalReport)
    _state: State = field(init=False)
    _settled: list[tuple[int, Settled]] = field(default_factory=list)
    """Event and outcome of each receipt since the last comparison with the ledger."""
    _asked: set[int] = field(default_factory=set)
    """Events in whose state a batch was chosen."""
    _choices: dict[int, tuple[int, tuple[int, ...] | None]] = field(default_factory=dict)
    """Event -> the step and the slots of the batch that is chosen in the state after it."""

    async def fold(self) -> JournalReport:
        """Fold all that is archived, and the events since. Raises RowFault, and LocalError if this machine cannot say."""
        try:
            await self._read_chain()
            return await self._fold()
        except DamagedRow as error:
            raise RowFault(error.row, "it is not as it was written") from None

    async def _opened(self) -> AsyncIterator[OpenSegment]:
        async for segment in self.store.segments(after=0):
            try:
                yield await asyncio.to_thread(decode_segment, segment)
            except DamagedSegment as error:
                raise RowFault(_named(segment.first, segment.last), str(error)) from None

    async def _read_chain(self) -> None:
        """Compare the segments with each other, and note in which states a batch was chosen."""
        before: OpenSegment | None = None
        async for one in self._opened():
            header = one.header
            if before is not None:
                end = before.header.first + before.header.num_events
                if header.first != end:
                    raise RowFault(_named(end, header.first - 1), "this part of the journal is missing in the archive")
                if header.previous != before.digest:
                    raise RowFault(
                        _named(before.header.first, end - 1), "the next segment names another one in its place"
                    )
                if header.opening != before.header.closing:
                    raise RowFault(
                        _named(header.first, end), "it begins with another state than the one before it ends"
                    )
            self._note_choices(one.events, header.software)
            before = one
        last = 0 if before is None else before.header.first + before.header.num_events - 1
        self._note_choices([logged async for logged in self.store.events(after=last)])

    def _note_choices(self, events: Sequence[LoggedEvent], software: str = __version__) -> None:
        for logged in events:
            if '"batch_fixed"' in logged.payload:
                event = _event_of(logged, software)
                if isinstance(event, ev.BatchFixed):
                    self._asked.add(event.chosen_after)

    async def _fold(self) -> JournalReport:
        report, rules = self.report, rules_of(self.run)
        self._state, closing, walk = State(rules), "", _LedgerWalk(self.store, self.run)
        initial = _digest_of_state(self._state)
        point: LedgerPoint | None = LedgerPoint(0, self.run.digest)
        async for one in self._opened():
            header = one.header
            if not report.num_segments:
                report.first, report.last, point = header.first, header.first - 1, header.ledger_before
                if not one.state or (header.first == 1 and header.opening != initial):
                    raise RowFault(_named(header.first, header.first), "it does not begin with a state that is known")
            if one.state:
                self._state = await asyncio.to_thread(_state_of, one)
            name = _named(header.first, header.first + header.num_events - 1)
            await self._apply_all(one.events, header.software)
            closing = await asyncio.to_thread(_digest_of_state, self._state)
            if closing != header.closing:
                _require_release(header.software)
                raise RowFault(
                    name, f"the state after it is {closing[:12]}, and the coordinator's was {header.closing[:12]}"
                )
            await self._compare_lines(walk, point, header.ledger_after)
            point = header.ledger_after
            report.num_segments += 1
        await self._fold_rest(walk, point, closing)
        return report

    async def _fold_rest(self, walk: _LedgerWalk, point: LedgerPoint | None, closing: str) -> None:
        """Fold the events that no segment holds yet, and compare the ends."""
        report, latest = self.report, await self.store.latest_snapshot()
        if latest is not None and not report.num_segments:
            raise LocalError(
                f"the journal up to event {latest[0]} is not archived: coordinator.journal_days and journal_gib_max say what is "
                "kept, and a run of an older release has an archive from its next snapshot on"
            )
        if latest is not None and (latest[0], digest_of(latest[1].encode())) != (report.last, closing):
            raise RowFault(
                f"snapshot of event {latest[0]}", f"the archive ends at event {report.last} in another state"
            )
        if not report.num_segments:
            report.first = 1
        rest = [logged async for logged in self.store.events(after=report.last)]
        await self._apply_all(rest)
        length = await self.store.ledger_length()
        expected = LedgerPoint(length, await walk.digest_at(length))
        await self._compare_lines(walk, point, expected)
        if self.head is not None and await walk.digest_at(self.head.num_entries) != self.head.digest:
            raise RowFault(
                f"line {self.head.num_entries - 1} of the ledger", "the head that was signed names another line here"
            )
        report.ledger, report.state = expected, await asyncio.to_thread(_digest_of_state, self._state)

    async def _apply_all(self, events: Sequence[LoggedEvent], software: str = __version__) -> None:
        for logged in events:
            if logged.number != self.report.last + 1:
                raise RowFault(f"event {self.report.last + 1}", "it is missing in the journal")
            await self._apply(logged, _event_of(logged, software))
            self.report.last = logged.number

    async def _apply(self, logged: LoggedEvent, event: ev.Event) -> None:
        """Fold one event. Raises RowFault if it cannot follow the ones before it."""
        state = self._state
        if isinstance(event, ev.BatchFixed):
            self._check_choice(logged.number, event)
        if (
            isinstance(event, ev.GroupsDropped)
            and self._knows_rules(event)
            and event.slots != stale_slots(state, next_step(state))
        ):
            raise RowFault(f"event {logged.number}", f"slots {_few(event.slots)} were dropped as too old, and are not")
        try:
            effects = tick(state, event, logged.at_ms)
        except (AssertionError, LookupError, ValueError) as error:
            raise RowFault(
                f"event {logged.number}", f"a {event.type} cannot follow the events before it ({type(error).__name__})"
            ) from None
        self._settled += [
            (logged.number, effect)
            for effect in effects
            if isinstance(effect, Settled) and effect.status is not BundleStatus.PENDING
        ]
        if logged.number in self._asked:
            self._choices[logged.number] = next_step(state), choose_batch(state)
        if isinstance(event, ev.BatchFixed):
            await self._compare_published(logged.number, event)

    def _knows_rules(self, event: ev.BatchFixed | ev.GroupsDropped) -> bool:
        """Return whether this release chooses by the rules of an event; count the event if not."""
        if event.rules == CHOICE_RULES:
            return True
        self.report.other_rules[event.rules] = self.report.other_rules.get(event.rules, 0) + 1
        return False

    def _check_choice(self, number: int, event: ev.BatchFixed) -> None:
        self.report.num_batches += 1
        if not self._knows_rules(event):
            return
        if event.chosen_after < self.report.first:  # before the archive, or of a release that did not note it
            self.report.notes.append(f"event {number}: the state in which batch {event.step} was chosen is not known")
            return
        step, slots = self._choices.pop(event.chosen_after, (-1, None))
        if (event.step, event.slots) != (step, slots):
            chosen = "no batch" if slots is None else f"slots {_few(slots)} for step {step}"
            raise RowFault(
                f"event {number}",
                f"step {event.step} was given slots {_few(event.slots)}; the state after event {event.chosen_after} gives "
                f"{chosen}",
            )

    async def _compare_published(self, number: int, event: ev.BatchFixed) -> None:
        state, part = self._state, len(self._state.batches[event.step]) - 1
        row = f"batch {part} of step {event.step}"
        try:
            data = await self.published.read(batch_name(event.step, part))
            envelope = open_envelope(data, bytes_max=limits.WORK_BYTES_MAX)
            payload = self.run.keys.verify_kept(envelope, PayloadType.BATCH, Role.COORDINATOR)
            batch = parse_json(payload, TrainBatch)
        except KeyError:  # not promised, or not published yet
            return
        except RemoteError as error:
            raise RowFault(row, f"its document is damaged: {error.detail}") from None
        self.report.num_published += 1
        found = [
            (one.slot, one.worker, one.policy_version, one.bundle, one.first, one.rewards, one.unscored, one.logprobs)
            for one in batch.groups
        ]
        groups = [(slot, state.steps[slot // state.rules.groups_per_step].accepted[slot]) for slot in event.slots]
        expected = [
            (slot, it.worker, it.policy_version, it.bundle, it.first, it.rewards, it.unscored, it.logprobs or None)
            for slot, it in groups
        ]
        for mine, theirs in zip(expected, found, strict=False):
            if mine != theirs:
                raise RowFault(row, f"its group of slot {mine[0]} is not that of event {number}")
        if len(expected) != len(found):
            raise RowFault(row, f"it has {len(found)} groups, event {number} {len(expected)}")

    async def _compare_lines(self, walk: _LedgerWalk, before: LedgerPoint | None, after: LedgerPoint) -> None:
        """Compare what was settled since `before` with the lines up to `after`."""
        settled, self._settled = self._settled, []
        start = after.num_lines - len(settled) if before is None else before.num_lines
        await walk.skip_to(start)
        if before is not None and walk.chain.digest != before.digest:
            raise RowFault(f"line {start - 1} of the ledger", "it is not the line with which the journal continued")
        for number, outcome in settled:
            place = walk.chain.num_entries
            receipt = await walk.next_receipt()
            if receipt is None:
                raise RowFault(
                    f"line {place} of the ledger", f"it is missing: event {number} settles {outcome.bundle[:12]}"
                )
            expected = receipt_of(self.run, self.assigner, outcome, receipt.at_ms)
            if receipt != expected:
                names = [name for name in Receipt.model_fields if getattr(receipt, name) != getattr(expected, name)]
                raise RowFault(
                    f"line {place} of the ledger", f"event {number} settles another receipt: {', '.join(names)} differ"
                )
            self.report.num_lines += 1
        if (walk.chain.num_entries, walk.chain.digest) != (after.num_lines, after.digest):
            raise RowFault(
                f"line {max(walk.chain.num_entries - 1, 0)} of the ledger",
                f"the journal leads to {walk.chain.num_entries} lines, and the ledger had {after.num_lines}, or other ones",
            )


class _LedgerWalk:
    """The stored ledger, read once from its first line on."""

    def __init__(self, store: Store, run: PinnedRun) -> None:
        self.chain = LedgerChain(run.digest)
        self._store, self._run = store, run.digest
        self._page: list[str] = []
        self._last_ms = -1

    async def next_receipt(self) -> Receipt | None:
        """Return the receipt of the next line; None at the end. Raises RowFault."""
        place = self.chain.num_entries
        if not self._page:
            self._page = (await self._store.ledger(start=place, limit=_LINES_MAX))[::-1]
        if not self._page:
            return None
        try:
            receipt, _ = self.chain.follow(self._page.pop().encode())
        except RemoteError as error:
            raise RowFault(f"line {place} of the ledger", error.detail) from None
        if receipt.at_ms <= self._last_ms:
            raise RowFault(f"line {place} of the ledger", "it is dated before the line before it")
        self._last_ms = receipt.at_ms
        return receipt

    async def skip_to(self, num_lines: int) -> None:
        """Read lines until there were so many. Raises RowFault if there are fewer."""
        while self.chain.num_entries < num_lines:
            if await self.next_receipt() is None:
                raise RowFault(f"line {self.chain.num_entries} of the ledger", f"the journal knows {num_lines} lines")

    async def digest_at(self, num_lines: int) -> str:
        """Return the digest after so many lines."""
        if num_lines == 0:
            return self._run
        lines = await self._store.ledger(start=num_lines - 1, limit=1)
        return digest_of(lines[0].encode()) if lines else ""


def _event_of(logged: LoggedEvent, software: str) -> ev.Event:
    try:
        return ev.event_from_json(logged.payload)
    except ValueError:
        _require_release(software)
        raise RowFault(f"event {logged.number}", "this release knows no such event") from None


def _state_of(segment: OpenSegment) -> State:
    try:
        return snapshot.state_from_json(segment.state)
    except ValueError:
        _require_release(segment.header.software)
        raise RowFault(_named(segment.header.first, segment.header.first), "its state cannot be read") from None


def _require_release(software: str) -> None:
    if software != __version__:
        raise LocalError(
            f"release {software} wrote this part of the journal, and {__version__} folds it to another state: run that release"
        )


def _digest_of_state(state: State) -> str:
    return digest_of_all(json_pieces(state))


def _named(first: int, last: int) -> str:
    return f"segment of events {first} to {last}"


def _few(slots: Sequence[int]) -> str:
    return ", ".join(map(str, slots[:8])) + (", ..." if len(slots) > 8 else "")
