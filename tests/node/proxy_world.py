"""A forward proxy on loopback, as those of companies: it takes whole URLs and CONNECT, and leads every name to one port."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

from tests.raw_server_world import raw_server


class ForwardProxy:
    """A proxy. Every connection through it leads to `port` of this machine, or where its own resolver says."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.asked: list[str] = []
        """First lines of the requests."""
        self.refusal = b""
        """Answer to all further requests; empty: they are passed on."""
        self.url = ""
        self.ports: dict[str, int] = {}
        """Port of this machine for each host that the proxy's own resolver leads elsewhere."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        head = await reader.readuntil(b"\r\n\r\n")
        line, _, rest = head.partition(b"\r\n")
        self.asked.append(line.decode())
        method, url, version = line.split(b" ")
        if self.refusal:
            writer.write(self.refusal)
            return
        host = urlsplit(f"//{url.decode()}" if method == b"CONNECT" else url.decode()).hostname or ""
        there, to = await asyncio.open_connection("127.0.0.1", self.ports.get(host, self.port))
        if method == b"CONNECT":
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        else:
            to.write(b" ".join((method, urlsplit(url).path or b"/", version)) + b"\r\n" + rest)
        await asyncio.gather(_pass(reader, to), _pass(there, writer))


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(2**16):
                writer.write(data)
    finally:
        writer.close()


@contextlib.asynccontextmanager
async def forward_proxy(port: int) -> AsyncIterator[ForwardProxy]:
    """Run a proxy."""
    proxy = ForwardProxy(port)
    async with raw_server(proxy.serve) as own_port:
        proxy.url = f"http://127.0.0.1:{own_port}"
        yield proxy
