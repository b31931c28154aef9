"""The daemon as a separate process that tests can kill.

python -m tests.node.coordinator_process FOLDER PORT CLOCK_AHEAD_S [SETTING=NUMBER ...]
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import MappingProxyType

from tests.node.coordinator_world import folder_parts, make_run

from prime_node.adapters.system_clock import SystemClock
from prime_node.coordinator.daemon import serve_coordinator

REPOSITORY = Path(__file__).parents[2]
START_S_MAX = 120.0


class WrongClock(SystemClock):
    """Clock whose wall time differs from the true time by a fixed amount."""

    def __init__(self, ahead_s: float) -> None:
        self._ahead_ms = round(1_000 * ahead_s)

    def now_ms(self) -> int:
        return super().now_ms() + self._ahead_ms


def crash_run() -> dict[str, object]:
    return {"max_steps": 10_000, "heartbeat_seconds": 30.0, "lease_seconds": 2.0, "groups_per_step": 4}


class Daemon:
    """A daemon in another process that tests can kill."""

    def __init__(self, process: BaseProcess) -> None:
        self._process = process

    def kill(self) -> None:
        self._process.kill()

    def send(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    async def wait(self) -> None:
        await asyncio.to_thread(self._process.join)


async def start(
    folder: Path,
    port: int,
    *,
    clock_ahead_s: float = 0.0,
    settings: Mapping[str, str] = MappingProxyType({}),
    environment: Mapping[str, str] = MappingProxyType({}),
) -> tuple[Daemon, int]:
    """Start a daemon in another process; return it and its port. Port 0 chooses a free one.

    The process is forked from a server that has imported everything, which takes a new process more than a second.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(
        target=_serve, args=(theirs, folder, port, clock_ahead_s, dict(settings), dict(environment)), daemon=True
    )
    await asyncio.to_thread(process.start)
    theirs.close()
    with ours:
        assert await asyncio.to_thread(ours.poll, START_S_MAX), "the daemon does not say its port"
        return Daemon(process), ours.recv()


def _serve(
    told: Connection,
    folder: Path,
    port: int,
    clock_ahead_s: float,
    settings: dict[str, str],
    environment: dict[str, str],
) -> None:
    os.environ.update(environment)  # the server that forks has that of its own start
    asyncio.run(main(folder, port, clock_ahead_s, ready=told.send, **settings))


async def main(
    folder: Path, port: int, clock_ahead_s: float, *, ready: Callable[[int], None], **settings: float | str
) -> None:
    given = {"snapshot_events": 20, "requests_per_second": 10_000, **settings}
    parts = await folder_parts(make_run(**crash_run()), folder, port=port, **given)
    parts = replace(parts, clock=WrongClock(clock_ahead_s))
    if parts.config.gateways_address is not None:
        from tests.node.gateway_world import hearing

        parts, _ = hearing(parts)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, stop.set)  # SIGTERM, from a test that ends, kills
    await serve_coordinator(parts, stop, ready=ready)


def _print(port: int) -> None:
    print(port, flush=True)


if __name__ == "__main__":
    named = (setting.partition("=") for setting in sys.argv[4:])
    numbers = {name: float(number) for name, _, number in named}
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), ready=_print, **numbers))
