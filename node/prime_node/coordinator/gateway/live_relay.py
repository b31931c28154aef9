"""The live changes of the page at a gateway: one stream from the writer for all of its viewers, and none without a viewer."""

from __future__ import annotations

import logging
import re

from prime_node.coordinator.page.live_feed import LiveFrames
from prime_node.ports.clock import Clock
from prime_node.ports.writer_link import ForwardedCall, WriterLink
from prime_protocol.errors import RemoteError

log = logging.getLogger(__name__)

LIVE_PATH = "/v1/live"
RETRY_S = 1.0
"""Pause before the next stream, when one has ended or was refused."""
END = b"\n\n"
_VERSION = re.compile(rb"id: ([0-9]{1,15})\n")


class LiveRelay(LiveFrames):
    """Frames of the writer, for the viewers of one gateway."""

    def __init__(self, link: WriterLink, clock: Clock) -> None:
        super().__init__(0)
        self._link, self._clock = link, clock

    def begin_at(self, version: int) -> None:
        """Begin with the version of the first viewer; the stream of the writer is asked for what comes after it."""
        if not self.num_viewers:
            self._frames.clear()
            self._version = version

    async def follow(self) -> None:
        """Read the writer's stream, and begin another when it ends, until it is cancelled."""
        while True:
            try:
                await self._read_one()
            except RemoteError as error:
                log.debug("the stream of live changes: %s", error)
            await self._clock.sleep(RETRY_S)

    async def _read_one(self) -> None:
        call = ForwardedCall(LIVE_PATH, address="gateway", query={"since": str(self._version)})
        response = (await self._link.ask(call)).response
        held = b""
        try:
            if isinstance(response.body, bytes):
                return
            async for piece in response.body:
                *events, held = (held + piece).split(END)
                for event in events:
                    self._take(event + END)
        finally:
            if response.after is not None:
                response.after()

    def _take(self, event: bytes) -> None:
        if found := _VERSION.match(event):
            self.add(int(found[1]), event)
        elif event.startswith(b"event: reset"):  # the writer has restarted, or this gateway was too slow
            self._frames.clear()
            self._version = 0
            self._wake()
