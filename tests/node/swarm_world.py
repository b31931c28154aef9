"""A swarm on loopback: a real coordinator, the trainer's seeder and workers' followers, each a separate peer over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.builder import base_of, build_manifest, provenance
from tests.node.coordinator_world import ANNA, BEN, CONFIG_JSON, TRAINER, World, make_run, memory_parts, running
from tests.time_world import until

from prime_node.adapters.system_clock import SystemClock
from prime_node.adapters.web.aiohttp_server import AiohttpServer
from prime_node.adapters.web.http_client import HttpClient
from prime_node.adapters.web.http_peer import HttpDialBack
from prime_node.broadcast.follow.follower import Follower
from prime_node.broadcast.seed.seeding import Seeding
from prime_node.broadcast.swarm.neighbours import Neighbours
from prime_node.broadcast.swarm.peer import Peer
from prime_node.broadcast.swarm.swarm_config import SwarmConfig
from prime_node.cli import wire_swarm
from prime_node.ports.transport import Unreachable
from prime_node.ports.web import CallerBounds, Request, Response, Route
from prime_node.worker.config import WorkerConfig
from prime_protocol.checkpoint import encode_checkpoint
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.identity import SigningKey
from prime_protocol.manifest import SignedManifest, sign_manifest
from prime_protocol.run_spec import PinnedRun
from prime_protocol.weights import Weights, WeightTensor

CORA = SigningKey(bytes([77]) * 32)
LOCAL = SwarmConfig(host="127.0.0.1", p2p="off", p2p_lan=False)
NUM_TENSORS, ELEMENTS = 24, 2**15


def policy_weights(version: int) -> Weights:
    """Return about 1.5 MB of incompressible weights: 24 pieces. A tenth of the tensors changes with each version."""
    made = {}
    for number in range(NUM_TENSORS):
        changed = version if number % 8 == version % 8 else number % 8
        words = np.random.default_rng([number, changed]).integers(0, 2**16, ELEMENTS, dtype=np.uint16)
        made[f"layer{number}"] = WeightTensor("bf16", (ELEMENTS,), words)
    return made


class CutServer(AiohttpServer):
    """Server of a coordinator whose chunk endpoint can fail."""

    is_cut = False
    num_bytes = 0
    """Bytes of requested blobs."""

    async def start(
        self,
        routes: Sequence[Route],
        *,
        host: str,
        port: int,
        bounds: CallerBounds | None = None,
        bound: socket.socket | None = None,
        may_send: Callable[[], bool] | None = None,
    ) -> int:
        return await super().start(
            [self._cuttable(route) for route in routes],
            host=host,
            port=port,
            bounds=bounds,
            bound=bound,
            may_send=may_send,
        )

    def _cuttable(self, route: Route) -> Route:
        if (route.method, route.path) != ("GET", "/v1/blobs/{digest}"):
            return route

        async def handle(request: Request) -> Response:
            if self.is_cut:
                raise RemoteError(ErrorCode.UNAVAILABLE, "no chunks here any more")
            response = await route.handler(request)
            self.num_bytes += int(response.headers["Content-Length"])
            return response

        return dataclasses.replace(route, handler=handle)


@dataclass
class Swarm:
    """The coordinator's world and its peers."""

    world: World
    chunks: CutServer
    seeding: Seeding
    seeder: Peer
    folder: Path
    stack: contextlib.AsyncExitStack
    head: SignedManifest | None = None
    weights: Weights = field(default_factory=dict)
    workers: list[tuple[Follower, Peer]] = field(default_factory=list)
    clients: dict[str, HttpClient] = field(default_factory=dict)
    """HTTP clients of the workers to the coordinator, by key."""

    async def publish(
        self, *, delta: bool = False, weights: Weights | None = None, is_coordinator_lost: bool = False
    ) -> SignedManifest:
        """Publish the next policy through the trainer's seeder, as the publisher does. The coordinator may fail in the middle."""
        version = 0 if self.head is None else self.head.manifest.policy_version + 1
        if self.head is None:
            await self.world.join(ANNA)
        else:
            self.world.head = self.head
            await self.world.fill(version - 1)
        weights = policy_weights(version) if weights is None else weights
        base = None
        if delta and self.head is not None:
            base = base_of(self.head), self.weights
        encoded = encode_checkpoint(weights, base, part_bytes=2**19)
        manifest = build_manifest(
            self.world.run,
            self.head,
            weights,
            encoded,
            produced_by=provenance(version, batch=self.world.batch),
            created_at_ms=SystemClock().now_ms(),
        )
        self.head, self.weights = sign_manifest(manifest, TRAINER), weights
        for blob in encoded.blobs:
            await self.seeding.put_blob(blob)
        if is_coordinator_lost:
            await self.lose_coordinator()
            with pytest.raises(Unreachable):
                await self.seeding.publish(self.head.envelope)
        else:
            await self.seeding.publish(self.head.envelope)
        return self.head

    async def lose_coordinator(self) -> None:
        """Stop the coordinator on HTTP and libp2p."""
        await self.chunks.stop(grace_s=0.0)
        if self.world.parts.network is not None:
            await self.world.parts.network.close()

    async def worker(self, key: SigningKey, *, mirrors: tuple[str, ...] = (), **swarm: object) -> tuple[Follower, Peer]:
        """Start one more worker that follows the run."""
        run, folder = self.world.run, self.folder / key.key_id[-8:]
        client = await self.stack.enter_async_context(
            HttpClient(self.world.url, run=run.digest, clock=SystemClock(), key=key, bounds=run.spec.limits)
        )
        self.clients[key.key_id] = client
        settings = WorkerConfig(swarm=LOCAL.model_copy(update=swarm), poll_seconds=0.05, mirrors=mirrors)
        (folder / "model").mkdir(parents=True, exist_ok=True)
        (folder / "model" / "config.json").write_bytes(CONFIG_JSON)
        following = wire_swarm.swarm_follower(run, key, client, folder, settings)
        follower, _, peer = await self.stack.enter_async_context(following)
        assert peer is not None
        task = asyncio.create_task(follower.follow())
        self.stack.push_async_callback(ended, task)
        self.workers.append((follower, peer))
        return follower, peer


async def ended(task: asyncio.Task[None]) -> None:
    """Cancel a task. Fail if it has already ended."""
    assert not task.done(), task
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@contextlib.asynccontextmanager
async def swarm(
    folder: Path, *keys: SigningKey, seeder: SwarmConfig = LOCAL, run: PinnedRun | None = None, **replaced: Any
) -> AsyncIterator[Swarm]:
    """Start a coordinator with some parts replaced, a trainer's seeder, and a worker for each key."""
    server, run = CutServer(), run or make_run()
    members = [
        key.key_id for key in (*WORKERS, *keys)
    ]  # like members named by the operator: no test sends heartbeats for them
    own = {"web": server, "dial_back": HttpDialBack(run.digest)}
    parts = dataclasses.replace(memory_parts(run, seeders=members), **{**own, **replaced})
    await parts.public.put(CONFIG_JSON)
    async with running(parts) as world, contextlib.AsyncExitStack() as stack:
        client = world.client(TRAINER)
        seeding, peer = wire_swarm.trainer_seeding(run, TRAINER, client, seeder, folder / "trainer")
        await stack.enter_async_context(peer.running())
        made = Swarm(world, server, seeding, peer, folder, stack)
        for key in keys:
            await made.worker(key)
        yield made


async def linked(made: Swarm) -> None:
    """Wait until every worker is linked to the seeder and all other serving workers."""
    serving = sum(not peer.config.private for _, peer in made.workers) + 1
    for _, peer in made.workers:
        assert peer.neighbours is not None
        wanted = serving - (not peer.config.private)
        await until(functools.partial(_has_links, peer.neighbours, wanted))


def _has_links(neighbours: Neighbours, wanted: int) -> bool:
    return len(neighbours.linked) == wanted


def from_peers(follower: Follower, origin: str) -> int:
    """Return the bytes of pieces received from other peers."""
    received: Mapping[str, int] = follower.received
    return sum(num_bytes for name, num_bytes in received.items() if name != origin)


WORKERS = (ANNA, BEN, CORA)
