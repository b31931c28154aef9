"""The owner's limits on uploads: slots, rate, cap, and none at all."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.time_world import VirtualClock

from prime_node.broadcast.swarm.choker import ChokerRules
from prime_node.broadcast.swarm.uplink import PACE_BYTES, DataCap, Uplink
from prime_node.patience import BURST_S, RateLimit
from prime_protocol.errors import ErrorCode, RemoteError

DAY_MS = 86_400_000


class StillClock(VirtualClock):
    """Clock whose time moves on command, or while a task sleeps."""

    async def sleep(self, seconds: float) -> None:
        self.seconds += seconds


class StandingClock(StillClock):
    """Clock that wakes no sleeper."""

    async def sleep(self, seconds: float) -> None:
        await asyncio.get_running_loop().create_future()


async def test_a_rate_limit_holds_over_many_small_takes() -> None:
    clock = StillClock()
    limit, began_s = RateLimit(1_000.0, clock), clock.seconds
    for _ in range(100):
        await limit.take(100)
    assert clock.seconds - began_s >= 100 * 100 / 1_000 - BURST_S - 0.11


async def test_a_large_request_that_is_abandoned_uses_neither_rate_nor_cap(tmp_path: Path) -> None:
    clock = StandingClock()
    cap = DataCap(10**7, days=1, file=tmp_path / "uploaded.json", clock=clock)
    rate = RateLimit(1_000.0, clock)
    uplink = Uplink(clock=clock, rate=rate, cap=cap)
    (await uplink.slot("anna", 1_000, is_member=True))()
    gone = asyncio.create_task(uplink.slot("ben", 10**6, is_member=True))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    assert cap.used_bytes == 1_000
    clock.seconds += 1.0
    (await asyncio.wait_for(uplink.slot("cora", 1_000, is_member=True), 1.0))()


async def test_a_long_answer_under_a_rate_limit_does_not_hold_up_a_short_one() -> None:
    clock = StillClock()
    uplink = Uplink(clock=clock, rate=RateLimit(PACE_BYTES, clock))
    await uplink.slot("anybody", 64 * PACE_BYTES, is_member=False)
    began_s = clock.seconds
    await uplink.slot("member", 1_000, is_member=True)
    assert clock.seconds - began_s <= 1.0
    await uplink.pace(PACE_BYTES)
    await uplink.pace(PACE_BYTES)
    assert clock.seconds - began_s >= 2.0 - BURST_S


async def test_no_rate_limit_is_no_wait() -> None:
    clock = StillClock()
    began_s = clock.seconds
    await RateLimit(0.0, clock).take(10**9)
    assert clock.seconds == began_s


def test_a_data_cap_is_remembered_and_restarts_after_its_days(tmp_path: Path) -> None:
    clock, file = StillClock(), tmp_path / "uploaded.json"
    clock.seconds = 30 * 86_400 * 20.0
    cap = DataCap(1_000, days=30, file=file, clock=clock)
    assert cap.take(900)
    assert not cap.is_reached
    assert not cap.take(101)
    cap.close()
    again = DataCap(1_000, days=30, file=file, clock=clock)
    assert again.take(100)
    assert again.is_reached
    clock.seconds += 30 * 86_400
    assert not again.is_reached
    assert again.used_bytes == 0


@pytest.mark.parametrize("content", ["", "[]", "{", '{"days": 30}', '{"days": 30, "period": "x", "used_bytes": 5}'])
def test_a_damaged_count_restarts(tmp_path: Path, content: str) -> None:
    file = tmp_path / "uploaded.json"
    file.write_text(content)
    assert DataCap(10, days=30, file=file, clock=StillClock()).used_bytes == 0


async def test_nothing_is_served_when_the_cap_is_reached_or_the_owner_does_not_want_to(tmp_path: Path) -> None:
    clock = StillClock()
    cap = DataCap(1_000, days=1, file=tmp_path / "uploaded.json", clock=clock)
    idle = [True]
    uplink = Uplink(clock=clock, cap=cap, may_serve=lambda: idle[0])
    (await uplink.slot("anna", 1_000, is_member=True))()
    with pytest.raises(RemoteError) as caught:
        await uplink.slot("anna", 1, is_member=True)
    assert caught.value.code is ErrorCode.UNAVAILABLE
    clock.seconds += 86_400
    (await uplink.slot("anna", 1, is_member=True))()
    idle[0] = False
    with pytest.raises(RemoteError):
        await uplink.slot("anna", 1, is_member=True)
    assert uplink.served_bytes == 1_001


async def test_answers_that_are_under_way_together_do_not_go_over_the_cap(tmp_path: Path) -> None:
    clock = StillClock()
    cap = DataCap(1_000, days=1, file=tmp_path / "uploaded.json", clock=clock)
    uplink = Uplink(clock=clock, cap=cap)
    asked = [uplink.slot(f"peer-{number}", 300, is_member=True) for number in range(8)]
    given = [slot for slot in await asyncio.gather(*asked, return_exceptions=True) if not isinstance(slot, RemoteError)]
    assert len(given) == 3
    assert cap.used_bytes == 900


async def test_a_waiting_peer_is_not_served_once_the_machine_is_busy() -> None:
    idle = [True]
    uplink = Uplink(clock=StillClock(), rules=ChokerRules(slots=1), may_serve=lambda: idle[0])
    first = await uplink.slot("anna", 10, is_member=True)
    waiting = asyncio.create_task(uplink.slot("ben", 10, is_member=True))
    await asyncio.sleep(0)
    idle[0] = False
    first()
    with pytest.raises(RemoteError):
        await waiting
    idle[0] = True
    (await uplink.slot("cora", 10, is_member=True))()


async def test_a_slot_that_is_given_back_goes_to_a_waiting_peer() -> None:
    uplink = Uplink(clock=StillClock(), rules=ChokerRules(slots=1))
    first = await uplink.slot("anna", 10, is_member=True)
    waiting = asyncio.create_task(uplink.slot("ben", 10, is_member=True))
    await asyncio.sleep(0)
    assert not waiting.done()
    first()
    (await waiting)()


async def test_a_waiting_peer_that_leaves_does_not_keep_the_slot() -> None:
    uplink = Uplink(clock=StillClock(), rules=ChokerRules(slots=1))
    first = await uplink.slot("anna", 10, is_member=True)
    gone, stays = (asyncio.create_task(uplink.slot(peer, 10, is_member=True)) for peer in ("ben", "cora"))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    first()
    (await stays)()
    (await uplink.slot("anna", 10, is_member=True))()


async def test_a_slot_that_comes_as_the_asker_goes_is_passed_on() -> None:
    uplink = Uplink(clock=StillClock(), rules=ChokerRules(slots=1))
    first = await uplink.slot("anna", 10, is_member=True)
    gone = asyncio.create_task(uplink.slot("ben", 10, is_member=True))
    await asyncio.sleep(0)
    first()
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    (await uplink.slot("cora", 10, is_member=True))()


async def test_too_many_requests_of_one_peer_are_refused() -> None:
    uplink = Uplink(clock=StillClock(), rules=ChokerRules(slots=1, waiting_per_peer_max=1))
    first = await uplink.slot("anna", 10, is_member=True)
    waiting = asyncio.create_task(uplink.slot("anna", 10, is_member=True))
    await asyncio.sleep(0)
    with pytest.raises(RemoteError) as caught:
        await uplink.slot("anna", 10, is_member=True)
    assert caught.value.is_transient
    first()
    (await waiting)()


async def test_a_slot_that_becomes_free_as_a_waiter_gives_up_is_not_lost() -> None:
    uplink = Uplink(clock=StillClock(), rules=ChokerRules(slots=1))
    first = await uplink.slot("anna", 10, is_member=True)
    gone, stays = (asyncio.create_task(uplink.slot(peer, 10, is_member=True)) for peer in ("ben", "cora"))
    await asyncio.sleep(0)
    gone.cancel()
    first()  # before the cancelled one has withdrawn
    await asyncio.gather(gone, return_exceptions=True)
    (await asyncio.wait_for(stays, 1.0))()
    (await asyncio.wait_for(uplink.slot("anna", 10, is_member=True), 1.0))()
