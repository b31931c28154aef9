"""Attacks of siege.py on a coordinator: one attack per process, over several sockets, until it is stopped.

    python scripts/bench/siege_attacks.py ATTACK PORT BLOB MEMBER TAG

Each attack is a coroutine for one socket. It is started again, on a new socket, whenever the server ends the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import socket
import struct
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

SOCKETS = 64
CONNECTS_PER_S = 10_000
SECOND_PIECE = 65_536


@dataclass(frozen=True)
class Target:
    """Public knowledge of an attacker."""

    port: int
    blob: str
    """A public blob's digest."""
    member: str
    """A member's key id."""
    tag: str
    """The newest manifest's ETag."""


Attack = Callable[[Target, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def get(path: str, *lines: str) -> bytes:
    return "\r\n".join([f"GET {path} HTTP/1.1", "Host: 127.0.0.1", *lines, "\r\n"]).encode()


def post(path: str, num_bytes: int, *lines: str) -> bytes:
    head = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", f"Content-Length: {num_bytes}", *lines, "\r\n"]
    return "\r\n".join(head).encode()


def fill(path: str, num_bytes: int) -> Attack:
    """Send all of a body but its last bytes, then a byte every few seconds."""

    async def attack(target: Target, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(post(path, num_bytes))
        for _ in range(0, num_bytes - SECOND_PIECE, SECOND_PIECE):
            writer.write(bytes(SECOND_PIECE))
            await writer.drain()
        while not reader.at_eof():
            writer.write(b"x")
            await asyncio.sleep(3.0)

    return attack


async def chunks(target: Target, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"POST /v1/join HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
    while True:
        writer.write(b"1\r\nx\r\n" * 10_000)
        await writer.drain()


async def single_bytes(target: Target, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    for byte in post("/v1/join", 100_000) + bytes(100_000):
        writer.write(bytes([byte]))
        await asyncio.sleep(0)


async def slow_headers(target: Target, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"GET /v1/status HTTP/1.1\r\nHost: 127.0.0.1\r\n")
    while not reader.at_eof():
        writer.write(b"X: 1\r\n")
        await asyncio.sleep(0.5)


async def slow_readers(target: Target, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    transport = writer.transport
    assert isinstance(transport, asyncio.Transport)
    transport.pause_reading()
    while True:
        writer.write(get("/metrics") * 100)
        await writer.drain()


async def garbage(target: Target, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(random.choice((os.urandom(4_096), b"GET " + os.urandom(4_096), b"\r\n" * 2_048)))
    await reader.read()


def flood(*requests: bytes, depth: int) -> Attack:
    """Return an attack that keeps `depth` requests in flight and reads every answer."""

    async def attack(target: Target, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = b"".join(requests).replace(b"BLOB", target.blob.encode()).replace(b"TAG", target.tag.encode())
        reading = asyncio.ensure_future(_read_all(reader))
        try:
            while not reading.done():
                writer.write(asked * depth)
                await writer.drain()
        finally:
            reading.cancel()

    return attack


async def _read_all(reader: asyncio.StreamReader) -> None:
    while await reader.read(2**20):
        pass


async def forged(target: Target, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A member's name under a signature that is none: the dearest check that a stranger can ask for."""
    envelope = (
        '{"payload":"e30=","payloadType":"application/vnd.prime.request+json","signatures":'
        f'[{{"keyid":"{target.member}","sig":"{"A" * 86}=="}}]}}'
    )
    reading = asyncio.ensure_future(_read_all(reader))
    try:
        while not reading.done():
            writer.write(post("/v1/heartbeat", 0, f"Prime-Request: {envelope}"))
            await writer.drain()
    finally:
        reading.cancel()


ATTACKS: dict[str, Attack] = {
    "fill of requests": fill("/v1/join", 131_072),
    "fill of verdicts": fill("/v1/check_result", 524_288),
    "fill of uploads": fill("/v1/rollouts", 2**26),
    "fill of blobs": fill("/v1/blobs", 2**26),
    "fill of manifests": fill("/v1/manifests", 2**22),
    "one-byte chunks": chunks,
    "single bytes": single_bytes,
    "slow headers": slow_headers,
    "slow readers": slow_readers,
    "garbage": garbage,
    "pipelines": flood(get("/healthz"), depth=100),
    "ranges": flood(get("/v1/blobs/BLOB", "Range: bytes=0-0"), depth=1),
    "status": flood(get("/v1/status"), depth=1),
    "held polls": flood(get("/v1/head", "If-None-Match: TAG", "Prefer: wait=30"), depth=1),
    "forged signatures": forged,
}
CONNECTS = "10,000 connects a second"
NAMES = (*ATTACKS, CONNECTS)


def main() -> None:
    """Attack until the process is stopped. A line on stdout marks the start."""
    if len(sys.argv) != 6 or sys.argv[1] not in NAMES:
        sys.exit(__doc__)
    name, port, blob, member, tag = sys.argv[1:]
    target = Target(int(port), blob, member, tag)
    logging.getLogger("asyncio").setLevel(
        logging.ERROR
    )  # it warns at each write to a connection that the server has cut
    print("begins", flush=True)
    if name == CONNECTS:
        _connect_all(target)
    asyncio.run(_attack_all(ATTACKS[name], target))


async def _attack_all(attack: Attack, target: Target) -> None:
    async def again() -> None:
        while True:
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", target.port)
            except OSError:
                await asyncio.sleep(0.05)
                continue
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                await attack(target, reader, writer)
            writer.transport.abort()
            await asyncio.sleep(0.001)

    await asyncio.gather(*(again() for _ in range(SOCKETS)))


def _connect_all(target: Target) -> None:
    """Open and reset, as fast as one process can, at most CONNECTS_PER_S."""
    began, count = time.monotonic(), 0
    while True:
        made = socket.socket()
        with contextlib.suppress(OSError):
            made.setblocking(False)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            made.connect_ex(("127.0.0.1", target.port))
        made.close()
        count += 1
        ahead_s = count / CONNECTS_PER_S - (time.monotonic() - began)
        if ahead_s > 0.01:
            time.sleep(ahead_s)


if __name__ == "__main__":
    main()
