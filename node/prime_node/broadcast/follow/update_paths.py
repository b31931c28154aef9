"""Find the update path to a policy, reading as few manifests as possible.

A path begins at a held policy, or at nothing, and every hop is an encoding of a signed manifest. A manifest off the known
chain (older than where this machine joined) is accepted because of the newer one: the trainer signed it, and its state root
is the one that the newer one names as its base. So nothing has to be walked link by link.

Blobs on this machine's disk cost nothing: after a restart the path reuses what was downloaded before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from prime_node.broadcast.follow.heads import Heads
from prime_node.broadcast.routes import Path, PathSearch, UpdateRoute, routes_of
from prime_protocol.errors import RemoteError
from prime_protocol.manifest import BasePolicy, Encoding, SignedManifest

MANIFESTS_AT_ONCE = 8
WITH_PATH_MAX = 64
"""Manifests that one search looks at once some path is known; cheaper paths further back are ignored."""
ROUTES_MAX = 4_096
MANIFESTS_MAX = 32

Closed = Collection[tuple[int, int | None]]
"""Encodings not to use, by policy and base."""


@dataclass(frozen=True, slots=True)
class UpdateStep:
    """One hop with everything needed to apply it."""

    signed: SignedManifest
    encoding: Encoding

    @property
    def name(self) -> tuple[int, int | None]:
        """Policy version and base of the encoding."""
        return self.signed.manifest.policy_version, self.encoding.base_version


class UpdatePaths:
    """Update paths found from the manifests read so far."""

    def __init__(self, heads: Heads, *, on_disk: Callable[[str], bool]) -> None:
        """Search with the manifests of `heads`. `on_disk` returns whether a blob is stored, by its digest."""
        self._heads = heads
        self._on_disk = on_disk
        self.routes: dict[int, tuple[UpdateRoute, ...]] = {}
        self.roots: dict[int, BasePolicy] = {}
        """Policies whose root is known: from their own manifest, or from that of a delta against them."""
        self._manifests: dict[int, SignedManifest] = {}

    async def find(self, target: SignedManifest, *, held: Collection[int], closed: Closed) -> list[UpdateStep]:
        """Return the cheapest path in bytes. Raises RemoteError(NOT_FOUND) if none is open, or Unreachable."""
        self._forget_old()
        self._note(target)
        path = await self._search(target.manifest.policy_version, held, closed)
        steps = []
        for hop in path.hops:
            signed = await self._manifest(hop.policy_version)
            encoding = signed.manifest.encoding(hop.route.base_version)
            assert encoding is not None
            steps.append(UpdateStep(signed, encoding))
        return steps

    def at_hand(self, policy_version: int) -> SignedManifest | None:
        """Return a manifest that was read recently, or None."""
        return self._manifests.get(policy_version)

    async def _search(self, target: int, held: Collection[int], closed: Closed) -> Path:
        dead_ends: set[int] = set()

        def open_routes(version: int) -> Sequence[UpdateRoute] | None:
            if version in dead_ends or version not in self.routes:
                return () if version in dead_ends else None
            return [route for route in self._routes_now(version) if (version, route.base_version) not in closed]

        found = PathSearch(target, open_routes, held, with_path_max=WITH_PATH_MAX)
        while wanted := found.unread(MANIFESTS_AT_ONCE):
            read = await asyncio.gather(*(self._manifest(version) for version in wanted), return_exceptions=True)
            for version, result in zip(wanted, read, strict=True):
                if isinstance(result, RemoteError):
                    dead_ends.add(version)
                elif isinstance(result, BaseException):
                    raise result
        return found.require_path()

    def _routes_now(self, version: int) -> Sequence[UpdateRoute]:
        """Return a policy's edges, without the bytes that are on disk if its manifest is held."""
        signed = self._manifests.get(version)
        if signed is None:
            return self.routes[version]
        return [
            UpdateRoute(one.base_version, sum(blob.size for blob in one.blobs if not self._on_disk(blob.digest)))
            for one in signed.manifest.encodings
        ]

    async def _manifest(self, version: int) -> SignedManifest:
        signed = self._manifests.get(version)
        if signed is None:
            signed = await self._heads.base(self.roots[version])
            self._note(signed)
        return signed

    def _note(self, signed: SignedManifest) -> None:
        version = signed.manifest.policy_version
        self.routes[version] = routes_of(signed.manifest)
        self._manifests.pop(version, None)
        self._manifests[version] = signed
        self.roots[version] = BasePolicy(policy_version=version, state_root=signed.manifest.state_root)
        for encoding in signed.manifest.encodings:
            if encoding.base is not None:
                self.roots[encoding.base.policy_version] = encoding.base
        while len(self._manifests) > MANIFESTS_MAX:
            del self._manifests[next(iter(self._manifests))]

    def _forget_old(self) -> None:
        """Drop old entries between searches, because a search needs everything it has read until its end."""
        if len(self.routes) > ROUTES_MAX:
            self.routes = {version: self.routes[version] for version in sorted(self.routes)[-ROUTES_MAX:]}
            bases = {route.base_version for routes in self.routes.values() for route in routes}
            self.roots = {one: root for one, root in self.roots.items() if one in self.routes or one in bases}
