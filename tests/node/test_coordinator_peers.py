"""The coordinator's list of peers: only peers that register, at the address of their request, and until they expire."""

from __future__ import annotations

import dataclasses
import random

import pytest
from tests.node.coordinator_world import ANNA, BEN, World, make_run, memory_parts, running
from tests.time_world import turns

from prime_node.adapters.web.http_peer import HttpDialBack
from prime_node.coordinator.listed_peers import OFFER_S_MAX, TRIED_AGAIN_S, Peers
from prime_protocol.identity import KeyId, SigningKey
from prime_protocol.peers import PeerRecord, authorization, check_authorization, open_peer_list
from prime_protocol.replies import PeersReply
from prime_protocol.requests import PeersRequest

RUN = make_run()
HOME = "192.0.2.1"


class Dials:
    """Fake of ports.swarm.DialBack with preset answers."""

    def __init__(self) -> None:
        self.reachable = True
        self.asked: list[str] = []

    async def answers(self, address: str, peer: KeyId) -> bool:
        self.asked.append(address)
        return self.reachable

    async def close(self) -> None:
        """Do nothing: there is nothing to close."""


def record(key: SigningKey, port: int = 4000) -> PeerRecord:
    return PeerRecord(peer=key.key_id, urls=(f"http://{HOME}:{port}",))


def listed(peers: Peers, asker: SigningKey, now_s: float) -> set[str]:
    return {found.peer for found in peers.sample(asker.key_id, 10, now_s, random.Random(1), address=HOME)}


async def test_an_offer_is_listed_once_the_dial_back_has_found_it() -> None:
    dials = Dials()
    peers = Peers(dials)
    assert peers.offer(record(ANNA), 0.0, seen_at=HOME, offers_max=10) is None
    assert listed(peers, BEN, 0.0) == set()
    await turns()
    assert peers.offer(record(ANNA), 1.0, seen_at=HOME, offers_max=10) is True
    assert listed(peers, BEN, 1.0) == {ANNA.key_id}
    assert listed(peers, ANNA, 1.0) == set()
    assert len(dials.asked) == 1


async def test_an_unreachable_peer_is_not_listed_and_is_tried_again_later() -> None:
    dials = Dials()
    peers, dials.reachable = Peers(dials), False
    peers.offer(record(ANNA), 0.0, seen_at=HOME, offers_max=10)
    await turns()
    assert peers.offer(record(ANNA), 1.0, seen_at=HOME, offers_max=10) is False
    assert listed(peers, BEN, 1.0) == set()
    dials.reachable = True
    peers.offer(record(ANNA), TRIED_AGAIN_S + 1.0, seen_at=HOME, offers_max=10)
    await turns()
    assert listed(peers, BEN, TRIED_AGAIN_S + 1.0) == {ANNA.key_id}


async def test_another_address_is_tried_before_it_is_listed() -> None:
    dials = Dials()
    peers = Peers(dials)
    peers.offer(record(ANNA), 0.0, seen_at=HOME, offers_max=10)
    await turns()
    dials.reachable = False
    assert peers.offer(record(ANNA, 4001), 1.0, seen_at=HOME, offers_max=10) is None
    await turns()
    assert listed(peers, BEN, 1.0) == set()


async def test_an_offer_that_is_not_repeated_is_forgotten() -> None:
    peers = Peers(Dials())
    peers.offer(record(ANNA), 0.0, seen_at=HOME, offers_max=10)
    await turns()
    assert listed(peers, BEN, OFFER_S_MAX) == {ANNA.key_id}
    assert listed(peers, BEN, OFFER_S_MAX + 1.0) == set()


async def test_offers_are_bounded() -> None:
    peers = Peers(Dials())
    for number in range(5):
        peers.offer(record(SigningKey(bytes([100 + number]) * 32)), 0.0, seen_at=HOME, offers_max=3)
    await turns()
    assert len(peers) == 3


async def find(world: World, key: SigningKey, **fields: object) -> PeersReply:
    return await world.client(key).find_peers(PeersRequest(**fields))  # type: ignore[arg-type]


async def test_an_address_where_another_peer_answers_is_not_listed() -> None:
    parts = dataclasses.replace(memory_parts(RUN), dial_back=HttpDialBack(RUN.digest))
    async with running(parts) as world:
        port = int(world.url.rpartition(":")[2])  # the coordinator itself answers there, and is not ANNA
        await find(world, ANNA, port=port)

        async def is_known() -> bool:
            return (await find(world, ANNA, port=port)).reachable is False

        await world.until(is_known)
        assert open_peer_list((await find(world, BEN)).peers, RUN).peers == ()


@pytest.mark.parametrize("fields", [{}, {"peers_max": 0}])
async def test_a_peer_without_pieces_gets_a_ticket_and_is_not_listed(fields: dict[str, object]) -> None:
    async with running(memory_parts(RUN)) as world:
        await world.join(ANNA)
        reply = await find(world, ANNA, **fields)
        assert reply.reachable is None
        shown = authorization(reply.ticket, BEN.key_id, RUN.digest, ANNA, now_ms=world.parts.clock.now_ms())
        assert check_authorization(shown, BEN.key_id, RUN, now_ms=world.parts.clock.now_ms()) == ANNA.key_id
        assert open_peer_list((await find(world, BEN)).peers, RUN).peers == ()


async def test_an_address_is_shown_only_to_those_whom_it_leads_there() -> None:
    peers = Peers(Dials())
    addresses = ("127.0.0.1", "192.168.7.7", "10.0.0.1", "8.8.8.8")
    for number, address in enumerate(addresses):
        key = SigningKey(bytes([120 + number]) * 32)
        offered = PeerRecord(peer=key.key_id, urls=(f"http://{address}:80",))
        peers.offer(offered, 0.0, seen_at=address, offers_max=10)
    await turns()
    listed = {
        "127.0.0.1": set(addresses),  # on this machine itself
        "192.168.1.1": {"192.168.7.7", "8.8.8.8"},
        "10.0.0.9": {"10.0.0.1", "8.8.8.8"},
        "9.9.9.9": {"8.8.8.8"},
    }
    for asker, seen in listed.items():
        shown = peers.sample(ANNA.key_id, 10, 0.0, random.Random(1), address=asker)
        assert {found.urls[0] for found in shown} == {f"http://{address}:80" for address in seen}
