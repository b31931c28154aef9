"""The part of wire.py for the swarm: followers, seeders and their adapters. Imported on use."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from prime_node.cli.missing_extra import missing_extra, needing_extra
from prime_node.cli.wire import clock, trust
from prime_protocol.addresses import endpoint_of, place_of
from prime_protocol.errors import LocalError
from prime_protocol.identity import SigningKey
from prime_protocol.run_spec import PinnedRun

if TYPE_CHECKING:
    from prime_node.adapters.tcp_links import TcpLinks
    from prime_node.adapters.web.http_client import HttpClient
    from prime_node.broadcast.follow.follower import DownloadProgress, Follower
    from prime_node.broadcast.follow.trust import Trust
    from prime_node.broadcast.seed.seeder import Seeder
    from prime_node.broadcast.seed.seeding import Seeding
    from prime_node.broadcast.swarm.directory import Directory
    from prime_node.broadcast.swarm.have_set import HaveSet
    from prime_node.broadcast.swarm.neighbours import Neighbours
    from prime_node.broadcast.swarm.part_store import PartStore
    from prime_node.broadcast.swarm.peer import Peer
    from prime_node.broadcast.swarm.sources import SourcePool
    from prime_node.broadcast.swarm.swarm_config import SwarmConfig
    from prime_node.broadcast.swarm.swarm_tasks import SwarmTasks
    from prime_node.broadcast.swarm.uplink import Uplink
    from prime_node.patience import RateLimit, Switch
    from prime_node.ports.peer_network import PeerNetwork
    from prime_node.ports.swarm import PeerLink
    from prime_node.worker.config import WorkerConfig
    from prime_protocol.envelope import Envelope


class FollowerSettings(Protocol):
    """Settings of a worker and a validator for fetching policies."""

    @property
    def mirrors(self) -> tuple[str, ...]:
        """URLs that also serve the run's checkpoints. They are not trusted."""

    @property
    def swarm(self) -> SwarmConfig:
        """Settings of this peer in the swarm."""

    @property
    def poll_seconds(self) -> float:
        """Interval between two requests for the newest policy."""

    @property
    def policies_kept(self) -> int:
        """Number of policies held in memory."""

    @property
    def policies_bytes_max(self) -> int | None:
        """Memory for decoded policies; None: by what is available."""

    @property
    def parts_bytes_max(self) -> int:
        """Disk that downloaded parts may take."""


SEED_BYTES_MAX = 256 * 2**30
"""Disk limit for the trainer's own copy of its newest policies."""


@dataclass(frozen=True, slots=True)
class Served:
    """Content that a peer serves, and its storage."""

    have_set: HaveSet
    parts: PartStore
    manifest: Callable[[int], Envelope | None]
    folder: Path
    """Folder of the role: the model files are in `model`, key rings and the newest timestamp in `trust`."""


@dataclass(frozen=True, slots=True)
class PeerLinks:
    """Connections of a machine to other peers. They are made before the parts that fetch and serve over it."""

    network: PeerNetwork | None
    uplink: Uplink
    directory: Directory
    swarm_tasks: SwarmTasks
    tcp: TcpLinks
    """Connections over which others fetch."""
    neighbours: Neighbours | None = None
    """Links that fetch; None for a machine that only serves."""


def peer_links(
    run: PinnedRun,
    key: SigningKey,
    client: HttpClient,
    config: SwarmConfig,
    folder: Path,
    *,
    pool: SourcePool | None = None,
    on_fault: Callable[[int], None] = lambda num_faults: None,
) -> PeerLinks:
    """Return links over HTTP, and over libp2p with peers that HTTP does not reach. Nothing is started.

    Without a `pool` to put neighbours into, there are no links to fetch over.
    """
    from prime_node.adapters.tcp_links import TcpLinks
    from prime_node.adapters.web.http_peer import HttpPeer
    from prime_node.broadcast.swarm.choker import ChokerRules
    from prime_node.broadcast.swarm.directory import Directory
    from prime_node.broadcast.swarm.neighbours import Neighbours
    from prime_node.broadcast.swarm.network_peer import NetworkPeer
    from prime_node.broadcast.swarm.swarm_tasks import SwarmTasks
    from prime_node.broadcast.swarm.topology import TopologyRules
    from prime_node.broadcast.swarm.uplink import DataCap, Uplink
    from prime_node.patience import RateLimit
    from prime_protocol.peers import PeerRecord

    def may_serve() -> bool:
        is_fetching = pool is not None and any(named.fetching for named in pool.all)
        return config.serve == "always" or not (is_fetching or os.getloadavg()[0] > (os.cpu_count() or 1) / 2)

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

    tcp = TcpLinks()
    network = peer_network(run, key, config, client.hosts, tcp.add)
    folder.mkdir(parents=True, exist_ok=True)
    cap_bytes = round(config.upload_gib_max * 2**30)
    uplink = Uplink(
        clock=clock(),
        rules=ChokerRules(slots=config.upload_slots),
        rate=RateLimit(config.upload_bytes_per_s, clock()),
        cap=DataCap(cap_bytes, days=config.cap_days, file=folder / "uploaded.json", clock=clock()),
        may_serve=may_serve,
        links=tcp if config.yields and tcp.are_measured() else None,
    )
    directory = Directory(run, key, client, clock=clock(), rng=random.Random())
    swarm_tasks = SwarmTasks(clock(), on_fault)
    if pool is None:
        return PeerLinks(network, uplink, directory, swarm_tasks, tcp)
    rules = TopologyRules(neighbours_max=config.neighbours_max)
    neighbours = Neighbours(
        directory, pool, connect, uplink, swarm_tasks, clock=clock(), rng=random.Random(), rules=rules
    )  # fmt: skip
    return PeerLinks(network, uplink, directory, swarm_tasks, tcp, neighbours)


def make_peer(
    run: PinnedRun,
    key: SigningKey,
    config: SwarmConfig,
    links: PeerLinks,
    served: Served,
    *,
    pool: SourcePool | None = None,
    accepted: Switch | None = None,
) -> Peer:
    """Return a peer that serves over `links` what is stored; the peer starts and closes them.

    With `accepted`, it takes part in the swarm only while that switch is on.
    """
    from prime_node.adapters.web.aiohttp_server import AiohttpServer
    from prime_node.broadcast.swarm.mesh import Mesh
    from prime_node.broadcast.swarm.network_peer import serve_over
    from prime_node.broadcast.swarm.peer import Peer
    from prime_node.broadcast.swarm.serving import PeerService

    directory, network = links.directory, links.network
    service = PeerService(
        run, key, served.have_set, served.parts, links.uplink, clock(), served.manifest,
        peer_list=directory.list_for,
        met=directory.met,
        heard_of=(lambda peer: {}) if pool is None else pool.heard_of,
        folder=served.folder,
    )  # fmt: skip
    mesh = None
    if network is not None:
        if not config.private:
            serve_over(network, service)
        mesh = Mesh(run, network, directory, clock=clock(), rng=random.Random())
    web = AiohttpServer(on_socket=links.tcp.add)
    return Peer(
        config, service, web, directory, links.swarm_tasks, links.neighbours, network, mesh, accepted
    )  # fmt: skip


def peer_network(
    run: PinnedRun, key: SigningKey, config: SwarmConfig, near: frozenset[str], on_socket: Callable[[Any], None]
) -> PeerNetwork | None:
    """Return a libp2p network with the role's key; None if it is off or not installed. It imports libp2p when it starts.

    `near` are the coordinator's IP addresses. `on_socket` gets the socket of each link, in a thread of the network.

    Raises LocalError if it is on and not installed, and for an address in the settings that other peers cannot use.
    """
    if config.p2p == "off":
        return None
    missing = next((name for name in ("libp2p", "trio") if find_spec(name) is None), None)
    if missing is not None:
        if config.p2p == "on":
            raise missing_extra("p2p", "links over libp2p", ModuleNotFoundError(f"No module named '{missing}'"))
        return None
    from prime_node.adapters.peers.late_network import LateNetwork
    from prime_node.ports.peer_network import PeerAddress

    try:
        bootstrap = tuple(PeerAddress.parse(text) for text in config.p2p_bootstrap)
    except ValueError as error:
        raise LocalError(f"swarm.p2p_bootstrap: {error}") from None
    require_tcp("swarm.p2p_announce", config.p2p_announce)
    require_tcp("swarm.p2p_bootstrap", [text for one in bootstrap for text in one.addresses])

    def made() -> PeerNetwork:
        with needing_extra("p2p", "links over libp2p"):
            from prime_node.adapters.peers.libp2p_host import PeerSettings
            from prime_node.adapters.peers.libp2p_network import Libp2pNetwork
        settings = PeerSettings(
            listen=() if config.private else config.p2p_listen,
            announce=config.p2p_announce,
            bootstrap=bootstrap,
            private=config.private,
            lan=config.p2p_lan,
            near=tuple(near),
            on_socket=on_socket,
        )
        network = Libp2pNetwork(key, run=run.digest, settings=settings)
        network.learn(bootstrap)  # peers that a newcomer asks while no coordinator names any
        return network

    return LateNetwork(key.key_id, made, private=config.private)


def require_tcp(setting: str, addresses: Sequence[str]) -> None:
    """Check addresses. Raises LocalError for one without an IP address and TCP port: peers resolve no names."""
    for address in addresses:
        end = endpoint_of(address)
        if end is None or place_of(end.host) is None:
            raise LocalError(
                f"{setting}: {address!r} is not an address for peers; write for example /ip4/203.0.113.7/tcp/4001"
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
        pool, swarm = _pool(sources), settings.swarm
        links = peer_links(run, key, client, swarm, folder / "swarm", pool=pool) if swarm.enabled else None
        neighbours = None if links is None else links.neighbours
        trusted = await trust(run, sources, folder, peers=tuple if neighbours is None else neighbours.named_links)
        follower = Follower(
            run,
            pool,
            folder / "checkpoints",
            clock=clock(),
            poll_s=settings.poll_seconds,
            policies_kept=settings.policies_kept,
            policies_bytes_max=settings.policies_bytes_max,
            parts_bytes_max=settings.parts_bytes_max,
            on_progress=on_progress,
            plan=neighbours,
            rate=_download_rate(swarm),
        )
        peer = None
        if links is not None:
            served = Served(follower.have_set, follower.parts, follower.manifest_at_hand, folder)
            peer = make_peer(run, key, swarm, links, served, pool=pool, accepted=accepted)
            await stack.enter_async_context(peer.running())
        yield follower, trusted, peer


def trainer_seeding(
    run: PinnedRun,
    key: SigningKey,
    client: HttpClient,
    config: SwarmConfig,
    folder: Path,
    *,
    on_fault: Callable[[int], None] = lambda num_faults: None,
) -> tuple[Seeding, Peer]:
    """Return the port through which the trainer publishes, and the peer that serves what it published.

    `on_fault` gets the number of the swarm's faults so far.
    """
    from prime_node.broadcast.seed.seeding import Seeding
    from prime_node.broadcast.swarm.have_set import HaveSet
    from prime_node.broadcast.swarm.part_store import PartStore

    have_set, parts = HaveSet(), PartStore(folder / "seed" / "parts", bytes_max=SEED_BYTES_MAX)
    links = peer_links(run, key, client, config, folder / "seed", on_fault=on_fault)
    seeding = Seeding(client, run, parts, have_set, folder=folder / "seed")
    served = Served(have_set, parts, seeding.seed_store.manifest_at_hand, folder)
    return seeding, make_peer(run, key, config, links, served)


@contextlib.asynccontextmanager
async def seeder(
    run: PinnedRun, key: SigningKey, client: HttpClient, folder: Path, settings: WorkerConfig
) -> AsyncIterator[tuple[Seeder, Peer]]:
    """Run a seeder of others' policies: it stores and serves them without decoding. The model files are in `folder`/model."""
    from prime_node.broadcast.seed.seeder import Seeder

    async with contextlib.AsyncExitStack() as stack:
        sources = await _sources(stack, run, client, settings)
        trusted = await trust(run, sources, folder)
        pool, swarm = _pool(sources), settings.swarm
        links = peer_links(run, key, client, swarm, folder / "swarm", pool=pool)
        made = Seeder(
            run,
            pool,
            folder / "checkpoints",
            clock=clock(),
            rng=random.Random(),
            parts_bytes_max=settings.parts_bytes_max,
            plan=links.neighbours,
            rate=_download_rate(swarm),
            trust=trusted,
        )
        served = Served(made.have_set, made.parts, made.manifest_at_hand, folder)
        peer = make_peer(run, key, swarm, links, served, pool=pool)
        await stack.enter_async_context(peer.running())
        yield made, peer


def _pool(sources: Sequence[tuple[str, HttpClient]]) -> SourcePool:
    from prime_node.broadcast.swarm.sources import SourcePool

    return SourcePool(sources, clock=clock(), rng=random.Random())


def _download_rate(config: SwarmConfig) -> RateLimit | None:
    """Return the owner's limit on downloads, or None if there is none."""
    from prime_node.patience import RateLimit

    is_limited = config.enabled and config.download_bytes_per_s
    return RateLimit(config.download_bytes_per_s, clock()) if is_limited else None


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
