"""Raw sockets to a real coordinator, for requests that no well-behaved client would send."""

from __future__ import annotations

import asyncio
import json
import secrets
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import urlsplit

from tests.node.coordinator_world import World

from prime_protocol.body_claim import CLAIM_HEADER, BodyClaim
from prime_protocol.digest import digest_of
from prime_protocol.envelope import PayloadType, parse_json, seal
from prime_protocol.errors import HTTP_STATUS
from prime_protocol.identity import SigningKey
from prime_protocol.replies import ErrorBody


@dataclass
class Answer:
    """Answer of the server, read by its Content-Length."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def code(self) -> str:
        """Return the code of an ErrorBody; fail if the answer is not one."""
        fault = parse_json(self.body, ErrorBody)
        assert HTTP_STATUS[fault.code] == self.status
        assert self.headers["content-type"].startswith("application/json")
        return fault.code


class Raw:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def to(cls, url: str) -> Self:
        found = urlsplit(url)
        assert found.hostname is not None
        return cls(*await asyncio.open_connection(found.hostname, found.port, limit=2**22))

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def answer(self) -> Answer:
        """Return the next answer. Raises IncompleteReadError or ConnectionError if the connection ends first."""
        async with asyncio.timeout(10.0):
            head = (await self._reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:-2])}
            body = await self._reader.readexactly(int(headers.get("content-length", "0")))
        return Answer(int(head[0].split(" ")[1]), headers, body)

    async def line(self) -> bytes:
        async with asyncio.timeout(10.0):
            return await self._reader.readline()

    async def is_cut(self) -> bool:
        """Wait until the server ends the connection without another byte."""
        try:
            async with asyncio.timeout(10.0):
                return await self._reader.read(1) == b""
        except ConnectionError:
            return True

    def stand_still(self) -> None:
        """Read nothing more."""
        transport = self._writer.transport
        assert isinstance(transport, asyncio.Transport)
        transport.pause_reading()

    def close(self) -> None:
        self._writer.close()
        self._writer.transport.abort()


async def ask(url: str, data: bytes) -> Answer:
    """Return one answer over a separate connection."""
    raw = await Raw.to(url)
    try:
        await raw.send(data)
        return await raw.answer()
    finally:
        raw.close()


def get(path: str, *lines: str, host: str = "127.0.0.1") -> bytes:
    return "\r\n".join([f"GET {path} HTTP/1.1", f"Host: {host}", *lines, "\r\n"]).encode()


def post(path: str, num_bytes: int, *lines: str) -> bytes:
    """Return the header alone."""
    head = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", f"Content-Length: {num_bytes}", *lines, "\r\n"]
    return "\r\n".join(head).encode()


async def claim(world: World, key: SigningKey, body: bytes, /, *, action: str = "rollouts", **changes: Any) -> str:
    """Return a header line that announces a body, with `changes`."""
    epoch = json.loads((await ask(world.url, get("/healthz"))).body)["epoch"]
    fields: dict[str, Any] = {
        "run": world.run.digest,
        "action": action,
        "nonce": secrets.token_hex(16),
        "issued_at_ms": world.parts.clock.now_ms(),
        "epoch": epoch,
        "body_digest": digest_of(body),
        "body_bytes": len(body),
    }
    sealed = seal(BodyClaim.model_validate(fields | changes), PayloadType.BODY_CLAIM, key)
    return f"{CLAIM_HEADER}: {sealed.to_bytes().decode()}"


async def barrier(url: str) -> None:
    """Return once the server has read everything sent before."""
    assert (await ask(url, get("/healthz"))).status == 200
