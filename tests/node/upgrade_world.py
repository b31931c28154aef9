"""Roles of different ages: processes by the code of any tree, and today's validator and trainer around them.

A recording of a coordinator and a worker in the middle of a step, both by the code of an earlier commit:

    git archive COMMIT | tar x -C OLD
    cp tests/node/aged_process.py OLD/tests/node/
    python -m tests.node.upgrade_world OLD FOLDER
    tar -C FOLDER --exclude='*-shm' -cJf tests/node/recorded/roles-COMMIT.tar.xz coordinator worker
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
from tests.node.aged_process import AGED_RUN
from tests.node.coordinator_process import START_S_MAX
from tests.node.coordinator_world import World, memory_parts
from tests.node.crowd_world import persist
from tests.node.served_world import publish, validate
from tests.node.worker_world import COORDINATOR, TRAINER, MemorySource
from tests.time_world import until

from prime_protocol.envelope import Envelope, open_envelope, parse_json
from prime_protocol.replies import TrainBatch
from prime_protocol.requests import BatchRequest
from prime_protocol.run_spec import PinnedRun

STEPS_BEFORE = 2
"""Steps that a recording has trained."""


class AgedProcess:
    """A role in a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    @classmethod
    async def start(cls, tree: Path, role: str, folder: Path, *arguments: str) -> AgedProcess:
        """Start a role by the code of a tree."""
        path = os.pathsep.join([*map(str, (tree, tree / "node", tree / "protocol", tree / "lab")), *_extra_path()])
        return cls(
            await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tests.node.aged_process", role, str(folder), *arguments),
                cwd=tree,
                env=os.environ | {"PYTHONPATH": path},
                stdout=asyncio.subprocess.PIPE,
            )
        )

    async def line(self) -> str:
        """Return its next line."""
        assert self.process.stdout is not None
        async with asyncio.timeout(START_S_MAX):
            return (await self.process.stdout.readline()).decode().strip()

    async def kill(self) -> None:
        """Kill it. Idempotent."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGKILL)
        await self.process.wait()


def _extra_path() -> list[str]:
    return [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]


@contextlib.asynccontextmanager
async def around(run: PinnedRun, url: str) -> AsyncIterator[World]:
    """Yield the clients of today's validator and trainer, and let the validator work."""
    async with aiohttp.ClientSession() as session:
        world = World(run, memory_parts(run), url, session)
        validating = asyncio.create_task(_validate(world))
        try:
            yield world
        finally:
            validating.cancel()
            await asyncio.wait({validating})
            for client in world.clients.values():
                await client.close()


async def _validate(world: World) -> None:
    while True:
        await persist(lambda: validate(world.client(COORDINATOR)))


async def train_one(world: World, source: MemorySource, step: int) -> TrainBatch:
    """Publish the policy of a step unless it is out, take the step's batch, and publish the policy after it."""
    if not source.manifests:
        await persist(lambda: publish(world, source, 0, None))
    request = BatchRequest(step=step, durable_step=step, wait_s=1.0)
    while not isinstance(answer := await persist(lambda: world.client(TRAINER).batch(request)), Envelope):
        pass
    await publish(world, source, step + 1, answer.digest)
    return parse_json(answer.payload, TrainBatch)


def source_of(run: PinnedRun, public: Path) -> MemorySource:
    """Return what the trainer of a recording has published."""
    source = MemorySource(run)
    for file in sorted((public / "manifests").iterdir()):
        source.manifests[int(file.stem)] = open_envelope(file.read_bytes())
    return source


async def record(tree: Path, folder: Path) -> None:
    """Let a coordinator and a worker of a tree run, and kill them in the middle of a step."""
    coordinator = await AgedProcess.start(tree, "coordinator", folder / "coordinator", "0")
    url = f"http://127.0.0.1:{await coordinator.line()}"
    worker = await AgedProcess.start(tree, "worker", folder / "worker", url, AGED_RUN.digest)
    source = MemorySource(AGED_RUN)
    async with around(AGED_RUN, url) as world:
        for step in range(STEPS_BEFORE):
            await train_one(world, source, step)
        await until((folder / "worker" / "receipts.jsonl").exists)
    await worker.kill()
    await coordinator.kill()


if __name__ == "__main__":
    asyncio.run(record(Path(sys.argv[1]), Path(sys.argv[2])))
