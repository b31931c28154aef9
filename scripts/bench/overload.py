"""A coordinator that gets twice the heartbeats that it can answer: what its members' work gets meanwhile.

    python scripts/bench/overload.py [--seconds 20]
    python scripts/bench/overload.py --quick [--json]    5 seconds for each phase

The real daemon (SQLite, folders, signatures) is a process on one core; the load comes from another. 300 members send heartbeats
over kept connections, signed in advance, at fixed times and whether or not earlier ones were answered; they obey no Retry-After.
Meanwhile eight members work: at fixed times one asks for a lease, then uploads a new bundle of 16 KiB, and obeys Retry-After.
Latency counts from the time at which a request was due. First the benchmark measures the capacity: heartbeats a second over 32
connections, each of which waits for its answers. Then the load is half of that, and then twice. After that the daemon is killed,
starts again, and each acknowledged bundle is sent once more.

Bars at twice the capacity: the 99th percentile of leases and uploads, and that of heartbeats that were answered, at most 3 times
what it is at half the capacity; nine tenths of the work done; no lease refused for load and no acknowledged bundle lost; each
refusal has Retry-After.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import aiohttp
from checks import Check, Output, at_least, at_most
from coordinator import asked, send_all
from processes import SPAWN, pin, processor_s, started, use_fast_loop
from tests.node.coordinator_world import (
    ENGINE,
    HEARTBEAT,
    STOP_TOKEN,
    World,
    folder_parts,
    make_parcel,
    make_run,
    memory_parts,
)

from prime_node.adapters.system_clock import SystemClock
from prime_node.adapters.web.http_client import HttpClient
from prime_node.coordinator.config import CoordinatorConfig
from prime_node.coordinator.daemon import serve_coordinator
from prime_node.patience import Backoff
from prime_node.ports.transport import Unreachable
from prime_protocol.assignment import Lease, Sampling
from prime_protocol.envelope import Envelope, parse_json
from prime_protocol.errors import RemoteError
from prime_protocol.identity import SigningKey
from prime_protocol.limits import Limits
from prime_protocol.requests import JoinRequest, LeaseRequest
from prime_protocol.run_spec import PinnedRun

NUM_BEATING, NUM_WORKING, CONNECTIONS = 300, 8, 32
BEATING = [SigningKey(number.to_bytes(2, "big") * 16) for number in range(1_000, 1_000 + NUM_BEATING)]
WORKING = [SigningKey(number.to_bytes(2, "big") * 16) for number in range(2_000, 2_000 + NUM_WORKING)]
WORK_PER_S = 20.0
"""Leases and uploads a second, of all working members together."""
BODY_BYTES = 16 * 2**10
TIMES_MAX, SHARE_MIN = 3.0, 0.9


@functools.cache
def overload_run() -> PinnedRun:
    bounds = Limits(leases_per_worker_max=1_024, bundles_pending_per_worker_max=1_024)
    sampling = Sampling(completion_tokens_max=2_048, stop_token_ids=(STOP_TOKEN,))
    return make_run(
        groups_per_step=8_192, rollouts_per_group=8, heartbeat_seconds=60.0, limits=bounds, sampling=sampling
    )


def serve_daemon(folder: str, port: int, core: int | None, lag_ms_max: float, pipe: Connection) -> None:
    pin(core)
    use_fast_loop()

    async def main() -> None:
        parts = await folder_parts(
            overload_run(), Path(folder), port=port, faults_per_second=1e9, lag_ms_max=lag_ms_max
        )
        await serve_coordinator(parts, asyncio.Event(), ready=pipe.send)

    asyncio.run(main())


@dataclass
class Seen:
    """One phase."""

    beats_s: list[float] = field(default_factory=list)
    """Seconds from when a heartbeat was due to its answer, if it was not refused."""
    statuses: Counter[bytes] = field(default_factory=Counter)
    num_unexplained: int = 0
    """Refusals without Retry-After."""
    work_s: list[float] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    num_uploads: int = 0
    seconds: float = 0.0
    beating_s: float = 0.0
    """Time in which the heartbeats were sent: more than `seconds` if their sender was late."""
    processor_s: float = 0.0


class Beating(asyncio.Protocol):
    """One member's connection: its requests are written when they are due, and its answers counted as they come."""

    def __init__(self, seen: Seen) -> None:
        self.seen, self._due, self._data = seen, list[float](), b""
        self.transport: asyncio.Transport | None = None
        self.idle = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def send(self, request: bytes, due_s: float) -> None:
        assert self.transport is not None
        self._due.append(due_s)
        self.idle.clear()
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        self._data += data
        while (end := self._data.find(b"\r\n\r\n")) >= 0:
            head = self._data[:end].lower()
            length = int(head.split(b"content-length:")[1].split(b"\r\n")[0])
            if len(self._data) < end + 4 + length:
                return
            self._data = self._data[end + 4 + length :]
            due_s, status = self._due.pop(0), head[9:12]
            self.seen.statuses[status] += 1
            if status == b"200":
                self.seen.beats_s.append(time.perf_counter() - due_s)
            elif b"retry-after:" not in head:
                self.seen.num_unexplained += 1
        if not self._due:
            self.idle.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.seen.statuses[b"unanswered"] += len(self._due)


async def beat(port: int, requests: Sequence[bytes], per_s: float, seen: Seen, started: Callable[[], None]) -> None:
    """Send all requests at their times, then wait for the answers for five seconds at most.

    The first one of each connection is not counted: it shows that the connection is a member's.
    """
    loop, requests = asyncio.get_running_loop(), list(requests)
    connections = []
    for first in requests[:NUM_BEATING]:
        shown = Seen()
        connection = (await loop.create_connection(functools.partial(Beating, shown), "127.0.0.1", port))[1]
        while not shown.statuses[b"200"]:
            connection.send(first, time.perf_counter())
            await connection.idle.wait()
            await asyncio.sleep(0.002 if shown.statuses[b"200"] else 0.5)
        connection.seen = seen
        connections.append(connection)
    started()
    requests = requests[NUM_BEATING:]
    began_s = time.perf_counter()
    for number, request in enumerate(requests):
        due_s = began_s + number / per_s
        if due_s > time.perf_counter():
            await asyncio.sleep(due_s - time.perf_counter())
        due_s = max(due_s, time.perf_counter())  # this process may be late itself
        connection = connections[number % NUM_BEATING]
        if connection.transport is not None and not connection.transport.is_closing():
            connection.send(request, due_s)
        else:
            seen.statuses[b"unanswered"] += 1
        if number % 16 == 0:
            await asyncio.sleep(0)
    seen.beating_s = time.perf_counter() - began_s
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(5.0):
            for connection in connections:
                await connection.idle.wait()
    for connection in connections:
        if connection.transport is not None:
            connection.transport.abort()


class Work:
    """Members that lease and upload, and remember what was acknowledged."""

    def __init__(self, port: int, digest: str) -> None:
        self._run, self._digest = overload_run(), digest
        self._clients = [
            HttpClient(f"http://127.0.0.1:{port}", run=self._run.digest, clock=SystemClock(), key=key)
            for key in WORKING
        ]
        self.uploaded: list[tuple[int, bytes, str]] = []

    async def close(self) -> None:
        for client in self._clients:
            await client.close()

    async def work(self, seconds: float, seen: Seen) -> None:
        began_s, number = time.perf_counter(), 0
        running = set[asyncio.Task[None]]()
        while (due_s := began_s + number / WORK_PER_S) < began_s + seconds:
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            running.add(asyncio.create_task(self._once(number % NUM_WORKING, due_s, seen)))
            number += 1
        done, late = await asyncio.wait(running, timeout=5.0)
        for task in late:
            task.cancel()
        for task in done:
            task.result()

    async def _once(self, place: int, due_s: float, seen: Seen) -> None:
        client = self._clients[place]
        request = LeaseRequest(policy_version=0, policy_digest=self._digest, rollouts_max=8)
        answer = await self._persist(lambda: client.lease(request), "lease", due_s, seen)
        assert isinstance(answer, Envelope), answer
        lease = parse_json(answer.payload, Lease)
        parcel = make_parcel(lease, WORKING[place], body=os.urandom(BODY_BYTES))
        reply = await self._persist(lambda: client.upload(parcel), "upload", time.perf_counter(), seen)
        seen.num_uploads += 1
        self.uploaded.append((place, parcel, reply.bundle))

    async def _persist(self, call, what: str, due_s: float, seen: Seen):  # type: ignore[no-untyped-def]
        backoff = Backoff(random.Random(0))
        while True:
            try:
                answer = await call()
                seen.work_s.append(time.perf_counter() - due_s)
                return answer
            except (RemoteError, Unreachable) as error:
                if isinstance(error, RemoteError) and not error.is_transient:
                    raise
                seen.refused[what] += 1
                await asyncio.sleep(backoff.next_s(error))

    async def count_lost(self) -> int:
        """Send each acknowledged bundle again. A lost one has no lease, or is new."""
        lost = 0
        for place, parcel, bundle in self.uploaded:
            try:
                reply = await self._persist(
                    functools.partial(self._clients[place].upload, parcel), "again", 0.0, Seen()
                )
                lost += reply.bundle != bundle
            except RemoteError as error:
                print(f"lost: {error}")
                lost += 1
        return lost


async def prepare(port: int) -> tuple[str, str]:
    """Let all members join, and publish a policy. Return its digest and the epoch."""
    run = overload_run()
    async with aiohttp.ClientSession() as session:
        world = World(run, memory_parts(run), f"http://127.0.0.1:{port}", session)
        manifest = await world.publish()
        await world.learn_epoch()
        for client in world.clients.values():
            await client.close()
    join = JoinRequest(name="bench", software="1", engine=ENGINE, rollouts_max=128)
    await send_all(port, [signed_as("/v1/join", join, key, world.epoch) for key in (*BEATING, *WORKING)])
    return manifest.digest, world.epoch


def signed_as(path: str, message, key: SigningKey, epoch: str) -> bytes:  # type: ignore[no-untyped-def]
    return asked(path, message, key, epoch, run=overload_run().digest)


async def capacity(port: int, epoch: str, count: int) -> float:
    """Return the heartbeats a second that the daemon answers."""
    requests = [signed_as("/v1/heartbeat", HEARTBEAT, BEATING[number % NUM_BEATING], epoch) for number in range(count)]
    began_s = time.perf_counter()
    await send_all(port, requests, connections=CONNECTIONS)
    return count / (time.perf_counter() - began_s)


def beat_all(port: int, requests: Sequence[bytes], per_s: float, core: int | None, pipe: Connection) -> None:
    """Beat in a process of its own, so that the work's times are not its own."""
    pin(core)
    seen = Seen()
    asyncio.run(beat(port, requests, per_s, seen, lambda: pipe.send(None)))
    pipe.send((seen.beats_s, seen.statuses, seen.num_unexplained, seen.beating_s))


async def phase(port: int, pid: int, core: int | None, epoch: str, per_s: float, work: Work, seconds: float) -> Seen:
    requests = [
        signed_as("/v1/heartbeat", HEARTBEAT, BEATING[number % NUM_BEATING], epoch)
        for number in range(NUM_BEATING + int(per_s * seconds))
    ]
    seen = Seen(seconds=seconds)
    here, there = multiprocessing.Pipe()
    beating = SPAWN.Process(target=beat_all, args=(port, requests, per_s, core, there), daemon=True)
    beating.start()
    await asyncio.to_thread(here.recv)
    before_s = processor_s(pid)
    await work.work(seconds, seen)
    seen.beats_s, seen.statuses, seen.num_unexplained, seen.beating_s = await asyncio.to_thread(here.recv)
    beating.join()
    seen.processor_s = processor_s(pid) - before_s
    return seen


def p99_s(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=100)[98] if len(values) > 1 else float("inf")


def show(name: str, seen: Seen) -> None:
    answered = {status.decode(): count for status, count in sorted(seen.statuses.items())}
    print(
        f"{name}: uploads {seen.num_uploads / seen.seconds:.1f}/s, work p50 {1e3 * statistics.median(seen.work_s or [9]):.0f} "
        f"p99 {1e3 * p99_s(seen.work_s):.0f} ms, refused {dict(seen.refused)}; heartbeats {answered} in {seen.beating_s:.1f} s, "
        f"p99 {1e3 * p99_s(seen.beats_s):.0f} ms; {seen.processor_s:.1f} s of processor",
        flush=True,
    )


async def measure(
    folder: str, core: int | None, others: int | None, *, seconds: float, lag_ms_max: float
) -> list[Check]:
    with started(serve_daemon, folder, 0, core, lag_ms_max) as (port, pid):
        digest, epoch = await prepare(port)
        per_s = await capacity(port, epoch, 3_000 if seconds > 5 else 1_000)
        print(f"capacity: {per_s:.0f} heartbeats a second", flush=True)
        work = Work(port, digest)
        half = await phase(port, pid, others, epoch, per_s / 2, work, seconds)
        show("half", half)
        await asyncio.sleep(2.0)
        twice = await phase(port, pid, others, epoch, 2 * per_s, work, seconds)
        show("twice", twice)
    with started(serve_daemon, folder, port, core, lag_ms_max):
        lost = await work.count_lost()
    await work.close()
    return [
        at_most("work: p99 at twice the capacity by that at half", p99_s(twice.work_s) / p99_s(half.work_s), TIMES_MAX),
        at_most(
            "heartbeats answered: p99 at twice the capacity by that at half",
            p99_s(twice.beats_s) / p99_s(half.beats_s),
            TIMES_MAX,
        ),
        at_least(
            "uploads at twice the capacity by those at half", twice.num_uploads / max(1, half.num_uploads), SHARE_MIN
        ),
        at_most("work refused while heartbeats are refused", sum(twice.refused.values()), 0),
        at_least("heartbeats refused at twice the capacity", twice.statuses[b"503"], 1),
        at_most(
            "refusals without Retry-After, and connections without an answer",
            twice.num_unexplained + twice.statuses[b"unanswered"],
            0,
        ),
        at_most(f"lost of {len(work.uploaded)} acknowledged bundles after kill -9", lost, 0),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each phase")
    parser.add_argument(
        "--lag", type=float, default=CoordinatorConfig().lag_ms_max, help="coordinator.lag_ms_max; 0 refuses nothing"
    )
    parser.add_argument("--quick", action="store_true", help="five seconds of each")
    parser.add_argument("--json", action="store_true", help="print the checks alone, as JSON")
    options = parser.parse_args()
    output = Output(as_json=options.json)
    cores = sorted(os.sched_getaffinity(0))
    servers, others = (cores[0], cores[1]) if len(cores) > 1 else (None, None)
    pin(others)
    with tempfile.TemporaryDirectory(prefix="overload-") as folder:
        checks = asyncio.run(
            measure(folder, servers, others, seconds=5.0 if options.quick else options.seconds, lag_ms_max=options.lag)
        )
    return output.finish(checks)


if __name__ == "__main__":
    raise SystemExit(main())
