"""A server of raw TCP connections. When a test ends, no connection, task or socket of it is left."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[object]]


@contextlib.asynccontextmanager
async def raw_server(serve: Serve, *, tls: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """Serve each connection of a port of loopback with `serve`, close it afterwards, and yield the port.

    A client may leave at any moment. Any other error of `serve` is raised at the end.
    """
    writers: dict[asyncio.Task[object], asyncio.StreamWriter] = {}

    async def serve_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        writers[task] = writer
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                await serve(reader, writer)
        finally:
            writer.close()

    server = await asyncio.start_server(serve_one, "127.0.0.1", 0, ssl=tls)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task, writer in writers.items():
            task.cancel()
            writer.transport.abort()
        ends = await asyncio.gather(*writers, return_exceptions=True)
        await asyncio.sleep(0)  # transports close in the next turn of the loop
        for end in ends:
            if isinstance(end, BaseException) and not isinstance(end, asyncio.CancelledError):
                raise end
