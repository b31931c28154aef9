"""What a linked peer's notifications cost: malformed runs are refused first, sets are built once a line, and lines are paced."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator

import pytest
from tests.node.coordinator_world import ANNA, BEN
from tests.node.mesh_world import RUN, Finder, where
from tests.time_world import VirtualClock, until

from prime_node.adapters.system_clock import SystemClock
from prime_node.adapters.web.http_peer import HttpPeer
from prime_node.broadcast.swarm.directory import Directory
from prime_node.broadcast.swarm.have_set import HaveBroadcast, HaveSet, HeldEncoding, encode_update
from prime_node.broadcast.swarm.neighbours import LINE_MS, Neighbours
from prime_node.broadcast.swarm.piece_sets import piece_set, runs, spans
from prime_node.broadcast.swarm.sources import SourcePool
from prime_node.broadcast.swarm.swarm_tasks import SwarmTasks
from prime_node.broadcast.swarm.uplink import Uplink
from prime_node.ports.transport import Unreachable
from prime_protocol import limits
from prime_protocol.digest import digest_of
from prime_protocol.envelope import parse_json
from prime_protocol.errors import RemoteError
from prime_protocol.limits import Limits
from prime_protocol.manifest import CheckpointKind, Encoding, PartEntry
from prime_protocol.peers import PeerUpdate
from prime_protocol.requests import PeersRequest

NAMES = [f"{number:064x}" for number in range(limits.PEER_UPDATE_ENCODINGS_MAX)]
LAST = limits.CHUNKS_MAX
FULL = tuple((LAST - 2 * number - 1, LAST - 2 * number) for number in reversed(range(limits.PEER_UPDATE_RUNS_MAX)))
"""Most runs of one line, at the end where a number is largest."""
EMPTY = PeerUpdate()


def line(pieces: dict[str, list[list[int]]]) -> bytes:
    listed = ",".join(f'"{name}":{ranges}' for name, ranges in pieces.items())
    return f'{{"cursor":1,"head":1,"pieces":{{{listed}}}}}'.encode()


@pytest.mark.parametrize(
    "pieces",
    [
        {NAMES[0]: [[LAST - 10, LAST], [LAST - 9, LAST]]},
        {NAMES[0]: [[0, 2], [1, 3]]},
        {NAMES[0]: [[4, 5], [0, 1]]},
        {NAMES[0]: [[1, 1]]},
        {NAMES[0]: [[0, LAST + 1]]},
        {name: [[2 * n, 2 * n + 1] for n in range(limits.PEER_UPDATE_RUNS_MAX // 2 + 1)] for name in NAMES[:2]},
    ],
    ids=["the same run again", "overlap", "descending", "empty", "too far", "too many together"],
)
def test_runs_that_do_not_ascend_or_are_too_many_in_a_line_are_refused_by_the_parser(
    pieces: dict[str, list[list[int]]],
) -> None:
    with pytest.raises(RemoteError):
        parse_json(line(pieces), PeerUpdate)


def test_a_set_is_built_and_listed_in_one_step_whatever_the_number_of_runs() -> None:
    made = spans(FULL)
    assert made.bit_count() == len(FULL)
    assert tuple(runs(made)) == FULL
    rng = random.Random(1)
    for bits in (1, 7, 8, 9, 64, 1_000):
        some = piece_set(number for number in range(bits) if rng.random() < 0.5)
        assert spans(runs(some)) == some
    assert spans([(0, 3), (3, 5)]) == 0b11111


class Flooding:
    """Link of a peer that has another notification whenever it is asked."""

    def __init__(self, update: PeerUpdate) -> None:
        self.num_lines = 0
        self._update = update

    async def updates(self) -> AsyncIterator[PeerUpdate]:
        while True:
            self.num_lines += 1
            yield self._update
            await asyncio.sleep(0)

    async def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("update", "lines_max"),
    [
        (EMPTY, 10 * 1_000 // LINE_MS),
        (PeerUpdate(pieces={NAMES[0]: FULL}), 5),
        (PeerUpdate(pieces=dict.fromkeys(NAMES, ((LAST - 1, LAST),))), 2),
    ],
    ids=["empty lines", "most runs", "most pieces"],
)
async def test_a_peer_that_sends_without_pause_is_read_ten_times_in_a_second_and_less_if_lines_cost_more(
    update: PeerUpdate, lines_max: int
) -> None:
    clock, rng, link = VirtualClock(), random.Random(1), Flooding(update)
    directory = Directory(RUN, ANNA, Finder(peers=(where(BEN),)), clock=clock, rng=rng)
    pool = SourcePool([], clock=clock, rng=rng)
    neighbours = Neighbours(
        directory,
        pool,
        lambda _: link,  # type: ignore[arg-type, return-value]
        Uplink(clock=clock),
        SwarmTasks(clock),
        clock=clock,
        rng=rng,
    )
    listening = asyncio.create_task(neighbours.run(PeersRequest))
    await until(lambda: link.num_lines)
    began_s, before = clock.seconds, link.num_lines
    await until(lambda: clock.seconds >= began_s + 10.0)
    passed_s, num_lines = clock.seconds - began_s, link.num_lines - before
    listening.cancel()
    await asyncio.gather(listening, return_exceptions=True)
    assert 1 <= num_lines <= lines_max * passed_s / 10.0 + 5


class Impatient(HttpPeer):
    def __init__(self, url: str) -> None:
        super().__init__(url, run=RUN.digest, clock=SystemClock(), bounds=Limits(), authorization=lambda: None)
        self._stall_s = 0.05


async def test_a_peer_that_takes_the_question_and_answers_nothing_is_unreachable() -> None:
    closed = asyncio.Event()

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            await reader.read(-1)
        writer.close()
        await writer.wait_closed()
        closed.set()

    async with await asyncio.start_server(say_nothing, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        peer = Impatient(f"http://127.0.0.1:{port}")
        with pytest.raises(Unreachable, match="stopped sending"):
            async with asyncio.timeout(10):
                await anext(peer.updates())
        await peer.close()
        await closed.wait()


async def test_an_honest_peer_names_scattered_pieces_of_a_large_policy_in_several_allowed_lines() -> None:
    have_set, clock = HaveSet(), VirtualClock()
    scattered = spans(FULL) | spans((2 * n, 2 * n + 1) for n in range(limits.PEER_UPDATE_RUNS_MAX))
    index, part = (PartEntry(digest=digest_of(name), size=1) for name in (b"index", b"part"))
    name = index.digest
    have_set.add(
        HeldEncoding(Encoding(kind=CheckpointKind.ANCHOR, base=None, index=index, parts=(part,)), [], scattered)
    )
    expected, cursor, num_lines, has_more = 0, 0, 0, True
    while has_more:
        change = have_set.updates(cursor)
        encoded = encode_update(change)
        assert len(encoded) <= limits.PEER_UPDATE_BYTES_MAX
        expected |= spans(parse_json(encoded, PeerUpdate).pieces[name])
        cursor, has_more, num_lines = change.cursor, change.has_more, num_lines + 1
    assert expected == scattered
    assert num_lines > 1
    began_s = clock.seconds
    async with contextlib.aclosing(HaveBroadcast(have_set, clock).lines()) as lines:
        heard = 0
        for _ in range(num_lines):
            heard |= spans(parse_json((await anext(lines))[:-1], PeerUpdate).pieces.get(name, ()))
    assert heard == scattered
    assert clock.seconds - began_s >= (num_lines - 1) * LINE_MS / 1_000 - 1e-6


def test_changes_that_are_forgotten_are_replaced_by_everything() -> None:
    have_set = HaveSet()
    index, part = (PartEntry(digest=digest_of(name), size=1) for name in (b"index", b"part"))
    have_set.add(HeldEncoding(Encoding(kind=CheckpointKind.ANCHOR, base=None, index=index, parts=(part,)), [], 1))
    old = have_set.updates(0)
    for piece in range(2, 4 * limits.PEER_UPDATE_RUNS_MAX, 2):
        have_set.came(index.digest, piece)
    heard, cursor, has_more = old.pieces[index.digest], old.cursor, True
    while has_more:
        change = have_set.updates(cursor)
        heard |= change.pieces.get(index.digest, 0)
        cursor, has_more = change.cursor, change.has_more
    assert heard == next(iter(have_set)).has
