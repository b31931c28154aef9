"""Digests of the store's rows, in their column `digest`, so that a row that a disk changed is found when it is read.

The digest of an event includes that of the event before it, so a lost or exchanged event is found too. These digests are against
rot. Against people who can write to the database there are the signatures and the ledger.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from blake3 import blake3

from prime_node.ports.store import DamagedRow

_BYTES = 12
CHAINED = "events"
"""Table whose digests are chained."""
SEALED_SINCE = 2
"""Version of the tables that brought the digests (schema_versions.py)."""
SEALED = ("events", "snapshots", "receipts", "ledger")
"""Tables of that version."""


def row_digest(*values: object) -> str:
    """Return the digest of a row's other columns, joined by NUL, which no column holds: 24 hexadecimal digits.

    The writer computes one for each row, so it joins once and hashes once.
    """
    return blake3("\0".join(map(str, values)).encode("utf-8", "surrogatepass")).hexdigest(length=_BYTES)


def event_digest(previous: str, number: object, at_ms: object, payload: object) -> str:
    """Return `row_digest` of an event after the digest of the one before it, in less time: a restart reads a million."""
    return blake3(f"{previous}\0{number}\0{at_ms}\0{payload}".encode("utf-8", "surrogatepass")).hexdigest(length=_BYTES)


def sealed(*values: object) -> tuple[object, ...]:
    """Return a row with its digest as the last value."""
    return (*values, row_digest(*values))


def chained(events: Iterable[Sequence[Any]], previous: str) -> list[tuple[Any, ...]]:
    """Return the rows of consecutive events. `previous` is the digest of the event before them, empty for the first."""
    return [(*event, previous := event_digest(previous, *event)) for event in events]


def seals_of(table: str, rows: Sequence[Sequence[Any]]) -> list[tuple[Any, Any]]:
    """Return the digest and the first column of each row, for all rows of a table of an older release."""
    whole = chained(rows, "") if table == CHAINED else [sealed(*row) for row in rows]
    return [(row[-1], row[0]) for row in whole]


def require_intact(place: str, table: str, row: Sequence[Any]) -> None:
    """Raise LocalError if a row, whose last value is its digest, is not as it was written."""
    *values, digest = row
    if digest != row_digest(*values) or not isinstance(values[-1], str):
        raise damaged(place, f"row {values[0]} of {table}")


def damaged(place: str, what: str) -> DamagedRow:
    """Return the error for a store that holds something else than was written."""
    return DamagedRow(
        what,
        f"{place}: {what} is damaged or lost: check the disk, then put back a copy of the run's folder or database",
    )
