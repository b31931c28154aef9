"""A coordinator that hears gateways, and gateways in front of it: in this process, or in one of their own that tests can kill.

python -m tests.node.gateway_world WRITER_PORT
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

from tests.node.coordinator_process import REPOSITORY, START_S_MAX, crash_run
from tests.node.coordinator_world import World, make_run, memory_parts, running

from prime_node.adapters.link.link_client import LinkClient
from prime_node.adapters.link.link_server import LinkServer
from prime_node.adapters.system_clock import SystemClock
from prime_node.adapters.web.aiohttp_server import AiohttpServer
from prime_node.coordinator.assembly import Parts
from prime_node.coordinator.config import CoordinatorConfig
from prime_node.coordinator.gateway.config import GatewayConfig
from prime_node.coordinator.gateway.daemon import GatewayParts, serve_gateway
from prime_node.ports.blobs import Blobs
from prime_protocol.run_spec import PinnedRun

SECRET = bytes(range(32))
LISTENS = {"gateways_listen": "127.0.0.1:0"}


def hearing(parts: Parts) -> tuple[Parts, LinkServer]:
    """Return the parts of a coordinator that hears gateways. Its settings are LISTENS."""
    server = LinkServer()
    return replace(parts, gateways=server, gateway_secret=SECRET), server


def gateway_parts(
    run: PinnedRun,
    writer_ports: Sequence[int],
    *,
    secret: bytes = SECRET,
    bundles: Blobs | None = None,
    public: Blobs | None = None,
    port: int = 0,
    **shared: object,
) -> GatewayParts:
    """Return the parts of a gateway, on any free port unless one is named."""
    addresses = tuple(("127.0.0.1", port) for port in writer_ports)
    return GatewayParts(
        run=run,
        config=GatewayConfig.load({"gateway": {"port": port}}),
        shared=CoordinatorConfig.load({"coordinator": {"grace_seconds": 0.5, "lag_ms_max": 0.0, **shared}}),
        clock=SystemClock(),
        web=AiohttpServer(),
        link=LinkClient(addresses, secret=secret, run=run.digest),
        public=public,
        bundles=bundles,
    )


@contextlib.asynccontextmanager
async def serving(parts: GatewayParts) -> AsyncIterator[str]:
    """Run a gateway, and yield its URL once it is linked."""
    stop, port = asyncio.Event(), asyncio.get_running_loop().create_future()
    daemon = asyncio.create_task(serve_gateway(parts, stop, ready=port.set_result))
    try:
        await asyncio.wait({daemon, port}, return_when=asyncio.FIRST_COMPLETED)
        assert isinstance(parts.link, LinkClient)
        async with asyncio.timeout(10.0):
            await parts.link.linked.wait()
        yield f"http://127.0.0.1:{port.result()}"
    finally:
        stop.set()
        await daemon


@contextlib.asynccontextmanager
async def two_gateways(run: PinnedRun | None = None, **settings: object) -> AsyncIterator[tuple[World, list[World]]]:
    """Run a coordinator and two gateways, and yield a world at each address."""
    run = run or make_run()
    parts, server = hearing(memory_parts(run, **LISTENS, **settings))
    async with running(parts) as world, contextlib.AsyncExitStack() as stack:
        worlds = []
        for _ in range(2):
            url = await stack.enter_async_context(serving(gateway_parts(run, [server.port])))
            at_gateway = World(run, parts, url, world.session)
            stack.push_async_callback(_close, at_gateway)
            await at_gateway.learn_epoch()
            worlds.append(at_gateway)
        yield world, worlds


async def _close(world: World) -> None:
    for client in world.clients.values():
        await client.close()


class GatewayProcess:
    """A gateway in another process that tests can kill."""

    def __init__(self, process: asyncio.subprocess.Process, url: str) -> None:
        self._process, self.url = process, url

    @classmethod
    async def start(cls, writer_port: int) -> GatewayProcess:
        """Start one in front of a coordinator of `crash_run`, and wait until it is linked."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", __name__, str(writer_port)), cwd=REPOSITORY, stdout=asyncio.subprocess.PIPE
        )
        assert process.stdout is not None
        async with asyncio.timeout(START_S_MAX):
            return cls(process, (await process.stdout.readline()).decode().strip())

    async def kill(self) -> None:
        """Kill it. Idempotent."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGKILL)
        await self._process.wait()


async def _main(writer_port: int) -> None:
    async with serving(gateway_parts(make_run(**crash_run()), [writer_port])) as url:
        print(url, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    arguments: list[Any] = sys.argv[1:]
    asyncio.run(_main(int(arguments[0])))
