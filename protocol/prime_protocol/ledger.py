"""The ledger: every settled receipt of a run in one order that cannot be changed afterwards. SPEC.md, section 21.

Each line holds the digest of the line before it, so the last digest fixes all of them. The coordinator signs that
digest with the number of lines (a head). Anyone with a head can prove later that history was rewritten: a ledger with
another line at that place, or another head of the same length, contradicts it.

A line holds the receipt's payload byte for byte as signed. So a worker finds its own receipts by digest, and a missing
receipt convicts the coordinator by its own signature. A bundle may have several lines: the last one counts.
"""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import Field

from prime_protocol import limits
from prime_protocol.assignment import Count
from prime_protocol.digest import Digest, digest_of
from prime_protocol.envelope import Envelope, PayloadType, WireModel, parse_json
from prime_protocol.errors import ErrorCode, LimitExceeded, RemoteError
from prime_protocol.key_ring import Role
from prime_protocol.run_spec import PinnedRun
from prime_protocol.seed_chain import OpenSecret
from prime_protocol.verdict import BundleStatus, Receipt


class LedgerEntry(WireModel):
    """One line of the ledger."""

    index: Count
    """Number of the line: 0, 1, 2, ... without gaps."""
    previous: Digest
    """Digest of the previous line; for the first line, the run's digest."""
    receipt: Receipt
    """Receipt of an accepted or rejected bundle, as it was signed."""


class LedgerHead(WireModel):
    """Length of the ledger and digest of its last line (envelope type LEDGER_HEAD)."""

    run: Digest
    num_entries: Count
    digest: Digest
    """Digest of the last line; the run's digest if there is none."""
    at_ms: Count
    secret: OpenSecret | None = Field(default=None, exclude_if=lambda secret: secret is None)
    """Newest secret of the run's seed chain whose steps are over. Omitted if there is none."""


@dataclass(slots=True)
class LedgerChain:
    """Position up to which a ledger has been written or read. Example: LedgerChain(run) before the first line."""

    run: str
    num_entries: int = 0
    digest: str = ""
    """Digest of the last line; the run's digest if there is none."""

    def __post_init__(self) -> None:
        self.digest = self.digest or self.run

    def add(self, receipt: bytes) -> bytes:
        """Return the next line, for the payload of a settled receipt."""
        line = _head_of_line(self.num_entries, self.digest) + receipt + b"}"
        self.num_entries, self.digest = self.num_entries + 1, digest_of(line)
        return line

    def follow(self, line: bytes) -> tuple[Receipt, str]:
        """Return the next line's receipt and the digest of its payload. Raises RemoteError and does not advance then.

        (1) size; (2) schema; (3) it is the next line; (4) its receipt is settled, of this run, and written as it was
        signed.
        """
        if len(line) > limits.LEDGER_LINE_BYTES_MAX:  # (1)
            raise LimitExceeded("LEDGER_LINE_BYTES_MAX", len(line), limits.LEDGER_LINE_BYTES_MAX)
        entry = parse_json(line, LedgerEntry)  # (2)
        if (entry.index, entry.previous) != (self.num_entries, self.digest):  # (3)
            detail = (
                f"entry {entry.index} after {entry.previous[:12]}, expected {self.num_entries} after {self.digest[:12]}"
            )
            raise RemoteError(ErrorCode.CHAIN_BROKEN, f"ledger: {detail}")
        head = _head_of_line(entry.index, entry.previous)
        receipt = line[len(head) : -1]
        if not line.startswith(head) or receipt[:1] + receipt[-1:] + line[-1:] != b"{}}":  # (4)
            raise RemoteError(
                ErrorCode.MALFORMED, f"ledger: entry {entry.index} is not in the canonical form of SPEC section 21"
            )
        if entry.receipt.status is BundleStatus.PENDING:
            raise RemoteError(ErrorCode.WRONG_TYPE, f"ledger: entry {entry.index} is not settled")
        if entry.receipt.run != self.run:
            raise RemoteError(
                ErrorCode.WRONG_RUN, f"ledger: entry {entry.index} belongs to run {entry.receipt.run[:12]}"
            )
        self.num_entries, self.digest = self.num_entries + 1, digest_of(line)
        return entry.receipt, digest_of(receipt)

    def head(self, at_ms: int, secret: OpenSecret | None = None) -> LedgerHead:
        """Return the head that the coordinator signs."""
        return LedgerHead(run=self.run, num_entries=self.num_entries, digest=self.digest, at_ms=at_ms, secret=secret)


def open_ledger_head(envelope: Envelope, run: PinnedRun) -> LedgerHead:
    """Open a head that a coordinator of the run signed, at any time: it binds the run permanently. Raises RemoteError."""
    if len(envelope.payload) > limits.LEDGER_LINE_BYTES_MAX:
        raise LimitExceeded("LEDGER_LINE_BYTES_MAX", len(envelope.payload), limits.LEDGER_LINE_BYTES_MAX)
    head = parse_json(run.keys.verify_kept(envelope, PayloadType.LEDGER_HEAD, Role.COORDINATOR), LedgerHead)
    if head.run != run.digest:
        raise RemoteError(ErrorCode.WRONG_RUN, f"the ledger head belongs to run {head.run[:12]}, not {run.digest[:12]}")
    return head


def _head_of_line(index: int, previous: str) -> bytes:
    return b'{"index":%d,"previous":"%s","receipt":' % (index, previous.encode())
