"""`prime-node evidence contradiction` shows anyone that a coordinator's receipt and its lease disagree, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.node.coordinator_world import ANNA, BEN, COORDINATOR, memory_parts, running
from tests.node.seed_chain_world import chained, leased_and_judged
from typer.testing import CliRunner

from prime_node.cli.main import app
from prime_node.worker import receipts
from prime_node.worker.receipts import ReceiptBook
from prime_protocol.assignment import Lease
from prime_protocol.envelope import Envelope, PayloadType, parse_json, seal
from prime_protocol.errors import LocalError
from prime_protocol.identity import SigningKey
from prime_protocol.replies import ReceiptList
from prime_protocol.run_spec import PinnedRun
from prime_protocol.verdict import BundleStatus, Receipt, RejectReason

Statements = tuple[PinnedRun, Lease, Receipt]


@pytest.fixture
async def statements() -> Statements:
    """A run, a lease of Anna's, and the receipt that accepts its bundle."""
    async with running(memory_parts(chained())) as world:
        lease, receipt = await leased_and_judged(world)
        return world.run, lease, parse_json(receipt.payload, Receipt)


def checked(file: Path, *options: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["evidence", "contradiction", str(file), *options], catch_exceptions=False)
    return result.exit_code, result.output


def written(path: Path, run: PinnedRun, lease: Lease, receipt: Receipt, *, signer: SigningKey = COORDINATOR) -> Path:
    said: list[Envelope] = [seal(lease, PayloadType.LEASE, signer), seal(receipt, PayloadType.RECEIPT, signer)]
    path.write_bytes(b"".join(one.to_bytes() + b"\n" for one in (run.envelope, *said)))
    return path


def test_the_file_that_a_worker_keeps_convicts_its_coordinator(tmp_path: Path, statements: Statements) -> None:
    run, lease, receipt = statements
    book = ReceiptBook(tmp_path, run=run, worker=ANNA.key_id)
    book.note_lease(lease, seal(lease, PayloadType.LEASE, COORDINATOR))
    lie = seal(receipt.model_copy(update={"step": 99}), PayloadType.RECEIPT, COORDINATOR)
    book.add(ReceiptList(receipts=(lie.to_bytes().decode(),), next=1), now_ms=receipt.at_ms)
    (file,) = tmp_path.glob("contradiction-*.jsonl")
    code, shown = checked(file, "--run", run.digest)
    assert (code, "one is false: the receipt says step 99, the lease 0" in shown) == (0, True)
    code, shown = checked(file, "--json")
    assert (code, json.loads(shown)["what"]) == (0, "the receipt says step 99, the lease 0")
    assert json.loads(checked(file, "--json", "--run", "0" * 64)[1])["ok"] is False, "another run"


def test_a_worker_keeps_the_newest_leases_of_long_prompts_in_bounded_memory(
    tmp_path: Path, statements: Statements, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 leases of the largest size, with their tokens as objects, took many gigabytes."""
    run, lease, receipt = statements
    leases = [lease.model_copy(update={"lease_id": str(number) * 64}) for number in range(3)]
    signed = [seal(one, PayloadType.LEASE, COORDINATOR) for one in leases]
    monkeypatch.setattr(receipts, "LEASES_BYTES_MAX", len(signed[0].payload) * 2)
    book = ReceiptBook(tmp_path, run=run, worker=ANNA.key_id)
    for one, envelope in zip(leases, signed, strict=True):
        book.note_lease(one, envelope)
    for number, one in enumerate(leases):
        lie = receipt.model_copy(update={"lease_id": one.lease_id, "bundle": str(number) * 64, "step": 99})
        sent = seal(lie, PayloadType.RECEIPT, COORDINATOR).to_bytes().decode()
        book.add(ReceiptList(receipts=(sent,), next=number + 1), now_ms=receipt.at_ms)
    kept = sorted(file.name for file in tmp_path.glob("contradiction-*.jsonl"))
    assert kept == [f"contradiction-{one.lease_id[:16]}.jsonl" for one in leases[1:]]


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"at_ms": 0}, "before its lease"),
        ({"policy_version": 7}, "policy_version 7"),
        ({"assigned": None}, "lacks its assignment"),
    ],
)
def test_each_difference_is_named(
    changes: dict[str, object], what: str, tmp_path: Path, statements: Statements
) -> None:
    run, lease, receipt = statements
    code, shown = checked(written(tmp_path / "file", run, lease, receipt.model_copy(update=changes)))
    assert (code, what in shown) == (0, True)


@pytest.mark.parametrize(
    ("changes", "signer", "why"),
    [
        ({}, COORDINATOR, "agrees with the lease"),
        ({"lease_id": "0" * 64}, COORDINATOR, "nothing connects the two"),
        ({"worker": BEN.key_id}, COORDINATOR, "nothing connects the two"),
        (
            {"step": 99, "status": BundleStatus.REFUSED, "reason": RejectReason.WRONG_ASSIGNMENT, "assigned": None},
            COORDINATOR,
            "accepts no bundle",
        ),
        ({"step": 99}, ANNA, "FAIL"),
    ],
)
def test_what_proves_nothing_convicts_nobody(
    changes: dict[str, object], signer: SigningKey, why: str, tmp_path: Path, statements: Statements
) -> None:
    run, lease, receipt = statements
    changed = receipt.model_copy(update=changes)
    code, shown = checked(written(tmp_path / "file", run, lease, changed, signer=signer))
    assert (code, why in shown) == (1, True), shown


def test_a_broken_file_is_a_fault_and_no_traceback(tmp_path: Path, statements: Statements) -> None:
    run, lease, receipt = statements
    whole = written(tmp_path / "whole", run, lease, receipt.model_copy(update={"step": 99})).read_bytes()
    for number, data in enumerate((b"", b"\n", whole[:-40], whole.splitlines()[0], whole + b"{}\n")):
        file = tmp_path / f"file{number}"
        file.write_bytes(data)
        code, shown = checked(file)
        assert (code, shown.startswith("FAIL ")) == (1, True), shown
    with pytest.raises(LocalError, match="No such file"):
        checked(tmp_path / "absent")
