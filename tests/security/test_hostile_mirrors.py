"""Mirrors that lie, truncate, never end, or never move on: over real sockets, with and without the honest coordinator."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from tests.node.coordinator_world import ANNA
from tests.node.swarm_world import Swarm, swarm
from tests.raw_server_world import raw_server
from tests.time_world import until

from prime_node.adapters.system_clock import SystemClock
from prime_node.adapters.web.http_client import HttpClient
from prime_node.broadcast.follow.trust import Trust
from prime_protocol.weights import root_of

Answer = Callable[[str, asyncio.StreamWriter], Awaitable[None]]
"""Handler: (path, writer of the answer)."""


class Mirror:
    """A raw HTTP server with an attacker's answers."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.asked: list[str] = []

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while head := await reader.readuntil(b"\r\n\r\n"):
                path = head.split(b" ")[1].decode()
                self.asked.append(path)
                await self.answer(path, writer)

        async with raw_server(serve) as port:
            yield f"http://127.0.0.1:{port}"


async def reply(writer: asyncio.StreamWriter, body: bytes, status: int = 200, length: int | None = None) -> None:
    writer.write(
        f"HTTP/1.1 {status} X\r\nContent-Length: {len(body) if length is None else length}\r\n\r\n".encode() + body
    )
    await writer.drain()


def copy_of(made: Swarm) -> Answer:
    """A mirror that repeats the coordinator's first answers without end: an old copy."""
    kept: dict[str, tuple[int, bytes]] = {}

    async def answer(path: str, writer: asyncio.StreamWriter) -> None:
        if path not in kept:
            status, body, _ = await made.world.get(path)
            kept[path] = (status, body)
        status, body = kept[path]
        await reply(writer, body, status)

    return answer


async def wrong_bytes(path: str, writer: asyncio.StreamWriter) -> None:
    await reply(writer, b"\xff" * 70_000 if "/blobs/" in path else b'{"payload": "bm9uZQ=="}')


async def truncated(path: str, writer: asyncio.StreamWriter) -> None:
    await reply(writer, b"x" * 100, length=2**20)
    writer.close()


async def endless(path: str, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    for _ in range(4_096):  # a quarter of a gigabyte, if the client does not hang up
        writer.write(b"10000\r\n" + b"x" * 65_536 + b"\r\n")
        await writer.drain()
    writer.close()


async def endless_headers(path: str, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n")
    for number in range(200_000):
        writer.write(b"X-%d: %b\r\n" % (number, b"y" * 1_000))
        await writer.drain()
    writer.close()


async def elsewhere(path: str, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 302 X\r\nLocation: http://169.254.169.254/latest\r\nContent-Length: 0\r\n\r\n")
    await writer.drain()


async def deep(path: str, writer: asyncio.StreamWriter) -> None:
    await reply(writer, b"[" * 100_000)


async def silent(path: str, writer: asyncio.StreamWriter) -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    "answer", [wrong_bytes, truncated, endless, endless_headers, elsewhere, deep, silent], ids=lambda one: one.__name__
)
async def test_a_mirror_that_lies_costs_time_and_nothing_else(
    tmp_path: Path, answer: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    defaults = HttpClient.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "stall_s", 3.0)  # it is 30 s
    mirror = Mirror(answer)
    async with swarm(tmp_path) as made, mirror.serving() as url:
        follower, _ = await made.worker(ANNA, mirrors=(url,))
        for version in (0, 1):
            published = await made.publish(delta=version == 1)
            async with asyncio.timeout(30):
                policy = await follower.wait_newer(version - 1)
            assert root_of(policy.weights) == published.manifest.state_root
        assert mirror.asked, "it was asked, and its answers were looked at"


class Later(SystemClock):
    """The clock of a machine that runs for hours while the mirror shows the same old state."""

    ahead_ms = 0

    def now_ms(self) -> int:
        return super().now_ms() + self.ahead_ms


async def test_a_mirror_that_always_serves_old_heads_is_noticed_when_the_timestamp_expires(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with swarm(tmp_path) as made:
        await made.publish()
        mirror = Mirror(copy_of(made))
        async with mirror.serving() as url:
            run, clock = made.world.run, Later()
            async with HttpClient(url, run=run.digest, clock=clock, bounds=run.spec.limits) as client:
                trust = Trust(run, [(url, client)], tmp_path / "trust", clock=clock)
                await trust.refresh()
                assert trust.fault() == "", "an honest copy, as long as it is fresh"
                assert trust.newest is not None
                await made.publish(delta=True)  # which the mirror does not show
                await trust.refresh()
                assert trust.newest.policy_version == 0
                clock.ahead_ms = trust.newest.expires_at_ms - trust.newest.issued_at_ms + 121_000
                await trust.refresh()
                assert "has expired, and there is no newer one" in trust.fault()
                assert "has expired, and there is no newer one; waiting" in caplog.text


async def test_a_mirror_with_old_heads_delays_no_follower_with_another_source(tmp_path: Path) -> None:
    async with swarm(tmp_path) as made:
        await made.publish()
        mirror = Mirror(copy_of(made))
        async with mirror.serving() as url:
            follower, _ = await made.worker(ANNA, mirrors=(url,))
            await until(lambda: follower.heads.newest == 0)
            await until(lambda: "/v1/head" in mirror.asked)
            published = await made.publish(delta=True)
            async with asyncio.timeout(20):
                policy = await follower.wait_newer(0)
            assert root_of(policy.weights) == published.manifest.state_root


async def test_linked_peers_show_a_fresher_timestamp_than_a_frozen_mirror(tmp_path: Path) -> None:
    """The freeze ends once a peer is linked that has a newer policy."""
    async with swarm(tmp_path) as made:
        await made.publish()
        mirror = Mirror(copy_of(made))
        async with mirror.serving() as url:
            run, clock = made.world.run, SystemClock()
            async with (
                HttpClient(url, run=run.digest, clock=clock, bounds=run.spec.limits) as frozen,
                HttpClient(made.world.url, run=run.digest, clock=clock, bounds=run.spec.limits) as peer,
            ):
                linked: list[tuple[str, HttpClient]] = []
                trust = Trust(run, [(url, frozen)], tmp_path / "trust", clock=clock, peers=lambda: linked)
                await trust.refresh()
                await made.publish(delta=True)
                await trust.refresh()
                assert trust.newest is not None
                assert trust.newest.policy_version == 0
                linked.append(("a peer", peer))

                async def is_seen() -> bool:
                    await trust.refresh()
                    return trust.newest is not None and trust.newest.policy_version == 1

                await made.world.until(is_seen)
