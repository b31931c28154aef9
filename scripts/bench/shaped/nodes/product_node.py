"""This project, wired as the CLI does it: coordinator and trainer's seeder on the origin, workers' followers everywhere else.

At `go` the trainer publishes a policy whose blobs it has uploaded before; workers that wait for a newer head are notified, fetch
its pieces from each other, verify, store and decode them. One is done when every piece is verified and on its disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import gc
import time
from pathlib import Path
from types import SimpleNamespace

import uvloop
from marks import description, mark, until_everyone, until_go, wait_until_over

from prime_node.adapters.system_clock import SystemClock
from prime_node.adapters.web.http_client import HttpClient
from prime_node.broadcast.follow.follower import DownloadProgress
from prime_node.broadcast.swarm import directory, topology
from prime_node.broadcast.swarm.part_store import PartStore
from prime_node.broadcast.swarm.peer import Peer
from prime_node.broadcast.swarm.swarm_config import SwarmConfig
from prime_node.cli import wire_swarm
from prime_node.ports.peer_network import PeerNetwork
from prime_node.worker.config import WorkerConfig
from prime_protocol.codec.compiling import ready_decoder
from prime_protocol.envelope import open_envelope
from prime_protocol.identity import SigningKey
from prime_protocol.manifest import open_manifest
from prime_protocol.run_spec import open_run_spec

LINK_S_MAX, LINKS_S_MAX = 20.0, 120.0
"""Seconds without a further link, and seconds at all, after which a receiver begins, even if it has not linked to all others."""
NODE = description()
POLICY = Path(NODE.file).parent
RUN_ENVELOPE = open_envelope((POLICY / "run").read_bytes())
RUN = open_run_spec(RUN_ENVELOPE, pinned=RUN_ENVELOPE.digest)
CONFIG_JSON = (POLICY / "config.json").read_bytes()


async def publish(node: SimpleNamespace) -> None:
    from tests.node.coordinator_world import TRAINER, folder_parts

    from prime_node.adapters.web.http_peer import HttpDialBack
    from prime_node.coordinator.daemon import serve_coordinator

    parts = await folder_parts(
        RUN,
        Path("coordinator"),
        host="0.0.0.0",
        port=node.port,
        requests_per_second=1e9,
        faults_per_second=1e9,
        seeders=[key_of(number).key_id for number in range(1, len(node.receivers) + 1)],  # members, as workers are
        **node.options.get("coordinator", {}),
    )
    network = meeting_place(node)
    parts = dataclasses.replace(parts, dial_back=HttpDialBack(RUN.digest), network=network)
    if network is not None:
        from prime_node.adapters.peers.libp2p_dial_back import Libp2pDialBack

        parts = dataclasses.replace(parts, dial_back_libp2p=Libp2pDialBack())
    await parts.public.put(CONFIG_JSON)
    up = asyncio.get_running_loop().create_future()
    daemon = asyncio.create_task(serve_coordinator(parts, asyncio.Event(), ready=up.set_result))
    await asyncio.wait({daemon, up}, return_when=asyncio.FIRST_COMPLETED)
    envelope = open_envelope((POLICY / "manifest").read_bytes())
    url = f"http://{node.address}:{node.port}"
    async with HttpClient(url, run=RUN.digest, clock=SystemClock(), key=TRAINER, bounds=RUN.spec.limits) as client:
        seeding, peer = wire_swarm.trainer_seeding(RUN, TRAINER, client, swarm_config(node, is_seeder=True), Path())
        async with peer.running():
            for blob in open_manifest(envelope, RUN).manifest.blobs:
                await seeding.put_blob((POLICY / "blobs" / blob.digest).read_bytes())
            mark("ready")
            await until_go(node)
            await seeding.publish(envelope)
            await daemon


def key_of(number: int) -> SigningKey:
    """Return the key of a receiver."""
    return SigningKey(bytes([100 + number]) * 32)


def meeting_place(node: SimpleNamespace) -> PeerNetwork | None:
    """If a host is behind a NAT, the coordinator has a libp2p host: a relay over which holes are punched."""
    if not node.has_nat:
        return None
    from tests.node.coordinator_world import COORDINATOR

    from prime_node.adapters.peers.libp2p_host import PeerSettings
    from prime_node.adapters.peers.libp2p_network import Libp2pNetwork

    settings = PeerSettings(listen=(f"/ip4/{node.address}/tcp/{node.port + 2}",), relay=True)
    return Libp2pNetwork(COORDINATOR, run=RUN.digest, settings=settings)


async def receive(node: SimpleNamespace) -> None:
    ready_decoder()  # a worker at its second policy has imported numba
    all_here = asyncio.Event()

    def on_progress(progress: DownloadProgress) -> None:
        if progress.bytes_done == progress.bytes_total:
            mark("done")
            all_here.set()

    folder = Path("worker")
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "config.json").write_bytes(CONFIG_JSON)
    settings = WorkerConfig(swarm=swarm_config(node, is_seeder=False))
    key = key_of(node.index)
    url = f"http://{node.origin}:{node.port}"
    async with contextlib.AsyncExitStack() as stack:
        client = await stack.enter_async_context(
            HttpClient(url, run=RUN.digest, clock=SystemClock(), key=key, bounds=RUN.spec.limits)
        )
        following = wire_swarm.swarm_follower(RUN, key, client, folder, settings, on_progress=on_progress)
        follower, _, peer = await stack.enter_async_context(following)
        assert peer is not None
        if node.poisoned:
            poison(peer)
        task = asyncio.create_task(follower.follow())
        mark("up")
        await until_everyone(node)
        if node.is_on_time:
            await linked(peer, min(node.num_links, settings.swarm.neighbours_max))
        directory.ASK_S_MAX = 30.0  # as for a worker that knows all peers
        gc.freeze()  # as lifetime.py does for a role that has run for a minute
        mark("ready")
        here = asyncio.create_task(all_here.wait())
        await asyncio.wait({task, here}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()  # a follower ends only by a fault of this machine, or of ours
        await follower.wait_newer(-1)
        await asyncio.to_thread(write_out, node, follower.parts)
        print({name[-8:]: round(num_bytes / 1e6, 1) for name, num_bytes in follower.received.items()}, flush=True)
        await task


async def seed(node: SimpleNamespace) -> None:
    """Run as `prime-node seed`: keep and serve everything, decode nothing."""
    folder = Path("seeder")
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "config.json").write_bytes(CONFIG_JSON)
    settings = WorkerConfig(swarm=swarm_config(node, is_seeder=False))
    key = key_of(node.index)
    url = f"http://{node.origin}:{node.port}"
    async with (
        HttpClient(url, run=RUN.digest, clock=SystemClock(), key=key, bounds=RUN.spec.limits) as client,
        wire_swarm.seeder(RUN, key, client, folder, settings) as (mirror, peer),
    ):
        task = asyncio.create_task(mirror.follow())
        mark("up")
        await until_everyone(node)
        await linked(peer, min(node.num_links, settings.swarm.neighbours_max))
        mark("ready")
        while mirror.seed_store.newest < 0:  # noqa: ASYNC110 - it notifies its peers, not this process
            await asyncio.sleep(0.004)
        mark("done")
        await asyncio.to_thread(write_out, node, mirror.parts)
        await task


def spread_by(node: SimpleNamespace) -> None:
    """Send everything down the tree, where the row compares the two. The tree's parents are those of the product."""
    if node.options.get("is_tree"):
        topology.TopologyRules = functools.partial(topology.TopologyRules, tree_bytes_max=2**30, tree_peers_min=2)  # type: ignore[misc, assignment]


def swarm_config(node: SimpleNamespace, *, is_seeder: bool) -> SwarmConfig:
    """The defaults of a trainer and of a worker, but for what the row asks."""
    default = WorkerConfig().swarm
    if is_seeder:
        from prime_node.trainer.config import TrainerConfig

        default = TrainerConfig().swarm
    p2p = {"p2p": "on", "p2p_listen": (f"/ip4/0.0.0.0/tcp/{node.port + 3}",)} if node.has_nat else {"p2p": "off"}
    asked = p2p | node.options.get("seeder" if is_seeder else "worker", {})
    return default.model_copy(update={"host": "0.0.0.0", "port": node.port + 1, **asked})


def poison(peer: Peer) -> None:
    """From here on, every answer has a wrong byte in its middle."""
    honest = peer.service.parts.get

    def get(digest: str, start: int, end: int) -> bytes | None:
        data = honest(digest, start, end)
        if not data:
            return data
        middle = len(data) // 2
        return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]

    peer.service.parts = _Lying(get, peer.service.parts)  # type: ignore[assignment]


class _Lying:
    """A part store that answers `get` in another way."""

    def __init__(self, get: object, honest: object) -> None:
        self.get = self.get_cached = get
        self._honest = honest

    def __getattr__(self, name: str) -> object:
        return getattr(self._honest, name)


async def linked(peer: Peer, count: int) -> None:
    """Wait for so many links, or until there are no more to come, and leave a note of the share that was made."""
    assert peer.neighbours is not None
    most, end_s = 0, time.monotonic() + LINKS_S_MAX
    give_up_s = time.monotonic() + LINK_S_MAX
    while (made := len(peer.neighbours.linked)) < count and time.monotonic() < min(give_up_s, end_s):
        if made > most:
            most, give_up_s = made, time.monotonic() + LINK_S_MAX
        await asyncio.sleep(0.1)
    Path("linked").write_text(str(min(1.0, made / max(1, count))))  # noqa: ASYNC240 - a few bytes, before the race


def write_out(node: SimpleNamespace, parts: PartStore) -> None:
    """Write the bytes on the disk to a file, for the comparison after the race."""
    wait_until_over(node)
    policy = open_manifest(open_envelope((POLICY / "manifest").read_bytes()), RUN)
    with Path(node.out).open("wb") as out:
        for part in policy.manifest.encodings[0].parts:
            data = parts.read(part)
            assert data is not None
            out.write(data)
    mark("written")


if __name__ == "__main__":
    spread_by(NODE)
    directory.ASK_S_MAX = 1.0  # so that a race need not wait until all peers know each other
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        receiver = seed if NODE.options.get("is_seeder") else receive
        runner.run(publish(NODE) if NODE.role == "origin" else receiver(NODE))
