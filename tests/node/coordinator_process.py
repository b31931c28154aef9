"""The daemon as a process of its own, to be killed: python -m tests.node.coordinator_process FOLDER PORT"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from tests.node.coordinator_world import folder_parts, make_run

from prime_node.coordinator.daemon import serve


def crash_run() -> dict[str, object]:
    return {"max_steps": 10_000, "heartbeat_seconds": 30.0, "lease_seconds": 2.0, "groups_per_step": 4}


async def main(folder: Path, port: int) -> None:
    parts = await folder_parts(
        make_run(**crash_run()), folder, port=port, snapshot_events=20, requests_per_second=10_000
    )
    await serve(parts, asyncio.Event(), ready=lambda port: print(port, flush=True))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))
