"""Expensive answers take a bounded share of the coordinator's time, however often they are requested."""

from __future__ import annotations

import pytest
from tests.node.coordinator_world import make_run, memory_parts, running
from tests.time_world import VirtualClock

from prime_node.coordinator.api import cached_response
from prime_node.coordinator.api.cached_response import CachedResponse


def made_in(clock: VirtualClock, *, make_s: float, asked_every_s: float, times: int) -> int:
    """Return how often the answer was computed."""
    made = 0

    def make() -> int:
        nonlocal made
        made += 1
        clock.seconds += make_s
        return made

    answer = CachedResponse(make, clock)
    for _ in range(times):
        assert answer.get() == made
        clock.seconds += asked_every_s
    return made


def test_what_takes_long_is_made_again_only_in_its_share_of_the_time() -> None:
    clock = VirtualClock()
    began_s = clock.seconds
    made = made_in(clock, make_s=0.05, asked_every_s=0.001, times=20_000)
    assert 0.9 * cached_response.SHARE < made * 0.05 / (clock.seconds - began_s) < 1.1 * cached_response.SHARE


def test_what_is_made_at_once_is_always_new_and_what_is_asked_for_seldom_too() -> None:
    assert made_in(VirtualClock(), make_s=0.001, asked_every_s=0.0, times=100) == 100
    assert made_in(VirtualClock(), make_s=0.05, asked_every_s=1.0, times=100) == 100


def test_a_pause_of_the_whole_process_while_it_is_made_is_no_reason_to_show_it_for_long() -> None:
    assert made_in(VirtualClock(), make_s=60.0, asked_every_s=cached_response.OLD_S_MAX, times=3) == 3


async def test_a_flood_of_questions_for_a_large_status_is_answered_with_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0

    def slow(report: object) -> dict[str, int]:
        nonlocal asked
        asked += 1
        return {"asked": asked}

    monkeypatch.setattr("prime_node.coordinator.api.status.StatusReport.status_of_run", slow)
    monkeypatch.setattr(cached_response, "SHORT_S", -1.0)
    monkeypatch.setattr(cached_response, "SHARE", 1e-9)
    async with running(memory_parts(make_run())) as world:
        answers = [(await world.get("/v1/status"))[1] for _ in range(20)]
    assert set(answers) == {b'{"asked":1}'}
