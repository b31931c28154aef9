"""Capacity of one coordinator process: heartbeats, uploads of 256 KiB, leases of the demo's size, state machine events.

    python scripts/bench/coordinator.py [--quick] [--json]

The real daemon (SQLite, folders, signatures, uvloop where it is installed) is a separate process. The baseline is a bare aiohttp
server: it answers heartbeats with a fixed text, and uploads by a durable write of the body through the same adapter, unchecked.
The load comes from this process over raw sockets, with everything signed in advance, so on two cores the server has one of them.
Each figure is the median of three rounds, with the spread.

The last part measures, in this process, the cost of a lease when many handlers wait for one. Each time a lease is handed back,
the handler that waits longest wakes, is granted its group, and waits again. Leases per processor time, with 20 and 2,000 waiters.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from checks import Output, at_least
from processes import started, use_fast_loop
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

from prime_node.adapters.storage.folder_blobs import FolderBlobs
from prime_node.broadcast.routes import UpdateRoute
from prime_node.coordinator.assembly import open_coordinator
from prime_node.coordinator.daemon import serve_coordinator
from prime_node.coordinator.state import events as ev
from prime_node.coordinator.state.records import State
from prime_node.coordinator.state.rules import SchedulerRules
from prime_node.coordinator.state.scheduler import Grant, choose_slots
from prime_node.coordinator.state.tick import tick
from prime_protocol.assignment import Lease, Sampling
from prime_protocol.body_claim import CLAIM_HEADER, REQUEST_HEADER, claim_of
from prime_protocol.envelope import PayloadType, open_envelope, parse_json, seal
from prime_protocol.identity import SigningKey
from prime_protocol.limits import WAIT_S_MAX, Limits
from prime_protocol.requests import JoinRequest, LeaseRequest, Request, ReturnLeaseRequest, Stamped

CONNECTIONS = 8
ROUNDS = 3
BODY_BYTES = 256 * 2**10
WORKERS = [SigningKey(bytes([100 + number]) * 32) for number in range(CONNECTIONS)]


def bench_run() -> dict[str, object]:
    bounds = Limits(leases_per_worker_max=1_024, bundles_pending_per_worker_max=1_024)
    sampling = Sampling(
        completion_tokens_max=2_048, stop_token_ids=(STOP_TOKEN,)
    )  # a bundle may be as large as BODY_BYTES
    sizes = {"groups_per_step": 48 * 64, "rollouts_per_group": 8}
    return {**sizes, "heartbeat_seconds": 60.0, "limits": bounds, "sampling": sampling}


async def serve_daemon(folder: Path, ready: Callable[[int], None]) -> None:
    parts = await folder_parts(
        make_run(**bench_run()), folder, requests_per_second=1e9, faults_per_second=1e9, snapshot_events=1_000_000
    )
    await serve_coordinator(parts, asyncio.Event(), ready=ready)


async def serve_bare(folder: Path, ready: Callable[[int], None]) -> None:
    from aiohttp import web

    blobs = FolderBlobs(folder)

    async def heartbeat(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=b'{"step":0,"head":0,"draining":false,"notice":""}', content_type="application/json")

    async def upload(request: web.Request) -> web.Response:
        return web.json_response({"bundle": await blobs.put(await request.read())})

    app = web.Application(client_max_size=2**24)
    app.add_routes([web.post("/v1/heartbeat", heartbeat), web.post("/v1/rollouts", upload)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    ready(runner.addresses[0][1])
    await asyncio.Event().wait()


def run_server(kind: str, folder: str, pipe: Connection) -> None:
    use_fast_loop()
    server = {"daemon": serve_daemon, "bare": serve_bare}[kind]
    asyncio.run(server(Path(folder), pipe.send))


def http(path: str, body: bytes, *fields: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: bench", f"Content-Length: {len(body)}", *fields, "\r\n"]
    return "\r\n".join(lines).encode() + body


def asked(path: str, message: Request, key: SigningKey, epoch: str, *, run: str = "") -> bytes:
    """A signed request as clients send it: in a header. `run` is the digest of another run than `bench_run`'s."""
    return http(path, b"", f"{REQUEST_HEADER}: {signed(message, key, epoch, run=run).decode()}")


def announced(path: str, body: bytes, key: SigningKey, epoch: str) -> bytes:
    """A body behind the header that announces it."""
    claim = claim_of(
        body,
        key,
        run=make_run(**bench_run()).digest,
        action=path.removeprefix("/v1/"),
        nonce=secrets.token_hex(16),
        now_ms=time.time_ns() // 1_000_000,
        epoch=epoch,
    )
    return http(path, body, f"{CLAIM_HEADER}: {claim}")


async def send_all(port: int, requests: Sequence[bytes], *, connections: int = CONNECTIONS) -> list[bytes]:
    """All requests over some connections; the answers in order. Fails on the first that is not 200."""
    answers: list[bytes] = [b""] * len(requests)
    todo = iter(range(len(requests)))

    async def connection() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**24)
        for index in todo:
            writer.write(requests[index])
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
            answers[index] = await reader.readexactly(length)
            assert head.startswith(b"HTTP/1.1 200"), answers[index]
        writer.close()

    await asyncio.gather(*(connection() for _ in range(connections)))
    return answers


def signed(message: Request, key: SigningKey, epoch: str, *, run: str = "") -> bytes:
    stamped = Stamped(
        run=run or make_run(**bench_run()).digest,
        nonce=secrets.token_hex(16),
        issued_at_ms=time.time_ns() // 1_000_000,
        epoch=epoch,
        request=message,
    )
    return seal(stamped, PayloadType.REQUEST, key).to_bytes()


def timed(port: int, rounds: Sequence[Sequence[bytes]]) -> list[float]:
    """Requests per second of each round."""
    rates = []
    for requests in rounds:
        began = time.perf_counter()
        asyncio.run(send_all(port, requests))
        rates.append(len(requests) / (time.perf_counter() - began))
    return rates


async def join_and_publish(port: int) -> tuple[str, str]:
    """All workers in, policy 0 out; returns its digest, and the coordinator's epoch."""
    import aiohttp

    run = make_run(**bench_run())
    async with aiohttp.ClientSession() as session:
        world = World(run, memory_parts(run), f"http://127.0.0.1:{port}", session)
        manifest = await world.publish()
        await world.learn_epoch()
        for client in world.clients.values():
            await client.close()
    join = JoinRequest(name="bench", software="1", engine=ENGINE, rollouts_max=128)
    await send_all(port, [asked("/v1/join", join, key, world.epoch) for key in WORKERS])
    return manifest.digest, world.epoch


def bench_http(num_heartbeats: int, num_uploads: int) -> dict[str, list[float]]:
    """All that goes over a socket, the daemon and the bare server by turns."""
    rates: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        with started(run_server, "daemon", f"{folder}/daemon") as (port, _):
            digest, epoch = asyncio.run(join_and_publish(port))
            ask = LeaseRequest(policy_version=0, policy_digest=digest, rollouts_max=128)
            beats = [
                [asked("/v1/heartbeat", HEARTBEAT, WORKERS[i % CONNECTIONS], epoch) for i in range(num_heartbeats)]
                for _ in range(ROUNDS)
            ]
            rates["heartbeats"] = timed(port, beats)
            asks = [[asked("/v1/lease", ask, key, epoch) for key in WORKERS] for _ in range(ROUNDS)]
            rates["leases"] = timed(port, asks)
            rates["uploads"] = timed(port, [make_uploads(port, digest, epoch, num_uploads) for _ in range(ROUNDS)])
        with started(run_server, "bare", f"{folder}/bare") as (port, _):
            rates["bare heartbeats"] = timed(port, beats)
            bodies = [[http("/v1/rollouts", os.urandom(BODY_BYTES)) for _ in range(num_uploads)] for _ in range(ROUNDS)]
            rates["bare uploads"] = timed(port, bodies)
    return rates


def make_uploads(port: int, digest: str, epoch: str, count: int) -> list[bytes]:
    """Parcels for fresh leases of one group each."""
    ask = LeaseRequest(policy_version=0, policy_digest=digest, rollouts_max=8)
    answers = asyncio.run(
        send_all(port, [asked("/v1/lease", ask, WORKERS[i % CONNECTIONS], epoch) for i in range(count)])
    )
    leases = [parse_json(open_envelope(answer).payload, Lease) for answer in answers]
    keys = {key.key_id: key for key in WORKERS}
    return [
        announced("/v1/rollouts", make_parcel(lease, key, body=os.urandom(BODY_BYTES)), key, epoch)
        for lease, key in ((lease, keys[lease.worker]) for lease in leases)
    ]


def bench_events(num_workers: int, steps: int) -> list[float]:
    """Events per second of the state machine with its scheduler: lease, upload, verdict, batch, manifest."""
    rates = []
    rules = SchedulerRules("r" * 64, 2, 1_024, 8, 10**6, 60_000, 2, 10**6, 64, 128)
    for _ in range(ROUNDS):
        state, number = State(rules), 0
        for index in range(num_workers):
            tick(state, ev.WorkerJoined(f"w{index}", "n", "1", "e", 128), 0)
        tick(state, ev.ManifestPublished(0, "d", (UpdateRoute(None, 1),)), 0)
        began = time.perf_counter()
        for step in range(steps):
            turn = 0
            while not state.is_ready(step):
                worker = f"w{turn % num_workers}"
                turn += 1
                found = choose_slots(state, state.workers[worker], policy_version=step, rollouts_max=8, now_ms=0)
                assert isinstance(found, Grant)
                lease, bundle = f"l{number}", f"b{number}"
                tick(state, ev.LeaseGranted(lease, worker, found.step, step, "d", found.slots, 60_000), 0)
                tick(state, ev.BundleArrived(bundle, lease, worker, 8 * len(found.slots), 1), 0)
                rewards = (1.0,) * (8 * len(found.slots))
                tick(state, ev.VerdictGiven(bundle, None, "", rewards, 64, "v"), 0)
                number += 3
            tick(state, ev.BatchFixed(step, tuple(range(step * 1_024, (step + 1) * 1_024))), 0)
            tick(state, ev.ManifestPublished(step + 1, "d", (UpdateRoute(None, 1),)), 0)
            tick(state, ev.TrainerDurable(step), 0)
        rates.append(number / (time.perf_counter() - began))
    return rates


async def bench_waiting(num_waiting: int, num_leases: int) -> float:
    """Return the leases per second of processor time, while this many handlers wait for one."""
    run = make_run(groups_per_step=num_leases, rollouts_per_group=8, max_steps=1)
    coordinator = await open_coordinator(memory_parts(run))
    decisions, leasing = coordinator.decisions, coordinator.handlers.leasing
    names = [f"w{number}" for number in range(num_leases + num_waiting)]
    for name in names:
        decisions.decide(ev.WorkerJoined(name, name, "1", "e", 8))
    decisions.decide(ev.ManifestPublished(0, "d" * 64, (UpdateRoute(None, 1),)))
    ask = LeaseRequest(policy_version=0, policy_digest="d" * 64, rollouts_max=8, wait_s=WAIT_S_MAX)
    for name in names[:num_leases]:
        await leasing.lease(name, ask)
    held = list(decisions.state.leases)
    assert len(held) == num_leases, "somebody has more than one group"
    waiting = [asyncio.create_task(leasing.lease(name, ask)) for name in names[num_leases:]]
    await asyncio.sleep(0.1)
    began = time.process_time()
    for number, (name, lease_id) in enumerate(zip(names, held, strict=False)):
        await leasing.return_lease(name, ReturnLeaseRequest(lease_id=lease_id))
        for _ in range(16):  # turns of the loop, until one has it
            await asyncio.sleep(0)
        assert decisions.state.num_leases == num_leases + number + 1
        joined = f"late {number}"
        decisions.decide(ev.WorkerJoined(joined, joined, "1", "e", 8))
        waiting.append(asyncio.create_task(leasing.lease(joined, ask)))
        await asyncio.sleep(0)
    took = time.process_time() - began
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    return num_leases / took


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="about ten seconds")
    parser.add_argument("--json", action="store_true", help="print the checks alone, as JSON")
    options = parser.parse_args()
    output = Output(as_json=options.json)
    rates = bench_http(*((1_000, 80) if options.quick else (5_000, 300)))
    rates["events, 10 workers"] = bench_events(10, 10 if options.quick else 30)
    rates["events, 10,000 workers"] = bench_events(10_000, 10 if options.quick else 30)
    for _ in range(ROUNDS):
        for count in (20, 2_000):
            rate = asyncio.run(bench_waiting(count, 64 if options.quick else 256))
            rates.setdefault(f"leases by CPU, {count:,} wait", []).append(rate)
    median = {name: statistics.median(values) for name, values in rates.items()}
    checks = [
        ("heartbeats of the bare server's", median["heartbeats"] / median["bare heartbeats"], 0.12),
        ("uploads of 256 KiB of the bare server's", median["uploads"] / median["bare uploads"], 0.25),
        ("leases of 16 x 8 a second", median["leases"], 100.0),
        ("events a second", median["events, 10 workers"], 20_000.0),
        (
            "events with 10,000 workers of those with 10",
            median["events, 10,000 workers"] / median["events, 10 workers"],
            0.5,
        ),
        (
            "leases by processor time, 2,000 waiting of those with 20",
            median["leases by CPU, 2,000 wait"] / median["leases by CPU, 20 wait"],
            0.5,
        ),
    ]
    for name, values in rates.items():
        print(f"{name:26} {median[name]:10,.0f} /s   ({min(values):,.0f} to {max(values):,.0f})")
    return output.finish([at_least(name, value, bar) for name, value, bar in checks])


if __name__ == "__main__":
    raise SystemExit(main())
