"""The cheapest way to a policy, in bytes, from what is held or from nothing. Pure.

Policies are places; an encoding is a road from its base to its policy, and its length is what it costs to download. An anchor
is a road from nothing. Bases are older than their policies, so the search runs backward from the policy that is wanted
(Dijkstra) and ends at the first place that is held. Where a manifest has not been read yet, its roads are unknown: the search
names those places, and whoever called reads their manifests and searches again.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from prime_protocol.manifest import Manifest


@dataclass(frozen=True, slots=True)
class UpdateRoute:
    """What an encoding means here. Example: UpdateRoute(base_version=40, sent_bytes=120_000) of policy 44."""

    base_version: int | None
    """None for an anchor."""
    sent_bytes: int


Routes = Mapping[int, Sequence[UpdateRoute]]
"""Policy version -> its encodings, for every manifest that was read."""


@dataclass(frozen=True, slots=True)
class Hop:
    """One encoding to apply."""

    policy_version: int
    route: UpdateRoute


@dataclass(frozen=True, slots=True)
class Path:
    """Encodings in the order in which they are applied; none where the policy itself is held."""

    hops: tuple[Hop, ...]

    @property
    def sent_bytes(self) -> int:
        return sum(hop.route.sent_bytes for hop in self.hops)


@dataclass(frozen=True, slots=True)
class Search:
    """What is known so far."""

    path: Path | None
    """The cheapest way through the manifests that were read."""
    unread: tuple[int, ...]
    """Policies whose manifests might show a cheaper one, the nearest first."""


def routes_of(manifest: Manifest) -> tuple[UpdateRoute, ...]:
    return tuple(UpdateRoute(encoding.base_version, encoding.sent_bytes) for encoding in manifest.encodings)


def search(target: int, known: Routes, held: Collection[int] = ()) -> Search:
    """From any policy of `held`, or from nothing, to `target`. Of two ways of the same size the one with fewer hops."""
    onward: dict[int | None, Hop | None] = {}  # the first hop from a place toward the target
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
            num_seen += 1  # settles ties: places and hops have no order
            longer = (sent_bytes + route.sent_bytes, num_hops + 1, num_seen, route.base_version, Hop(place, route))
            heapq.heappush(ahead, longer)
    return Search(None, tuple(unread))


def _path_from(place: int | None, onward: Mapping[int | None, Hop | None]) -> Path:
    hops = []
    while (hop := onward[place]) is not None:
        hops.append(hop)
        place = hop.policy_version
    return Path(tuple(hops))
