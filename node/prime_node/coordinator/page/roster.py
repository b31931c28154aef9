"""The list of all workers for browsers: once as a whole, and then what has changed since a version.

Each worker has a number as long as the state knows it. Only the newest versions are known: strangers choose what they ask for,
and each version costs an answer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from prime_node.coordinator.page.run_page import NAME_CHARS_MAX, TEXT_CHARS_MAX, RunPage
from prime_node.coordinator.state import audits, newcomers
from prime_node.coordinator.state.records import WorkerRecord
from prime_protocol.visible import printable

FIXED = ("key", "name", "hardware", "engine", "person")
LIVE = ("state", "policy", "accepted", "refused", "tokens", "audits", "newcomer", "waits")
VERSIONS_KEPT = 16
Cells = tuple[Any, ...]


@dataclass(slots=True)
class _Row:
    number: int
    fixed: Cells
    live: Cells
    fixed_at: int
    """Version in which what the worker says of itself has changed."""
    live_at: int


class Roster:
    """The rows of all workers, and when each has changed."""

    def __init__(self, page: RunPage) -> None:
        self._page = page
        self.version = page.clock.now_ms()
        self._rows: dict[str, _Row] = {}
        self._next = 0
        self._gone: deque[tuple[int, int]] = deque()
        """Version and number of rows that have ended since the oldest known version."""
        self._known: deque[int] = deque(maxlen=VERSIONS_KEPT)

    def look(self) -> None:
        """Compare the rows with the state, and begin a version."""
        workers, rows = self._page.decisions.state.workers, self._rows
        self.version += 1
        for key in [key for key in rows if key not in workers]:
            self._gone.append((self.version, rows.pop(key).number))
        for key, worker in workers.items():
            fixed, live = (
                _fixed_cells(key, worker.name, worker.hardware, worker.engine, worker.person),
                self._live_cells(worker),
            )
            row = rows.get(key)
            if row is None:
                rows[key] = _Row(self._next, fixed, live, self.version, self.version)
                self._next += 1
                continue
            if row.fixed != fixed:
                row.fixed, row.fixed_at = fixed, self.version
            if row.live != live:
                row.live, row.live_at = live, self.version
        self._known.append(self.version)
        while self._gone and self._gone[0][0] <= self._known[0]:
            self._gone.popleft()

    def knows(self, version: int) -> bool:
        """Return whether the changes since a version are known."""
        return version in self._known

    def since(self, version: int) -> dict[str, Any]:
        """Return what has changed since a version that is known, and otherwise the whole, with `since` 0."""
        version = version if self.knows(version) else 0
        named = [row for row in self._rows.values() if row.fixed_at > version]
        moved = [row for row in self._rows.values() if row.live_at > version >= row.fixed_at]
        return {
            "version": self.version,
            "since": version,
            "named": _columns(named, FIXED + LIVE, [row.fixed + row.live for row in named]),
            "moved": _columns(moved, LIVE, [row.live for row in moved]),
            "gone": [number for at, number in self._gone if at > version > 0],
        }

    def _live_cells(self, worker: WorkerRecord) -> Cells:
        page = self._page
        rules, seen = page.decisions.state.rules, page.presence.get(worker.worker)
        hint = page.presence.hint(worker.worker)
        return (
            page.presence.doing(worker),
            -1 if seen is None else seen.policy_version,
            worker.accepted,
            sum(worker.refused.values()),
            page.history.tokens.get(worker.worker, 0),
            round(audits.audit_share(rules, worker), 3),
            int(newcomers.is_newcomer(rules, worker)),
            printable(hint, TEXT_CHARS_MAX) if hint else "",
        )


def _columns(rows: Sequence[_Row], names: Sequence[str], cells: Sequence[Cells]) -> dict[str, list[Any]]:
    """Return rows as columns, which compress best. Example: {"number": [0, 1], "key": ["12D3...", "12D3..."], ...}."""
    columns = zip(*cells, strict=True) if cells else ((),) * len(names)
    found = {name: list(column) for name, column in zip(names, columns, strict=True)}
    return {"number": [row.number for row in rows], **found}


@lru_cache(maxsize=20_000)
def _fixed_cells(key: str, name: str, hardware: str, engine: str, person: str) -> Cells:
    """Return what a worker says of itself. Kept, because to make texts harmless takes longest of all."""
    return (key, *(printable(text, NAME_CHARS_MAX) for text in (name, hardware, engine)), person)
