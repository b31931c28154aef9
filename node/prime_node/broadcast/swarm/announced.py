"""Heads as peers announce them: a source of manifests that is told instead of asked.

Each announcement is a manifest with the trainer's signature, or, where that is too long to be passed on, the coordinator's
timestamp, which names it. It is verified before it is forwarded; a peer that sends on what does not verify is to blame. What is
announced counts like any other source's word: heads.py links it to the chain before anything follows from it.
"""

from __future__ import annotations

import asyncio
import logging

from prime_node.broadcast.swarm.network_peer import NetworkPeer
from prime_node.broadcast.swarm.sources import NamedSource, SourceKind, SourcePool
from prime_node.ports.clock import Clock
from prime_node.ports.peers import GossipJudgement, PeerNetwork
from prime_node.ports.transport import Unreachable
from prime_protocol import limits
from prime_protocol.envelope import Envelope, PayloadType, open_envelope
from prime_protocol.errors import ErrorCode, PeerError
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
    """What to announce of a new head: itself, or the timestamp that names it; None where it is too long and there is none."""
    whole = manifest.to_bytes()
    if len(whole) <= limits.ANNOUNCEMENT_BYTES_MAX:
        return whole
    return None if timestamp is None else timestamp.to_bytes()


async def announce(network: PeerNetwork, manifest: Envelope, timestamp: Envelope | None = None) -> bool:
    """Tell all peers of a head. False where the network has ended."""
    data = announcement(manifest, timestamp)
    if data is None:
        return True  # peers that ask will find it
    try:
        await network.announce(TOPIC, data)
    except Unreachable as error:
        log.warning("heads are no longer announced: %s", error)
        return False
    return True


class AnnouncedHeads:
    """Implements CheckpointSource as far as manifests go. Made before the network starts; then it is in the pool."""

    def __init__(self, network: PeerNetwork, run: PinnedRun, pool: SourcePool, clock: Clock) -> None:
        self._network = network
        self._run = run
        self._pool = pool
        self._clock = clock
        self._recent: dict[int, Envelope] = {}
        self._authors: dict[int, KeyId] = {}
        """Who announced a manifest by its digest."""
        self._named = NamedSource("announcements", self, SourceKind.PEER)
        network.subscribe(TOPIC, self.judge, self.hear)

    async def judge(self, sender: KeyId, data: bytes) -> GossipJudgement:
        """Verify, beside the event loop: a manifest may be long."""
        try:
            version, _ = await asyncio.to_thread(self._open, data)
        except PeerError as error:
            log.info("peer %s sends on a head that does not hold: %s", sender, error)
            return GossipJudgement.REJECT
        return GossipJudgement.ACCEPT if version > self._named.head else GossipJudgement.IGNORE

    async def hear(self, author: KeyId, data: bytes) -> None:
        version, manifest = await asyncio.to_thread(self._open, data)
        if manifest is not None:
            self._recent[version] = manifest
        else:
            self._authors[version] = author
        for known in (self._recent, self._authors):
            while len(known) > RECENT_MAX:
                del known[min(known)]
        self._named.head = max(self._named.head, version)
        self._pool.add(self._named)

    def _open(self, data: bytes) -> tuple[int, Envelope | None]:
        """(policy version, the manifest where it is there). Raises PeerError."""
        envelope = open_envelope(data, bytes_max=limits.ANNOUNCEMENT_BYTES_MAX)
        if envelope.payload_type == PayloadType.TIMESTAMP:
            stamp = open_timestamp(envelope, self._run)
            check_fresh(stamp, self._clock.now_ms())
            return stamp.policy_version, None
        return open_manifest(envelope, self._run).manifest.policy_version, envelope

    # As a source

    async def run_spec(self) -> Envelope:
        return self._run.envelope

    async def head(self, *, wait_s: float = 0.0) -> Envelope | None:
        return await self.manifest(self._named.head) if self._named.head >= 0 else None

    async def manifest(self, policy_version: int) -> Envelope:
        if policy_version in self._recent:
            return self._recent[policy_version]
        if policy_version in self._authors:
            return await self._fetch(policy_version, self._authors[policy_version])
        raise PeerError(ErrorCode.NOT_FOUND, f"nobody has announced manifest {policy_version}")

    async def blob(self, digest: str, *, start: int = 0, end: int | None = None) -> bytes:
        raise PeerError(ErrorCode.NOT_FOUND, "announcements hold no blobs")

    async def _fetch(self, policy_version: int, author: KeyId) -> Envelope:
        """From the author, or whoever else is linked and has it."""
        linked = [link.peer for link in self._network.connected() if link.is_direct]
        last: Exception = Unreachable(f"nobody is linked who has manifest {policy_version}")
        for peer in sorted(linked, key=lambda peer: peer != author)[:ASKED_MAX]:
            try:
                bounds = self._run.spec.limits
                link = NetworkPeer(self._network, PeerRecord(peer=peer), bounds=bounds, authorization=lambda: None)
                self._recent[policy_version] = await link.manifest(policy_version)
                return self._recent[policy_version]
            except (PeerError, Unreachable) as error:
                last = error
        raise last
