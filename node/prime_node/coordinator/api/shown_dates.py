"""Dates of the timestamps that clients may hold, and the date that the next one may have. Pure.

Only a client whose clock was at least a timestamp's date less REQUEST_AGE_S_MAX has taken it. If the next one is dated before
this clock by more than its own lifetime and REQUEST_AGE_S_MAX, the client rejects it as expired, and sees no contradiction.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field

from prime_protocol import limits
from prime_protocol.digest import digest_of

log = logging.getLogger(__name__)

LEAP_MS = round(1_000 * limits.REQUEST_AGE_S_MAX)
"""A clock that gains more against the monotonic clock has made a leap."""


@dataclass(slots=True)
class ShownDates:
    """Dates in milliseconds. `ran_ms` is always the monotonic time."""

    reach_ms: int
    """Lifetime of the next timestamp, and REQUEST_AGE_S_MAX twice."""
    spans: list[tuple[int, int]] = field(default_factory=list)
    """For each time without a leap: least difference of a date and the monotonic time when it was shown, and last date."""

    @property
    def last_ms(self) -> int:
        """Date of the last timestamp; 0 before the first."""
        return self.spans[-1][1] if self.spans else 0

    def next_ms(self, now_ms: int, ran_ms: int) -> int:
        """Return the first date from now on that contradicts none of these."""
        date_ms = now_ms
        for ahead_ms, last_ms in sorted(self.spans, key=lambda span: span[1]):
            if ahead_ms + ran_ms - self.reach_ms <= date_ms <= last_ms:
                date_ms = last_ms + 1
        return date_ms

    def is_leap(self, date_ms: int, ran_ms: int) -> bool:
        """Return whether the clock has made a leap to a date since the last one."""
        if not self.spans:
            return False
        least_ms, last_ms = self.spans[-1]
        return date_ms < last_ms or date_ms - ran_ms - least_ms > LEAP_MS

    def add(self, date_ms: int, ran_ms: int) -> None:
        """Add the date of a timestamp that is shown now, also again: a client may take it now."""
        ahead_ms = date_ms - ran_ms
        if self.spans and not self.is_leap(date_ms, ran_ms):
            ahead_ms = min(ahead_ms, self.spans.pop()[0])
        self.spans = [span for span in self.spans if span[0] + ran_ms - self.reach_ms <= span[1]]
        self.spans.append((ahead_ms, date_ms))

    def to_bytes(self, date_ms: int, ran_ms: int) -> bytes:
        """Return what a restart must know of the dates before a leap to `date_ms`: JSON after its digest."""
        body = json.dumps([date_ms, [(ahead_ms + ran_ms, last_ms) for ahead_ms, last_ms in self.spans]]).encode()
        return f"{digest_of(body)}\n".encode() + body

    def restore(self, data: bytes, stored_ms: int, now_ms: int, ran_ms: int) -> None:
        """Take the bytes of the last leap. Damaged ones count as none. `stored_ms` is the date of the last timestamp.

        The time since the leap is what the clock counted from it to the last timestamp, and to now if it made no leap since.
        """
        digest, _, body = data.partition(b"\n")
        if digest != digest_of(body).encode():
            log.warning("the dates of earlier timestamps are damaged, and only the last one counts")
            return
        leap_ms, spans = json.loads(body)
        passed_ms = (now_ms if 0 <= now_ms - stored_ms <= LEAP_MS else stored_ms) - leap_ms
        if passed_ms < 0 or any(last_ms == stored_ms for _, last_ms in spans):  # a crash before the leap's timestamp
            passed_ms = 0
        self.spans = [(at_ms + passed_ms - ran_ms, last_ms) for at_ms, last_ms in spans]
