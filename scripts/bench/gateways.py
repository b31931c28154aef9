"""Two gateways in front of a writer against one process: requests a second, and the writer's processor time for each request.

thousands.py runs this. The daemon (SQLite, folders) and the gateways are processes; the load comes from this one, over kept
connections, with everything signed in advance. On a machine of two cores all of them share these, so requests a second say
little; the writer's processor time says how many gateways it could serve. Gateways store bundles themselves, as they do in a
bucket, and get those of the leases that they passed on, since a client stays with its address.

The writer commits at most every 5 ms, and gateways send eight heartbeats in one call. How many leases share a commit depends on
the machine: compare two releases by turns on one.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import coordinator
from checks import Check, at_least, at_most
from coordinator import BODY_BYTES, CONNECTIONS, WORKERS, asked, bench_run, make_uploads
from processes import processor_s, started, use_fast_loop
from tests.node.coordinator_world import HEARTBEAT, folder_parts, make_run
from tests.node.gateway_world import LISTENS, gateway_parts, hearing, serving

from prime_node.adapters.storage.folder_blobs import FolderBlobs
from prime_node.coordinator.assembly import Parts
from prime_node.coordinator.daemon import serve_coordinator
from prime_node.coordinator.gateway.daemon import GatewayParts
from prime_protocol.requests import LeaseRequest

NUM_GATEWAYS = 2
FREE: dict[str, Any] = {"requests_per_second": 1e9, "faults_per_second": 1e9, "connects_per_second": 1e9}
"""Settings of a coordinator or gateway that limit no rate."""
TICK_SECONDS = 0.5
"""As by default: ticks for tests cost 6 ms in each second."""
TIMES_MIN, HEARTBEAT_US_MAX, LEASE_US_MAX, UPLOAD_US_MAX = 1.5, 35.0, 260.0, 290.0


def serve_hearing(make_parts: Callable[[], Awaitable[Parts]], pipe: Connection) -> None:
    """Serve a coordinator that hears gateways, as a process of its own; send both of its ports."""
    use_fast_loop()

    async def main() -> None:
        parts, server = hearing(await make_parts())
        await serve_coordinator(parts, asyncio.Event(), ready=lambda port: pipe.send((port, server.port)))

    asyncio.run(main())


def serve_linked(make_parts: Callable[[], GatewayParts], pipe: Connection) -> None:
    """Serve a gateway, as a process of its own; send its URL."""
    use_fast_loop()

    async def main() -> None:
        async with serving(make_parts()) as url:
            pipe.send(url)
            await asyncio.Event().wait()

    asyncio.run(main())


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


def serve_writer(folder: str, pipe: Connection) -> None:
    bounds = {**FREE, "snapshot_events": 1_000_000, "tick_seconds": TICK_SECONDS}
    serve_hearing(lambda: folder_parts(make_run(**bench_run()), Path(folder), **LISTENS, **bounds), pipe)


def serve_one_gateway(writer_port: int, folder: str, pipe: Connection) -> None:
    """Serve a gateway that stores bundles itself, in the writer's folder as others do in its bucket."""
    run, bundles = make_run(**bench_run()), Path(folder)
    serve_linked(lambda: gateway_parts(run, [writer_port], bundles=FolderBlobs(bundles), **FREE), pipe)


class Sender:
    """One kept connection: its next request leaves once the last one is answered."""

    def __init__(self, port: int, todo: Iterator[bytes]) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._todo, self._answer = todo, b""

    def send(self) -> bool:
        """Send the next request; return whether there was one."""
        request = next(self._todo, None)
        if request is not None:
            self.socket.sendall(request)
        return request is not None

    def receive(self) -> bool:
        """Read what has come; return whether the answer is complete. Fails if it is not 200."""
        self._answer += self.socket.recv(2**20)
        head, found, body = self._answer.partition(b"\r\n\r\n")
        if not found or len(body) < int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0]):
            return False
        assert head.startswith(b"HTTP/1.1 200"), self._answer
        self._answer = b""
        return True


def send_to(ports: Sequence[int], requests: Sequence[bytes]) -> None:
    """Send requests over CONNECTIONS connections to each of the ports.

    A plain loop of sockets: an event loop of asyncio would take as much of the second core as a gateway does.
    """
    todos = [iter(requests[place :: len(ports)]) for place in range(len(ports))]
    senders = [Sender(port, todo) for port, todo in zip(ports, todos, strict=True) for _ in range(CONNECTIONS)]
    by_number = {sender.socket.fileno(): sender for sender in senders if sender.send()}
    with select.epoll() as ready:
        for number in by_number:
            ready.register(number, select.EPOLLIN)
        num_waiting = len(by_number)
        while num_waiting:
            for number, _ in ready.poll():
                if by_number[number].receive() and not by_number[number].send():
                    num_waiting -= 1
    for sender in senders:
        sender.socket.close()


Measured = dict[str, float]
"""Requests a second, and the microseconds of processor time that each request took of each part."""


def measured(ports: Sequence[int], pids: Mapping[str, Sequence[int]], requests: Sequence[bytes]) -> Measured:
    """Send requests, and measure what they take of the processes of each part and of this one, the load's."""

    def spent_s() -> dict[str, float]:
        return {"load": time.process_time(), **{name: sum(map(processor_s, each)) for name, each in pids.items()}}

    before, began_s = spent_s(), time.perf_counter()
    send_to(ports, requests)
    per_s = len(requests) / (time.perf_counter() - began_s)
    return {"per_s": per_s} | {name: 1e6 * (s - before[name]) / len(requests) for name, s in spent_s().items()}


def measure_gateways(folder: Path, *, quick: bool) -> list[Check]:
    """Measure heartbeats, leases and uploads, without gateways and with two."""
    count, num_uploads = (2_000, 64) if quick else (10_000, 512)
    with contextlib.ExitStack() as stack:
        (port, link_port), writer = stack.enter_context(started(serve_writer, str(folder / "writer")))
        gateways = [
            stack.enter_context(started(serve_one_gateway, link_port, str(folder / "writer" / "bundles")))
            for _ in range(NUM_GATEWAYS)
        ]
        pids = {"writer": [writer], "gateways": [pid for _, pid in gateways]}
        digest, epoch = asyncio.run(coordinator.join_and_publish(port))
        found: dict[str, Measured] = {}
        for name, ports in (("one process", [port]), ("two gateways", [port_of(url) for url, _ in gateways])):
            beats = [asked("/v1/heartbeat", HEARTBEAT, WORKERS[i % CONNECTIONS], epoch) for i in range(count)]
            found[f"heartbeats, {name}"] = measured(ports, pids, beats)
            ask = LeaseRequest(policy_version=0, policy_digest=digest, rollouts_max=8)
            asks = [asked("/v1/lease", ask, WORKERS[i % CONNECTIONS], epoch) for i in range(num_uploads)]
            found[f"leases, {name}"] = measured(ports, pids, asks)
            several = [make_uploads(one, digest, epoch, num_uploads // len(ports)) for one in ports]
            uploads = [upload for each in zip(*several, strict=True) for upload in each]
            found[f"uploads of {BODY_BYTES // 1_024} KiB, {name}"] = measured(ports, pids, uploads)
    for name, each in found.items():
        parts = ", ".join(f"{part} {us:,.0f}" for part, us in each.items() if part != "per_s")
        print(f"{name}: {each['per_s']:,.0f}/s; us of processor: {parts}", flush=True)
    times = found["heartbeats, two gateways"]["per_s"] / found["heartbeats, one process"]["per_s"]
    bars = {
        "heartbeats": HEARTBEAT_US_MAX,
        "leases": LEASE_US_MAX,
        f"uploads of {BODY_BYTES // 1_024} KiB": UPLOAD_US_MAX,
    }
    return [
        at_least("heartbeats a second, two gateways by one process", times, TIMES_MIN),
        *(
            at_most(
                f"{name} behind gateways, us of the writer's processor", found[f"{name}, two gateways"]["writer"], bar
            )
            for name, bar in bars.items()
        ),
    ]


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory(prefix="gateways-") as temporary:
        for check in measure_gateways(Path(temporary), quick="--quick" in sys.argv):
            print(check)
