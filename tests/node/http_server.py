"""A real HTTP server on loopback that answers as a test requires."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

from aiohttp import web
from tests.node.worker_world import WORKER, make_run

from prime_node.adapters.system_clock import SystemClock
from prime_node.adapters.web.http_client import HttpClient
from prime_protocol.body_claim import REQUEST_HEADER
from prime_protocol.requests import HeartbeatRequest, LeaseRequest, WorkerState

RUN = make_run()
HEARTBEAT = HeartbeatRequest(state=WorkerState.IDLE, policy_version=0, bundles_spooled=0)
LEASE = LeaseRequest(policy_version=0, policy_digest="0" * 64, rollouts_max=8)
Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Server:
    """Server with one handler for all paths, set by a test."""

    def __init__(self) -> None:
        self.answer: Answer
        self.seen: list[tuple[str, str, bytes]] = []
        """Method, path, and body or the signed request in its header."""
        self.url = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read() or request.headers.get(REQUEST_HEADER, "").encode()
        self.seen.append((request.method, request.path, body))
        return await self.answer(request)

    def says(self, body: bytes | str, *, status: int = 200, headers: dict[str, str] | None = None) -> None:
        async def answer(request: web.Request) -> web.StreamResponse:
            return web.Response(body=body, status=status, headers=headers)

        self.answer = answer


@contextlib.asynccontextmanager
async def served() -> AsyncIterator[Server]:
    server = Server()
    application = web.Application(client_max_size=2**28)
    application.router.add_route("*", "/{path:.*}", server.handle)
    runner = web.AppRunner(application, shutdown_timeout=0.01)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield server
    await runner.cleanup()


@contextlib.asynccontextmanager
async def client_of(server: Server, *, stall_s: float = 30.0) -> AsyncIterator[HttpClient]:
    """Make a worker's client, which gives up an answer that stalls for so long."""
    async with HttpClient(server.url, run=RUN.digest, clock=SystemClock(), key=WORKER, stall_s=stall_s) as made:
        yield made
