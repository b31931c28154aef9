"""Requests for peers to the coordinator: rare without changes, and soon after a new peer joins."""

from __future__ import annotations

import asyncio
import random

import pytest
from tests.node.coordinator_world import ANNA, BEN, COORDINATOR, ROOT, TRAINER, make_run
from tests.node.worker_world import next_ring

from prime_node.adapters.system_clock import SystemClock
from prime_node.broadcast.swarm.directory import ASK_S_MAX, ASK_S_MIN, LIST_AGE_S_MAX, Directory
from prime_protocol import limits
from prime_protocol.envelope import PayloadType, seal
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.identity import SigningKey
from prime_protocol.peers import PeerList, PeerRecord
from prime_protocol.replies import PeersReply
from prime_protocol.requests import PeersRequest

RUN = make_run()


class Finder:
    """Fake of ports.swarm.PeerFinder that names given peers and numbers its tickets."""

    num_tickets = 0
    hosts = frozenset(["192.0.2.9"])

    def __init__(self) -> None:
        self.peers: tuple[PeerRecord, ...] = (PeerRecord(peer=TRAINER.key_id, urls=("http://192.0.2.1:4000",)),)

    async def find_peers(self, request: PeersRequest) -> PeersReply:
        listed = PeerList(run=RUN.digest, issued_at_ms=1, peers=self.peers)
        self.num_tickets += 1
        text = seal(listed, PayloadType.PEER_LIST, COORDINATOR).to_bytes().decode()
        return PeersReply(peers=text, ticket=f"ticket {self.num_tickets}")


class Pauses(SystemClock):
    """Clock whose pauses end on the test's command."""

    def __init__(self) -> None:
        self.asked: asyncio.Queue[float] = asyncio.Queue()
        self.over = asyncio.Event()

    async def sleep(self, seconds: float) -> None:
        self.asked.put_nowait(seconds)
        await self.over.wait()
        self.over.clear()

    async def until_long(self) -> float:
        """End pauses one by one until one has the maximum length."""
        while (seconds := await self.asked.get()) < 0.8 * ASK_S_MAX:
            self.over.set()
        return seconds


async def test_a_coordinator_that_refuses_us_is_asked_ever_less_often_and_reported_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Refusing(Finder):
        async def find_peers(self, request: PeersRequest) -> PeersReply:
            raise RemoteError(ErrorCode.EXPIRED, "your clock is ahead")

    caplog.set_level("INFO")
    clock = Pauses()
    directory = Directory(RUN, ANNA, Refusing(), clock=clock, rng=random.Random(1))
    asking = asyncio.create_task(directory.run(list, lambda: None))
    assert await clock.until_long() >= 0.8 * ASK_S_MAX
    asking.cancel()
    assert [line for line in caplog.messages if "sent no list of peers" in line] == [
        "the coordinator sent no list of peers: expired: your clock is ahead"
    ]


async def test_the_record_of_a_newcomer_that_links_is_requested_soon() -> None:
    clock, finder = Pauses(), Finder()
    directory = Directory(RUN, ANNA, finder, clock=clock, rng=random.Random(1))
    asking = asyncio.create_task(directory.run(list, lambda: None))
    async with asyncio.timeout(5):
        assert await clock.until_long() > 20.0
        finder.peers = (*finder.peers, PeerRecord(peer=BEN.key_id, urls=("http://192.0.2.2:4000",)))
        directory.met(BEN.key_id)
        assert await clock.asked.get() <= 1.2 * ASK_S_MIN
        clock.over.set()
        assert await clock.asked.get() <= 2 * ASK_S_MIN
    assert set(directory.records) == {TRAINER.key_id, BEN.key_id}
    asking.cancel()


@pytest.mark.parametrize("peer", [ANNA.key_id, TRAINER.key_id])
async def test_a_known_peer_causes_no_request(peer: str) -> None:
    clock = Pauses()
    directory = Directory(RUN, ANNA, Finder(), clock=clock, rng=random.Random(1))
    asking = asyncio.create_task(directory.run(list, lambda: None))
    async with asyncio.timeout(5):
        await clock.until_long()
        directory.met(peer)
        directory.met(peer)
        for _ in range(10):
            await asyncio.sleep(0)
    assert clock.asked.empty()
    asking.cancel()


async def test_a_member_that_the_coordinator_does_not_name_causes_one_request() -> None:
    clock = Pauses()
    directory = Directory(RUN, ANNA, Finder(), clock=clock, rng=random.Random(1))
    asking = asyncio.create_task(directory.run(list, lambda: None))
    async with asyncio.timeout(5):
        for _ in range(2):
            await clock.until_long()
            directory.met(BEN.key_id)
            for _ in range(10):
                await asyncio.sleep(0)
            if clock.asked.empty():
                break
            clock.over.set()
        else:
            pytest.fail("it was woken twice")
    asking.cancel()


async def test_the_members_that_are_remembered_are_bounded() -> None:
    directory = Directory(RUN, ANNA, Finder(), clock=Pauses(), rng=random.Random(1))
    for number in range(limits.PEER_RECORDS_MAX + 10):
        directory.met(SigningKey(number.to_bytes(32, "big")).key_id)
    assert len(directory.members_met) <= limits.PEER_RECORDS_MAX


async def test_a_ticket_from_before_the_keys_were_replaced_is_not_shown_and_a_new_one_comes_at_once() -> None:
    clock, run = Pauses(), make_run()
    directory = Directory(run, ANNA, Finder(), clock=clock, rng=random.Random(1))
    asking = asyncio.create_task(directory.run(list, lambda: None))
    async with asyncio.timeout(5):
        await clock.until_long()
        shown = directory.authorization(BEN.key_id)
        assert shown is not None
        assert directory.authorization(BEN.key_id) == shown
        run.keys.add(next_ring(run.keys, ROOT))
        assert directory.authorization(BEN.key_id) is None
        assert await clock.asked.get() <= 1.2 * ASK_S_MIN
        clock.over.set()
        await clock.asked.get()
    renewed = directory.authorization(BEN.key_id)
    assert renewed is not None
    assert _ticket_in(renewed) != _ticket_in(shown)
    asking.cancel()


def signed_list(issued_at_ms: int, *records: PeerRecord) -> str:
    listed = PeerList(run=RUN.digest, issued_at_ms=issued_at_ms, peers=records)
    return seal(listed, PayloadType.PEER_LIST, COORDINATOR).to_bytes().decode()


async def test_an_old_list_replaces_nothing_that_is_known_and_a_list_of_yesterday_counts_from_no_peer() -> None:
    """Before, a peer could show any list ever signed, and so lead machines to addresses that are others' now."""
    clock = SystemClock()
    directory = Directory(RUN, ANNA, Finder(), clock=clock, rng=random.Random(1))
    now_ms = clock.now_ms()
    here, before = (PeerRecord(peer=BEN.key_id, urls=(f"http://192.0.2.{number}:4000",)) for number in (1, 2))
    trainer = PeerRecord(peer=TRAINER.key_id, urls=("http://192.0.2.3:4000",))
    directory.take_in(signed_list(now_ms, here))
    directory.take_in(signed_list(now_ms - 1, before, trainer), age_s_max=LIST_AGE_S_MAX)
    assert directory.records == {BEN.key_id: here, TRAINER.key_id: trainer}
    with pytest.raises(RemoteError, match="too old"):
        directory.take_in(signed_list(now_ms - round(1_001 * LIST_AGE_S_MAX), before), age_s_max=LIST_AGE_S_MAX)
    directory.take_in(signed_list(now_ms + 1, before), age_s_max=LIST_AGE_S_MAX)
    assert directory.records[BEN.key_id] == before


async def test_the_coordinators_own_list_counts_after_its_clock_was_set_back() -> None:
    """Before, no list that it sent changed a known address until its clock had passed the wrong time."""
    directory = Directory(RUN, ANNA, Finder(), clock=SystemClock(), rng=random.Random(1))
    before, here = (PeerRecord(peer=BEN.key_id, urls=(f"http://192.0.2.{number}:4000",)) for number in (1, 2))
    directory.take_in(signed_list(3_600_000, before))
    directory.take_in(signed_list(0, here))
    assert directory.records[BEN.key_id] == here


def _ticket_in(header: str) -> str:
    return header.removeprefix("Prime ").split(".")[0]
