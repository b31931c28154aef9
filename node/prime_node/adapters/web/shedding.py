"""Refuse requests while the event loop is behind, the least important ones first.

A loop that gets more than it can answer makes all wait, and what needs several turns, such as an upload, waits several times. So
the loop's lateness is measured, and a pressure follows it: it rises while timers are later than the bound, and falls slowly
while they are not. Each kind of request (`Importance`) has its range of pressures, within which the refused share of it rises. A
refused request costs a tenth of an answered one.

Lateness counts as far as this thread computed meanwhile: other load of the machine is not counted.
"""

from __future__ import annotations

import asyncio
import logging
import statistics
import time
from collections import deque
from collections.abc import Sequence

from prime_node.adapters.web.request_head import Head
from prime_node.ports.web import CallerBounds, Importance, Route, Sender
from prime_protocol.errors import ErrorCode, RemoteError

log = logging.getLogger(__name__)

SAMPLE_S = 0.05
"""Seconds between two measurements."""
RISE, FALL = 0.4, 0.03
"""Change of the pressure by one measurement: for each bound that the lateness is beyond the first, and while it is below."""
NEAR, SLOWER = 0.15, 8.0
"""Distance from the pressure at which the loop last fell behind, within which it falls slower, by this factor."""
BEYOND_MAX = 3.0
"""Bounds beyond the first that count at most."""
BEGINS = {
    Importance.STRANGERS: 0.0,
    Importance.HEARTBEATS: 1.0,
    Importance.NEW_WORK: 4.0,
    Importance.FINISHED_WORK: 5.0,
}
"""Pressure from which requests of a kind are refused. At one more, all are refused but every LET_THROUGH-th.

Between heartbeats and work, the refused heartbeats have some time to take effect.
"""
PRESSURE_MAX = 6.0
SLACK, SLACK_SLOWER = 2.0, 6.0
"""Pressure from which on, up to that of the next kind, all heartbeats are refused. Within, it rises slower, by this factor.

It returns to the beginning as soon as the loop has caught up.
"""
LET_THROUGH = 16
"""One of so many requests is answered at any pressure, so each caller is answered in the end."""
RETRY_S = {
    Importance.STRANGERS: 5.0,
    Importance.HEARTBEATS: 5.0,
    Importance.NEW_WORK: 2.0,
    Importance.FINISHED_WORK: 1.0,
}
PAGE_FILES_PER_S, PAGE_FILES_BURST = 50.0, 100.0
"""Requests for a page's files that are answered at any pressure. A page needs a dozen, and shows nothing if one of them fails."""
SAY_AGAIN_S = 60.0
"""Seconds between two warnings."""
_SAID = {
    Importance.STRANGERS: "requests of strangers",
    Importance.HEARTBEATS: "heartbeats too",
    Importance.NEW_WORK: "requests for work too",
    Importance.FINISHED_WORK: "uploads too",
}


class Shedding:
    """The overload of one server."""

    def __init__(self, routes: Sequence[Route], bounds: CallerBounds) -> None:
        self.pressure = 0.0
        self._importance_of = {route.path: route.importance for route in routes}
        self._page_paths = {route.path.partition("{")[0] for route in routes if route.is_page_file}
        self._page_files, self._page_files_at_s = PAGE_FILES_BURST, 0.0
        self._lag_s_max, self._refused, self._claimed = bounds.lag_s_max, bounds.refused, bounds.claimed
        self._lags_s = deque([0.0, 0.0, 0.0], maxlen=3)
        self._fell_behind_at = 0.0
        self._is_behind = False
        self._owed = dict.fromkeys(BEGINS, 0.0)
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = self._spent_s = 0.0
        self._said_s = -SAY_AGAIN_S

    def start(self) -> None:
        """Measure the running loop."""
        loop = asyncio.get_running_loop()
        self._spent_s, self._due_s = time.thread_time(), loop.time() + SAMPLE_S
        self._timer = loop.call_at(self._due_s, self._measure, loop)

    def stop(self) -> None:
        """Measure no more. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()

    def note(self, lag_s: float) -> None:
        """Record one measurement of the lateness. One long pause is no overload: the median of three in a row counts."""
        self._lags_s.append(lag_s)
        beyond = min(statistics.median(self._lags_s) / self._lag_s_max - 1.0, BEYOND_MAX)
        is_slack = SLACK <= self.pressure < BEGINS[Importance.NEW_WORK]
        if beyond > 0.0:
            if not self._is_behind:
                self._is_behind, self._fell_behind_at = True, self.pressure
            self.pressure = min(self.pressure + RISE * beyond / (SLACK_SLOWER if is_slack else 1.0), PRESSURE_MAX)
            return
        self._is_behind = False
        if is_slack:
            self.pressure = SLACK
        is_near = abs(self.pressure - self._fell_behind_at) <= NEAR
        self.pressure = max(self.pressure - FALL / (SLOWER if is_near else 1.0), 0.0)

    def refusal(self, head: Head, sender: Sender | None) -> RemoteError | None:
        """Return the error for a request that is refused now; None for one that is answered.

        `sender` is the verified sender of the connection's last request. Without one, the key that the request names counts: a
        stranger that names a member's gets no further than its own share of the processor's time.
        """
        return self.refusal_of(head.path, sender or self._claimed(head.signed)) if self.pressure else None

    def refusal_of(self, path: str, sender: Sender | None) -> RemoteError | None:
        """Return what `refusal` returns, for a known sender or a stranger (None)."""
        importance = self._importance_of.get(path, Importance.NEW_WORK)
        if importance is Importance.ALWAYS or (sender is not None and sender.is_role):
            return None
        folder = path[: path.rfind("/", 1) + 1]
        if (folder or path) in self._page_paths and self._has_room_for_page_file():
            return None
        if sender is None:
            importance = Importance.STRANGERS
        share = min(max(self.pressure - BEGINS[importance], 0.0), 1.0 - 1.0 / LET_THROUGH)
        self._owed[importance] += share
        if self._owed[importance] < 1.0:
            return None
        self._owed[importance] -= 1.0
        self._refused(importance, 1)
        self._say(importance)
        return RemoteError(
            ErrorCode.UNAVAILABLE, "more requests than this server can answer", retry_after_s=RETRY_S[importance]
        )

    def _has_room_for_page_file(self) -> bool:
        now_s = time.monotonic()
        earned = PAGE_FILES_PER_S * (now_s - self._page_files_at_s)
        self._page_files, self._page_files_at_s = min(PAGE_FILES_BURST, self._page_files + earned), now_s
        if self._page_files < 1.0:
            return False
        self._page_files -= 1.0
        return True

    def _measure(self, loop: asyncio.AbstractEventLoop) -> None:
        now_s, spent_s = loop.time(), time.thread_time()
        self.note(min(now_s - self._due_s, spent_s - self._spent_s))
        self._spent_s, self._due_s = spent_s, now_s + SAMPLE_S
        self._timer = loop.call_at(self._due_s, self._measure, loop)

    def _say(self, importance: Importance) -> None:
        now_s = time.monotonic()
        if importance > Importance.STRANGERS and now_s - self._said_s >= SAY_AGAIN_S:
            self._said_s = now_s
            log.warning(
                "overloaded: more requests than one processor core answers; refusing %s, with Retry-After",
                _SAID[importance],
            )
