"""`prime-node evidence verify` and `ledger verify` read what a stranger made: hostile sizes, and keys that were revoked."""

from __future__ import annotations

from pathlib import Path

import pytest
import zstandard
from tests.builder import build_header
from tests.node.cases_world import check
from tests.node.coordinator_world import ANNA, COORDINATOR, ENGINE, make_run

from prime_protocol.assignment import GroupAssignment, Lease, Problem
from prime_protocol.case import BanStatement
from prime_protocol.digest import digest_of
from prime_protocol.envelope import PayloadType, seal
from prime_protocol.limits import UNPINNED_CASE_BYTES_MAX, Limits
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


def bomb_in(folder: Path, run: PinnedRun, *, size: int) -> Path:
    """A case whose deciding bundle, of a few kilobytes, has `size` bytes after decompression."""
    lease = Lease(
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
    ("size", "is_bounded"), [(UNPINNED_CASE_BYTES_MAX, False), (UNPINNED_CASE_BYTES_MAX + 1, True)]
)
def test_a_case_does_not_set_its_own_limits_where_the_run_is_not_named(
    tmp_path: Path, size: int, is_bounded: bool
) -> None:
    file = bomb_in(tmp_path, LARGE, size=size)
    told = "the deciding bundle has more than 268,435,456 bytes; --run with the run's digest applies"
    code, said = check(file)
    assert (code, told in str(said["fault"])) == (1, is_bounded)
    code, said = check(file, "--run", LARGE.digest)
    assert (code, told in str(said["fault"])) == (1, False)


@pytest.mark.parametrize("what", ["case", "parcel"])
def test_a_file_without_end_is_not_read_where_the_run_is_not_named(tmp_path: Path, what: str) -> None:
    file = bomb_in(tmp_path, LARGE, size=2**20)
    padded = file if what == "case" else next(tmp_path.glob("*.parcel"))
    with padded.open("r+b") as opened:
        opened.truncate(UNPINNED_CASE_BYTES_MAX + 1)  # sparse: it takes no place on the disk
    code, said = check(file)
    assert code == 1
    assert f"{padded.name} has more than 268,435,456 bytes" in str(said["fault"])
