"""Two coordinators of one run that can be killed and stopped."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections.abc import Awaitable, Sequence
from pathlib import Path

import aiohttp
from tests.node.coordinator_process import Daemon, start
from tests.node.coordinator_world import ANNA, HEARTBEAT, World
from tests.time_world import be_slow

from prime_lab.free_ports import free_ports
from prime_lab.postgres_server import PASSWORD, PostgresServer
from prime_lab.s3_server import S3Server
from prime_protocol.body_claim import REQUEST_HEADER

LEADER_S_MAX = 60.0
"""Timeout in seconds until one of two coordinators leads: some terms, and the start of a process on a busy machine."""


class Pair:
    """Two coordinators of one run, and the settings with which each is started again."""

    def __init__(
        self,
        folder: Path,
        settings: dict[str, str],
        environment: dict[str, str],
        *,
        link_ports: Sequence[int] = (),
        stores: Sequence[str] = (),
        clocks_ahead_s: Sequence[float] = (0.0, 0.0),
    ) -> None:
        """`link_ports`: where each hears gateways, if it does. `stores`: where each reaches the store, if not at one place."""
        self.folder, self.settings, self.environment = folder, settings, environment
        self.link_ports, self.stores, self.clocks_ahead_s = link_ports, stores, clocks_ahead_s
        self.daemons: list[Daemon] = []
        self.ports: list[int] = []

    async def start(self, place: int, port: int = 0) -> None:
        settings = dict(self.settings)
        if self.link_ports:
            settings["gateways_listen"] = f"127.0.0.1:{self.link_ports[place]}"
        if self.stores:
            settings["store"] = self.stores[place]
        daemon, port = await start(
            self.folder / str(place),
            port,
            clock_ahead_s=self.clocks_ahead_s[place],
            settings=settings,
            environment=self.environment,
        )
        self.daemons[place:], self.ports[place:] = (
            [daemon, *self.daemons[place + 1 :]],
            [port, *self.ports[place + 1 :]],
        )

    @property
    def urls(self) -> list[str]:
        return [f"http://127.0.0.1:{port}" for port in self.ports]

    async def leader(self, session: aiohttp.ClientSession) -> int:
        """Return the place of the coordinator that leads, as soon as one does.

        On a busy machine one may have lost its term and ended: it is started again, as a service does.
        """
        async with asyncio.timeout(LEADER_S_MAX):
            while True:
                for place, daemon in enumerate(self.daemons):
                    if not daemon.is_alive:
                        await self.start(place, self.ports[place])
                for place in range(len(self.daemons)):
                    if await self.is_ready(session, place):
                        return place
                await be_slow(0.02)

    async def is_ready(self, session: aiohttp.ClientSession, place: int) -> bool:
        """Return whether a coordinator answers as the one that leads."""
        try:
            async with session.get(f"{self.urls[place]}/readyz", timeout=aiohttp.ClientTimeout(1.0)) as answer:
                return answer.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def kill(self) -> None:
        """Kill both, also those that are stopped."""
        for daemon in self.daemons:
            with contextlib.suppress(ProcessLookupError):
                daemon.send(signal.SIGKILL)
            await daemon.wait()


def pair_for_gateways(folder: Path, blobs: str, postgres: PostgresServer, s3: S3Server) -> Pair:
    """Return two coordinators of one database and one bucket that hear gateways. They start in the test."""
    settings = {"store": postgres.make_database(), "blobs": blobs, "standby": "true", "term_seconds": "1.0"}
    return Pair(folder, settings, {"PGPASSWORD": PASSWORD, **s3.environment}, link_ports=free_ports(2))


async def unanswered(port: int, requests: list[bytes]) -> list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Send requests to a stopped process; return the connections."""
    made = []
    for request in requests:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request)
        await writer.drain()
        made.append((reader, writer))
    return made


async def answers_of_stopped(pair: Pair, world: World, work: Awaitable[None], *, stop_s: float) -> list[bytes]:
    """Stop the leader for a time while requests wait in its buffers, and return what it answers when it continues.

    `work` needs the other coordinator to lead. Returns when the former leader has ended by itself.
    """
    stopped = await pair.leader(world.session)
    async with world.session.get(pair.urls[stopped] + "/healthz") as answer:
        world.epoch = json.loads(await answer.read())["epoch"]
    signed = world.signed(HEARTBEAT, ANNA).decode()
    lines = [(f"GET {path}", "") for path in ("/healthz", "/v1/head", "/v1/timestamp", "/nowhere")]
    lines.append(("POST /v1/heartbeat", f"{REQUEST_HEADER}: {signed}\r\nContent-Length: 0\r\n"))
    requests = [f"{line} HTTP/1.1\r\nHost: 127.0.0.1\r\n{header}\r\n".encode() for line, header in lines]
    loop = asyncio.get_running_loop()
    pair.daemons[stopped].send(signal.SIGSTOP)
    begun_s, waiting = loop.time(), await unanswered(pair.ports[stopped], requests)
    await work
    await asyncio.sleep(max(0.0, begun_s + stop_s - loop.time()))
    pair.daemons[stopped].send(signal.SIGCONT)
    answers = []
    for reader, writer in waiting:
        answer_of_it = b""
        with contextlib.suppress(ConnectionError):
            answer_of_it = await reader.read()
        answers.append(answer_of_it)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
    await pair.daemons[stopped].wait()
    return answers


class Place:
    """Leadership (ports.leadership.Leadership) that no other coordinator ends, with gaps between its terms."""

    is_leading = lasts = True

    def may_answer(self) -> bool:
        return self.lasts

    async def catch_up(self) -> None: ...

    async def led(self) -> None: ...

    async def lost(self) -> None:
        await asyncio.Event().wait()
