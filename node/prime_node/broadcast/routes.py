"""Find the cheapest update path to a policy, in bytes, from what is held or from nothing. Pure.

Policies are nodes; an encoding is an edge from its base to its policy, weighted by its download size. An anchor is an edge
from nothing. Bases are older than their policies, so the search runs backward from the wanted policy (Dijkstra) and ends at
the first node that is held. The edges of a manifest that has not been read are unknown: the search returns those nodes, and
continues when the caller has read their manifests. A run without anchors has no end, so the number of manifests is bounded.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.manifest import Manifest

MANIFESTS_MAX = 4_096
"""Manifests that one search looks at while it knows no path. Honest runs have an anchor or a root delta far nearer."""


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


_Entry = tuple[int, int, int, int | None, Hop | None]
"""Node of a search: bytes and hops from it to the target, a number that orders equal ones, the policy, the first hop."""


class PathSearch:
    """Search that can be continued: it names the manifests to read next, and continues from there once they are read.

    So each manifest is looked at once, and the work is linear in the number of their encodings.
    """

    def __init__(
        self,
        target: int,
        known: Callable[[int], Sequence[UpdateRoute] | None],
        held: Collection[int] = (),
        *,
        with_path_max: int = MANIFESTS_MAX,
    ) -> None:
        """Search from any policy of `held`, or from nothing, to `target`.

        `known` returns a policy's encodings, or None if its manifest has not been read. After `with_path_max`
        manifests the search ends with the cheapest path known by then; without a path, after MANIFESTS_MAX.
        """
        self._target = target
        self._known = known
        self._held = held
        self._with_path_max = with_path_max
        self._onward: dict[int, Hop | None] = {}  # the first hop from a node toward the target
        self._ahead: list[_Entry] = [(0, 0, 0, target, None)]
        self._num_seen = 0
        self._some_path = False
        self._is_cut = False
        self.path: Path | None = None
        """Cheapest path, once nothing is left to read; None if there is none."""

    def unread(self, at_once: int = 1) -> list[int]:
        """Return the next policies whose manifests might show a cheaper path, the nearest first.

        None are left once the search has ended.
        """
        waiting: dict[int, _Entry] = {}
        while self._ahead and self.path is None and len(waiting) < at_once:
            entry = heapq.heappop(self._ahead)
            place, hop = entry[3:]
            if place in self._onward or place in waiting:
                continue
            is_start = place is None or place in self._held
            routes = () if is_start or place is None else self._known(place)
            if routes is None and place is not None and self._may_read(len(waiting)):
                waiting[place] = entry
            elif waiting:  # a manifest that is not read yet may lead to this node for fewer bytes
                heapq.heappush(self._ahead, entry)
                break
            elif is_start:
                self.path = self._path_by(hop)
            elif routes is None:
                self._is_cut = True
            else:
                assert place is not None
                self._onward[place] = hop
                self._expand(entry, place, routes)
        for entry in waiting.values():
            heapq.heappush(self._ahead, entry)
        return list(waiting)

    def require_path(self) -> Path:
        """Return the path. Raises RemoteError(NOT_FOUND) if there is none."""
        if self.path is not None:
            return self.path
        if self._is_cut:
            raise RemoteError(
                ErrorCode.NOT_FOUND,
                f"no update path leads to policy {self._target} through the {MANIFESTS_MAX:,} manifests that a search reads; "
                "its trainer publishes an anchor or a root delta more often",
            )
        raise RemoteError(ErrorCode.NOT_FOUND, f"no update path leads to policy {self._target} any more")

    def _may_read(self, num_waiting: int) -> bool:
        return len(self._onward) + num_waiting < (self._with_path_max if self._some_path else MANIFESTS_MAX)

    def _path_by(self, hop: Hop | None) -> Path:
        hops = []
        while hop is not None:
            hops.append(hop)
            hop = self._onward[hop.policy_version]
        return Path(tuple(hops))

    def _expand(self, entry: _Entry, place: int, routes: Sequence[UpdateRoute]) -> None:
        sent_bytes, num_hops = entry[:2]
        for route in routes:
            base = route.base_version
            self._some_path = self._some_path or base is None or base in self._held
            self._num_seen += 1  # breaks ties: nodes and hops have no order
            longer = (sent_bytes + route.sent_bytes, num_hops + 1, self._num_seen, base, Hop(place, route))
            heapq.heappush(self._ahead, longer)


def routes_of(manifest: Manifest) -> tuple[UpdateRoute, ...]:
    """Return a manifest's encodings as edges."""
    return tuple(UpdateRoute(encoding.base_version, encoding.sent_bytes) for encoding in manifest.encodings)


def search(target: int, known: Routes, held: Collection[int] = ()) -> Path | None:
    """Return the cheapest path through manifests that are all known, or None.

    Of two paths of the same size, take the one with fewer hops.
    """
    found = PathSearch(target, lambda version: known.get(version, ()), held)
    found.unread()
    return found.path
