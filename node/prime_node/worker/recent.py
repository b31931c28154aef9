"""What a worker did in the last hours, a row a minute, kept over restarts.

The file describes the past of one machine for its contributor. It proves nothing and is written without a sync; receipts are
the proof. A damaged file is dropped.
"""

from __future__ import annotations

import logging
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from prime_node.files import replace
from prime_node.inside import read_inside
from prime_node.worker.status import Status
from prime_protocol.errors import RemoteError

log = logging.getLogger(__name__)

MINUTES_MAX = 24 * 60
"""Rows that are kept: those of a day in which the worker ran."""
FILE, FILE_BYTES_MAX = "recent.json", 2**20
MINUTE_MS = 60_000


class RecentMinutes(BaseModel):
    """Columns of equal length, the oldest minute first. A minute without a row is one in which the worker did not run."""

    model_config = ConfigDict(extra="forbid")

    minute: list[int] = Field(default_factory=list, max_length=MINUTES_MAX)
    """Unix time in minutes."""
    tokens: list[int] = Field(default_factory=list, max_length=MINUTES_MAX)
    """Tokens generated."""
    accepted: list[int] = Field(default_factory=list, max_length=MINUTES_MAX)
    """Rollouts accepted: receipts of the minute, whose rollouts are older."""
    rejected: list[int] = Field(default_factory=list, max_length=MINUTES_MAX)
    down_bytes: list[int] = Field(default_factory=list, max_length=MINUTES_MAX)
    up_bytes: list[int] = Field(default_factory=list, max_length=MINUTES_MAX)

    def columns(self) -> dict[str, list[int]]:
        """Return the columns by name."""
        return {name: getattr(self, name) for name in RecentMinutes.model_fields}


_COUNTED = ("tokens", "accepted", "rejected", "down_bytes", "up_bytes")


class RecentWork:
    """The last minutes of one worker. Call `note` every few seconds."""

    def __init__(self, folder: Path) -> None:
        """Read the minutes of earlier starts."""
        self._folder = folder
        self.minutes = self._read()
        self._before: tuple[int, ...] | None = None

    def note(self, status: Status) -> None:
        """Add what has happened since the last call to the present minute. Write the file when a minute begins."""
        now = (
            status.tokens_generated,
            status.rollouts_accepted,
            sum(status.refused.values()),
            status.down_bytes,
            status.up_bytes,
        )
        before, self._before = self._before or now, now
        minute, columns = status.at_ms // MINUTE_MS, self.minutes.columns()
        if not self.minutes.minute or minute > self.minutes.minute[-1]:
            for name, column in columns.items():
                column.append(minute if name == "minute" else 0)
                del column[:-MINUTES_MAX]
            self.write()
        for name, new, old in zip(_COUNTED, now, before, strict=True):
            columns[name][-1] += max(0, new - old)  # a verdict may be withdrawn; a clock set back keeps its minute

    def since(self, minute: int) -> dict[str, list[int]]:
        """Return the columns from a minute on: that minute may have been incomplete."""
        first = next(
            (place for place, one in enumerate(self.minutes.minute) if one >= minute), len(self.minutes.minute)
        )
        return {name: column[first:] for name, column in self.minutes.columns().items()}

    def write(self) -> None:
        """Write the file."""
        try:
            replace(self._folder / FILE, self.minutes.model_dump_json().encode())
        except OSError as error:
            log.warning("recent work %s: %s", self._folder / FILE, error)

    def _read(self) -> RecentMinutes:
        try:
            data = read_inside(self._folder, FILE, bytes_max=FILE_BYTES_MAX)
            found = RecentMinutes() if data is None else RecentMinutes.model_validate_json(data)
        except (OSError, RemoteError, ValidationError):
            log.warning("%s is damaged: the minutes of earlier starts are dropped", self._folder / FILE)
            found = RecentMinutes()
        columns = found.columns()
        is_whole = len({len(column) for column in columns.values()}) == 1 and found.minute == sorted(set(found.minute))
        return found if is_whole else RecentMinutes()
