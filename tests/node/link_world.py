"""Links between gateways and a writer whose answers a test gives, and a gateway whose frames a test writes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from tests.node.gateway_world import SECRET

from prime_node.adapters.link.link_client import LinkClient
from prime_node.adapters.link.link_server import LinkServer
from prime_node.adapters.link.sealed_frames import (
    MAGIC,
    NONCE_BYTES,
    PROOF_BYTES,
    FrameKind,
    FrameOpener,
    FrameSealer,
    LinkFrame,
    proof,
)
from prime_node.ports.web import Response
from prime_node.ports.writer_link import AnswerCall, ForwardedAnswer, ForwardedCall

RUN = "a" * 64
BODY_BYTES_MAX = 2**26
"""Longest body of the run whose gateways are heard."""


class RawGateway:
    """A gateway whose frames a test writes itself."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, nonces: bytes) -> None:
        self._reader, self._writer = reader, writer
        self.sealer = FrameSealer(proof(SECRET, "from the gateway", nonces, RUN))
        self._opener = FrameOpener(proof(SECRET, "from the writer", nonces, RUN))

    def send(self, data: bytes) -> None:
        """Send bytes of frames."""
        self._writer.write(data)

    async def frames(self) -> AsyncIterator[LinkFrame]:
        """Yield what the writer sends, until it ends the link."""
        while data := await self._reader.read(2**18):
            for frame in list(self._opener.feed(data)):  # a reader may leave in the middle
                yield frame

    async def close(self) -> None:
        """End the link."""
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()


@contextlib.asynccontextmanager
async def answering(
    answer: AnswerCall,
    *,
    may_send: Callable[[], bool] | None = None,
    body_bytes_max: int = BODY_BYTES_MAX,
    server: LinkServer | None = None,
) -> AsyncIterator[int]:
    """Hear gateways with a function that answers their calls, and yield the port."""
    server = server or LinkServer()
    port = await server.start(
        answer,
        address=("127.0.0.1", 0),
        secret=SECRET,
        run=RUN,
        body_bytes_max=body_bytes_max,
        may_send=may_send,
    )
    try:
        yield port
    finally:
        await server.stop()


@contextlib.asynccontextmanager
async def raw_gateway(port: int) -> AsyncIterator[RawGateway]:
    """Open a link by hand."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    mine = bytes(NONCE_BYTES)
    nonces = (await reader.readexactly(len(MAGIC) + NONCE_BYTES))[len(MAGIC) :] + mine
    writer.write(mine + proof(SECRET, "gateway", nonces, RUN))
    await reader.readexactly(PROOF_BYTES)
    gateway = RawGateway(reader, writer, nonces)
    try:
        yield gateway
    finally:
        await gateway.close()


@contextlib.asynccontextmanager
async def linked(port: int, run: str = RUN) -> AsyncIterator[LinkClient]:
    """Keep a link of a gateway."""
    link = LinkClient((("127.0.0.1", port),), secret=SECRET, run=run)
    keeping = asyncio.ensure_future(link.keep())
    try:
        await link.linked.wait()
        yield link
    finally:
        keeping.cancel()
        await asyncio.wait({keeping})


async def no_answer(call: ForwardedCall) -> ForwardedAnswer:
    return ForwardedAnswer(Response())


def call(number: int, num_bytes: int = 0, **head: Any) -> LinkFrame:
    """Return the frame of a call with so many bytes."""
    return LinkFrame(FrameKind.CALL, number, {"path": "/v1/status", **head}, bytes(num_bytes))
