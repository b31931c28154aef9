"""`prime-node evidence verify` and `ledger verify` read what a stranger made: hostile sizes, and keys that were revoked."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from pathlib import Path

import pytest
import zstandard
from tests.builder import build_header, role_keys
from tests.node.coordinator_world import ANNA, COORDINATOR, ENGINE, ROOT, TRAINER, VALIDATOR, make_run
from tests.node.dossiers_world import check
from tests.node.ledger_world import Shown, command, rewritten
from typer.testing import CliRunner

from prime_node.broadcast.audit.ledger_audit import LedgerReport, audit_ledger
from prime_node.broadcast.audit.ledger_file import export_ledger
from prime_node.cli.main import app
from prime_protocol.assignment import GroupAssignment, Lease, Problem
from prime_protocol.digest import digest_of
from prime_protocol.dossier import BanStatement
from prime_protocol.envelope import Envelope, PayloadType, seal
from prime_protocol.identity import SigningKey
from prime_protocol.key_ring import KeyRing
from prime_protocol.limits import UNPINNED_DOSSIER_BYTES_MAX, Limits
from prime_protocol.parcel import pack_parcel
from prime_protocol.run_spec import PinnedRun
from prime_protocol.verdict import BanKind, BundleStatus, Receipt, RejectReason

LARGE = make_run(limits=Limits(rollout_decompressed_bytes_max=2**33, rollout_bytes_max=2**31))
"""A run with the largest limits that a RunSpec may state."""


def refused(run: PinnedRun, bundle: str, *, at_ms: int = 5) -> Receipt:
    return Receipt(
        run=run.digest,
        worker=ANNA.key_id,
        bundle=bundle,
        lease_id="a" * 64,
        step=0,
        policy_version=0,
        num_rollouts=2,
        num_tokens=0,
        status=BundleStatus.REFUSED,
        reason=RejectReason.SEED_MISMATCH,
        at_ms=at_ms,
    )


def lease_of(run: PinnedRun) -> Lease:
    """Lease that the receipts above name."""
    return Lease(
        run=run.digest,
        lease_id="a" * 64,
        worker=ANNA.key_id,
        step=0,
        policy_version=0,
        policy_digest="b" * 64,
        groups=(
            GroupAssignment(
                slot=0, problem=Problem(environment="letters", index=0), prompt_token_ids=(1, 2), seeds=(1, 2)
            ),
        ),
        sampling=run.spec.sampling,
        issued_at_ms=0,
        expires_at_ms=10,
    )


def bomb_in(folder: Path, run: PinnedRun, *, size: int) -> Path:
    """A case whose deciding bundle, of a few kilobytes, has `size` bytes after decompression."""
    lease = lease_of(run)
    body = zstandard.ZstdCompressor(level=1).compress(bytes(2**20))
    parcel = pack_parcel(
        build_header(lease, body, size, worker=ANNA.key_id, engine=ENGINE), body, PayloadType.ROLLOUT, ANNA
    )
    bundle = digest_of(parcel)
    receipts = [refused(run, one) for one in ("1" * 64, bundle)]
    ban = BanStatement(
        run=run.digest,
        worker=ANNA.key_id,
        kind=BanKind.HARD,
        reason="x",
        bundle=bundle,
        step=0,
        at_ms=6,
        num_receipts=2,
    )
    signed = [
        seal(ban, PayloadType.BAN, COORDINATOR),
        seal(lease, PayloadType.LEASE, COORDINATOR),
        *(seal(one, PayloadType.RECEIPT, COORDINATOR) for one in receipts),
    ]
    file = folder / "case.jsonl"
    file.write_bytes(b"".join(one.to_bytes() + b"\n" for one in (run.envelope, *signed)))
    (folder / f"{bundle}.parcel").write_bytes(parcel)
    return file


@pytest.mark.parametrize(
    ("size", "is_bounded"), [(UNPINNED_DOSSIER_BYTES_MAX, False), (UNPINNED_DOSSIER_BYTES_MAX + 1, True)]
)
def test_a_case_does_not_set_its_own_limits_where_the_run_is_not_named(
    tmp_path: Path, size: int, is_bounded: bool
) -> None:
    file = bomb_in(tmp_path, LARGE, size=size)
    fault = "the deciding bundle has more than 268,435,456 bytes; --run with the run's digest applies"
    code, report = check(file)
    assert (code, fault in str(report["fault"])) == (1, is_bounded)
    code, report = check(file, "--run", LARGE.digest)
    assert (code, fault in str(report["fault"])) == (1, False)


@pytest.mark.parametrize("what", ["case", "parcel"])
def test_a_file_without_end_is_not_read_where_the_run_is_not_named(tmp_path: Path, what: str) -> None:
    file = bomb_in(tmp_path, LARGE, size=2**20)
    padded = file if what == "case" else next(tmp_path.glob("*.parcel"))
    with padded.open("r+b") as opened:
        opened.truncate(UNPINNED_DOSSIER_BYTES_MAX + 1)  # sparse: it takes no place on the disk
    code, report = check(file)
    assert code == 1
    assert f"{padded.name} has more than 268,435,456 bytes" in str(report["fault"])


NEW = SigningKey(b"n" * 32)
"""The coordinator's key after the former one was stolen."""
RING_AT_MS = 1_000
FORMER = "signed by a former key, replaced by ring 1 of 1970-01-01 00:00 UTC"


def ring_of(run: PinnedRun) -> Envelope:
    keys = role_keys(ROOT, NEW, TRAINER, VALIDATOR)
    ring = KeyRing(
        run=run.digest,
        version=1,
        previous=run.digest,
        keys=keys,
        published=None,
        created_at_ms=RING_AT_MS,
        reason="stolen",
    )
    return seal(ring, PayloadType.KEY_RING, ROOT)


def test_a_file_of_empty_lines_ends_at_the_first(tmp_path: Path) -> None:
    size, file = 2**23, tmp_path / "ban.jsonl"
    file.write_bytes(b"\n" * size)
    tracemalloc.start()
    try:
        assert check(file)[0] == 1
        assert tracemalloc.get_traced_memory()[1] < 3 * size
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("ban_key", "receipt_ms", "ban_ms", "holds"),
    [
        (COORDINATOR, RING_AT_MS, RING_AT_MS, True),  # a thief can write this: no signature shows a date
        (COORDINATOR, RING_AT_MS, RING_AT_MS + 1, False),
        (COORDINATOR, RING_AT_MS + 1, RING_AT_MS, False),
        (
            NEW,
            RING_AT_MS + 1,
            RING_AT_MS + 2,
            True,
        ),  # the present coordinator counts receipts that the former key signed
    ],
)
def test_a_ban_by_a_former_key_is_named_and_fails_where_it_is_dated_after_the_ring(
    tmp_path: Path, ban_key: SigningKey, receipt_ms: int, ban_ms: int, holds: bool
) -> None:
    run = make_run()
    receipts = [refused(run, digit * 64, at_ms=receipt_ms) for digit in "12"]
    ban = BanStatement(
        run=run.digest,
        worker=ANNA.key_id,
        kind=BanKind.HARD,
        reason="2 bundles refused",
        bundle="2" * 64,
        step=0,
        at_ms=ban_ms,
        num_receipts=2,
    )
    file = tmp_path / "case.jsonl"
    lease = seal(lease_of(run), PayloadType.LEASE, COORDINATOR)
    signed = [seal(one, PayloadType.RECEIPT, COORDINATOR) for one in receipts]
    signed = [seal(ban, PayloadType.BAN, ban_key), lease, *signed]
    file.write_bytes(b"".join(one.to_bytes() + b"\n" for one in (run.envelope, ring_of(run), *signed)))
    code, report = check(file, "--run", run.digest)
    assert (code, report["ok"]) == (0 if holds else 1, holds)
    if holds:
        assert any(FORMER in note for note in report["notes"])  # type: ignore[attr-defined]
    else:
        assert report["fault"] == f"a statement is {FORMER}, and dated after it"


def test_a_ban_by_a_former_key_whose_ring_the_file_leaves_out_fails_by_a_ledger(tmp_path: Path) -> None:
    """Before, a thief left the ring out, and `--ledger` compared the seeds alone."""
    run = make_run()
    ban = BanStatement(
        run=run.digest, worker=ANNA.key_id, kind=BanKind.OPERATOR, reason="x", bundle=None, step=0, at_ms=RING_AT_MS + 1,
        num_receipts=0,
    )  # fmt: skip
    file = tmp_path / "case.jsonl"
    signed = (run.envelope, seal(ban, PayloadType.BAN, COORDINATOR))
    file.write_bytes(b"".join(one.to_bytes() + b"\n" for one in signed))
    assert check(file, "--run", run.digest)[0] == 0
    code, report = check(file, "--run", run.digest, "--ledger", str(ledger_with_the_ring(tmp_path)))
    assert (code, report["fault"]) == (1, f"a statement is {FORMER}, and dated after it")


def ledger_with_the_ring(folder: Path) -> Path:
    """Export a ledger of the run after its key ring."""
    run, file = make_run(), folder / "ledger.jsonl"
    run.keys.add(ring_of(run))
    shown = rewritten(run, [], at_ms=9_000)
    shown.head = seal(shown.head.payload, PayloadType.LEDGER_HEAD, NEW)
    asyncio.run(export_ledger(shown, run, file))
    return file


def test_a_contradiction_by_a_former_key_whose_ring_the_file_leaves_out_fails_by_a_ledger(tmp_path: Path) -> None:
    """Before, a thief of a former key convicted an honest coordinator by such a file, and nothing could show it."""
    run = make_run()
    fields = {"status": BundleStatus.ACCEPTED, "reason": None, "step": 9, "at_ms": RING_AT_MS + 1}
    receipt = refused(run, "1" * 64).model_copy(update=fields)
    signed = (seal(lease_of(run), PayloadType.LEASE, COORDINATOR), seal(receipt, PayloadType.RECEIPT, COORDINATOR))
    ledger, codes = ledger_with_the_ring(tmp_path), []
    for name, rings in (("without", ()), ("with", (ring_of(run),))):
        file = tmp_path / name
        file.write_bytes(b"".join(one.to_bytes() + b"\n" for one in (run.envelope, *rings, *signed)))
        for options in ([], ["--ledger", str(ledger)]):
            arguments = ["evidence", "contradiction", str(file), "--run", run.digest, *options]
            result = CliRunner().invoke(app, arguments, catch_exceptions=False)
            codes.append((result.exit_code, f"a statement is {FORMER}, and dated after it" in result.output))
    assert codes == [(0, False), (1, True), (1, True), (1, True)]


def audited(run: PinnedRun, head_key: SigningKey, head_ms: int, *, kept: tuple[Shown, ...] = ()) -> LedgerReport:
    """Audit a ledger of one receipt under this head."""
    shown = rewritten(run, [refused(run, "1" * 64).model_dump_json().encode()], at_ms=head_ms)
    shown.head = seal(shown.head.payload, PayloadType.LEDGER_HEAD, head_key)
    return asyncio.run(audit_ledger(shown, run, kept=kept))


@pytest.mark.parametrize(("at_ms", "is_void"), [(RING_AT_MS, False), (RING_AT_MS + 1, True)])
def test_a_head_by_a_former_key_dated_after_the_ring_convicts_no_key(at_ms: int, is_void: bool) -> None:
    run = make_run()
    run.keys.add(ring_of(run))
    other = rewritten(run, [refused(run, "2" * 64).model_dump_json().encode()], at_ms=at_ms)
    report = audited(run, NEW, 9_000, kept=(other,))
    (fault,) = report.faults
    assert FORMER in fault
    assert ("it is no evidence" in fault) == is_void
    assert len(report.evidence) == (0 if is_void else 2)
    assert any(FORMER in note for note in report.notes)


def test_a_ledger_whose_head_a_former_key_signed_after_the_ring_fails() -> None:
    run = make_run()
    run.keys.add(ring_of(run))
    assert audited(run, COORDINATOR, RING_AT_MS + 1).faults == [f"the signed head is {FORMER}, and dated after it"]
    earlier = audited(run, COORDINATOR, RING_AT_MS)
    assert (earlier.faults, earlier.notes) == ([], [f"1 statement is {FORMER}"])
    assert audited(run, NEW, RING_AT_MS + 1).notes == []


def test_a_missing_receipt_that_a_former_key_signed_after_the_ring_fails_and_convicts_no_key(tmp_path: Path) -> None:
    run = make_run()
    run.keys.add(ring_of(run))
    late = seal(refused(run, "2" * 64, at_ms=RING_AT_MS + 1), PayloadType.RECEIPT, COORDINATOR)
    (tmp_path / "receipts.jsonl").write_bytes(late.to_bytes() + b"\n")
    shown = rewritten(run, [], at_ms=9_000)
    shown.head = seal(shown.head.payload, PayloadType.LEDGER_HEAD, NEW)
    asyncio.run(export_ledger(shown, run, tmp_path / "ledger.jsonl"))
    options = ["--receipts", str(tmp_path), "--evidence", str(tmp_path / "proof"), "--run", run.digest]
    result = command("verify", str(tmp_path / "ledger.jsonl"), *options, "--json")
    report = json.loads(result.stdout)
    assert result.exit_code == 1
    assert report["notes"] == [f"1 statement is {FORMER}, and dated after it"]
    assert "it is no evidence" in report["faults"][0]
    assert not (tmp_path / "proof").exists()
