"""Decide which encodings of a policy are made: the only place with the cost model. Pure.

Every policy gets the delta from its predecessor. A policy whose version is divisible by a span gets the delta over that span
too: changes over d steps grow slower than d, so a worker that was away for a while catches up in long strides. At intervals a
root delta against policy 0 serves those that hold it (the public model that the run began with), and an anchor serves
newcomers.

An encoding is published only if it pays. A delta pays if no other path leads from its base to its policy for as few bytes,
and an anchor would not be smaller. An anchor pays if a newcomer would download `anchor_pays` times as much without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from prime_node.broadcast.routes import Routes, UpdateRoute, search

FIRST_S_MAX = 3_600.0
"""Time for which a trainer that starts waits for policy 0, which root deltas need."""
HOPS_MAX = 1_024
"""Encodings on a newcomer's path: a search reads routes.MANIFESTS_MAX manifests at most."""


@dataclass(frozen=True, slots=True)
class SpanRules:
    """Settings of the cost model. Example: SpanRules(spans=(1, 4, 16), root_every=16, anchor_pays=2.0)."""

    spans: tuple[int, ...] = (1, 4, 16)
    """Steps that a delta spans, at versions that they divide."""
    root_every: int = 16
    """Policies between two root deltas; 0 makes none."""
    anchor_pays: float = 2.0
    """Largest download of a newcomer, as a multiple of an anchor."""


def planned_bases(policy_version: int, rules: SpanRules) -> tuple[int, ...]:
    """Return the policies to encode a delta against, the nearest first."""
    bases = {policy_version - span for span in rules.spans if policy_version % span == 0 and policy_version >= span}
    if policy_version and rules.root_every and policy_version % rules.root_every == 0:
        bases.add(0)
    return tuple(sorted(bases, reverse=True))


def needed_later(policy_version: int, rules: SpanRules) -> frozenset[int]:
    """Return the policies up to this one whose weights later encodings need: at most one a span, and policy 0."""
    bases = {policy_version - policy_version % span for span in rules.spans}
    return frozenset(bases | {0} if rules.root_every else bases)


def paying_deltas(
    policy_version: int, deltas: Mapping[int, int], published: Routes, *, anchor_bytes: int | None
) -> list[int]:
    """Return the bases of `deltas` (base -> bytes) worth publishing.

    `published` holds the encodings of earlier policies, as far as they matter; `anchor_bytes` is an anchor's size, if known.
    """
    chosen: list[UpdateRoute] = []
    for base, sent_bytes in sorted(deltas.items(), reverse=True):
        if anchor_bytes is not None and sent_bytes >= anchor_bytes:
            continue
        other_way = search(policy_version, {**published, policy_version: chosen}, {base})
        if other_way is None or sent_bytes < other_way.sent_bytes:
            chosen.append(UpdateRoute(base, sent_bytes))
    return [route.base_version for route in chosen if route.base_version is not None]


def anchor_is_due(
    policy_version: int, deltas: Mapping[int, int], published: Routes, rules: SpanRules, *, anchor_bytes: int | None
) -> bool:
    """Return whether an anchor pays in addition to the chosen deltas.

    It always does if nothing else leads to the policy from nothing, or only a path of more than HOPS_MAX encodings.
    """
    routes = [UpdateRoute(base, sent_bytes) for base, sent_bytes in deltas.items()]
    way = search(policy_version, {**published, policy_version: routes})
    if way is None or anchor_bytes is None or len(way.hops) > HOPS_MAX:
        return True
    return way.sent_bytes > rules.anchor_pays * anchor_bytes


def worth_remembering(published: Routes) -> dict[int, tuple[UpdateRoute, ...]]:
    """Return the part of `published` that later decisions need: policy 0, and everything since the second-newest anchor."""
    anchors = sorted(version for version, routes in published.items() if any(r.base_version is None for r in routes))
    since = anchors[-2] if len(anchors) > 1 else 0
    return {version: tuple(routes) for version, routes in published.items() if version == 0 or version >= since}
