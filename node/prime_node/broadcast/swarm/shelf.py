"""Which policies a seeder keeps and shows: the newest ones, and the newest anchor, from which a newcomer begins."""

from __future__ import annotations

from prime_node.broadcast.swarm.holdings import Holdings
from prime_node.broadcast.swarm.part_store import PartStore
from prime_protocol.envelope import Envelope
from prime_protocol.manifest import Encoding, SignedManifest

POLICIES_KEPT = 8


class Shelf:
    """Used from the event loop only. Invariant: what is announced lies on the disk, and what is dropped was withdrawn before."""

    def __init__(self, parts: PartStore, holdings: Holdings) -> None:
        self._parts = parts
        self._holdings = holdings
        self._kept: dict[int, SignedManifest] = {}
        self._anchor: tuple[SignedManifest, Encoding] | None = None

    def manifest_at_hand(self, policy_version: int) -> Envelope | None:
        """Of a policy that is kept."""
        anchor = self._anchor and self._anchor[0]
        kept = self._kept.get(policy_version)
        if kept is None and anchor is not None and anchor.manifest.policy_version == policy_version:
            kept = anchor
        return None if kept is None else kept.envelope

    def put(self, signed: SignedManifest) -> None:
        """A policy all of whose encodings are here. Drops what is too old."""
        manifest = signed.manifest
        self._kept[manifest.policy_version] = signed
        anchor = manifest.encoding(None)
        if anchor is not None:
            self._anchor = signed, anchor
        while len(self._kept) > POLICIES_KEPT:
            del self._kept[min(self._kept)]
        digests = {blob.digest for kept in self._kept.values() for blob in kept.manifest.blobs}
        if self._anchor is not None:
            digests |= {blob.digest for blob in self._anchor[1].blobs}
        self._holdings.staged(manifest.policy_version)
        self._holdings.keep_only(digests)
        self._parts.keep_only(digests)
