"""A line to a server that can fall silent: what is sent then arrives when it is heard again, and no connection ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from tests.raw_server_world import raw_server


class SilentLine:
    """A TCP forwarder on loopback."""

    def __init__(self, port: int) -> None:
        """Forward to this port."""
        self._to, self.port = port, 0
        self._is_heard = asyncio.Event()
        self._is_heard.set()
        self._tasks: set[asyncio.Task[None]] = set()

    def fall_silent(self) -> None:
        """Forward nothing, and keep all connections."""
        self._is_heard.clear()

    def be_heard(self) -> None:
        """Forward what waits, and what follows."""
        self._is_heard.set()

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward one connection until either side ends it."""
        with contextlib.suppress(OSError):
            await self._is_heard.wait()
            there, back = await asyncio.open_connection("127.0.0.1", self._to)
            async with asyncio.TaskGroup() as both:
                both.create_task(self._pass_on(reader, back))
                both.create_task(self._pass_on(there, writer))

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(2**16):
                await self._is_heard.wait()
                writer.write(data)
                await writer.drain()
        except OSError:
            return
        finally:
            await self._is_heard.wait()
            writer.close()


@contextlib.asynccontextmanager
async def silent_line(port: int) -> AsyncIterator[SilentLine]:
    """Forward connections to a port of loopback."""
    line = SilentLine(port)
    async with raw_server(line.carry) as line.port:
        try:
            yield line
        finally:
            line.be_heard()
