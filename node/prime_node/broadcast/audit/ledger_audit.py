"""Audit a ledger: one chain up to its signed head, agreement with earlier statements, and each worker's credit.

    (1) every line follows the one before it             CHAIN_BROKEN, MALFORMED, ...
    (2) the head that a coordinator of the run signed names the last line; each line is dated after the one before it, and
        none after the head; the head of a live coordinator is not old
    (3) earlier heads name lines of this ledger, and this head names a line of every ledger that was kept; of two heads
        the longer is dated later
    (4) every settled receipt of the caller's own up to the head is a line
    (5) all receipts that accept one bundle, lines and the caller's own, state the same lease, step, policy, size and seeds
    (6) if the RunSpec has a seed chain, the head's secret is the chain's and as new as required, and every bundle
        accepted for a step whose secret is open was assigned the problems and seeds that the secret gives, and, if its
        receipt states prompts and this machine renders them, the prompts of these problems

If (2) to (5) fail by two statements that the coordinator signed itself, both are kept: together they convict it. A
statement by a former key that is dated after the key ring that replaced it is no evidence. If (6) fails, the
head alone convicts the coordinator, with the lines that it covers.

Reports name statements that a former coordinator key signed. A key ring replaces a key that was stolen, or that is out of use.
A statement of such a key that is dated after the ring is void: the coordinator no longer used the key then. The thief can date
a statement before the ring; no signature shows that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from prime_node.broadcast.audit.audit_report import date_of
from prime_node.broadcast.audit.seed_audit import Render, SeedAudit, SeedReport
from prime_node.ports.transport import LedgerSource
from prime_protocol import limits
from prime_protocol.digest import digest_of
from prime_protocol.envelope import Envelope, PayloadType, parse_json
from prime_protocol.errors import LocalError, RemoteError
from prime_protocol.key_ring import Role
from prime_protocol.ledger import LedgerChain, LedgerHead, open_ledger_head
from prime_protocol.run_spec import PinnedRun
from prime_protocol.verdict import BundleStatus, Receipt


@dataclass(frozen=True, slots=True)
class FormerKey:
    """The key ring that replaced a statement's signer."""

    ring: int
    """Version of the key ring."""
    is_void: bool
    """Whether the statement is dated after the ring."""
    text: str
    """Example: `signed by a former key, replaced by ring 1 of 2026-11-23 00:00 UTC`."""


def former_key(run: PinnedRun, envelope: Envelope, at_ms: int) -> FormerKey | None:
    """Return the ring that replaced the signer of a verified statement of `at_ms`; None if a current key signed it."""
    ring = run.keys.replaced_by(envelope, Role.COORDINATOR)
    if ring is None:
        return None
    is_void = at_ms > ring.created_at_ms
    text = f"signed by a former key, replaced by ring {ring.version} of {date_of(ring.created_at_ms)}"
    return FormerKey(ring.version, is_void, f"{text}, and dated after it" if is_void else text)


def former_key_notes(signers: Iterable[FormerKey | None]) -> list[str]:
    """Return a line for each kind of statement by a former key, with their number."""
    counts = Counter(one.text for one in signers if one is not None)
    return [f"{count:,} statement{'s are' if count > 1 else ' is'} {text}" for text, count in counts.items()]


HEAD_OLD_S = limits.LEDGER_HEAD_S_MAX + limits.REQUEST_AGE_S_MAX
"""Age of a live coordinator's head, by another machine's clock, above which the coordinator withholds a newer one."""


@dataclass(slots=True)
class Account:
    """Credit of one worker by the ledger."""

    rollouts: int = 0
    """Accepted rollouts."""
    tokens: int = 0
    """Completion tokens credited."""
    refused: Counter[str] = field(default_factory=Counter)
    """Rejected rollouts by reason."""


@dataclass(slots=True)
class LedgerReport:
    """Content of a ledger, and its inconsistencies."""

    head: LedgerHead
    num_entries: int = 0
    """Lines that follow one another."""
    accounts: dict[str, Account] = field(default_factory=dict)
    num_receipts: int = 0
    """Settled receipts of the caller's own."""
    num_newer_receipts: int = 0
    """Receipts among them that are not in the ledger and dated after its head: nothing shows that they must be in it."""
    faults: list[str] = field(default_factory=list)
    """Inconsistencies, as text for people; empty if there are none."""
    seeds: SeedReport = field(default_factory=SeedReport)
    """Findings of check (6)."""
    evidence: list[Envelope] = field(default_factory=list)
    """Statements by the coordinator that cannot all be true."""
    notes: list[str] = field(default_factory=list)
    """Statements by former keys, as text for people."""


async def audit_ledger(
    source: LedgerSource,
    run: PinnedRun,
    *,
    kept: Sequence[LedgerSource] = (),
    receipts: Sequence[Envelope] = (),
    now_ms: Callable[[], int] | None = None,
    render: Render | None = None,
) -> LedgerReport:
    """Audit a ledger. `kept`: ledgers that were exported earlier. `receipts`: one worker's own.

    `now_ms` is this machine's clock in Unix milliseconds, if the source is a coordinator that runs. `render` renders prompts
    again, with the environments of this machine.

    Raises RemoteError if there is no ledger to read, or if the coordinator did not sign what was kept; LocalError if a kept
    ledger's lines do not lead to its own head.
    """
    signed = await source.ledger_head()
    report = LedgerReport(open_ledger_head(signed, run))
    if now_ms is not None and (age_s := (now_ms() - report.head.at_ms) / 1_000) > HEAD_OLD_S:
        report.faults.append(
            f"the coordinator's signed head is {age_s:.0f} s old by this machine's clock, expected at most {HEAD_OLD_S:.0f} s: "
            "it may omit what was settled since; compare the clocks (prime-node doctor)"
        )
    heads = [(open_ledger_head(one, run), one) for one in (signed, *[await each.ledger_head() for each in kept])]
    mine = _settled(receipts, run)
    formers = [former_key(run, envelope, head.at_ms) for head, envelope in heads]
    formers += [former_key(run, envelope, receipt.at_ms) for receipt, envelope in mine.values()]
    report.notes = former_key_notes(formers)
    if formers[0] is not None and formers[0].is_void:
        report.faults.append(f"the signed head is {formers[0].text}")
    reader = _Reader(run, report, heads, missing=dict(mine), render=render)
    try:
        await reader.read(source)
    except RemoteError as error:
        report.faults.append(str(error))
    for one, (head, envelope) in zip(kept, heads[1:], strict=True):
        await reader.compare_kept(one, head, envelope)
    reader.finish()
    report.num_receipts = len(mine)
    return report


def _settled(receipts: Sequence[Envelope], run: PinnedRun) -> dict[str, tuple[Receipt, Envelope]]:
    found = {}
    for envelope in receipts:
        receipt = parse_json(run.keys.verify_kept(envelope, PayloadType.RECEIPT, Role.COORDINATOR), Receipt)
        if receipt.run == run.digest and receipt.status is not BundleStatus.PENDING:
            found[envelope.digest] = (receipt, envelope)
    return found


class _Reader:
    def __init__(
        self,
        run: PinnedRun,
        report: LedgerReport,
        heads: list[tuple[LedgerHead, Envelope]],
        *,
        missing: dict[str, tuple[Receipt, Envelope]],
        render: Render | None,
    ) -> None:
        self._run = run
        self._report = report
        self._heads = heads
        self._missing = missing
        self._mine = list(missing.values())
        self._seeds = SeedAudit(run, report.head, report.seeds, render)
        self._chain = LedgerChain(report.head.run)
        self._newest_ms = -1  # of all lines
        self._undated: int | None = None  # the first line that is not dated after the one before it
        self._accepted: dict[bytes, tuple[int, int]] = {}  # accepted bundle -> its rollouts and tokens
        self._stated: dict[bytes, bytes] = {}  # accepted bundle -> digest of what its receipts state
        self._contradicted = ""  # the first bundle whose receipts state two things
        for receipt, _ in self._mine:
            self._compare_statements(receipt)

    async def read(self, source: LedgerSource) -> None:
        """Read all lines. Raises RemoteError if a line does not follow."""
        wanted = self._report.head.num_entries
        self._compare()
        while self._chain.num_entries < wanted:
            lines = await source.ledger(self._chain.num_entries)
            if not lines:
                self._report.faults.append(
                    f"the signed head counts {wanted} entries, but the ledger has only {self._chain.num_entries}"
                )
                return
            for line in lines[: wanted - self._chain.num_entries]:
                receipt, digest = self._chain.follow(line)
                self._report.num_entries = self._chain.num_entries
                self._missing.pop(digest, None)
                if receipt.at_ms <= self._newest_ms and self._undated is None:
                    self._undated = self._chain.num_entries - 1
                self._newest_ms = max(self._newest_ms, receipt.at_ms)
                self._count(receipt)
                self._compare()

    async def compare_kept(self, kept: LedgerSource, known: LedgerHead, envelope: Envelope) -> None:
        """Look in a longer kept ledger for the line that the shown head names. Raises LocalError if it is damaged."""
        head, signed = self._heads[0]
        if known.num_entries <= head.num_entries:  # the shown lines were compared with its head
            return
        chain, named = LedgerChain(head.run), head.run
        while chain.num_entries < known.num_entries:
            lines = await kept.ledger(chain.num_entries)
            try:
                for line in lines[: known.num_entries - chain.num_entries]:
                    chain.follow(line)
                    named = chain.digest if chain.num_entries == head.num_entries else named
            except RemoteError as error:
                raise LocalError(f"a kept ledger is damaged: {error.detail}") from None
            if not lines:
                break
        if (chain.num_entries, chain.digest) != (known.num_entries, known.digest):
            raise LocalError(f"a kept ledger is damaged: its {chain.num_entries} entries do not lead to its own head")
        if named != head.digest:
            fault = f"the signed head names another entry {head.num_entries - 1} than the kept ledger of {known.num_entries} has"
            self._accuse(fault, (head, signed), (known, envelope))

    def finish(self) -> None:
        """Make the checks that need the end: kept heads longer than the ledger, missing receipts, (5) and (6)."""
        head, signed = self._heads[0]
        if self._report.faults:
            return
        if self._undated is not None:  # equal dates would hide an omission: no head would be later than it
            self._accuse(f"entry {self._undated} is not dated after the entry before it", (head, signed))
        if self._newest_ms > head.at_ms:  # back-dated, so that missing receipts would not count
            self._accuse("the signed head is dated before one of its own entries", (head, signed))
        if faults := self._seeds.faults():
            self._report.faults += faults
            self._report.evidence.append(signed)
        if self._contradicted:
            fault = f"bundle {self._contradicted[:12]} has accepting receipts of other leases, steps, policies, sizes or seeds"
            own = (one for one in self._mine if one[0].bundle == self._contradicted)
            self._accuse(fault, (head, signed), *own)
        for known, envelope in self._heads[1:]:
            if known.num_entries > head.num_entries and known.at_ms <= head.at_ms:
                fault = f"an earlier head counts {known.num_entries} entries, this one {head.num_entries}"
                self._accuse(fault, (head, signed), (known, envelope))
            if known.num_entries < head.num_entries and known.at_ms >= head.at_ms:
                fault = (
                    f"an earlier head of {known.num_entries} entries is not dated before this one of {head.num_entries}"
                )
                self._accuse(fault, (head, signed), (known, envelope))
        for receipt, envelope in self._missing.values():
            if receipt.at_ms > head.at_ms:  # perhaps settled after the head was signed
                self._report.num_newer_receipts += 1
                continue
            fault = f"a signed receipt is missing: bundle {receipt.bundle[:12]}, {receipt.status}"
            self._accuse(fault, (head, signed), (receipt, envelope))

    def _accuse(self, fault: str, *statements: tuple[LedgerHead | Receipt, Envelope]) -> None:
        """Report a contradiction, and keep the statements as evidence unless one of them is void."""
        formers = [former_key(self._run, envelope, one.at_ms) for one, envelope in statements]
        void = next((former for former in formers if former is not None and former.is_void), None)
        named = void or next((former for former in formers if former is not None), None)
        proves = ": it is no evidence" if void else ""
        self._report.faults.append(f"{fault} (one of the two is {named.text}{proves})" if named else fault)
        if void is None:
            is_there = bool(self._report.evidence)  # the shown head, the first of the two, then is its first item
            self._report.evidence += [envelope for _, envelope in statements[is_there:]]

    def _compare(self) -> None:
        for head, envelope in self._heads:
            if head.num_entries == self._chain.num_entries and head.digest != self._chain.digest:
                first = self._heads[0]
                if envelope is first[1]:
                    self._report.faults.append(
                        f"the signed head names another entry {head.num_entries - 1} than the ledger has"
                    )
                else:
                    fault = f"an earlier signed head names another entry {head.num_entries - 1} than the ledger has"
                    self._accuse(fault, first, (head, envelope))

    def _compare_statements(self, receipt: Receipt) -> None:
        if receipt.status is BundleStatus.ACCEPTED:
            fields = {"lease_id", "step", "policy_version", "num_rollouts", "assigned"}
            stated = bytes.fromhex(digest_of(receipt.model_dump_json(include=fields).encode()))
            if self._stated.setdefault(bytes.fromhex(receipt.bundle), stated) != stated:
                self._contradicted = self._contradicted or receipt.bundle

    def _count(self, receipt: Receipt) -> None:
        account = self._report.accounts.setdefault(receipt.worker, Account())
        bundle = bytes.fromhex(receipt.bundle)
        before = self._accepted.pop(bundle, None)
        self._compare_statements(receipt)
        if receipt.status is BundleStatus.ACCEPTED:
            self._seeds.look(receipt, is_first=before is None)
        if before is not None:  # a later line of a bundle replaces the one before
            account.rollouts -= before[0]
            account.tokens -= before[1]
        if receipt.status is BundleStatus.ACCEPTED:
            self._accepted[bundle] = (receipt.num_rollouts, receipt.num_tokens)
            account.rollouts += receipt.num_rollouts
            account.tokens += receipt.num_tokens
        else:
            account.refused[receipt.reason or "unknown"] += receipt.num_rollouts
