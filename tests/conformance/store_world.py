"""Rows for the tests of the stores."""

from __future__ import annotations

from prime_node.ports.store import LoggedEvent, Store, StoredReceipt

RUN, OTHER_RUN = "ab" * 32, "cd" * 32


def event(number: int) -> LoggedEvent:
    return LoggedEvent(number, 1_763_690_000_000 + number, f'{{"type":"test","number":{number}}}')


def receipt(bundle: str, *, lease: str = "", worker: str = "anna", status: str = "pending") -> StoredReceipt:
    return StoredReceipt(bundle, lease or f"lease of {bundle}", worker, 3, status, f"envelope {status}")


async def events(store: Store, *, after: int = 0) -> list[LoggedEvent]:
    return [entry async for entry in store.events(after=after)]
