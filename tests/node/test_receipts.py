"""The worker's summary of its receipts."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.node.worker_world import COORDINATOR, WORKER, make_run

from prime_node.worker.receipts import ReceiptBook, Tally
from prime_node.worker.status import Status
from prime_protocol.digest import digest_of
from prime_protocol.envelope import PayloadType, seal
from prime_protocol.replies import ReceiptList
from prime_protocol.requests import WorkerState
from prime_protocol.verdict import BundleStatus, Receipt, RejectReason

RUN = make_run()


@pytest.fixture
def book(tmp_path: Path) -> ReceiptBook:
    return ReceiptBook(tmp_path, run=RUN, worker=WORKER.key_id)


def note(
    book: ReceiptBook, number: int, status: BundleStatus, reason: RejectReason | None = None, *, num_tokens: int = 0
) -> None:
    receipt = Receipt(
        run=RUN.digest,
        worker=WORKER.key_id,
        lease_id=digest_of(b"lease %d" % number),
        bundle=digest_of(b"bundle %d" % number),
        step=0,
        policy_version=0,
        num_rollouts=4,
        num_tokens=num_tokens,
        status=status,
        reason=reason,
        at_ms=0,
    )
    signed = seal(receipt, PayloadType.RECEIPT, COORDINATOR).to_bytes().decode()
    book.add(ReceiptList(receipts=(signed,), next=book.cursor + 1), now_ms=0)


def test_the_last_accepted_bundles_are_in_escrow_until_a_dishonest_one_costs_them_all(book: ReceiptBook) -> None:
    held = []
    for number in range(5):
        note(book, number, BundleStatus.PENDING)
        note(book, number, BundleStatus.ACCEPTED)
        held.append(book.num_escrows(3))
    assert held == [1, 2, 3, 3, 3]
    note(book, 5, BundleStatus.REFUSED, RejectReason.STALE)
    assert book.num_escrows(3) == 3
    note(book, 6, BundleStatus.REFUSED, RejectReason.SEED_MISMATCH)
    assert book.num_escrows(3) == 0


def test_a_line_that_a_crash_cut_short_costs_no_receipt_that_comes_after_it(book: ReceiptBook, tmp_path: Path) -> None:
    note(book, 0, BundleStatus.ACCEPTED, num_tokens=5)
    file = tmp_path / "receipts.jsonl"
    file.write_bytes(file.read_bytes() * 2)
    with file.open("rb+") as torn:
        torn.truncate(file.stat().st_size - 40)
    again = ReceiptBook(tmp_path, run=RUN, worker=WORKER.key_id)
    note(again, 1, BundleStatus.ACCEPTED, num_tokens=7)
    note(again, 1, BundleStatus.REFUSED, RejectReason.COPIED)
    note(again, 2, BundleStatus.PENDING)
    last = ReceiptBook(tmp_path, run=RUN, worker=WORKER.key_id)
    assert last.tally() == again.tally() == Tally(accepted=4, tokens=5, pending=4, refused={"copied": 4})


def test_an_answer_without_receipts_touches_no_file(book: ReceiptBook, tmp_path: Path) -> None:
    book.add(ReceiptList(receipts=(), next=0), now_ms=0)
    assert list(tmp_path.iterdir()) == []


def test_no_bundle_is_in_escrow_once_the_end_of_the_run_has_credited_it(book: ReceiptBook, tmp_path: Path) -> None:
    for number in (0, 1, 2, 2):
        note(book, number, BundleStatus.ACCEPTED)
    assert book.num_escrows(3) == 3, "a receipt that is fetched twice says nothing new"
    note(book, 2, BundleStatus.ACCEPTED, num_tokens=30)
    assert book.num_escrows(3) == 0
    assert ReceiptBook(tmp_path, run=RUN, worker=WORKER.key_id).num_escrows(3) == 0
    note(book, 3, BundleStatus.ACCEPTED)
    assert book.num_escrows(3) == 1


def test_the_status_line_shows_how_many_bundles_are_in_escrow() -> None:
    status = Status(WORKER.key_id, WorkerState.IDLE, 3, 3, 3, 0.0, 8, 8, 0, 0, bundles_in_escrow=8)
    assert " | 8 in escrow | " in status.line()
    assert "escrow" not in Status(WORKER.key_id, WorkerState.IDLE, 3, 3, 3, 0.0, 8, 8, 0, 0).line()
