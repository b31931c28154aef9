"""Which encodings of a policy are made: the one place with the cost model. Pure.

Every policy gets the delta from the one before it. A policy whose version a span divides gets the delta over that span too:
what changes in d steps grows slower than d, so that whoever was away for a while catches up with long strides. Now and then a
root delta against policy 0 serves those who hold it (the public model that the run began with), and an anchor serves newcomers.

An encoding is published only where it pays: a delta, when nothing else leads from its base to its policy for as few bytes and
an anchor would not be smaller; an anchor, when a newcomer would have to download `anchor_pays` times as much without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from prime_node.broadcast.follow.paths import Routes, UpdateRoute, search


@dataclass(frozen=True, slots=True)
class SpanRules:
    """Settings. Example: SpanRules(spans=(1, 4, 16), root_every=16, anchor_pays=2.0)."""

    spans: tuple[int, ...] = (1, 4, 16)
    """Steps that a delta goes over, at versions that they divide."""
    root_every: int = 16
    """Policies between two root deltas; 0 makes none."""
    anchor_pays: float = 2.0
    """A newcomer never downloads more than this many times an anchor."""


def planned_bases(policy_version: int, rules: SpanRules) -> tuple[int, ...]:
    """Policies to encode a delta against, the nearest first."""
    bases = {policy_version - span for span in rules.spans if policy_version % span == 0 and policy_version >= span}
    if policy_version and rules.root_every and policy_version % rules.root_every == 0:
        bases.add(0)
    return tuple(sorted(bases, reverse=True))


def needed_later(policy_version: int, rules: SpanRules) -> frozenset[int]:
    """Policies up to this one whose weights the encodings of later ones need: at most one a span, and policy 0."""
    bases = {policy_version - policy_version % span for span in rules.spans}
    return frozenset(bases | {0} if rules.root_every else bases)


def paying_deltas(
    policy_version: int, deltas: Mapping[int, int], published: Routes, *, anchor_bytes: int | None
) -> list[int]:
    """The bases worth publishing of `deltas` (base -> bytes).

    `published` are the encodings of earlier policies, as far as they matter; `anchor_bytes` is what an anchor takes, where
    that is known.
    """
    chosen: list[UpdateRoute] = []
    for base, sent_bytes in sorted(deltas.items(), reverse=True):
        if anchor_bytes is not None and sent_bytes >= anchor_bytes:
            continue
        other_way = search(policy_version, {**published, policy_version: chosen}, {base}).path
        if other_way is None or sent_bytes < other_way.sent_bytes:
            chosen.append(UpdateRoute(base, sent_bytes))
    return [route.base_version for route in chosen if route.base_version is not None]


def anchor_is_due(
    policy_version: int, deltas: Mapping[int, int], published: Routes, rules: SpanRules, *, anchor_bytes: int | None
) -> bool:
    """Does an anchor pay beside the deltas that were chosen? Always where nothing else leads to the policy from nothing."""
    routes = [UpdateRoute(base, sent_bytes) for base, sent_bytes in deltas.items()]
    way = search(policy_version, {**published, policy_version: routes}).path
    return way is None or anchor_bytes is None or way.sent_bytes > rules.anchor_pays * anchor_bytes


def worth_remembering(published: Routes) -> dict[int, tuple[UpdateRoute, ...]]:
    """The part of `published` that later decisions look at: policy 0, and all since the newest anchor but one."""
    anchors = sorted(version for version, routes in published.items() if any(r.base_version is None for r in routes))
    since = anchors[-2] if len(anchors) > 1 else 0
    return {version: tuple(routes) for version, routes in published.items() if version == 0 or version >= since}
