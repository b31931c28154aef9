"""What a seeder keeps and shows: the newest policies, and the cheapest ways that lead to them from nothing, for newcomers."""

from __future__ import annotations

from prime_node.broadcast.follow.paths import Route, search
from prime_node.broadcast.swarm.holdings import Holdings
from prime_node.broadcast.swarm.part_store import PartStore
from prime_protocol.envelope import Envelope
from prime_protocol.manifest import Encoding, SignedManifest

POLICIES_KEPT = 8

Name = tuple[int, int | None]
"""An encoding: its policy and its base, None for an anchor."""


class Shelf:
    """Used from the event loop only. Invariant: what is announced lies on the disk, and what is dropped was withdrawn before."""

    def __init__(self, parts: PartStore, holdings: Holdings) -> None:
        self._parts = parts
        self._holdings = holdings
        self._signed: dict[int, SignedManifest] = {}
        self._here: dict[Name, Encoding] = {}

    def manifest_at_hand(self, policy_version: int) -> Envelope | None:
        """Of a policy of which something is kept."""
        kept = self._signed.get(policy_version)
        return None if kept is None else kept.envelope

    def has(self, policy_version: int, base_version: int | None) -> bool:
        return (policy_version, base_version) in self._here

    def add(self, signed: SignedManifest, encoding: Encoding) -> None:
        """One encoding that is here: a step on the way to a policy that will be put."""
        version = signed.manifest.policy_version
        self._signed[version] = signed
        self._here[version, encoding.base_version] = encoding

    def put(self, signed: SignedManifest) -> None:
        """A policy all of whose encodings are here. Drops what is too old."""
        for encoding in signed.manifest.encodings:
            self.add(signed, encoding)
        kept = self._worth_keeping()
        self._here = {name: encoding for name, encoding in self._here.items() if name in kept}
        self._signed = {version: one for version, one in self._signed.items() if any(v == version for v, _ in kept)}
        digests = {blob.digest for encoding in self._here.values() for blob in encoding.blobs}
        self._holdings.staged(signed.manifest.policy_version)
        self._holdings.keep_only(digests)
        self._parts.keep_only(digests)

    def _worth_keeping(self) -> set[Name]:
        routes: dict[int, list[Route]] = {version: [] for version in self._signed}
        for (version, base_version), encoding in self._here.items():
            routes[version].append(Route(base_version, encoding.sent_bytes))
        newest = sorted(routes)[-POLICIES_KEPT:]
        kept = {name for name in self._here if name[0] in newest}
        for version in newest:
            way = search(version, routes).path
            kept |= set() if way is None else {(hop.policy_version, hop.route.base_version) for hop in way.hops}
        return kept
