"""The daemon as a separate process that tests can kill.

python -m tests.node.coordinator_process FOLDER PORT CLOCK_AHEAD_S [SETTING=NUMBER ...]
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from pathlib import Path

from tests.node.coordinator_world import folder_parts, make_run

from prime_node.adapters.system_clock import SystemClock
from prime_node.coordinator.daemon import serve_coordinator

REPOSITORY = Path(__file__).parents[2]


class WrongClock(SystemClock):
    """Clock whose wall time differs from the true time by a fixed amount."""

    def __init__(self, ahead_s: float) -> None:
        self._ahead_ms = round(1_000 * ahead_s)

    def now_ms(self) -> int:
        return super().now_ms() + self._ahead_ms


def crash_run() -> dict[str, object]:
    return {"max_steps": 10_000, "heartbeat_seconds": 30.0, "lease_seconds": 2.0, "groups_per_step": 4}


async def start(folder: Path, port: int, *, clock_ahead_s: float = 0.0) -> tuple[asyncio.subprocess.Process, int]:
    """A daemon in another process, and its port; port 0 chooses a free one."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.node.coordinator_process",
        folder,
        str(port),
        str(clock_ahead_s),
        cwd=REPOSITORY,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    line = await asyncio.wait_for(process.stdout.readline(), 120)
    return process, int(line)


async def main(folder: Path, port: int, clock_ahead_s: float, **settings: float) -> None:
    given = {"snapshot_events": 20, "requests_per_second": 10_000, **settings}
    parts = await folder_parts(make_run(**crash_run()), folder, port=port, **given)
    parts = replace(parts, clock=WrongClock(clock_ahead_s))
    await serve_coordinator(parts, asyncio.Event(), ready=lambda port: print(port, flush=True))


if __name__ == "__main__":
    named = (setting.partition("=") for setting in sys.argv[4:])
    numbers = {name: float(number) for name, _, number in named}
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), **numbers))
