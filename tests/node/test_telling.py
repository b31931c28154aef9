"""Notifications in one beat for all subscribers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from tests.time_world import VirtualClock, turns, until

from prime_node.adapters.system_clock import SystemClock
from prime_node.broadcast.swarm import have_set as have_set_module
from prime_node.broadcast.swarm.have_set import UPDATES_EVERY_S, HaveBroadcast, HaveSet, HeldEncoding, rest_s
from prime_protocol.digest import digest_of
from prime_protocol.envelope import parse_json
from prime_protocol.manifest import CheckpointKind, Encoding, PartEntry
from prime_protocol.peers import PeerUpdate


@pytest.fixture
def have_set(monkeypatch: pytest.MonkeyPatch) -> HaveSet:
    monkeypatch.setattr(have_set_module, "UPDATES_EVERY_S", 0.0)
    return HaveSet()


@contextlib.asynccontextmanager
async def listener(made: HaveBroadcast) -> AsyncIterator[AsyncIterator[bytes]]:
    async with contextlib.aclosing(made.lines()) as lines:
        yield lines


def head_of(line: bytes) -> int:
    assert line.endswith(b"\n")
    return parse_json(line[:-1], PeerUpdate).head


def runs_of(line: bytes, encoding: str) -> tuple[tuple[int, ...], ...]:
    return parse_json(line[:-1], PeerUpdate).pieces[encoding]


async def test_all_peers_with_the_same_state_get_the_same_line(have_set: HaveSet) -> None:
    made = HaveBroadcast(have_set, SystemClock())
    async with listener(made) as first, listener(made) as second:
        assert head_of(await anext(first)) == head_of(await anext(second)) == -1
        waiting = [asyncio.ensure_future(anext(lines)) for lines in (first, second)]
        await asyncio.sleep(0)
        have_set.advance_head(3)
        one, other = await asyncio.gather(*waiting)
        assert one is other
        assert head_of(one) == 3


async def test_a_slow_reader_gets_all_missed_changes_in_one_line(have_set: HaveSet) -> None:
    made = HaveBroadcast(have_set, SystemClock())
    async with listener(made) as slow, listener(made) as quick:
        await anext(slow)
        await anext(quick)
        for version in (1, 2):
            waiting = asyncio.ensure_future(anext(quick))
            await asyncio.sleep(0)
            have_set.advance_head(version)
            assert head_of(await waiting) == version
        assert head_of(await anext(slow)) == 2


async def test_no_line_tells_a_listener_of_pieces_that_it_has_itself(have_set: HaveSet) -> None:
    index, part = (PartEntry(digest=digest_of(name), size=1) for name in (b"index", b"part"))
    have_set.add(HeldEncoding(Encoding(kind=CheckpointKind.ANCHOR, base=None, index=index, parts=(part,)), []))
    made, has = HaveBroadcast(have_set, SystemClock()), {index.digest: 0b0101}
    async with contextlib.aclosing(made.lines(lambda: has)) as informed, listener(made) as other:
        for lines in (informed, other):
            await anext(lines)
        waiting = asyncio.ensure_future(anext(informed))
        for piece in (0, 2):
            heard = asyncio.ensure_future(anext(other))
            await asyncio.sleep(0)
            have_set.came(index.digest, piece)
            assert runs_of(await heard, index.digest) == ((piece, piece + 1),)
        assert not waiting.done()
        have_set.came(index.digest, 3)
        assert runs_of(await waiting, index.digest) == ((3, 4),)
        has[index.digest] = 0b1_1111
        waiting = asyncio.ensure_future(anext(informed))
        have_set.came(index.digest, 4)
        have_set.advance_head(7)
        assert head_of(await waiting) == 7


async def test_a_listener_that_has_everything_gets_a_line_in_time(
    have_set: HaveSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, pieces that it has could delay the line that shows that the link lives to twice the time that peers count on."""
    monkeypatch.setattr(have_set_module, "KEEP_ALIVE_S", 1_000.0)
    index, part = (PartEntry(digest=digest_of(name), size=1) for name in (b"index", b"part"))
    have_set.add(HeldEncoding(Encoding(kind=CheckpointKind.ANCHOR, base=None, index=index, parts=(part,)), []))
    clock = VirtualClock()
    made = HaveBroadcast(have_set, clock)
    async with contextlib.aclosing(made.lines(lambda: {index.digest: 1})) as lines:
        await anext(lines)
        waiting = asyncio.ensure_future(anext(lines))
        await turns()
        clock.seconds += 600.0
        have_set.came(index.digest, 0)
        assert runs_of(await asyncio.wait_for(waiting, 20.0), index.digest) == ((0, 1),)


def test_many_listeners_get_lines_less_often() -> None:
    assert [rest_s(num) for num in (1, 10, 40)] == [UPDATES_EVERY_S, UPDATES_EVERY_S, 4 * UPDATES_EVERY_S]


async def test_a_line_comes_now_and_then_although_nothing_is_new(
    have_set: HaveSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(have_set_module, "KEEP_ALIVE_S", 0.01)
    async with listener(HaveBroadcast(have_set, SystemClock())) as lines:
        assert [head_of(await anext(lines)) for _ in range(3)] == [-1, -1, -1]


async def test_listeners_end_when_it_is_closed_and_nothing_runs_on_without_them(have_set: HaveSet) -> None:
    made = HaveBroadcast(have_set, SystemClock())
    async with listener(made) as lines:
        await anext(lines)
        waiting = asyncio.ensure_future(anext(lines))
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == 3
        made.close()
        with pytest.raises(StopAsyncIteration):
            await waiting
    await until(lambda: len(asyncio.all_tasks()) == 1)
