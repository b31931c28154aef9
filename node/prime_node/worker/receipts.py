"""Receipts: the coordinator's signed word on every bundle, kept by the worker.

receipts.jsonl holds the envelopes as they came, one a line, so that a contributor can prove what he did; the
tally is made from them. The cursor is written after the receipts that it stands for, so a crash fetches some
twice and loses none; the last receipt of a bundle counts.

Where a receipt says that something else was assigned than the lease did, both are kept in contradiction-LEASE.jsonl: the
coordinator signed them, and one of them hides what it did (SPEC.md, section 9).
"""

from __future__ import annotations

import logging
import os
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from prime_protocol.assigned import assigned_in
from prime_protocol.assignment import Lease
from prime_protocol.envelope import Envelope, PayloadType, open_envelope, parse_json
from prime_protocol.errors import ErrorCode, LocalError, PeerError
from prime_protocol.identity import KeyId
from prime_protocol.key_ring import Role
from prime_protocol.messages import ReceiptList
from prime_protocol.run_spec import PinnedRun
from prime_protocol.verdict import BundleStatus, Receipt

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Tally:
    """Rollouts by what became of them. Example: Tally(accepted=1_024, tokens=7_890, pending=128,
    refused={"stale": 128})."""

    accepted: int
    tokens: int
    """Completion tokens credited."""
    pending: int
    refused: dict[str, int]


LEASES_KEPT = 64
"""Signed leases that wait for the receipt of their bundle, the newest ones."""


class ReceiptBook:
    """Blocking; a few kilobytes each time."""

    def __init__(self, folder: Path, *, run: PinnedRun, worker: KeyId) -> None:
        """Raises LocalError where the folder is unusable. Broken lines, as a crash leaves them, are
        skipped."""
        self._run = run
        self._worker = worker
        self._file = folder / "receipts.jsonl"
        self._cursor_file = folder / "receipts.cursor"
        self._latest: dict[str, Receipt] = {}
        self._leases: OrderedDict[str, tuple[Lease, Envelope]] = OrderedDict()
        self._settles_all: set[str] = set()
        """Bundles that were accepted twice: the second receipt credits all that was withheld (SPEC.md, section 11)."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lines = self._file.read_bytes().splitlines() if self._file.exists() else []
            cursor = self._cursor_file.read_text(encoding="ascii") if self._cursor_file.exists() else "0"
        except OSError as error:
            raise LocalError(f"receipts {self._file}: {error.strerror}") from None
        self.cursor = int(cursor) if cursor.strip().isdigit() else 0
        for line in lines:
            try:
                envelope = open_envelope(line)
                kept = run.keys.verify_kept(envelope, PayloadType.RECEIPT, Role.COORDINATOR)
                self._note(self._parsed(kept))
            except PeerError as error:
                log.warning("receipts %s: skipping a line: %s", self._file, error)

    def note_lease(self, lease: Lease, envelope: Envelope) -> None:
        """A lease that was taken: its receipt is compared with it."""
        self._leases[lease.lease_id] = (lease, envelope)
        if len(self._leases) > LEASES_KEPT:
            self._leases.popitem(last=False)

    def add(self, answer: ReceiptList) -> None:
        """Verify and keep. Raises PeerError where a receipt is not the coordinator's word to us,
        LocalError for the disk."""
        envelopes = [open_envelope(text.encode()) for text in answer.receipts]
        verify = self._run.keys.verify
        receipts = [self._parsed(verify(one, PayloadType.RECEIPT, Role.COORDINATOR)) for one in envelopes]
        try:
            for receipt, envelope in zip(receipts, envelopes, strict=True):
                self._compare(receipt, envelope)
            self._append(envelope.to_bytes() for envelope in envelopes)
            partial = self._cursor_file.with_suffix(".partial")
            partial.write_text(str(answer.next), encoding="ascii")
            partial.replace(self._cursor_file)
        except OSError as error:
            raise LocalError(f"receipts {self._file}: {error.strerror}; free some space and start again") from None
        self.cursor = answer.next
        for receipt in receipts:
            self._note(receipt)

    def tally(self) -> Tally:
        accepted = [r for r in self._latest.values() if r.status is BundleStatus.ACCEPTED]
        refused: Counter[str] = Counter()
        for receipt in self._latest.values():
            if receipt.status is BundleStatus.REFUSED:
                refused[receipt.reason or "unknown"] += receipt.num_rollouts
        return Tally(
            accepted=sum(receipt.num_rollouts for receipt in accepted),
            tokens=sum(receipt.num_tokens for receipt in accepted),
            pending=sum(r.num_rollouts for r in self._latest.values() if r.status is BundleStatus.PENDING),
            refused=dict(refused),
        )

    def num_sureties(self, bundles_max: int) -> int:
        """How many of our last accepted bundles stand surety now: with a dishonest one that was found all of them are lost, and
        at the run's end all are credited."""
        held = 0
        for receipt in self._latest.values():
            if receipt.status is BundleStatus.ACCEPTED:
                held = 0 if receipt.bundle in self._settles_all else min(held + 1, bundles_max)
            elif receipt.reason is not None and receipt.reason.is_dishonest:
                held = 0
        return held

    def _compare(self, receipt: Receipt, signed: Envelope) -> None:
        known, said = self._leases.get(receipt.lease_id), receipt.assigned
        if known is None or said is None:
            return
        groups = known[0].groups  # which the receipt may say were more or fewer
        if len(said.draws) in (0, len(groups)) and assigned_in(groups, said.draws) == said:
            return
        file = self._file.with_name(f"contradiction-{receipt.lease_id[:16]}.jsonl")
        file.write_bytes(b"".join(one.to_bytes() + b"\n" for one in (known[1], signed)))
        log.error(
            "the coordinator leased us other problems or seeds than its receipt and the ledger say; both are kept in %s: "
            "show them to others of the run",
            file,
        )

    def _parsed(self, payload: bytes) -> Receipt:
        receipt = parse_json(payload, Receipt)
        if receipt.run != self._run.digest or receipt.worker != self._worker:
            raise PeerError(ErrorCode.WRONG_RUN, "a receipt of another run or worker")
        return receipt

    def _note(self, receipt: Receipt) -> None:
        before = self._latest.pop(receipt.bundle, receipt)
        # One that is fetched twice is the same.
        if before.status is receipt.status is BundleStatus.ACCEPTED and before != receipt:
            self._settles_all.add(receipt.bundle)
        self._latest[receipt.bundle] = receipt

    def _append(self, lines: Iterable[bytes]) -> None:
        with self._file.open("ab") as file:
            for line in lines:
                file.write(line + b"\n")
            file.flush()
            os.fsync(file.fileno())
