"""Live changes of the page as server-sent events: one frame per tick for all viewers, and no tick without a viewer.

A viewer first fetches the whole (`document`), which names a version, and then the frames after it. Frames replace values or add
rows with a number of their own, so that a viewer may apply one twice. One that falls behind gets `reset`, and fetches
the whole again. Versions begin with the time: they grow over restarts of the coordinator.
"""

from __future__ import annotations

import asyncio
import json
import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

from prime_node.coordinator.page.run_page import RunPage
from prime_node.ports.clock import Clock

log = logging.getLogger(__name__)

TICK_S = 1.0
FRAMES_KEPT = 64
BEAT_S = 15.0
"""Seconds after which a viewer without news gets an empty line, which finds out whether it is still there."""
VIEWERS_MAX = 512
VIEWERS_EACH_MAX = 16
"""Viewers of one network."""
EVENTS_PER_FRAME_MAX = 20
RETRY_MS = 3_000


class LiveFrames(ABC):
    """The newest frames and their viewers. `follow` brings frames while there are viewers."""

    def __init__(self, version: int) -> None:
        self._version = version
        self._frames: deque[tuple[int, bytes]] = deque(maxlen=FRAMES_KEPT)
        self._viewers: dict[str, int] = {}
        self._news = asyncio.Event()
        self._following: asyncio.Task[None] | None = None
        self._is_closed = False

    @property
    def num_viewers(self) -> int:
        """Number of viewers of the live changes."""
        return sum(self._viewers.values())

    @abstractmethod
    async def follow(self) -> None:
        """Bring frames until it is cancelled."""

    def has_room(self, network: str) -> bool:
        """Return whether one more viewer of this network may look on."""
        is_full = self.num_viewers >= VIEWERS_MAX or self._viewers.get(network, 0) >= VIEWERS_EACH_MAX
        return not (is_full or self._is_closed)

    def enter(self, network: str) -> None:
        """Count a viewer, and begin to follow."""
        self._viewers[network] = self._viewers.get(network, 0) + 1
        if self._following is None:
            self._following = asyncio.create_task(self.follow())

    def leave(self, network: str) -> None:
        """Stop counting a viewer."""
        self._viewers[network] -= 1
        if not self._viewers[network]:
            del self._viewers[network]
        if not self._viewers and self._following is not None:
            self._following.cancel()
            self._following = None

    async def frames(self, since: int) -> AsyncIterator[bytes]:
        """Yield the frames after version `since`, until the feed is closed."""
        yield f"retry: {RETRY_MS}\n\n".encode()
        while not self._is_closed:
            news = self._news
            oldest = self._frames[0][0] - 1 if self._frames else self._version
            if not oldest <= since <= self._version:  # an old version, or the viewer has read too slowly
                since = self._version
                yield b"event: reset\ndata: {}\n\n"
                continue
            new = [frame for version, frame in self._frames if version > since]
            if new:
                since = self._frames[-1][0]
                yield b"".join(new)
                continue
            try:
                async with asyncio.timeout(BEAT_S):
                    await news.wait()
            except TimeoutError:
                yield b":\n\n"

    def close(self) -> None:
        """End all streams, so that they do not delay the end of the server. Idempotent."""
        self._is_closed = True
        self._news.set()

    def add(self, version: int, frame: bytes) -> None:
        """Show a frame to all viewers."""
        self._version = version
        self._frames.append((version, frame))
        self._wake()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


class LiveFeed(LiveFrames):
    """The live changes of one run."""

    def __init__(self, page: RunPage, clock: Clock) -> None:
        super().__init__(clock.now_ms())
        self.page = page
        self.num_ticks = 0
        self._clock = clock
        self._shown: dict[str, Any] = {}
        self._step, self._event = -1, 0

    def document(self) -> dict[str, Any]:
        """Return everything that the page shows first."""
        if not self._viewers:
            self._tick()
        history = self.page.history
        return {
            "version": self._version,
            "run": self.page.facts(),
            "steps": history.columns(),
            "events": history.events(0, 200),
            "server_time": self._clock.now_ms(),
            **self._shown,
        }

    async def follow(self) -> None:
        """Tick until it is cancelled."""
        while True:
            await self._clock.sleep(TICK_S)
            try:
                self._tick()
            except Exception:  # nothing awaits this task, and every viewer depends on it
                log.exception("the run page cannot be brought up to date")

    def _tick(self) -> None:
        self.num_ticks += 1
        page, history = self.page, self.page.history
        values: dict[str, Any] = {
            "now": page.now(),
            "bans": page.bans(),
            "evaluations": list(history.evaluations),
            "contributors": page.contributors(),
        }
        change: dict[str, Any] = {name: value for name, value in values.items() if self._shown.get(name) != value}
        if "now" in change:
            before = self._shown.get("now", {})
            change["now"] = {name: value for name, value in values["now"].items() if before.get(name) != value}
        if history.last_step != self._step:
            change["steps"] = history.columns(self._step if history.last_step > self._step else -1)
        if history.number != self._event and (events := history.events(self._event, EVENTS_PER_FRAME_MAX)):
            change["events"] = events
        self._shown, self._step, self._event = values, history.last_step, history.number
        if not change:
            return
        version, body = self._version + 1, json.dumps(change, separators=(",", ":"))
        self.add(version, f"id: {version}\ndata: {body}\n\n".encode())
