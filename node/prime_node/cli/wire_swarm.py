"""The part of wire.py for the swarm: followers, seeders and their adapters. Imported on use."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from prime_node.cli.missing_extra import missing_extra
from prime_node.cli.wire import clock, trust
from prime_protocol.addresses import endpoint_of, place_of
from prime_protocol.errors import LocalError
from prime_protocol.identity import SigningKey
from prime_protocol.run_spec import PinnedRun

if TYPE_CHECKING:
    from prime_node.adapters.web.http_client import HttpClient
    from prime_node.broadcast.follow.follower import DownloadProgress, Follower
    from prime_node.broadcast.follow.trust import Trust
    from prime_node.broadcast.seed.mirror import Mirror
    from prime_node.broadcast.seed.seeding import Seeding
    from prime_node.broadcast.swarm.holdings import Holdings
    from prime_node.broadcast.swarm.part_store import PartStore
    from prime_node.broadcast.swarm.peer import Peer
    from prime_node.broadcast.swarm.sources import SourcePool
    from prime_node.broadcast.swarm.swarm_config import SwarmConfig
    from prime_node.patience import Switch
    from prime_node.ports.peer_network import PeerNetwork
    from prime_node.worker.config import WorkerConfig
    from prime_protocol.envelope import Envelope


class FollowerSettings(Protocol):
    """Settings of a worker and a validator for fetching policies."""

    @property
    def mirrors(self) -> tuple[str, ...]:
        """URLs that also serve the run's checkpoints. They are not trusted."""
        ...

    @property
    def swarm(self) -> SwarmConfig:
        """Settings of this peer in the swarm."""
        ...

    @property
    def poll_seconds(self) -> float:
        """Interval between two requests for the newest policy."""
        ...

    @property
    def policies_kept(self) -> int:
        """Number of policies held in memory."""
        ...

    @property
    def pieces_bytes_max(self) -> int:
        """Memory for pieces of a checkpoint during a download."""
        ...

    @property
    def parts_bytes_max(self) -> int:
        """Disk that downloaded parts may take."""
        ...


SEED_BYTES_MAX = 256 * 2**30
"""Disk limit for the trainer's own copy of its newest policies."""


@dataclass(frozen=True, slots=True)
class Served:
    """What a peer serves, and where it is stored."""

    holdings: Holdings
    parts: PartStore
    manifest: Callable[[int], Envelope | None]
    folder: Path
    """Folder of the role: the model files are in `model`, key rings and the newest timestamp in `trust`."""


def make_peer(
    run: PinnedRun,
    key: SigningKey,
    client: HttpClient,
    config: SwarmConfig,
    served: Served,
    *,
    folder: Path,
    pool: SourcePool | None = None,
    network: PeerNetwork | None = None,
) -> Peer:
    """Return a peer over HTTP, and over `network` with peers that HTTP does not reach; the peer starts and closes it.

    Without a `pool` to put neighbours into, the peer only serves.
    """
    from prime_node.adapters.web.aiohttp_server import AiohttpServer
    from prime_node.adapters.web.http_peer import HttpPeer
    from prime_node.broadcast.swarm.choker import ChokerRules
    from prime_node.broadcast.swarm.directory import Directory
    from prime_node.broadcast.swarm.gossiped_heads import AnnouncedHeads
    from prime_node.broadcast.swarm.mesh import Mesh
    from prime_node.broadcast.swarm.neighbours import Neighbours
    from prime_node.broadcast.swarm.network_peer import NetworkPeer, serve_over
    from prime_node.broadcast.swarm.peer import Peer
    from prime_node.broadcast.swarm.serving import PeerService
    from prime_node.broadcast.swarm.sources import NamedSource, SourceKind
    from prime_node.broadcast.swarm.topology import TopologyRules
    from prime_node.broadcast.swarm.uplink import DataCap, RateLimit, Uplink
    from prime_node.ports.swarm import PeerLink
    from prime_protocol.peers import PeerRecord

    def may_serve() -> bool:
        is_fetching = pool is not None and any(named.fetching for named in pool.all)
        return config.serve == "always" or not (is_fetching or os.getloadavg()[0] > (os.cpu_count() or 1) / 2)

    def gave(named: NamedSource, num_bytes: int) -> None:
        if named.kind is SourceKind.PEER:
            uplink.gave(named.name, num_bytes)

    def connect(record: PeerRecord) -> PeerLink | None:
        def shown() -> str | None:
            return directory.authorization(record.peer)

        if record.peer in run.keys.current.coordinator:
            return None  # the coordinator's libp2p host serves no bytes
        bounds = run.spec.limits
        if record.urls:
            if not directory.may_dial(record.urls[0]):
                return None  # the directory has checked it; this is a second check
            return HttpPeer(record.urls[0], run=run.digest, clock=clock(), bounds=bounds, authorization=shown)
        if network is not None and record.addresses:
            return NetworkPeer(network, record, bounds=bounds, authorization=shown)
        return None

    folder.mkdir(parents=True, exist_ok=True)
    cap_bytes = round(config.upload_gib_max * 2**30)
    uplink = Uplink(
        clock=clock(),
        rules=ChokerRules(slots=config.upload_slots),
        rate=RateLimit(config.upload_bytes_per_s, clock()),
        cap=DataCap(cap_bytes, days=config.cap_days, file=folder / "uploaded.json", clock=clock()),
        may_serve=may_serve,
    )
    directory = Directory(run, key, client, clock=clock(), rng=random.Random())
    service = PeerService(
        run, key, served.holdings, served.parts, uplink, clock(), served.manifest,
        peer_list=directory.list_for, met=directory.met, folder=served.folder,
    )  # fmt: skip
    if network is not None and not config.private:
        serve_over(network, service)
    neighbours = None
    if pool is not None:
        pool.gave = gave
        service.heard_of = pool.heard_of
        if config.download_bytes_per_s:
            pool.download_turn = RateLimit(config.download_bytes_per_s, clock()).take
        rules = TopologyRules(neighbours_max=config.neighbours_max)
        if network is not None:
            AnnouncedHeads(network, run, pool, clock())
        neighbours = Neighbours(directory, pool, connect, clock=clock(), rng=random.Random(), rules=rules)
    mesh = None if network is None else Mesh(run, network, directory, clock=clock(), rng=random.Random())
    return Peer(config, service, AiohttpServer(), directory, neighbours, network, mesh)


def peer_network(
    run: PinnedRun, key: SigningKey, config: SwarmConfig, coordinator_hosts: frozenset[str]
) -> PeerNetwork | None:
    """Return a libp2p network with the role's key; None if it is off or not installed.

    Raises LocalError if it is on and not installed, and for an address in the settings that other peers cannot use.
    """
    if config.p2p == "off":
        return None
    try:
        from prime_node.adapters.peers.libp2p_host import PeerSettings
        from prime_node.adapters.peers.libp2p_network import Libp2pNetwork
    except ImportError as error:
        if config.p2p == "on":
            raise missing_extra("p2p", "links over libp2p", error) from None
        return None
    from prime_node.ports.peer_network import PeerAddress

    try:
        bootstrap = tuple(PeerAddress.parse(text) for text in config.p2p_bootstrap)
    except ValueError as error:
        raise LocalError(f"swarm.p2p_bootstrap: {error}") from None
    require_tcp("swarm.p2p_announce", config.p2p_announce)
    require_tcp("swarm.p2p_bootstrap", [text for one in bootstrap for text in one.addresses])
    settings = PeerSettings(
        listen=() if config.private else config.p2p_listen,
        announce=config.p2p_announce,
        bootstrap=bootstrap,
        private=config.private,
        lan=config.p2p_lan,
        near=tuple(coordinator_hosts),
    )
    network = Libp2pNetwork(key, run=run.digest, settings=settings)
    network.learn(bootstrap)  # peers that a newcomer asks while no coordinator names any
    return network


def require_tcp(setting: str, addresses: Sequence[str]) -> None:
    """Check addresses. Raises LocalError for one without an IP address and TCP port: peers resolve no names."""
    for address in addresses:
        end = endpoint_of(address)
        if end is None or place_of(end.host) is None:
            raise LocalError(
                f"{setting}: {address!r} is not where peers could be sent; write for example /ip4/203.0.113.7/tcp/4001"
            )


@contextlib.asynccontextmanager
async def swarm_follower(
    run: PinnedRun,
    key: SigningKey,
    client: HttpClient,
    folder: Path,
    settings: FollowerSettings,
    *,
    accepted: Switch | None = None,
    on_progress: Callable[[DownloadProgress], None] = lambda progress: None,
) -> AsyncIterator[tuple[Follower, Trust, Peer | None]]:
    """Follow the coordinator, the mirrors that the owner names, and other peers.

    The model files are in `folder`/model. With `accepted`, this machine takes part in the swarm only while that switch is on.
    """
    from prime_node.broadcast.follow.follower import Follower

    async with contextlib.AsyncExitStack() as stack:
        sources = await _sources(stack, run, client, settings)
        trusted = await trust(run, sources, folder)
        follower = Follower(
            run,
            sources,
            folder / "checkpoints",
            clock=clock(),
            poll_s=settings.poll_seconds,
            policies_kept=settings.policies_kept,
            memory_bytes_max=settings.pieces_bytes_max,
            parts_bytes_max=settings.parts_bytes_max,
            on_progress=on_progress,
        )
        peer = None
        if settings.swarm.enabled:
            served = Served(follower.holdings, follower.parts, follower.manifest_at_hand, folder)
            network = peer_network(run, key, settings.swarm, client.hosts)
            peer = make_peer(
                run,
                key,
                client,
                settings.swarm,
                served,
                folder=folder / "swarm",
                pool=follower.pool,
                network=network,
            )
            peer.accepted = accepted
            await stack.enter_async_context(peer.running())
            if (neighbours := peer.neighbours) is not None:
                trusted.peers = lambda: list(zip(neighbours.linked, neighbours.links(), strict=True))
        yield follower, trusted, peer


def trainer_seeding(
    run: PinnedRun, key: SigningKey, client: HttpClient, config: SwarmConfig, folder: Path
) -> tuple[Seeding, Peer]:
    """Return the port through which the trainer publishes, and the peer that serves what it published."""
    from prime_node.broadcast.seed.seeding import Seeding
    from prime_node.broadcast.swarm.gossiped_heads import announce
    from prime_node.broadcast.swarm.holdings import Holdings
    from prime_node.broadcast.swarm.part_store import PartStore

    holdings, parts = Holdings(), PartStore(folder / "seed" / "parts", bytes_max=SEED_BYTES_MAX)
    seeding = Seeding(client, run, parts, holdings, folder=folder / "seed")
    served = Served(holdings, parts, seeding.shelf.manifest_at_hand, folder)
    network = peer_network(run, key, config, client.hosts)
    if network is not None:
        seeding.announce = partial(announce, network)
    return seeding, make_peer(run, key, client, config, served, folder=folder / "seed", network=network)


@contextlib.asynccontextmanager
async def mirror(
    run: PinnedRun, key: SigningKey, client: HttpClient, folder: Path, settings: WorkerConfig
) -> AsyncIterator[tuple[Mirror, Peer]]:
    """Run a seeder of others' policies: it stores and serves them without decoding. The model files are in `folder`/model."""
    from prime_node.broadcast.seed.mirror import Mirror

    async with contextlib.AsyncExitStack() as stack:
        sources = await _sources(stack, run, client, settings)
        await trust(run, sources, folder)
        made = Mirror(
            run,
            sources,
            folder / "checkpoints",
            clock=clock(),
            rng=random.Random(),
            memory_bytes_max=settings.pieces_bytes_max,
            parts_bytes_max=settings.parts_bytes_max,
        )
        served = Served(made.holdings, made.parts, made.shelf.manifest_at_hand, folder)
        network = peer_network(run, key, settings.swarm, client.hosts)
        peer = make_peer(
            run, key, client, settings.swarm, served, folder=folder / "swarm", pool=made.pool, network=network
        )
        await stack.enter_async_context(peer.running())
        yield made, peer


async def _sources(
    stack: contextlib.AsyncExitStack, run: PinnedRun, client: HttpClient, settings: FollowerSettings
) -> list[tuple[str, HttpClient]]:
    """Return the coordinator, and the mirrors that the contributor names."""
    from prime_node.adapters.web.http_client import HttpClient

    made = [(client.url, client)]
    for url in settings.mirrors:
        source = HttpClient(url, run=run.digest, clock=clock(), bounds=run.spec.limits)
        made.append((url, await stack.enter_async_context(source)))
    return made
