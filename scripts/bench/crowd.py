"""Ten thousand idle members and a long stream of signed requests, behind two gateways.

    python scripts/bench/crowd.py [--json]            10,000 held polls; 3,000 requests a second for ten minutes
    python scripts/bench/crowd.py --quick [--json]    2,000 held polls; 1,000 requests a second for fifteen seconds
    python scripts/bench/crowd.py --only stream       one part

The coordinator (SQLite, folders, signatures) and the gateways are processes. Another process holds the polls: each of its members
has joined, keeps a connection of its own, and asks for a lease as idle workers do, 30 seconds at a time; no group is left to
lease. Then one member sends heartbeats over a kept connection, and each waits for its answer. Memory is what all three processes
hold more than before the polls.

The stream: heartbeats of 1,500 members at fixed times, signed as they are sent. Each sends two a second at most, for which the
coordinator has room to remember nonces. Each hundredth one that was answered is sent once
more to the other gateway, which must refuse it. Rates count answers, and memory grows from the end of the first tenth to the end.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import aiohttp
from checks import Check, Output, at_least, at_most
from coordinator import asked
from gateways import FREE, NUM_GATEWAYS, TICK_SECONDS, port_of, serve_hearing, serve_linked
from processes import SPAWN, resident_bytes, started, use_fast_loop
from tests.node.coordinator_world import ENGINE, HEARTBEAT, World, folder_parts, make_run, memory_parts
from tests.node.gateway_world import LISTENS, gateway_parts
from tests.time_world import until

from prime_protocol.identity import SigningKey
from prime_protocol.limits import WAIT_S_MAX, Limits
from prime_protocol.requests import JoinRequest, LeaseRequest, Request

RUN = make_run(
    groups_per_step=4,
    rollouts_per_group=8,
    heartbeat_seconds=120.0,
    lease_seconds=3_600.0,
    limits=Limits(workers_max=20_000),
)
HOLDER, BEATING = SigningKey(b"h" * 32), 1_500
REPLAYED_EVERY = 100
NETWORKS, NEW_PER_S = 250, 200.0
"""Networks from which the polls come, and how many members a second begin: a new connection's first request is a stranger's."""
MIB = 2**20


@dataclass(frozen=True)
class Size:
    polls: int
    per_s: float
    """Heartbeats a second of the stream."""
    seconds: float


FULL, QUICK = Size(polls=10_000, per_s=3_000.0, seconds=600.0), Size(polls=2_000, per_s=1_000.0, seconds=15.0)


def member(number: int) -> SigningKey:
    return SigningKey(number.to_bytes(4, "big") * 8)


def signed_request(path: str, message: Request, key: SigningKey, epoch: str) -> bytes:
    return asked(path, message, key, epoch, run=RUN.digest)


def serve_writer(folder: str, pipe: Connection) -> None:
    serve_hearing(lambda: folder_parts(RUN, Path(folder), **LISTENS, **FREE, tick_seconds=TICK_SECONDS), pipe)


def serve_one_gateway(writer_port: int, pipe: Connection) -> None:
    serve_linked(lambda: gateway_parts(RUN, [writer_port], **FREE), pipe)


@dataclass
class Caller:
    """A kept connection. Requests are answered in their order."""

    port: int
    address: str = "127.0.0.1"
    """The caller's own address: gateways count callers by their network."""
    reader: asyncio.StreamReader = field(init=False)
    writer: asyncio.StreamWriter = field(init=False)

    async def open(self) -> Caller:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port, local_addr=(self.address, 0))
        return self

    async def answer(self) -> tuple[int, bytes]:
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        return int(head[9:12]), await self.reader.readexactly(length)

    async def ask(self, request: bytes) -> tuple[int, bytes]:
        self.writer.write(request)
        return await self.answer()


async def prepare(port: int) -> tuple[str, str]:
    """Publish a policy, and let one member lease all its groups. Return the policy's digest and the epoch."""
    async with aiohttp.ClientSession() as session:
        world = World(RUN, memory_parts(RUN), f"http://127.0.0.1:{port}", session)
        manifest = await world.publish()
        await world.learn_epoch()
        await world.join(HOLDER)
        with contextlib.suppress(AssertionError):  # no group is left
            while True:
                await world.lease(HOLDER, rollouts_max=8)
        for client in world.clients.values():
            await client.close()
    return manifest.digest, world.epoch


async def join_all(ports: Sequence[int], keys: Iterable[SigningKey], epoch: str) -> None:
    join, waiting = JoinRequest(name="bench", software="1", engine=ENGINE, rollouts_max=8), iter(keys)

    async def joining(port: int) -> None:
        caller = await Caller(port).open()
        for key in waiting:
            status, answer = await caller.ask(signed_request("/v1/join", join, key, epoch))
            assert status == 200, answer
        caller.writer.close()

    await asyncio.gather(*(joining(port) for port in ports for _ in range(4)))


def hold_polls(ports: Sequence[int], digest: str, epoch: str, count: int, pipe: Connection) -> None:
    """Let members wait for leases until killed.

    A member that is refused or cut off tries again after one to two seconds. Send a line once all wait. When asked, send the
    statuses of the answers since then (0: a broken connection), and how many do not wait.
    """
    use_fast_loop()
    statuses = Counter[int]()
    ask = LeaseRequest(policy_version=0, policy_digest=digest, rollouts_max=8, wait_s=WAIT_S_MAX)

    async def hold(number: int, key: SigningKey) -> None:
        address = f"127.1.{number % NETWORKS}.1"
        while True:
            try:
                caller = await Caller(ports[number % len(ports)], address).open()
                while True:
                    caller.writer.write(signed_request("/v1/lease", ask, key, epoch))
                    held.add(number)
                    status, _ = await caller.answer()
                    statuses[status] += 1
                    if status not in (200, 202):
                        held.discard(number)
                        await asyncio.sleep(random.uniform(1.0, 2.0))
            except (OSError, asyncio.IncompleteReadError):
                statuses[0] += 1
                held.discard(number)
                await asyncio.sleep(random.uniform(1.0, 2.0))

    async def main() -> None:
        keys = [member(number) for number in range(count)]
        await join_all(ports, keys, epoch)
        polls = []
        for number, key in enumerate(keys):
            polls.append(asyncio.create_task(hold(number, key)))
            await asyncio.sleep(1 / NEW_PER_S)
        await until(lambda: len(held) == count, seconds=120.0)
        statuses.clear()
        pipe.send("waiting")
        await asyncio.to_thread(pipe.recv)
        pipe.send((dict(statuses), count - len(held)))

    held = set[int]()
    asyncio.run(main())


async def beat(port: int, epoch: str, seconds: float) -> list[float]:
    """Return the latency of each heartbeat of one member, in seconds."""
    caller, key, taken_s = await Caller(port).open(), HOLDER, list[float]()
    until_s = time.perf_counter() + seconds
    while time.perf_counter() < until_s:
        request = signed_request("/v1/heartbeat", HEARTBEAT, key, epoch)
        began_s = time.perf_counter()
        status, answer = await caller.ask(request)
        assert status == 200, answer
        taken_s.append(time.perf_counter() - began_s)
        await asyncio.sleep(0.02)
    caller.writer.close()
    return taken_s


def measure_polls(ports: Sequence[int], pids: Sequence[int], digest: str, epoch: str, size: Size) -> list[Check]:
    quiet_s = asyncio.run(beat(ports[0], epoch, 3.0))
    before = sum(map(resident_bytes, pids))
    here, there = multiprocessing.Pipe()
    holder = SPAWN.Process(target=hold_polls, args=(ports, digest, epoch, size.polls, there), daemon=True)
    holder.start()
    assert here.poll(180.0), "the members do not wait"
    here.recv()
    held_s = asyncio.run(beat(ports[0], epoch, WAIT_S_MAX + 5.0))
    grown_mib = (sum(map(resident_bytes, pids)) - before) / MIB
    here.send("enough")
    statuses, missing = here.recv()
    holder.kill()
    holder.join()
    print(
        f"{size.polls:,} held polls: {grown_mib:.0f} MiB in all processes; answers {statuses}; heartbeats' p99 "
        f"{1e3 * p99(quiet_s):.1f} ms before, {1e3 * p99(held_s):.1f} ms meanwhile"
    )
    return [
        at_most(f"{size.polls:,} held polls: memory that they add, MiB", grown_mib, 400),
        at_most(f"{size.polls:,} held polls: p99 of heartbeats meanwhile, ms", 1e3 * p99(held_s), 50),
        at_most(f"{size.polls:,} held polls: not held at the end", missing, 0),
    ]


def p99(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=100)[98]


@dataclass
class Stream:
    """What a stream of heartbeats got."""

    latencies_s: list[float] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)
    replays: Counter[bytes] = field(default_factory=Counter)
    """Answers to requests that were answered before, at another gateway."""
    seconds: float = 0.0


def send_stream(ports: Sequence[int], epoch: str, size: Size, pipe: Connection) -> None:
    """Send heartbeats at their times, and some of them again. Send the Stream."""
    use_fast_loop()
    stream = Stream()
    keys = [member(1_000_000 + number) for number in range(BEATING)]

    async def main() -> None:
        await join_all(ports, keys, epoch)
        callers = list[Caller]()
        for number, key in enumerate(keys):  # a new connection's first request is a stranger's
            caller = await Caller(ports[number % len(ports)], f"127.2.{number % NETWORKS}.1").open()
            status, answer = await caller.ask(signed_request("/v1/heartbeat", HEARTBEAT, key, epoch))
            assert status == 200, answer
            callers.append(caller)
            await asyncio.sleep(1 / NEW_PER_S)
        others = [await Caller(port).open() for port in ports]
        sent: list[asyncio.Queue[tuple[bytes, float]]] = [asyncio.Queue() for _ in callers]
        again: asyncio.Queue[tuple[int, bytes]] = asyncio.Queue()
        count = int(size.per_s * size.seconds)

        async def hear(number: int) -> None:
            while True:
                request, sent_s = await sent[number].get()
                status, _ = await callers[number].answer()
                stream.latencies_s.append(time.perf_counter() - sent_s)
                stream.statuses[status] += 1
                if len(stream.latencies_s) % REPLAYED_EVERY == 0:
                    again.put_nowait(((number + 1) % len(ports), request))

        async def replay() -> None:
            while True:
                place, request = await again.get()
                status, answer = await others[place].ask(request)
                stream.replays[b"taken" if status == 200 else answer[:60]] += 1

        hearing = [asyncio.create_task(hear(number)) for number in range(BEATING)]
        hearing.append(asyncio.create_task(replay()))
        pipe.send("joined")
        began_s = time.perf_counter()
        for number in range(count):
            due_s = began_s + number / size.per_s
            if due_s > time.perf_counter():
                await asyncio.sleep(due_s - time.perf_counter())
            request = signed_request("/v1/heartbeat", HEARTBEAT, keys[number % BEATING], epoch)
            sent[number % BEATING].put_nowait((request, time.perf_counter()))
            callers[number % BEATING].writer.write(request)
            if number % 16 == 0:
                await asyncio.sleep(0)
        with contextlib.suppress(TimeoutError):
            await until(lambda: stream.statuses.total() == count and again.empty(), seconds=10.0)
        stream.seconds = time.perf_counter() - began_s
        for task in hearing:
            task.cancel()

    asyncio.run(main())
    pipe.send(stream)


def measure_stream(ports: Sequence[int], pids: Sequence[int], epoch: str, size: Size) -> list[Check]:
    here, there = multiprocessing.Pipe()
    sender = SPAWN.Process(target=send_stream, args=(ports, epoch, size, there), daemon=True)
    sender.start()
    assert here.poll(120.0), "the members do not join"
    here.recv()
    time.sleep(size.seconds / 10)
    before = sum(map(resident_bytes, pids))
    stream: Stream = here.recv()
    grown_mib = (sum(map(resident_bytes, pids)) - before) / MIB
    sender.join()
    per_s = stream.statuses[200] / stream.seconds
    print(
        f"{size.per_s:,.0f}/s for {size.seconds:.0f} s: {per_s:,.0f}/s answered, {dict(stream.statuses)}, p99 "
        f"{1e3 * p99(stream.latencies_s):.0f} ms; replays {dict(stream.replays)}; {grown_mib:.0f} MiB more"
    )
    name = f"{size.per_s:,.0f} signed requests a second for {size.seconds:,.0f} s"
    return [
        at_least(f"{name}: share answered in time", per_s / size.per_s, 0.99),
        at_most(f"{name}: replays taken by another gateway", stream.replays[b"taken"], 0),
        at_least(f"{name}: replays tried", stream.replays.total(), size.per_s * size.seconds / REPLAYED_EVERY / 2),
        at_most(f"{name}: memory that they add, MiB", grown_mib, 200),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="about a minute and a half")
    parser.add_argument("--json", action="store_true", help="print the checks alone, as JSON")
    parser.add_argument("--only", choices=("polls", "stream"), help="measure one part")
    options = parser.parse_args()
    output, size = Output(as_json=options.json), QUICK if options.quick else FULL
    with tempfile.TemporaryDirectory(prefix="crowd-") as folder, contextlib.ExitStack() as stack:
        (port, link_port), writer = stack.enter_context(started(serve_writer, folder))
        gateways = [stack.enter_context(started(serve_one_gateway, link_port)) for _ in range(NUM_GATEWAYS)]
        ports, pids = [port_of(gateway[0]) for gateway in gateways], [writer, *(gateway[1] for gateway in gateways)]
        digest, epoch = asyncio.run(prepare(port))
        checks = []
        if options.only != "stream":
            checks += measure_polls(ports, pids, digest, epoch, size)
        if options.only != "polls":
            checks += measure_stream(ports, pids, epoch, size)
    return output.finish(checks)


if __name__ == "__main__":
    raise SystemExit(main())
