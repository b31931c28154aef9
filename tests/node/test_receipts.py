"""The worker's summary of its receipts."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.node.worker_world import COORDINATOR, WORKER, make_run

from prime_node.worker.receipts import ReceiptBook, Tally
from prime_node.worker.status import Status
from prime_protocol.digest import digest_of
from prime_protocol.envelope import PayloadType, open_envelope, parse_json, seal
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


def reopened(folder: Path) -> ReceiptBook:
    return ReceiptBook(folder, run=RUN, worker=WORKER.key_id)


def test_a_flipped_bit_of_any_receipt_is_named_and_the_receipt_is_fetched_again(
    book: ReceiptBook, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Before, a changed number of tokens counted, and a line that was no JSON any more was left out at each start."""
    for number in range(3):
        note(book, number, BundleStatus.ACCEPTED, num_tokens=10)
    file, whole, cursor = tmp_path / "receipts.jsonl", tmp_path / "whole", tmp_path / "receipts.cursor"
    whole.write_bytes(data := file.read_bytes())
    kept = cursor.read_bytes()
    begin, end = data.index(b"\n") + 1, data.rindex(b"\n", 0, -1)
    for place in range(begin, end, 13):  # of the second line
        caplog.clear()
        file.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        cursor.write_bytes(kept)
        healed = reopened(tmp_path)
        assert healed.tally().tokens == 20, f"byte {place}: {data[place - 10 : place + 10]!r}"
        assert healed.cursor == 0
        assert f"{file} is damaged (line 2" in caplog.text
        assert (tmp_path / "receipts.damaged.jsonl").read_bytes() != data
    lines = data.decode().splitlines()
    healed.add(ReceiptList(receipts=tuple(lines), next=3), now_ms=0)
    assert (healed.tally().tokens, healed.cursor) == (30, 3)
    assert sorted(file.read_text().splitlines()) == sorted(lines), "those that were there are not kept twice"
    caplog.clear()
    assert reopened(tmp_path).tally() == book.tally()
    assert not caplog.records


@pytest.mark.parametrize("lines_left", [0, 1, None])
def test_receipts_that_are_missing_at_the_end_of_the_file_are_fetched_again(
    book: ReceiptBook, tmp_path: Path, lines_left: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(2):
        note(book, number, BundleStatus.ACCEPTED)
    file = tmp_path / "receipts.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.unlink() if lines_left is None else file.write_bytes(b"".join(lines[:lines_left]))
    assert reopened(tmp_path).cursor == 0
    assert f"{file} is damaged (its end is missing" in caplog.text
    assert reopened(tmp_path).cursor == 0


@pytest.mark.parametrize("cursor", ["2", f"2 {digest_of(b'2')[:16]}"])
def test_the_cursor_of_an_earlier_release_is_read(book: ReceiptBook, tmp_path: Path, cursor: str) -> None:
    for number in range(2):
        note(book, number, BundleStatus.ACCEPTED)
    (tmp_path / "receipts.cursor").write_text(cursor)
    assert (reopened(tmp_path).cursor, reopened(tmp_path).tally()) == (2, book.tally())


def test_the_cursor_of_another_run_that_used_the_folder_before_counts_for_nothing(
    book: ReceiptBook, tmp_path: Path
) -> None:
    """Before, a run whose coordinator had named a large cursor hid the receipts of each later run in the same folder."""
    other = make_run(name="other")
    book.add(ReceiptList(receipts=(), next=10**15), now_ms=0)
    assert ReceiptBook(tmp_path, run=other, worker=WORKER.key_id).cursor == 0
    note(book, 0, BundleStatus.ACCEPTED)
    assert reopened(tmp_path).cursor == 10**15 + 1
    assert ReceiptBook(tmp_path, run=other, worker=WORKER.key_id).cursor == 0


def test_receipts_that_are_asked_for_again_at_each_start_are_kept_once(book: ReceiptBook, tmp_path: Path) -> None:
    """Before, each start in a folder that another run had used wrote all but the last receipt of each bundle once more."""
    note(book, 0, BundleStatus.PENDING)
    note(book, 0, BundleStatus.ACCEPTED, num_tokens=5)
    file = tmp_path / "receipts.jsonl"
    own = file.read_text().splitlines()
    receipt = parse_json(open_envelope(own[0].encode()).payload, Receipt)
    other = seal(receipt.model_copy(update={"run": digest_of(b"other")}), PayloadType.RECEIPT, COORDINATOR)
    with file.open("ab") as lines:
        lines.write(other.to_bytes() + b"\n")
    data = file.read_bytes()
    for _ in range(2):
        again = reopened(tmp_path)
        assert again.cursor == 0
        again.add(ReceiptList(receipts=tuple(own), next=2), now_ms=0)
        assert again.tally() == book.tally()
        assert file.read_bytes() == data


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
