"""The rules of a term: when its leader may answer, and when another coordinator may take over. Pure; times are arguments.

A leader counts its renewals in one row of the database. Times are seconds of a clock that only this machine reads and that
counts while the process, or the machine, is stopped.

    leader      a renewal that was sent at s and succeeded lets it answer until s + ANSWER_SHARE * term
    standby     takes over if it has seen the same row for a term, by a statement that fails if the row has changed

The standby saw the row after the leader sent that renewal. So its term ends later than the leader's answers, by a tenth of the
term, which covers clocks of different speed. Writes need no such margin: they name the epoch (schema/postgres).
"""

from __future__ import annotations

from dataclasses import dataclass, field

ANSWER_SHARE = 0.9
"""Share of a term in which its leader answers."""
RENEWALS_PER_TERM, LOOKS_PER_TERM = 5, 10
"""Renewals of a leader, and looks of a standby, in one term."""


@dataclass(frozen=True, slots=True)
class TermRow:
    """What the database says about the term. Example: TermRow(7, "host-a, process 812", 41, 2_000)."""

    epoch: int
    """Number of the term."""
    holder: str
    renewals: int
    term_ms: int
    """Length without a renewal, in milliseconds; 0 if the term was ended."""


@dataclass(slots=True)
class HeldTerm:
    """A term as its leader knows it."""

    term_s: float
    epoch: int
    answers_until_s: float = field(default=0.0)
    is_lost: bool = False

    def renewed(self, *, sent_s: float) -> None:
        """Note a renewal that succeeded, by the time at which it was sent."""
        self.answers_until_s = max(self.answers_until_s, sent_s + ANSWER_SHARE * self.term_s)

    def lost(self) -> None:
        """Note that another coordinator has begun a term."""
        self.is_lost = True

    def may_answer(self, now_s: float) -> bool:
        """Return whether no other coordinator can have begun a term yet."""
        return not self.is_lost and now_s < self.answers_until_s


@dataclass(slots=True)
class WatchedTerm:
    """A term as a coordinator sees it that does not lead."""

    _row: TermRow | None = None
    _since_s: float = 0.0
    num_renewals: int = 0
    """Changes of the row that were seen: another coordinator is alive."""

    def is_over(self, row: TermRow, *, asked_s: float, seen_s: float) -> bool:
        """Return whether this coordinator may try to begin a term, after it asked for the row and saw it."""
        if row != self._row:
            self.num_renewals += self._row is not None
            self._row, self._since_s = row, seen_s
        return row.term_ms == 0 or asked_s - self._since_s >= row.term_ms / 1_000
