"""A coordinator or a worker in a process of its own, by the code of the tree in which it runs: today's, or an earlier commit's.

This file is copied into the earlier tree, so it uses only what both have.

    python -m tests.node.aged_process coordinator FOLDER PORT [NAME=SETTING ...]     prints its port
    python -m tests.node.aged_process worker FOLDER URL RUN                          prints how it ends
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
import sys
from pathlib import Path

from tests.node.table_engine import STOP_TOKEN, VOCAB_SIZE, TableEngine, equipped
from tests.node.worker_world import COORDINATOR, MODEL_FILES, WORKER, make_run

from prime_node.adapters.system_clock import SystemClock
from prime_node.adapters.web.http_client import HttpClient
from prime_node.broadcast.follow.follower import Follower
from prime_node.broadcast.follow.pinned import fetch_run
from prime_node.broadcast.follow.trust import Trust
from prime_node.broadcast.swarm.sources import SourcePool
from prime_node.worker.config import WorkerConfig
from prime_node.worker.loop import run_worker
from prime_node.worker.worker import Worker
from prime_protocol.envelope import open_envelope
from prime_protocol.errors import PrimeError
from prime_protocol.run_spec import open_run_spec

AGED_RUN = make_run(lease_seconds=60.0, heartbeat_seconds=0.2, max_steps=6)


class Digits:
    """Implements ports.environment.Tokenizer: one token a decimal digit."""

    vocab_size = VOCAB_SIZE
    stop_token_id = STOP_TOKEN

    def encode_prompt(self, text: str) -> list[int]:
        return [int(digit) for digit in text if digit.isdigit()]

    def encode(self, text: str) -> list[int]:
        return self.encode_prompt(text)

    def decode(self, token_ids: list[int]) -> str:
        return "".join(str(token) for token in token_ids if token < 10)


async def coordinate(folder: Path, port: int, settings: dict[str, str]) -> None:
    """Serve the run until killed."""
    # Here, since an earlier tree's coordinator needs packages that today's does not, and its worker does not need them.
    from tests.node.coordinator_world import Letters, folder_parts

    from prime_node.coordinator.daemon import serve_coordinator

    file, run = folder / "public" / "run.json", AGED_RUN
    if file.exists():  # a recording keeps its run when today's default has another one
        envelope = open_envelope(file.read_bytes())
        run = open_run_spec(envelope, pinned=envelope.digest)
    parts = await folder_parts(run, folder, port=port, snapshot_events=10, **settings)
    parts = dataclasses.replace(parts, key=COORDINATOR, environments={"toy": Letters()}, tokenizer=Digits())
    for data in MODEL_FILES.values():
        await parts.public.put(data)
    await serve_coordinator(parts, asyncio.Event(), ready=lambda port: print(port, flush=True))


async def work(folder: Path, url: str, digest: str) -> None:
    """Work until the run ends."""
    clock, rng = SystemClock(), random.Random(1)
    client = HttpClient(url, run=digest, clock=clock, key=WORKER)
    async with client:
        run = await fetch_run(digest, client, clock=clock)
        pool = SourcePool([("http", client)], clock=clock, rng=rng)
        worker = Worker(
            run=run,
            config=WorkerConfig.model_validate({"rollouts_max": 8, "receipts_seconds": 0.5}),
            key=WORKER,
            coordinator=client,
            engine_info=TableEngine().info,
            equip=equipped(TableEngine()),
            follower=Follower(run, pool, folder / "c", clock=clock, poll_s=0.05, rng=rng),
            trust=Trust(run, [("http", client)], folder / "trust", clock=clock, rng=rng),
            folder=folder,
            clock=clock,
            rng=rng,
        )
        try:
            print(await run_worker(worker, asyncio.Event()), flush=True)
        except PrimeError as error:
            print(f"{type(error).__name__}: {error}", flush=True)


if __name__ == "__main__":
    role, place, where = sys.argv[1:4]
    if role == "coordinator":
        asyncio.run(coordinate(Path(place), int(where), dict(setting.split("=", 1) for setting in sys.argv[4:])))
    else:
        asyncio.run(work(Path(place), where, sys.argv[4]))
