"""Find the cheapest update path to a policy, in bytes, from what is held or from nothing. Pure.

Policies are nodes; an encoding is an edge from its base to its policy, weighted by its download size. An anchor is an edge
from nothing. Bases are older than their policies, so the search runs backward from the wanted policy (Dijkstra) and ends at
the first node that is held. The edges of a manifest that has not been read are unknown: the search returns those nodes, and
the caller reads their manifests and searches again.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from prime_protocol.manifest import Manifest


@dataclass(frozen=True, slots=True)
class UpdateRoute:
    """One encoding as an edge. Example: UpdateRoute(base_version=40, sent_bytes=120_000) of policy 44."""

    base_version: int | None
    """Base of the delta; None for an anchor."""
    sent_bytes: int


Routes = Mapping[int, Sequence[UpdateRoute]]
"""Encodings by policy version, for every manifest that was read."""


@dataclass(frozen=True, slots=True)
class Hop:
    """One encoding to apply."""

    policy_version: int
    route: UpdateRoute


@dataclass(frozen=True, slots=True)
class Path:
    """Encodings in the order in which they are applied; none if the policy itself is held."""

    hops: tuple[Hop, ...]

    @property
    def sent_bytes(self) -> int:
        """Bytes to download."""
        return sum(hop.route.sent_bytes for hop in self.hops)


@dataclass(frozen=True, slots=True)
class Search:
    """Result of a search."""

    path: Path | None
    """Cheapest path through the manifests that were read."""
    unread: tuple[int, ...]
    """Policies whose manifests might show a cheaper one, the nearest first."""


def routes_of(manifest: Manifest) -> tuple[UpdateRoute, ...]:
    """Return a manifest's encodings as edges."""
    return tuple(UpdateRoute(encoding.base_version, encoding.sent_bytes) for encoding in manifest.encodings)


def search(target: int, known: Routes, held: Collection[int] = ()) -> Search:
    """Find the path from any policy of `held`, or from nothing, to `target`.

    Of two paths of the same size, take the one with fewer hops.
    """
    onward: dict[int | None, Hop | None] = {}  # the first hop from a node toward the target
    ahead: list[tuple[int, int, int, int | None, Hop | None]] = [(0, 0, 0, target, None)]
    unread: list[int] = []
    num_seen = 0
    while ahead:
        sent_bytes, num_hops, _, place, hop = heapq.heappop(ahead)
        if place in onward:
            continue
        onward[place] = hop
        if place is None or place in held:
            return Search(_path_from(place, onward), tuple(unread))
        if place not in known:
            unread.append(place)
            continue
        for route in known[place]:
            num_seen += 1  # breaks ties: nodes and hops have no order
            longer = (sent_bytes + route.sent_bytes, num_hops + 1, num_seen, route.base_version, Hop(place, route))
            heapq.heappush(ahead, longer)
    return Search(None, tuple(unread))


def _path_from(place: int | None, onward: Mapping[int | None, Hop | None]) -> Path:
    hops = []
    while (hop := onward[place]) is not None:
        hops.append(hop)
        place = hop.policy_version
    return Path(tuple(hops))
