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
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import coordinator
from checks import Check, at_least, at_most
from coordinator import BODY_BYTES, CONNECTIONS, WORKERS, asked, bench_run, make_uploads, send_all
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


async def send_to(ports: Sequence[int], requests: Sequence[bytes]) -> list[bytes]:
    """Send requests over CONNECTIONS connections to each of the ports."""
    parts = [requests[place :: len(ports)] for place in range(len(ports))]
    answers = await asyncio.gather(*(send_all(port, part) for port, part in zip(ports, parts, strict=True)))
    return [answer for part in answers for answer in part]


def measured(ports: Sequence[int], writer: int, requests: Sequence[bytes]) -> tuple[float, float]:
    """Return requests a second, and the writer's processor time of each in microseconds."""
    before_s, began_s = processor_s(writer), time.perf_counter()
    asyncio.run(send_to(ports, requests))
    taken_s = time.perf_counter() - began_s
    return len(requests) / taken_s, 1e6 * (processor_s(writer) - before_s) / len(requests)


def measure_gateways(folder: Path, *, quick: bool) -> list[Check]:
    """Measure heartbeats, leases and uploads, without gateways and with two."""
    count, num_uploads = (2_000, 64) if quick else (10_000, 512)
    with contextlib.ExitStack() as stack:
        (port, link_port), writer = stack.enter_context(started(serve_writer, str(folder / "writer")))
        gateways = [
            port_of(stack.enter_context(started(serve_one_gateway, link_port, str(folder / "writer" / "bundles")))[0])
            for _ in range(NUM_GATEWAYS)
        ]
        digest, epoch = asyncio.run(coordinator.join_and_publish(port))
        found: dict[str, tuple[float, float]] = {}
        for name, ports in (("one process", [port]), ("two gateways", gateways)):
            beats = [asked("/v1/heartbeat", HEARTBEAT, WORKERS[i % CONNECTIONS], epoch) for i in range(count)]
            found[f"heartbeats, {name}"] = measured(ports, writer, beats)
            ask = LeaseRequest(policy_version=0, policy_digest=digest, rollouts_max=8)
            asks = [asked("/v1/lease", ask, WORKERS[i % CONNECTIONS], epoch) for i in range(num_uploads)]
            found[f"leases, {name}"] = measured(ports, writer, asks)
            each = [make_uploads(one, digest, epoch, num_uploads // len(ports)) for one in ports]
            uploads = [upload for several in zip(*each, strict=True) for upload in several]
            found[f"uploads of {BODY_BYTES // 1_024} KiB, {name}"] = measured(ports, writer, uploads)
    for name, (per_s, writer_us) in found.items():
        print(f"{name}: {per_s:,.0f}/s, {writer_us:,.0f} us of the writer's processor", flush=True)
    times = found["heartbeats, two gateways"][0] / found["heartbeats, one process"][0]
    bars = {
        "heartbeats": HEARTBEAT_US_MAX,
        "leases": LEASE_US_MAX,
        f"uploads of {BODY_BYTES // 1_024} KiB": UPLOAD_US_MAX,
    }
    return [
        at_least("heartbeats a second, two gateways by one process", times, TIMES_MIN),
        *(
            at_most(f"{name} behind gateways, us of the writer's processor", found[f"{name}, two gateways"][1], bar)
            for name, bar in bars.items()
        ),
    ]


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory(prefix="gateways-") as temporary:
        for check in measure_gateways(Path(temporary), quick="--quick" in sys.argv):
            print(check)
