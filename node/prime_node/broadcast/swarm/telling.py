"""News for all who listen, in one beat: a line is written once for everybody who has heard as much, however many they are.

Who waits for whom: `_beat` waits until there is something new, at the longest KEEP_ALIVE_S, wakes all listeners, and rests for
NEWS_EVERY_S, so that what comes meanwhile goes into one line. A listener who reads slowly misses beats, and gets what came since
his last line at once when he has read it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from prime_node.broadcast.swarm.holdings import Holdings, HoldingsChange
from prime_node.broadcast.swarm.piece_sets import runs
from prime_node.ports.clock import Clock
from prime_protocol.peers import PeerNews

log = logging.getLogger(__name__)

NEWS_EVERY_S = 0.1
"""Between two lines of news to one listener: what comes meanwhile goes into one."""
KEEP_ALIVE_S = 15.0
"""A line is sent at least so often, so that a lost link is noticed on both sides."""
LINES_MAX = 16
"""Of one beat that are kept: one for each cursor."""


@dataclass
class HoldingsBroadcast:
    """What the listeners share."""

    holdings: Holdings
    clock: Clock
    _num_listeners: int = 0
    _beats: int = 0
    _told: asyncio.Event = field(default_factory=asyncio.Event)
    """Of the next beat."""
    _beating: asyncio.Task[None] | None = None
    _lines: dict[tuple[int, int, int], bytes] = field(default_factory=dict)
    """By the cursor that was asked from, and what stands in the line: its cursor and head."""
    _is_closing: bool = False

    def close(self) -> None:
        """Whoever listens is told no more."""
        self._is_closing = True
        self._wake()

    async def lines(self) -> AsyncGenerator[bytes, None]:
        """To one listener: everything, and then what comes."""
        self._num_listeners += 1
        if self._beating is None:
            self._beating = asyncio.create_task(self._beat())
        cursor = 0
        try:
            while not self._is_closing:
                heard = self._beats
                news = self.holdings.news(cursor)
                yield self._line(cursor, news)
                cursor = news.cursor
                while self._beats == heard:
                    await self._told.wait()
        finally:
            self._num_listeners -= 1
            if not self._num_listeners:
                self._beating.cancel()
                self._beating = None

    async def _beat(self) -> None:
        news = self.holdings.news(0)
        while True:
            try:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(KEEP_ALIVE_S):
                        await self.holdings.changed(news)
                news = self.holdings.news(news.cursor)
                self._wake()
            except Exception:  # nobody waits for this task, and every listener for what it does
                log.exception("news could not be told to the peers that listen")
            await self.clock.sleep(NEWS_EVERY_S)

    def _wake(self) -> None:
        self._beats += 1
        self._lines.clear()
        self._told.set()
        self._told = asyncio.Event()

    def _line(self, cursor: int, news: HoldingsChange) -> bytes:
        name = cursor, news.cursor, news.head
        line = self._lines.get(name)
        if line is None:
            line = told(news) + b"\n"
            if len(self._lines) < LINES_MAX:
                self._lines[name] = line
        return line


def told(news: HoldingsChange) -> bytes:
    """As it goes over the wire."""
    pieces: dict[str, tuple[tuple[int, ...], ...]] = {name: tuple(runs(held)) for name, held in news.pieces.items()}
    return PeerNews(cursor=news.cursor, head=news.head, pieces=pieces).model_dump_json().encode()
