"""One suite for every store: what ports/store.py promises."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from prime_lab.memory_store import MemoryStore
from prime_node.adapters.storage.sqlite_store import open_sqlite
from prime_node.ports.store import LoggedEvent, Store, StoreConflict, StoredReceipt


@pytest.fixture(params=["memory", "sqlite"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    store: Store = MemoryStore() if request.param == "memory" else await open_sqlite(tmp_path / "state.db")
    yield store
    await store.close()


def event(number: int) -> LoggedEvent:
    return LoggedEvent(number, 1_763_690_000_000 + number, f'{{"type":"test","number":{number}}}')


def receipt(bundle: str, *, lease: str = "", worker: str = "anna", status: str = "pending") -> StoredReceipt:
    return StoredReceipt(bundle, lease or f"lease of {bundle}", worker, 3, status, f"envelope {status}")


async def events(store: Store, *, after: int = 0) -> list[LoggedEvent]:
    return [entry async for entry in store.events(after=after)]


async def test_events_come_back_in_order(store: Store) -> None:
    await store.append([event(1), event(2)])
    await store.append([event(3)])
    assert await events(store) == [event(1), event(2), event(3)]
    assert await events(store, after=2) == [event(3)]
    assert await events(store, after=3) == []


async def test_more_events_than_are_read_at_once_come_back(store: Store) -> None:
    await store.append([event(number) for number in range(1, 1_202)])
    assert [entry.number for entry in await events(store)] == list(range(1, 1_202))


@pytest.mark.parametrize("number", [1, 2, 4])
async def test_a_number_that_is_not_the_next_is_a_conflict_and_nothing_is_written(store: Store, number: int) -> None:
    await store.append([event(1), event(2)])
    with pytest.raises(StoreConflict):
        await store.append([event(number)], [receipt("a")])
    assert await events(store) == [event(1), event(2)]
    assert await store.receipt("a") is None


async def test_a_lease_is_redeemed_by_one_bundle_and_nothing_else_is_written(store: Store) -> None:
    await store.append([event(1)], [receipt("a", lease="x")])
    with pytest.raises(StoreConflict):
        await store.append([event(2)], [receipt("b", lease="x")])
    assert await events(store) == [event(1)]
    assert await store.receipt("b") is None
    await store.append([event(2)], [receipt("c")])


async def test_a_receipt_replaces_the_one_of_the_same_bundle(store: Store) -> None:
    await store.append([event(1)], [receipt("a")])
    await store.append([event(2)], [receipt("a", status="accepted")])
    assert await store.receipt("a") == receipt("a", status="accepted")
    assert await store.receipt("nothing") is None


async def test_receipts_are_listed_by_worker_in_the_order_of_their_last_change(store: Store) -> None:
    await store.append([event(1)], [receipt("a"), receipt("b"), receipt("other", worker="ben")])
    await store.append([event(2)], [receipt("a", status="accepted")])
    first, cursor = await store.receipts_of("anna", after=0, limit=1)
    second, end = await store.receipts_of("anna", after=cursor, limit=10)
    assert [*first, *second] == [receipt("b"), receipt("a", status="accepted")]
    everybody, _ = await store.receipts_of(None, after=0, limit=10)
    assert {one.worker for one in everybody} == {"anna", "ben"}
    assert await store.receipts_of("anna", after=end, limit=10) == ([], end)
    await store.append([event(3)], [receipt("b", status="refused")])
    assert (await store.receipts_of("anna", after=end, limit=10))[0] == [receipt("b", status="refused")]


async def test_a_page_has_as_many_as_fit_in_its_size_and_one_in_any_case(store: Store) -> None:
    lines = ["x" * size for size in (100, 30, 30, 30, 100, 5)]
    stored = [StoredReceipt(f"{place}", f"{place}", "anna", 3, "pending", line) for place, line in enumerate(lines)]
    await store.append([event(1)], stored, lines)
    shown: list[list[int]] = []
    while (start := sum(len(page) for page in shown)) < len(lines):
        shown.append([len(line) for line in await store.ledger(start=start, limit=2, chars_max=70)])
    assert shown == [[100], [30, 30], [30], [100], [5]]
    pages: list[list[int]] = []
    cursor = 0
    while page := (found := await store.receipts_of("anna", after=cursor, limit=9, chars_max=60))[0]:
        pages, cursor = [*pages, [len(one.envelope) for one in page]], found[1]
    assert pages == [[100], [30, 30], [30], [100], [5]]


async def test_the_ledger_grows_with_the_events_or_not_at_all(store: Store) -> None:
    await store.append([event(1)], [receipt("a")], ["zero", "one"])
    with pytest.raises(StoreConflict):
        await store.append([event(1)], [], ["lost"])
    await store.append([event(2)], [], ["two"])
    assert await store.ledger_length() == 3
    assert await store.ledger(start=0, limit=2) == ["zero", "one"]
    assert await store.ledger(start=2, limit=10) == ["two"]
    assert await store.ledger(start=3, limit=10) == []


async def test_a_snapshot_replaces_the_older_one_and_the_log_continues(store: Store) -> None:
    assert await store.latest_snapshot() is None
    await store.append([event(1), event(2), event(3)])
    await store.save_snapshot(2, "two")
    await store.save_snapshot(3, "three")
    assert await store.latest_snapshot() == (3, "three")
    await store.append([event(4)])
    assert await events(store, after=3) == [event(4)]


async def test_everything_is_there_after_the_database_is_opened_again(tmp_path: Path) -> None:
    store = await open_sqlite(tmp_path / "state.db")
    await store.append([event(1), event(2)], [receipt("a")], ["zero"])
    await store.save_snapshot(2, "two")
    await store.close()
    again = await open_sqlite(tmp_path / "state.db")
    assert await again.latest_snapshot() == (2, "two")
    assert await again.receipt("a") == receipt("a")
    await again.append([event(3)], [receipt("b")], ["one"])
    assert await again.ledger(start=0, limit=10) == ["zero", "one"]
    listed, _ = await again.receipts_of("anna", after=0, limit=10)
    assert listed == [receipt("a"), receipt("b")]
    await again.close()


async def test_a_second_coordinator_on_the_same_database_is_found_out(tmp_path: Path) -> None:
    first, second = [await open_sqlite(tmp_path / "state.db") for _ in range(2)]
    await first.append([event(1)])
    await first.save_snapshot(1, "one")
    with pytest.raises(StoreConflict):
        await second.append([event(1)])
    await first.close()
    await second.close()
