"""Receipts: the coordinator's signed verdict on every bundle, kept by the worker.

receipts.jsonl holds the envelopes as received, one a line, so that contributors can prove their work; the tally is
computed from them. The cursor is written after the receipts that it covers, so a crash fetches some twice and loses
none; the last receipt of a bundle counts. At the start each line's signature is checked, and that the file is as long as the
cursor says. A damaged file is put aside, its good lines are kept, and the coordinator is asked for all receipts again.

A lease for which a bundle was signed is noted in answered.txt before the bundle is sent, and until its receipt is here: after a
restart too, a coordinator that grants it again gets no second bundle, with which it could convict this worker. At the start, and
after each ANSWERED_LINES lines, only leases without a receipt stay in the file.

Concurrency: a book belongs to the event loop, which alone changes it. `note_bundle` writes in a thread, one call at a time.

If a receipt contradicts the lease of its bundle, both are kept in contradiction-LEASE.jsonl, with the RunSpec and the key
rings: the coordinator signed both, so one of them is false (SPEC.md, sections 9 and 21).
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from prime_node.files import disk_faults, read_or_begin, write_durably
from prime_node.inside import open_regular, place, read_regular
from prime_protocol import limits
from prime_protocol.assignment import Lease
from prime_protocol.digest import digest_of
from prime_protocol.envelope import Envelope, PayloadType, open_envelope, parse_json
from prime_protocol.errors import ErrorCode, LocalError, RemoteError
from prime_protocol.identity import KeyId
from prime_protocol.key_ring import Role
from prime_protocol.replies import ReceiptList
from prime_protocol.run_spec import PinnedRun
from prime_protocol.verdict import BundleStatus, Receipt, RejectReason, contradiction

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Tally:
    """Rollouts by outcome. Example: Tally(accepted=1_024, tokens=7_890, pending=128, refused={"stale": 128})."""

    accepted: int
    tokens: int
    """Completion tokens credited."""
    pending: int
    refused: dict[str, int]


_LEASE_ID = re.compile(rb"[0-9a-f]{64}")
LEASES_KEPT = 64
"""Number of newest signed leases kept until the receipt of their bundle."""
ANSWERED_LINES = 1_024
"""Lines of 65 bytes that are appended to answered.txt before it is written again."""
LEASES_BYTES_MAX = 4 * limits.WORK_BYTES_MAX
"""Bytes of these leases in memory, which hold prompts."""
RECEIPTS_BYTES_MAX = 2**30
"""Size of receipts.jsonl above which the worker ends: years of receipts, or a coordinator that fills the disk."""
CONTRADICTIONS_MAX = 16
"""Contradictions that are kept. One convicts the coordinator."""


_ACCEPTED, _TOKENS, _PENDING = "accepted", "tokens", "pending"
"""Tally keys; no reason has these names."""


class _Kept(NamedTuple):
    """Compact last receipt of a bundle: a worker that stays for a year has a hundred thousand of them."""

    digest: str
    status: BundleStatus
    reason: RejectReason | None
    num_rollouts: int
    num_tokens: int
    settles_all: bool
    """Whether it was accepted twice: the second receipt credits all tokens in escrow (SPEC.md, section 11)."""


def _cursor_line(*numbers: int) -> bytes:
    """Return the content of the cursor's file, the cursor and the bytes of receipts: with a digest, since it may rot too."""
    text = b" ".join(b"%d" % number for number in numbers)
    return text + b" " + digest_of(text)[:16].encode()


def _cursor_in(line: bytes) -> tuple[int, int] | None:
    """Return the cursor and the bytes that it covers; None if its file is damaged.

    Earlier releases wrote no bytes, or no digest.
    """
    words = line.split()
    numbers = [int(word) for word in words[: max(1, len(words) - 1)] if word.isdigit()]
    if not numbers or line.strip() not in (b"%d" % numbers[0], _cursor_line(*numbers)):
        return None
    return numbers[0], sum(numbers[1:2])


def _answered_lines(leases: Iterable[bytes]) -> bytes:
    return "".join(f"{lease.hex()}\n" for lease in sorted(leases)).encode()


def _intact(line: bytes) -> Envelope | None:
    """Return the receipt in a line; None if it is not what was written. Who may sign was checked then."""
    try:
        envelope = open_envelope(line)
        envelope.verify(PayloadType.RECEIPT, trusted=(envelope.sole_signer(),))
    except RemoteError:
        return None
    return envelope


class ReceiptBook:
    """Receipts on disk and their tally. Methods block; each call writes a few kilobytes."""

    def __init__(self, folder: Path, *, run: PinnedRun, worker: KeyId) -> None:
        """Open the folder, and heal its file if it is damaged. Raises LocalError if the folder is unusable."""
        self._run = run
        self._worker = worker
        self._file = folder / "receipts.jsonl"
        self._cursor_file = folder / "receipts.cursor"
        self._aside = folder / "receipts.damaged.jsonl"
        self._answered_file = folder / "answered.txt"
        self.cursor = 0
        self._latest: dict[str, _Kept] = {}
        """Receipts by bundle, the most recently changed one last."""
        self._totals: Counter[str] = Counter()
        """Rollouts by outcome, and the tokens credited."""
        self._leases: OrderedDict[str, Envelope] = OrderedDict()
        self._bundles: OrderedDict[str, str] = OrderedDict()
        self._settled: set[bytes] = set()
        """Leases that a receipt names."""
        self._waiting: set[bytes] = set()
        """Leases for which a bundle was signed, and that no receipt names yet."""
        self._num_appended = 0
        """Lines of answered.txt since it was written as a whole."""
        self._noting = asyncio.Lock()
        with disk_faults(f"receipts {self._file}"):
            folder.mkdir(parents=True, exist_ok=True)
            envelopes = self._read()
            noted = read_or_begin(self._answered_file)
        for envelope in envelopes:
            try:
                self._note(self._parsed(envelope.payload), envelope.digest)
            except RemoteError as error:
                log.warning("receipts %s: skipping a line: %s", self._file, error)
                self.cursor = 0  # of another run, which used the folder before
        if not envelopes:
            self.cursor = 0
        self._kept = set() if self.cursor else {envelope.digest for envelope in envelopes}
        """Receipts on the disk, if all are asked for again."""
        self._restore_answered(noted)

    def note_lease(self, lease: Lease, envelope: Envelope) -> None:
        """Remember an accepted lease, to compare its receipt with it."""
        self._leases[lease.lease_id] = envelope
        held = [len(one.payload) for one in self._leases.values()]
        while len(held) > LEASES_KEPT or sum(held) > LEASES_BYTES_MAX:
            del held[0]
            self._leases.popitem(last=False)

    async def note_bundle(self, bundle: str, lease_id: str) -> None:
        """Remember the lease of a signed bundle, so that its receipt is compared with that lease whatever lease it names.

        The lease is on disk when it returns. Raises LocalError.
        """
        self._waiting.add(bytes.fromhex(lease_id))
        self._bundles[bundle] = lease_id
        if len(self._bundles) > LEASES_KEPT:
            self._bundles.popitem(last=False)
        with disk_faults(f"answered leases {self._answered_file}"):
            async with self._noting:
                if self._num_appended >= ANSWERED_LINES:
                    await asyncio.to_thread(write_durably, self._answered_file, _answered_lines(self._waiting))
                    self._num_appended = 0
                else:
                    await asyncio.to_thread(self._append, [lease_id.encode()], to=self._answered_file)
                    self._num_appended += 1

    def is_answered(self, lease_id: str) -> bool:
        """Return whether a bundle was signed for a lease of this id."""
        lease = bytes.fromhex(lease_id)
        return lease in self._waiting or lease in self._settled

    def add(self, answer: ReceiptList, *, now_ms: int) -> None:
        """Verify and store receipts. `now_ms` is this machine's Unix time in milliseconds.

        Raises RemoteError if a receipt is not the coordinator's, not for this worker or dated too far ahead, LocalError
        for the disk or too many receipts. No ledger head of the near future is later than one that is dated too far ahead,
        so none could be proven to lack it.
        """
        if not answer.receipts and answer.next == self.cursor:
            return  # the common case: do not wake a disk
        envelopes = [open_envelope(text.encode()) for text in answer.receipts]
        verify = self._run.keys.verify
        receipts = [self._parsed(verify(one, PayloadType.RECEIPT, Role.COORDINATOR)) for one in envelopes]
        latest_ms = max((receipt.at_ms for receipt in receipts), default=0)
        if latest_ms > now_ms + limits.REQUEST_AGE_S_MAX * 1_000:
            ahead_s = (latest_ms - now_ms) // 1_000
            raise RemoteError(
                ErrorCode.EXPIRED, f"a receipt is dated {ahead_s} s ahead of this machine's clock; not taken"
            )
        with disk_faults(f"receipts {self._file}"):
            if self._file.exists() and self._file.stat().st_size > RECEIPTS_BYTES_MAX:
                raise LocalError(
                    f"receipts {self._file} have more than {RECEIPTS_BYTES_MAX:,} bytes; move the file to another folder, and "
                    "ask the run's operator why this worker gets so many"
                )
            for receipt, envelope in zip(receipts, envelopes, strict=True):
                self._compare(receipt, envelope)
            known = {kept.digest for kept in (self._latest.get(receipt.bundle) for receipt in receipts) if kept}
            new = [one for one in envelopes if one.digest not in known and one.digest not in self._kept]
            self._append((envelope.to_bytes() for envelope in new), to=self._file)
            write_durably(self._cursor_file, _cursor_line(answer.next, self._file.stat().st_size))
        self.cursor = answer.next
        for receipt, envelope in zip(receipts, envelopes, strict=True):
            self._note(receipt, envelope.digest)

    def tally(self) -> Tally:
        """Return the tally of all receipts."""
        counts = +self._totals
        accepted, tokens, pending = (counts.pop(name, 0) for name in (_ACCEPTED, _TOKENS, _PENDING))
        return Tally(accepted=accepted, tokens=tokens, pending=pending, refused=dict(counts))

    def num_escrows(self, bundles_max: int) -> int:
        """Return how many of the last accepted bundles are in escrow.

        One bundle found dishonest forfeits all of them; at the run's end all are credited.
        """
        held = 0
        for kept in reversed(self._latest.values()):
            if held == bundles_max or kept.settles_all or (kept.reason is not None and kept.reason.is_dishonest):
                break
            held += kept.status is BundleStatus.ACCEPTED
        return held

    def _restore_answered(self, noted: bytes) -> None:
        """Take the leases that were noted before the start. Drop damaged lines, and leases that a receipt names."""
        leases = {bytes.fromhex(line.decode()) for line in noted.split() if _LEASE_ID.fullmatch(line)}
        self._waiting = leases - self._settled
        with disk_faults(f"answered leases {self._answered_file}"):
            if (kept := _answered_lines(self._waiting)) != noted:
                write_durably(self._answered_file, kept)

    def _compare(self, receipt: Receipt, signed: Envelope) -> None:
        known = self._leases.get(self._bundles.get(receipt.bundle, receipt.lease_id))
        if known is None:
            return
        lease = parse_json(known.payload, Lease)
        if not (what := contradiction(receipt, lease, self._run.spec)):
            return
        folder = self._file.parent
        file = place(folder, f"contradiction-{lease.lease_id[:16]}.jsonl")
        if file.exists() or len(list(folder.glob("contradiction-*.jsonl"))) >= CONTRADICTIONS_MAX:
            return
        rings = (ring for _, ring in self._run.keys.rings)
        lines = (self._run.envelope, *rings, known, signed)
        write_durably(file, b"".join(one.to_bytes() + b"\n" for one in lines))
        log.error(
            "the coordinator contradicts itself: %s. %s holds both statements: show it to other participants, who check it with "
            "`prime-node evidence contradiction`",
            what,
            file,
        )

    def _parsed(self, payload: bytes) -> Receipt:
        receipt = parse_json(payload, Receipt)
        if receipt.run != self._run.digest or receipt.worker != self._worker:
            raise RemoteError(ErrorCode.WRONG_RUN, "a receipt of another run or worker")
        return receipt

    def _note(self, receipt: Receipt, digest: str) -> None:
        lease = bytes.fromhex(receipt.lease_id)
        self._settled.add(lease)
        self._waiting.discard(lease)
        before = self._latest.pop(receipt.bundle, None)
        settles_all = False
        if before is not None:
            self._count(before, -1)
            # The same receipt, fetched twice, does not count.
            is_another = before.status is receipt.status is BundleStatus.ACCEPTED and before.digest != digest
            settles_all = is_another or before.settles_all
        kept = _Kept(digest, receipt.status, receipt.reason, receipt.num_rollouts, receipt.num_tokens, settles_all)
        self._latest[receipt.bundle] = kept
        self._count(kept, 1)

    def _count(self, kept: _Kept, sign: int) -> None:
        if kept.status is BundleStatus.ACCEPTED:
            self._totals[_TOKENS] += sign * kept.num_tokens
        outcome = _ACCEPTED if kept.status is BundleStatus.ACCEPTED else kept.reason or _PENDING
        self._totals[outcome] += sign * kept.num_rollouts

    def _read(self) -> list[Envelope]:
        """Return the receipts on the disk, and set the cursor. Raises OSError."""
        written = read_or_begin(self._cursor_file)
        cursor = _cursor_in(written) if written or self._cursor_file.exists() else (0, 0)
        if cursor is None:
            log.warning("%s is damaged: all receipts are asked for again", self._cursor_file)
        self.cursor, num_bytes = cursor or (0, 0)
        data = read_regular(self._file) if self._file.exists() else b""
        whole, _, torn = data.rpartition(b"\n")
        lines = whole.split(b"\n") if whole else []
        if torn:  # a crash left half a line, which no cursor covers
            with os.fdopen(open_regular(self._file, os.O_WRONLY), "wb") as file:
                file.truncate(len(data) - len(torn))
        found = [_intact(line) for line in lines]
        good = [envelope for envelope in found if envelope is not None]
        if len(good) == len(lines) and len(data) - len(torn) >= num_bytes:
            return good
        bad = [str(number) for number, envelope in enumerate(found, 1) if envelope is None]
        what = f"line {', '.join(bad[:5])}{' and others' * (len(bad) > 5)}" if bad else "its end is missing"
        log.warning(
            "%s is damaged (%s): all receipts are asked for again; it is kept as %s", self._file, what, self._aside
        )
        self.cursor = 0
        write_durably(self._cursor_file, _cursor_line(0, 0))
        if data:
            write_durably(self._aside, data)
        write_durably(self._file, b"".join(envelope.to_bytes() + b"\n" for envelope in good))
        return good

    def _append(self, lines: Iterable[bytes], *, to: Path) -> None:
        descriptor = open_regular(to, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        with os.fdopen(descriptor, "ab") as file:
            for line in lines:
                file.write(line + b"\n")
            file.flush()
            os.fsync(file.fileno())
