"""A copy of a store's tables into another database, row by row, so that cursors, sequence numbers and signatures stay.

    (0) the caller has checked the source's rows: SQLite stores any value in any column, and a file may lack unique columns
    (1) the target is empty, or an earlier move left it        else refused
    (2) the target is closed: "a move into it has not ended"
    (3) all rows are copied; both sides have the same digest of each table
    (4) the caller compares the states of both sides
    (5) the source is closed: "the run has moved to ..."
    (6) the target is opened

A move that ends before (5) leaves the source in use; one that ends between (5) and (6) is completed by the same command.
A closed source is copied only into the place for which it was closed: elsewhere, the run may have continued from there.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from blake3 import blake3

from prime_node.adapters.storage.row_digests import CHAINED, damaged, require_intact
from prime_node.adapters.storage.sql_store import TABLES, Database, info_of, page_query
from prime_node.ports.store import PAGE_CHARS_MAX
from prime_protocol.errors import LocalError
from prime_protocol.visible import printable

PAGE_ROWS = 2_000
"""Rows that are copied at once, unless they have more than PAGE_CHARS_MAX characters together, or are the archive's."""

SHORT_CHARS_MAX = 64
"""Characters of a column, except for the one before the digest, which holds the content."""
_INTEGERS = {"number", "change", "at_ms", "step", "first", "chapter", "num_bytes"}


def require_plain_rows(path: Path) -> None:
    """Check that each row of a file of SQLite could be one of a coordinator. Raises LocalError that names one that is not."""
    with contextlib.closing(sqlite3.connect(path)) as opened:
        opened.text_factory = _text_of
        try:
            for table, columns in TABLES.items():
                last = -1
                for row in opened.execute(f"SELECT {', '.join(columns)} FROM {table} ORDER BY {columns[0]}"):
                    values = zip(columns, row, strict=True)
                    if not (all(_is_plain(table, *value) for value in values) and row[0] > last):
                        raise damaged(str(path), f"row {printable(str(row[0]), SHORT_CHARS_MAX)} of {table}")
                    if table != CHAINED:
                        require_intact(str(path), table, row)
                    last = row[0]
            for column in ("bundle", "lease_id"):
                for (value,) in opened.execute(f"SELECT {column} FROM receipts GROUP BY 1 HAVING count(*) > 1"):
                    raise damaged(str(path), f"a row of receipts: {column} {value} is there twice, and one of them")
        except sqlite3.DatabaseError as error:
            raise damaged(str(path), f"its structure ({error})") from None


def _text_of(stored: bytes) -> str | bytes:
    try:
        return stored.decode()
    except UnicodeDecodeError:
        return stored


def _is_plain(table: str, column: str, value: object) -> bool:
    """Return whether another database's column can hold a value, and a coordinator writes such a one."""
    if column in _INTEGERS:
        return type(value) is int and value >= 0
    is_content = column == TABLES[table][-2]
    return isinstance(value, str) and "\0" not in value and (is_content or len(value) <= SHORT_CHARS_MAX)


async def copy_store(
    source: Database, target: Database, *, source_place: str, target_place: str, check: Callable[[], Awaitable[None]]
) -> dict[str, int]:
    """Move the rows of a store and return how many each table has. `check` raises where the states differ. Raises LocalError."""
    was, into = await info_of(source), await info_of(target)
    unfinished, moved = unfinished_from(source_place), moved_to(target_place)
    if was.closed and (was.closed, into.closed) != (moved, unfinished):
        raise LocalError(f"{source_place} is not in use: {was.closed}")
    if not into.closed and await _holds_rows(target):  # (1)
        raise LocalError(
            f"{target_place} holds a state already: name an empty database, or drop that one if nothing needs it"
        )
    await target.set_closed(unfinished)  # (2)
    await target.clear()
    counts = {table: await _copy_table(source, target, table) for table in TABLES}  # (3)
    for table in TABLES:
        if await _digest_of_table(source, table) != await _digest_of_table(target, table):
            raise LocalError(f"table {table} differs between {source_place} and {target_place}: run the move again")
    await check()  # (4)
    await source.set_closed(moved)  # (5)
    await target.set_closed("")  # (6)
    return counts


async def has_moved(source: Database, target: Database, *, target_place: str) -> bool:
    """Return whether a move of the source into the target has ended."""
    was, into = await info_of(source), await info_of(target)
    return was.closed == moved_to(target_place) and not into.closed and await _holds_rows(target)


def unfinished_from(source_place: str) -> str:
    """Return why no coordinator may use the target of a move that has not ended."""
    return f"a move into it from {source_place} has not ended; run that `prime-node coordinator move` again"


def moved_to(target_place: str) -> str:
    """Return why no coordinator may use the source of a move."""
    return f"the run has moved to {target_place}; set coordinator.store to it"


async def _holds_rows(database: Database) -> bool:
    return any([await _page_of(database, table, -1, 1) for table in TABLES])


async def _copy_table(source: Database, target: Database, table: str) -> int:
    count, after = 0, -1
    while rows := await _page_of(source, table, after, PAGE_ROWS):
        await target.insert(table, rows)
        count, after = count + len(rows), rows[-1][0]
    return count


async def _digest_of_table(database: Database, table: str) -> str:
    hasher, after = blake3(), -1
    while rows := await _page_of(database, table, after, PAGE_ROWS):
        for row in rows:
            hasher.update(json.dumps(row).encode() + b"\n")
        after = rows[-1][0]
    return hasher.hexdigest()


async def _page_of(database: Database, table: str, after: int, limit: int) -> list[tuple[Any, ...]]:
    key, *_, content, _ = TABLES[table]
    if table == "journal":  # a segment may have many megabytes, and the query reads all rows up to its limit
        limit = 1
    query = page_query(table, content, f"{key} > $3")
    return [tuple(row) for row in await database.fetch(query, PAGE_CHARS_MAX, limit, after)]
