"""Broadcast of changes in the have-set to all listeners, on a shared beat.

A line is serialised once for all listeners with the same cursor, however many they are.

Waiting: `_beat` waits for a change, at most KEEP_ALIVE_S, wakes all listeners, and rests for UPDATES_EVERY_S, so that changes
meanwhile share one line. A slow listener misses beats; when it has read its last line, it gets everything since that line at
once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from prime_node.broadcast.swarm.have_set import HaveChange, HaveSet
from prime_node.broadcast.swarm.piece_sets import runs
from prime_node.ports.clock import Clock
from prime_protocol.peers import PeerUpdate

log = logging.getLogger(__name__)

UPDATES_EVERY_S = 0.1
"""Seconds between two lines to one listener; changes in between share one line."""
KEEP_ALIVE_S = 15.0
"""Longest time between two lines, in seconds, so that both sides notice a lost link."""
LINES_MAX = 16
"""Lines cached for one beat: one for each cursor."""


@dataclass
class HaveBroadcast:
    """The state that all listeners share."""

    have_set: HaveSet
    clock: Clock
    _num_listeners: int = 0
    _beats: int = 0
    _told: asyncio.Event = field(default_factory=asyncio.Event)
    """Event of the next beat."""
    _beating: asyncio.Task[None] | None = None
    _lines: dict[tuple[int, int, int], bytes] = field(default_factory=dict)
    """Lines by the cursor asked from, and the line's own cursor and head."""
    _is_closing: bool = False

    def close(self) -> None:
        """End all listeners' streams."""
        self._is_closing = True
        self._wake()

    async def lines(self) -> AsyncGenerator[bytes, None]:
        """Yield lines to one listener: everything first, then changes."""
        self._num_listeners += 1
        if self._beating is None:
            self._beating = asyncio.create_task(self._beat())
        cursor = 0
        try:
            while not self._is_closing:
                heard = self._beats
                updates = self.have_set.updates(cursor)
                yield self._line(cursor, updates)
                cursor = updates.cursor
                while self._beats == heard:
                    await self._told.wait()
        finally:
            self._num_listeners -= 1
            if not self._num_listeners:
                self._beating.cancel()
                self._beating = None

    async def _beat(self) -> None:
        updates = self.have_set.updates(0)
        while True:
            try:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(KEEP_ALIVE_S):
                        await self.have_set.changed(updates)
                updates = self.have_set.updates(updates.cursor)
                self._wake()
            except Exception:  # nothing awaits this task, and every listener depends on it
                log.exception("the have-set could not be sent to the peers that listen")
            await self.clock.sleep(UPDATES_EVERY_S)

    def _wake(self) -> None:
        self._beats += 1
        self._lines.clear()
        self._told.set()
        self._told = asyncio.Event()

    def _line(self, cursor: int, updates: HaveChange) -> bytes:
        name = cursor, updates.cursor, updates.head
        line = self._lines.get(name)
        if line is None:
            line = encode_update(updates) + b"\n"
            if len(self._lines) < LINES_MAX:
                self._lines[name] = line
        return line


def encode_update(updates: HaveChange) -> bytes:
    """Serialise a change as one line of the protocol."""
    pieces: dict[str, tuple[tuple[int, ...], ...]] = {name: tuple(runs(held)) for name, held in updates.pieces.items()}
    return PeerUpdate(cursor=updates.cursor, head=updates.head, pieces=pieces).model_dump_json().encode()
