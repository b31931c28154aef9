"""Heads that peers announce: a source of manifests that is pushed instead of polled.

Each announcement is a manifest with the trainer's signature or, if that is too long to gossip, the coordinator's timestamp,
which names it. It is verified before it is forwarded; a peer that forwards an invalid one is at fault. An announcement counts
like any other source's answer: heads.py links it to the chain before anything follows from it.

A timestamp proves no manifest, and a stolen coordinator key can sign any. So an announced version hides no lower one until
its manifest is known, and a key ring voids all versions that are known from timestamps alone.
"""

from __future__ import annotations

import asyncio
import logging

from prime_node.broadcast.swarm.network_peer import NetworkPeer
from prime_node.broadcast.swarm.sources import NamedSource, SourceKind, SourcePool
from prime_node.ports.clock import Clock
from prime_node.ports.peer_network import GossipJudgement, PeerNetwork
from prime_node.ports.transport import Unreachable
from prime_protocol import limits
from prime_protocol.envelope import Envelope, PayloadType, open_envelope
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.identity import KeyId
from prime_protocol.manifest import open_manifest
from prime_protocol.peers import PeerRecord
from prime_protocol.run_spec import PinnedRun
from prime_protocol.timestamp import check_fresh, open_timestamp

log = logging.getLogger(__name__)

TOPIC = "heads"
RECENT_MAX = 16
ASKED_MAX = 4
"""Peers that are asked for a manifest that was announced by its digest."""


def announcement(manifest: Envelope, timestamp: Envelope | None) -> bytes | None:
    """Return what to announce for a new head: the manifest, or the timestamp that names it.

    Return None if the manifest is too long and there is no timestamp.
    """
    whole = manifest.to_bytes()
    if len(whole) <= limits.ANNOUNCEMENT_BYTES_MAX:
        return whole
    return None if timestamp is None else timestamp.to_bytes()


async def announce(network: PeerNetwork, manifest: Envelope, timestamp: Envelope | None = None) -> bool:
    """Announce a head to all peers. Return False if the network has ended."""
    data = announcement(manifest, timestamp)
    if data is None:
        return True  # peers that ask will find it
    try:
        await network.announce(TOPIC, data)
    except Unreachable as error:
        log.warning("announcing new heads has stopped: %s", error)
        return False
    return True


class AnnouncedHeads:
    """Implementation of CheckpointSource for manifests alone.

    Made before the network starts; joins the pool with the first announcement.
    """

    def __init__(self, network: PeerNetwork, run: PinnedRun, pool: SourcePool, clock: Clock) -> None:
        self._network = network
        self._run = run
        self._pool = pool
        self._clock = clock
        self._recent: dict[int, Envelope] = {}
        self._authors: dict[int, KeyId] = {}
        """Peers that announced a manifest by its digest, by policy version."""
        self._ring = run.keys.version
        self._shown = -1
        """Version of the newest manifest that `head` returned."""
        self._named = NamedSource("announcements", self, SourceKind.PEER)
        network.subscribe(TOPIC, self.judge, self.hear)

    async def judge(self, sender: KeyId, data: bytes) -> GossipJudgement:
        """Verify an announcement in a thread, because a manifest may be long."""
        try:
            version, manifest = await asyncio.to_thread(self._open, data)
        except RemoteError as error:
            log.info("peer %s forwards a head that does not verify: %s", sender, error)
            return GossipJudgement.REJECT
        self._void_former_keys()
        is_new = version > self._proven and (manifest is not None or version not in self._authors)
        return GossipJudgement.ACCEPT if is_new else GossipJudgement.IGNORE

    async def hear(self, author: KeyId, data: bytes) -> None:
        """Store a verified announcement and add this source to the pool."""
        version, manifest = await asyncio.to_thread(self._open, data)
        self._void_former_keys()
        if manifest is not None:
            self._recent[version] = manifest
        else:
            self._authors[version] = author
        for known in (self._recent, self._authors):
            while len(known) > RECENT_MAX:
                del known[next(iter(known))]  # the oldest: the lowest may be the only true one
        self._named.head = max(self._named.head, version)
        self._pool.add(self._named)

    @property
    def _proven(self) -> int:
        """Version of the newest announced manifest that the trainer has signed; -1 before the first."""
        return max(self._recent, default=-1)

    def _void_former_keys(self) -> None:
        """Forget what is known from timestamps alone, once a key ring has replaced keys."""
        if self._run.keys.version != self._ring:
            self._ring = self._run.keys.version
            self._authors.clear()
            self._named.head = self._proven

    def _open(self, data: bytes) -> tuple[int, Envelope | None]:
        """Return (policy version, manifest or None). Raises RemoteError."""
        envelope = open_envelope(data, bytes_max=limits.ANNOUNCEMENT_BYTES_MAX)
        if envelope.payload_type == PayloadType.TIMESTAMP:
            stamp = open_timestamp(envelope, self._run)
            check_fresh(stamp, self._clock.now_ms())
            return stamp.policy_version, None
        return open_manifest(envelope, self._run).manifest.policy_version, envelope

    # CheckpointSource

    async def run_spec(self) -> Envelope:
        """Return the run's RunSpec."""
        return self._run.envelope

    async def head(self, *, wait_s: float = 0.0) -> Envelope | None:
        """Return the newest announced manifest that is available, or None. Raises RemoteError or Unreachable."""
        self._void_former_keys()
        if self._named.head < 0:
            return None
        version = self._named.head
        try:
            newest = await self.manifest(version)
        except (RemoteError, Unreachable):
            if self._proven <= self._shown:
                raise
            version = self._proven
            newest = self._recent[version]
        self._shown = version
        return newest

    async def manifest(self, policy_version: int) -> Envelope:
        """Return an announced manifest, fetched from a linked peer if need be. Raises RemoteError or Unreachable."""
        if policy_version in self._recent:
            return self._recent[policy_version]
        if policy_version in self._authors:
            return await self._fetch(policy_version, self._authors[policy_version])
        raise RemoteError(ErrorCode.NOT_FOUND, f"no peer has announced manifest {policy_version}")

    async def blob(self, digest: str, *, start: int = 0, end: int | None = None) -> bytes:
        """Raise RemoteError(NOT_FOUND): announcements hold no blobs."""
        raise RemoteError(ErrorCode.NOT_FOUND, "announcements have no blobs")

    async def _fetch(self, policy_version: int, author: KeyId) -> Envelope:
        """Fetch a manifest from its author or another linked peer."""
        linked = [link.peer for link in self._network.connected() if link.is_direct]
        last: Exception = Unreachable(f"no connected peer has manifest {policy_version}")
        for peer in sorted(linked, key=lambda peer: peer != author)[:ASKED_MAX]:
            try:
                bounds = self._run.spec.limits
                link = NetworkPeer(self._network, PeerRecord(peer=peer), bounds=bounds, authorization=lambda: None)
                self._recent[policy_version] = await link.manifest(policy_version)
                return self._recent[policy_version]
            except (RemoteError, Unreachable) as error:
                last = error
        raise last
