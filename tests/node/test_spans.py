"""The cost model: encodings that are made, those that are worth sending, and their memory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prime_node.broadcast.publish.spans import (
    SpanRules,
    anchor_is_due,
    needed_later,
    paying_deltas,
    planned_bases,
    worth_remembering,
)
from prime_node.broadcast.routes import UpdateRoute, search

RULES = SpanRules()
ANCHOR = 1_000


def delta_bytes(distance: int, single: int) -> int:
    """Changes add up more slowly than steps: the size grows as d^0.62."""
    return round(float(single * distance**0.62))


def publish(num_policies: int, rules: SpanRules, single: int) -> dict[int, tuple[UpdateRoute, ...]]:
    """Return the encodings of a whole run, as the encoder makes them."""
    routes: dict[int, tuple[UpdateRoute, ...]] = {}
    remembered: dict[int, tuple[UpdateRoute, ...]] = {}
    for version in range(num_policies):
        sizes = {base: delta_bytes(version - base, single) for base in planned_bases(version, rules)}
        known = ANCHOR if version else None
        deltas = {base: sizes[base] for base in paying_deltas(version, sizes, remembered, anchor_bytes=known)}
        made = [UpdateRoute(base, size) for base, size in deltas.items()]
        if anchor_is_due(version, deltas, remembered, rules, anchor_bytes=known):
            made.append(UpdateRoute(None, ANCHOR))
        routes[version] = tuple(made)
        remembered = worth_remembering({**remembered, version: tuple(made)})
    return routes


@pytest.mark.parametrize(
    ("version", "bases"), [(0, ()), (1, (0,)), (4, (3, 0)), (7, (6,)), (20, (19, 16)), (32, (31, 28, 16, 0))]
)
def test_spans_are_made_at_the_versions_that_they_divide(version: int, bases: tuple[int, ...]) -> None:
    assert planned_bases(version, RULES) == bases


@given(
    spans=st.sets(st.integers(1, 20), min_size=1, max_size=4),
    root_every=st.integers(0, 20),
    version=st.integers(0, 200),
)
def test_every_base_is_still_held_when_its_turn_comes(spans: set[int], root_every: int, version: int) -> None:
    rules = SpanRules(tuple(spans), root_every)
    held: set[int] = set()
    for published in range(version + 1):
        assert set(planned_bases(published, rules)) <= held
        held = {policy for policy in held | {published} if policy in needed_later(published, rules)}
        assert len(held) <= len(spans) + 1


@given(single=st.integers(1, 3_000), spans=st.sampled_from([(1,), (1, 4), (1, 4, 16), (3,)]))
def test_a_newcomer_never_downloads_more_than_the_rules_allow(single: int, spans: tuple[int, ...]) -> None:
    rules = SpanRules(spans, anchor_pays=2.0)
    routes = publish(50, rules, single)
    for version in routes:
        path = search(version, {known: routes[known] for known in range(version + 1)})
        assert path is not None
        assert path.sent_bytes <= rules.anchor_pays * ANCHOR


@given(single=st.integers(1, 3_000))
def test_no_delta_is_larger_than_an_anchor_or_than_another_way(single: int) -> None:
    routes = publish(40, RULES, single)
    for version, made in routes.items():
        for route in made:
            if route.base_version is None:
                continue
            assert route.sent_bytes < ANCHOR
            others = {**routes, version: [other for other in made if other != route]}
            other_way = search(version, others, {route.base_version})
            assert other_way is None or route.sent_bytes < other_way.sent_bytes


def test_a_span_that_costs_as_much_as_its_steps_is_left_out() -> None:
    published = {0: (UpdateRoute(None, ANCHOR),), **{version: (UpdateRoute(version - 1, 10),) for version in (1, 2, 3)}}
    assert paying_deltas(4, {3: 10, 0: 40}, published, anchor_bytes=ANCHOR) == [3]
    assert paying_deltas(4, {3: 10, 0: 39}, published, anchor_bytes=ANCHOR) == [3, 0]


def test_deltas_that_change_everything_give_way_to_anchors() -> None:
    assert all(routes == (UpdateRoute(None, ANCHOR),) for routes in publish(20, RULES, ANCHOR).values())


def test_sparse_changes_need_one_anchor_and_no_more() -> None:
    routes = publish(64, RULES, 10)
    assert [version for version, made in routes.items() if any(route.base_version is None for route in made)] == [0]
    assert {route.base_version for route in routes[32]} == {31, 28, 16, 0}


def test_what_is_remembered_of_a_long_run_is_bounded() -> None:
    routes = publish(300, SpanRules((1,), root_every=0, anchor_pays=2.0), 100)
    assert len(worth_remembering(routes)) < 40
