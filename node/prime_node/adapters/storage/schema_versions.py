"""Versions of the store's tables: numbered SQL files, applied in order, each in one transaction with its number.

    schema/sqlite/0001.sql, 0002.sql, ...      schema/postgres/0001.sql, 0002.sql, ...

A file that a release contains never changes; a change of the tables is a new file. The table `store_info` has one row: the number
of the last file, the run, and why no coordinator may use the store (`closed`; empty if one may).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from prime_protocol.errors import LocalError

FOLDER = Path(__file__).parent / "schema"
CREATE_INFO = (
    "CREATE TABLE IF NOT EXISTS store_info"
    " (version INTEGER NOT NULL, run TEXT NOT NULL, closed TEXT NOT NULL DEFAULT '')"
)
READ_INFO = "SELECT version, run, closed FROM store_info"


@dataclass(frozen=True, slots=True)
class StoreInfo:
    """The row of `store_info`. Example: StoreInfo(1, "3f0c...", "")."""

    version: int
    run: str
    """Digest of the run's RunSpec."""
    closed: str


def migrations_after(dialect: str, version: int, *, place: str) -> list[tuple[int, str]]:
    """Return the number and SQL of each file that a store lacks. Raises LocalError if a newer release wrote the store."""
    files = sorted((FOLDER / dialect).glob("*.sql"))
    newest = int(files[-1].stem)
    if not isinstance(version, int) or version < 0:
        raise LocalError(f"{place}: the row of store_info is damaged: put back a copy of the run's folder or database")
    if version > newest:
        raise LocalError(
            f"{place} was written by a newer release (its tables have version {version}, this release knows {newest}): "
            "install that release"
        )
    return [(int(file.stem), file.read_text("utf-8")) for file in files if int(file.stem) > version]


def require_run(info: StoreInfo, run: str, *, place: str) -> None:
    """Raise LocalError if the store belongs to another run."""
    if info.run != run:
        raise LocalError(
            f"{place} belongs to another run, {info.run[:12]}, not to {run[:12]}: give each run its own store"
        )
