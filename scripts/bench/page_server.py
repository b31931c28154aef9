"""A coordinator with many workers and a recorded history, for a browser: the server of page.py.

The state, the page and the HTTP server are the product's own. Joins, heartbeats and verdicts do not arrive over HTTP here, but
are decided and reported directly: they would cost more than the page, which is to be measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import multiprocessing
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from processes import SPAWN, use_fast_loop
from tests.node.coordinator_world import make_run, memory_parts
from tests.page_world import MACHINES, name_of, recorded_history

from prime_node.broadcast.routes import UpdateRoute
from prime_node.coordinator.api.routes import serve_endpoints
from prime_node.coordinator.assembly import Coordinator, Parts, open_coordinator
from prime_node.coordinator.state import events as ev
from prime_protocol.identity import SigningKey
from prime_protocol.requests import HeartbeatRequest, WorkerState
from prime_protocol.telemetry import DownloadReport
from prime_protocol.verdict import RejectReason

BEAT_S = 0.05
CHANGES_PER_S = 2_000
STEP_S = 4.0
"""Seconds between two steps of the invented run."""
STATES = (
    WorkerState.GENERATING,
    WorkerState.GENERATING,
    WorkerState.GENERATING,
    WorkerState.IDLE,
    WorkerState.FETCHING,
)
STEPS = 180
OBSERVED = 40
"""Workers that report when they could use a policy."""
PERSON, PERSON_S = SigningKey(bytes([99]) * 32), range(3, 6)
"""A person, and the numbers of its machines."""


@dataclass
class PageServer:
    """The server in a process of its own."""

    url: str
    digest: str
    process: int
    pipe: Connection

    def ask(self, what: str) -> Any:
        """Ask for "ticks" (of the live feed), or switch to "changes" or "still"."""
        self.pipe.send(what)
        assert self.pipe.poll(60), "the server does not answer"
        return self.pipe.recv()


@contextlib.contextmanager
def page_server(num_workers: int) -> Iterator[PageServer]:
    """Run the server. Some workers have names that try to do harm."""
    here, there = multiprocessing.Pipe()
    process = SPAWN.Process(target=_run, args=(num_workers, there), daemon=True)
    process.start()
    try:
        assert here.poll(120), "the server did not start"
        port, digest = here.recv()
        assert process.pid is not None
        yield PageServer(f"http://127.0.0.1:{port}", digest, process.pid, here)
    finally:
        process.kill()
        process.join()


def _run(num_workers: int, pipe: Connection) -> None:
    use_fast_loop()
    asyncio.run(_serve(num_workers, pipe))


async def _serve(num_workers: int, pipe: Connection) -> None:
    run = make_run(
        name="sums",
        title="Two-digit sums",
        description="A small model learns to add, on machines of people who need not trust each other. All numbers are invented.",
        max_steps=400,
        created_at_ms=time.time_ns() // 1_000_000 - 6 * 3_600_000,
        groups_per_step=64,
        rollouts_per_group=8,
        heartbeat_seconds=600.0,
    )
    keys = [SigningKey(number.to_bytes(32, "big")).key_id for number in range(1, min(num_workers, 40) + 1)]
    draw, letters = random.Random(3), "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
    keys += ["12D3KooW" + "".join(draw.choices(letters, k=44)) for _ in range(len(keys), num_workers)]
    parts = memory_parts(run, connects_per_second=1e9, public_requests_per_second=1e9)
    tokens = {key: 400_000 // (place + 2) for place, key in enumerate(keys)}
    coordinator = await open_coordinator(parts)
    writing = asyncio.create_task(coordinator.journal.write(lambda _: None))
    _fill(coordinator, parts, keys)
    await parts.private.write("history.json", recorded_history(STEPS, tokens, now_ms=parts.clock.now_ms()))
    await coordinator.history.restore()
    of = coordinator
    served = serve_endpoints(of.handlers, of.gate, of.decisions, parts.clock, parts.metrics)
    routes = [endpoint.route() for endpoint in served]
    port = await parts.web.start(routes, host="0.0.0.0", port=0)
    pipe.send((port, run.digest))
    changes: asyncio.Task[None] | None = None
    asked: asyncio.Queue[str] = asyncio.Queue()
    asyncio.get_running_loop().add_reader(pipe.fileno(), lambda: asked.put_nowait(pipe.recv()))
    while True:
        match await asked.get():
            case "changes" if changes is None:
                changes = asyncio.create_task(_change(coordinator, parts, keys))
            case "still" if changes is not None:
                changes.cancel()
                changes = None
        if writing.done():
            writing.result()
        pipe.send(coordinator.feed.num_ticks)


def _fill(coordinator: Coordinator, parts: Parts, keys: list[str]) -> None:
    """Let all workers join, publish policies, and ban four workers. What leases and verdicts would count is set directly."""
    decide, draw, state = coordinator.decisions.decide, random.Random(1), coordinator.decisions.state
    observer, now_ms = coordinator.report.observer, parts.clock.now_ms()
    for number, key in enumerate(keys):
        machine = MACHINES[number % len(MACHINES)]
        name, person = name_of(number), PERSON.key_id if number in PERSON_S else ""
        decide(ev.WorkerJoined(key, name, "1", "vllm 0.32 bf16 cuda", 64, hardware=machine, person=person))
    for policy in range(STEPS + 1):
        whole, deltas = UpdateRoute(None, 90_000_000), range(max(0, policy - 2), policy)
        decide(ev.ManifestPublished(policy, "d" * 64, (whole, *(UpdateRoute(base, 4_100_000) for base in deltas))))
        observer.made(policy, now_ms - 60_000)
    for number in range(0, len(keys), max(5, len(keys) // 4)):
        reason = "3 bundles together are evidence of 11.6 nats: the tokens come from other weights"
        decide(ev.WorkerBanned(keys[number + 2], reason))
    for place, key in enumerate(keys):
        state.workers[key].accepted = 40_000 // (place + 2)
        state.workers[key].audit_score = 40
        coordinator.presence.reported(key, _beat(draw), time.monotonic())
        for policy in range(STEPS - 6, STEPS + 1) if place < OBSERVED else ():
            observer.usable(key, policy, abs(draw.gauss(11, 3)), now_ms)
    state.accepted = sum(worker.accepted for worker in state.workers.values())
    state.refused = {RejectReason.LOGPROB_MISMATCH: 96, RejectReason.LEASE_EXPIRED: 310, RejectReason.STALE: 41}
    state.step_ms = 91_000.0


def _beat(draw: random.Random) -> HeartbeatRequest:
    [policy] = draw.choices(range(STEPS - 2, STEPS + 1), (1, 4, 20))
    whole = draw.choice((0, 0, 0, 4_100_000))
    downloads = DownloadReport(
        peer_bytes=draw.randrange(10**9),
        operator_bytes=draw.randrange(10**8),
        links=draw.randrange(32),
        done_bytes=draw.randrange(whole + 1),
        all_bytes=whole,
    )
    return HeartbeatRequest(state=draw.choice(STATES), policy_version=policy, bundles_spooled=0, downloads=downloads)


async def _change(coordinator: Coordinator, parts: Parts, keys: list[str]) -> None:
    """Change the state of workers, and continue the run."""
    history, draw = coordinator.history, random.Random(2)
    each = max(1, round(min(CHANGES_PER_S, len(keys)) * BEAT_S))
    for beat in itertools.count():
        await asyncio.sleep(BEAT_S)
        now_ms = parts.clock.now_ms()
        for key in draw.sample(keys, each):
            coordinator.presence.reported(key, _beat(draw), parts.clock.monotonic_s())
            history.credited(key, 90)
        key = draw.choice(keys)
        name = coordinator.decisions.state.workers[key].name
        took_ms = draw.randrange(400, 1_500)
        for kind, outcome in (("lease", "redeemed"), ("check", "accepted")):
            history.record(
                kind=kind,
                begin_ms=now_ms - took_ms,
                end_ms=now_ms,
                outcome=outcome,
                worker=key,
                name=name,
                step=history.last_step,
                num_groups=4,
            )
        if beat % round(STEP_S / BEAT_S) == 0:
            history.record(
                step=history.last_step + 1, reward_mean=draw.gauss(0.8, 0.02), lag_mean=1.5, train_seconds=28.0
            )
            history.record(kind="batch", begin_ms=now_ms, end_ms=now_ms, step=history.last_step)
