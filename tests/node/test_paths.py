"""Shortest update paths equal those of an exhaustive search, and no manifest is read needlessly."""

from __future__ import annotations

from collections.abc import Collection

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prime_node.broadcast.routes import MANIFESTS_MAX, Hop, PathSearch, Routes, UpdateRoute, search
from prime_protocol.errors import ErrorCode, RemoteError


def every_way(target: int, routes: Routes, held: Collection[int]) -> list[int]:
    """Return the bytes of all paths, by exhaustive search."""
    if target in held:
        return [0]
    return [
        route.sent_bytes + rest
        for route in routes.get(target, ())
        for rest in ([0] if route.base_version is None else every_way(route.base_version, routes, held))
    ]


@st.composite
def published(draw: st.DrawFn) -> dict[int, list[UpdateRoute]]:
    """Return up to nine policies with arbitrary encodings."""
    routes = {}
    for version in range(draw(st.integers(1, 9))):
        bases = draw(st.sets(st.sampled_from([None, *range(version)]), max_size=4))
        routes[version] = [UpdateRoute(base, draw(st.integers(1, 50))) for base in bases]
    return routes


@given(routes=published(), held=st.sets(st.integers(0, 8), max_size=3))
def test_the_cheapest_way_is_found(routes: dict[int, list[UpdateRoute]], held: set[int]) -> None:
    target = max(routes)
    update_paths = every_way(target, routes, held)
    path = search(target, routes, held)
    if path is None:
        assert update_paths == []
    else:
        assert path.sent_bytes == min(update_paths)


@given(routes=published(), held=st.sets(st.integers(0, 8), max_size=3))
def test_a_way_leads_from_what_is_held_to_the_target(routes: dict[int, list[UpdateRoute]], held: set[int]) -> None:
    path = search(max(routes), routes, held)
    if path is None:
        return
    at: int | None = None
    for number, hop in enumerate(path.hops):
        assert hop.route in routes[hop.policy_version]
        start = hop.route.base_version
        assert start == at if number else start is None or start in held
        at = hop.policy_version
    assert at == max(routes) if path.hops else max(routes) in held


@given(routes=published(), held=st.sets(st.integers(0, 8), max_size=3), at_once=st.integers(1, 8))
def test_reading_what_is_asked_for_ends_at_the_same_way(
    routes: dict[int, list[UpdateRoute]], held: set[int], at_once: int
) -> None:
    known: dict[int, list[UpdateRoute]] = {}
    found = PathSearch(max(routes), known.get, held)
    while unread := found.unread(at_once):
        assert len(unread) <= at_once
        assert not set(unread) & (known.keys() | held)
        known |= {version: routes[version] for version in unread}
    whole = search(max(routes), routes, held)
    assert (found.path is None) == (whole is None)
    if found.path is not None and whole is not None:
        assert found.path.sent_bytes == whole.sent_bytes


def test_a_search_looks_at_each_manifest_once_and_at_a_bounded_number_of_them() -> None:
    """A run without anchors has no end: each policy has deltas to the sixteen before it."""
    looked: list[int] = []
    read: set[int] = set()

    def deltas(version: int) -> list[UpdateRoute] | None:
        if version not in read:
            return None
        looked.append(version)
        return [UpdateRoute(version - span, 1) for span in range(1, 17)]

    found = PathSearch(2**31 - 1, deltas)
    while unread := found.unread(8):
        read |= set(unread)
    assert len(read) == len(looked) == MANIFESTS_MAX
    assert found.path is None
    with pytest.raises(RemoteError, match="4,096 manifests") as refused:
        found.require_path()
    assert refused.value.code is ErrorCode.NOT_FOUND


def test_once_a_path_is_known_few_more_manifests_are_read() -> None:
    routes = {1_000: [UpdateRoute(999, 1), UpdateRoute(None, 10**9)]}
    found = PathSearch(1_000, lambda version: routes.get(version), with_path_max=20)
    while unread := found.unread():
        routes |= {version: [UpdateRoute(version - 1, 1)] for version in unread}
    assert len(routes) == 20
    assert found.require_path().hops == (Hop(1_000, UpdateRoute(None, 10**9)),)


@given(routes=published(), more=st.integers(0, 8))
def test_holding_more_never_costs_more(routes: dict[int, list[UpdateRoute]], more: int) -> None:
    target = max(routes)
    without, holding = search(target, routes), search(target, routes, {more})
    if without is not None:
        assert holding is not None
        assert holding.sent_bytes <= without.sent_bytes


def test_of_two_ways_of_one_size_the_one_with_fewer_hops_is_taken() -> None:
    routes = {0: [UpdateRoute(None, 9)], 1: [UpdateRoute(0, 2)], 2: [UpdateRoute(1, 2), UpdateRoute(0, 4)]}
    path = search(2, routes, {0})
    assert path is not None
    assert [hop.policy_version for hop in path.hops] == [2]


def test_what_is_held_already_costs_nothing() -> None:
    path = search(3, {}, {3})
    assert path is not None
    assert path.hops == ()
