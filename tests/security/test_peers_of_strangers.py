"""Limits on what keys that never joined get of the swarm, and on what one network's keys can hold of one peer."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from tests.node.coordinator_world import (
    ANNA,
    BEN,
    COORDINATOR,
    TRAINER,
    VALIDATOR,
    World,
    make_run,
    memory_parts,
    running,
)
from tests.node.swarm_world import CORA, LOCAL
from tests.time_world import until

from prime_node.adapters.system_clock import SystemClock
from prime_node.broadcast.swarm.choker import ChokerRules
from prime_node.broadcast.swarm.have_set import HaveSet
from prime_node.broadcast.swarm.network_peer import NetworkPeer, serve_over
from prime_node.broadcast.swarm.part_store import PartStore
from prime_node.broadcast.swarm.serving import PeerService
from prime_node.broadcast.swarm.uplink import Uplink
from prime_node.cli.seed import serve_policies
from prime_node.coordinator.listed_peers import Peers
from prime_node.ports.web import Request
from prime_node.worker.config import WorkerConfig
from prime_protocol import limits
from prime_protocol.addresses import network_of
from prime_protocol.digest import digest_of
from prime_protocol.envelope import PayloadType, seal
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.identity import KeyId, SigningKey
from prime_protocol.peers import PeerRecord, PeerTicket, authorization, open_peer_list
from prime_protocol.replies import PeersReply
from prime_protocol.requests import PeersRequest
from prime_protocol.run_spec import JoinLink

RUN, CLOCK = make_run(), SystemClock()
CLOSED = ({"invites_needed": True}, {"allowed_workers": [ANNA.key_id]})
BLOB = np.random.default_rng(7).bytes(6 * 2**20)
NUM_KEYS = 16


def key_of(number: int) -> SigningKey:
    return SigningKey(b"\x0b" + number.to_bytes(31, "big"))


async def find(world: World, key: SigningKey) -> PeersReply:
    return await world.client(key).find_peers(PeersRequest())


# The coordinator


@pytest.mark.parametrize("settings", CLOSED, ids=["invited", "listed"])
async def test_a_run_for_invited_keys_names_its_peers_to_no_other_key(settings: dict[str, object]) -> None:
    async with running(memory_parts(RUN, **settings, seeders=[CORA.key_id])) as world:
        with pytest.raises(RemoteError, match=rf"operator to add key {BEN.key_id} to coordinator\.seeders") as caught:
            await find(world, BEN)
        assert caught.value.code is ErrorCode.NOT_INVITED
        for key in (CORA, TRAINER, VALIDATOR, COORDINATOR):
            assert (await find(world, key)).ticket


async def test_a_worker_gets_a_ticket_while_it_takes_part() -> None:
    async with running(memory_parts(RUN)) as world:
        assert (await find(world, ANNA)).ticket == ""
        await world.join(ANNA)
        assert (await find(world, ANNA)).ticket


async def test_in_an_open_run_a_key_that_never_joined_gets_a_list_and_no_ticket() -> None:
    async with running(memory_parts(RUN)) as world:
        reply = await find(world, BEN)
        assert open_peer_list(reply.peers, RUN).run == RUN.digest
        assert reply.ticket == ""
        assert "ticket" not in reply.model_dump()


class Answers:
    """Fake of ports.swarm.DialBack: every peer answers."""

    async def answers(self, address: str, peer: KeyId) -> bool:
        return True

    async def close(self) -> None:
        """Do nothing: there is nothing to close."""


async def test_offers_of_keys_that_never_joined_crowd_out_no_member() -> None:
    peers, members = Peers(Answers()), {key_of(number).key_id for number in range(40)}

    def offer(number: int, host: str, *, is_guest: bool) -> None:
        record = PeerRecord(peer=key_of(number).key_id, urls=(f"http://{host}:4000",))
        peers.offer(record, 0.0, seen_at=host, offers_max=40, is_guest=is_guest)

    for number in range(1_000, 1_400):
        offer(number, f"8.{number % 256}.{number // 256}.8", is_guest=True)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert len(peers) == limits.PEER_GUESTS_MAX
    for number in range(40):
        offer(number, f"9.9.{number}.9", is_guest=False)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    shown = peers.sample(ANNA.key_id, limits.PEERS_MAX, 0.0, random.Random(1), address="7.7.7.7")
    named = [record.peer for record in shown]
    assert set(named[:40]) == members
    assert len(named) == 40 + limits.PEER_GUESTS_LISTED_MAX
    short = peers.sample(ANNA.key_id, 20, 0.0, random.Random(1), address="7.7.7.7")
    assert {record.peer for record in short} <= members


async def test_one_network_of_strangers_fills_a_quarter_of_their_places() -> None:
    peers = Peers(Answers())
    for number in range(200):
        record = PeerRecord(peer=key_of(number).key_id, urls=("http://8.8.8.8:4000",))
        peers.offer(record, 0.0, seen_at="8.8.8.8", offers_max=1_000, is_guest=True)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert len(peers) == limits.PEER_GUESTS_MAX // 4


async def test_dial_backs_to_strangers_leave_room_for_those_to_members() -> None:
    class Waits(Answers):
        async def answers(self, address: str, peer: KeyId) -> bool:
            asked.append(peer)
            await asyncio.Event().wait()
            return True

    asked: list[KeyId] = []
    peers = Peers(Waits())
    for number in range(100):
        host, is_guest = f"8.{number}.8.8", number < 99
        record = PeerRecord(peer=key_of(number).key_id, urls=(f"http://{host}:4000",))
        peers.offer(record, 0.0, seen_at=host, offers_max=1_000, is_guest=is_guest)
        await asyncio.sleep(0)
    assert len(asked) == limits.DIAL_BACKS_MAX // 4 + 1
    assert asked[-1] == key_of(99).key_id
    for task in list(peers.dials):
        task.cancel()
    await asyncio.gather(*peers.dials, return_exceptions=True)


# A seeder


async def run_seed(world: World, folder: Path, stop: asyncio.Event) -> int:
    """Run what `prime-node seed` runs, with the key CORA."""
    return await serve_policies(JoinLink(world.url, RUN.digest), WorkerConfig(swarm=LOCAL), folder, CORA, stop)


async def test_a_seeder_that_a_closed_run_does_not_list_ends_with_advice_for_its_operator(
    tmp_path: Path,
) -> None:
    parts = memory_parts(RUN, invites_needed=True)
    await parts.public.put(b"{}")
    async with running(parts) as world:
        await put_model_files(world)
        with pytest.raises(RemoteError, match=rf"operator to add key {CORA.key_id} to coordinator\.seeders"):
            await run_seed(world, tmp_path, asyncio.Event())


@pytest.mark.parametrize("settings", [{}, {"invites_needed": True, "seeders": [CORA.key_id]}], ids=["open", "named"])
async def test_a_seeder_serves_an_open_run_and_a_closed_one_that_names_it(
    settings: dict[str, object], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with running(memory_parts(RUN, **settings)) as world:
        await put_model_files(world)
        stop = asyncio.Event()
        seeding = asyncio.create_task(run_seed(world, tmp_path, stop))
        await until(lambda: seeding.done() or "serving peers on port" in caplog.text)
        stop.set()
        assert await seeding == 0
    assert ("the operator can add it to coordinator.seeders" in caplog.text) == (not settings)


async def put_model_files(world: World) -> None:
    from tests.node.coordinator_world import CONFIG_JSON

    await world.parts.public.put(CONFIG_JSON)


# A peer


def service_of(folder: Path) -> PeerService:
    parts = PartStore(folder / "parts", bytes_max=2**30)
    parts.write(digest_of(BLOB), BLOB)
    uplink = Uplink(clock=CLOCK, rules=ChokerRules(slots=16))
    return PeerService(RUN, ANNA, HaveSet(), parts, uplink, CLOCK, lambda version: None, folder=folder)


def shown_by(key: SigningKey) -> str:
    ticket = PeerTicket(run=RUN.digest, peer=key.key_id, expires_at_ms=CLOCK.now_ms() + 3_600_000)
    text = seal(ticket, PayloadType.PEER_TICKET, COORDINATOR).to_bytes().decode()
    return authorization(text, ANNA.key_id, RUN.digest, key, now_ms=CLOCK.now_ms())


def test_which_keys_share_a_bound() -> None:
    alike = (("8.8.8.8", "8.8.8.9"), ("2a00:1:2::1", "2a00:1:2:ffff::1"), ("::ffff:8.8.8.8", "8.8.8.77"), ("x", "y"))
    for one, other in alike:
        assert network_of(one) == network_of(other)
    for one, other in (("8.8.8.8", "8.8.9.8"), ("192.168.0.7", "192.168.0.8"), ("127.0.0.1", "::1"), ("x", "8.8.8.8")):
        assert network_of(one) != network_of(other)


async def test_many_keys_of_a_few_networks_hear_no_more_than_their_share_of_news(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, four networks filled all subscriptions, and no one else heard of a policy from this peer."""
    monkeypatch.setattr(limits, "PEER_LISTENERS_MAX", 16)
    monkeypatch.setattr(limits, "PEER_LISTENERS_NETWORK_MAX", 4)
    service = service_of(tmp_path)

    async def listen(number: int, host: str) -> None:
        request = Request(params={}, body=b"", headers={"authorization": shown_by(key_of(number))}, remote=host)
        response = await service.have(request)
        assert not isinstance(response.body, bytes)
        streams.append(response.body)
        await anext(streams[-1])

    streams: list[AsyncIterator[bytes]] = []
    for number in range(limits.PEER_LISTENERS_NETWORK_MAX):
        await listen(number, f"8.8.8.{number}")
    with pytest.raises(RemoteError, match="too many listeners at this peer already"):
        await listen(1_000, "8.8.8.200")
    for number in range(100, 109):
        await listen(number, f"{number // 4}.9.9.{number}")
    with pytest.raises(RemoteError, match="too many listeners at this peer already"):
        await listen(1_000, "27.9.9.200")
    await listen(1_001, "9.9.9.9")
    for stream in streams:
        await stream.aclose()  # type: ignore[attr-defined]
    assert not service.listeners


@pytest.mark.slow
@pytest.mark.parametrize("are_members", [True, False], ids=["tickets", "strangers"])
@pytest.mark.timeout(120)
async def test_sixteen_keys_of_one_network_that_read_nothing_keep_no_bytes_from_a_member(
    are_members: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is a separate libp2p host on 127.0.0.1; the member comes from another network, ::1."""
    pytest.importorskip("libp2p", reason="libp2p could not be built on this machine")
    from prime_node.adapters.peers.libp2p_host import PeerSettings
    from prime_node.adapters.peers.libp2p_network import Libp2pNetwork
    from prime_node.adapters.peers.libp2p_streams import AskingStream

    service = service_of(tmp_path)
    listen = ("/ip4/127.0.0.1/tcp/0", "/ip6/::1/tcp/0")
    async with contextlib.AsyncExitStack() as stack:

        async def host(key: SigningKey, *listen: str) -> Libp2pNetwork:
            made = Libp2pNetwork(key, run=RUN.digest, settings=PeerSettings(listen=listen))
            if key is ANNA:
                serve_over(made, service)
            await made.start()
            stack.push_async_callback(made.close)
            return made

        def link(network: Libp2pNetwork, key: SigningKey, kind: str, *, shows: bool) -> NetworkPeer:
            addresses = tuple(one for one in anna.addresses() if one.startswith(kind))
            record = PeerRecord(peer=ANNA.key_id, addresses=addresses)
            return NetworkPeer(
                network, record, bounds=RUN.spec.limits, authorization=lambda: shown_by(key) if shows else None
            )

        async def read_nothing(stream: AskingStream) -> None:
            import trio

            await trio.sleep_forever()

        anna = await host(ANNA, *listen)
        with monkeypatch.context() as patch:
            patch.setattr(AskingStream, "read_replies", read_nothing)
            asking = []
            for number in range(NUM_KEYS):
                attacker = await host(key_of(number), listen[0])
                hostile = link(attacker, key_of(number), "/ip4/", shows=are_members)
                await attacker.connect(hostile.address)
                asking += [asyncio.create_task(hostile.blob(digest_of(BLOB))) for _ in range(4)]
            choker = service.uplink.choker
            await until(lambda: choker.num_waiting, seconds=60.0)
            assert 0 < choker.serving <= 8
        member = link(await host(BEN, listen[1]), BEN, "/ip6/", shows=True)
        async with asyncio.timeout(20):
            for start in range(0, len(BLOB), 2**20):
                assert await member.blob(digest_of(BLOB), start=start, end=start + 2**20) == BLOB[start : start + 2**20]
        assert choker.serving > 0, "the slow readers still hold their share"
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
