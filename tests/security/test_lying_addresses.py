"""A hundred attackers announce addresses of every kind to a real swarm: no peer dials an address at which the attacker does not
answer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
from tests.time_world import until

pytest.importorskip("libp2p", reason="libp2p could not be built on this machine")

from tests.node.coordinator_world import ANNA, BEN, COORDINATOR, TRAINER, make_run
from tests.node.swarm_world import CORA, LOCAL, Swarm, swarm
from tests.security.dials import Dial, noted_dials

from prime_node.adapters.peers.libp2p_dial_back import Libp2pDialBack
from prime_node.adapters.peers.libp2p_host import PeerSettings
from prime_node.adapters.peers.libp2p_network import Libp2pNetwork
from prime_node.adapters.system_clock import SystemClock
from prime_node.adapters.web.http_client import HttpClient
from prime_node.coordinator.listed_peers import Peers
from prime_node.ports.peer_network import PeerAddress
from prime_protocol import limits
from prime_protocol.addresses import endpoint_of
from prime_protocol.identity import SigningKey
from prime_protocol.peers import PeerRecord, open_peer_list
from prime_protocol.requests import PeersRequest
from prime_protocol.weights import root_of

LISTEN = ("/ip4/127.0.0.1/tcp/0",)
OVER_LIBP2P = LOCAL.model_copy(update={"p2p": "on", "p2p_listen": LISTEN})
LIARS_HOST, VICTIMS_HOST = "127.0.0.66", "127.0.0.99"
NUM_LIARS = 100

ELSEWHERE = (
    *("169.254.169.254", "169.254.170.2", "100.100.100.200", "168.63.129.16", "127.0.0.1", "127.0.0.2", "0.0.0.0"),
    *(
        "10.1.2.3",
        "172.16.0.9",
        "192.168.1.1",
        "100.64.0.1",
        "169.254.7.7",
        "192.0.2.10",
        "198.51.100.4",
        "203.0.113.9",
    ),
    *("224.0.0.1", "239.255.255.250", "255.255.255.255", "240.0.0.1", "192.88.99.1", "8.8.8.8", "1.1.1.1"),
)
ELSEWHERE_6 = (
    *("::1", "::", "fe80::1", "fd00:ec2::254", "fc00::1", "ff02::1", "::ffff:127.0.0.99", "::127.0.0.99"),
    *("64:ff9b::7f00:63", "2002:7f00:63::1", "2001:db8::1", "2606:4700::1111"),
)


@dataclass
class Victim:
    """Strangers' machines that detect a visit."""

    port: int
    visits: int = 0


@pytest.fixture
async def victim() -> AsyncIterator[Victim]:
    found = Victim(0)

    async def visited(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        found.visits += 1
        writer.close()

    server = await asyncio.start_server(visited, VICTIMS_HOST, 0)
    found.port = server.sockets[0].getsockname()[1]
    yield found
    server.close()


@pytest.fixture(autouse=True)
def look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prime_node.broadcast.swarm.directory.ASK_S_MIN", 0.05)
    monkeypatch.setattr("prime_node.broadcast.swarm.directory.ASK_S_MAX", 0.2)


def lies(victim: Victim, host_of: str, relay: str) -> Iterator[tuple[str, ...]]:
    """Yield announcements, one after the other, without end."""
    port = victim.port
    each = [
        *(f"/ip4/{host}/tcp/{port}" for host in (VICTIMS_HOST, *ELSEWHERE)),
        *(f"/ip6/{host}/tcp/{port}" for host in ELSEWHERE_6),
        *(f"/{kind}/victim.example/tcp/{port}" for kind in ("dns", "dns4", "dns6", "dnsaddr")),
        *(
            f"/ip4/{VICTIMS_HOST}/{rest}"
            for rest in (f"udp/{port}/quic-v1", f"tcp/{port}/ws", f"tcp/{port}/http", "tcp/0")
        ),
        f"/ip4/{VICTIMS_HOST}/tcp/{port}/p2p/{relay}/p2p-circuit",
        f"/ip4/{VICTIMS_HOST}/tcp/{port}/p2p/{host_of}/p2p-circuit",
        f"/ip4/{VICTIMS_HOST}/tcp/{port}/p2p/{host_of}",
        f"/unix/tmp%2F{port}",
    ]
    while True:
        for number, address in enumerate(each):
            yield (address, each[(number + 7) % len(each)])


class Liar(HttpClient):
    """Client that sends from a separate address, so that the announced one is not the source."""

    def _connected(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(local_addr=(LIARS_HOST, 0)), headers={"Accept-Encoding": "identity"}
            )
        return self._session


async def announce_lies(made: Swarm, victim: Victim) -> list[Liar]:
    run, clients = made.world.run, []
    addresses = lies(victim, COORDINATOR.key_id, TRAINER.key_id)
    for number in range(NUM_LIARS):
        key = SigningKey(bytes([200, number]) + bytes(30))
        client = Liar(made.world.url, run=run.digest, clock=SystemClock(), key=key, bounds=run.spec.limits)
        clients.append(client)
        port = victim.port if number % 3 else None
        if number % 2:  # the others have not joined, and announce as guests
            await made.world.join(key)
        await client.find_peers(PeersRequest(port=port, addresses=next(addresses)))
    return clients


@contextlib.asynccontextmanager
async def attacked_swarm(folder: Path) -> AsyncIterator[Swarm]:
    host = Libp2pNetwork(COORDINATOR, run=make_run().digest, settings=PeerSettings(listen=LISTEN, relay=True))
    async with swarm(folder, seeder=OVER_LIBP2P, dial_back_libp2p=Libp2pDialBack(), network=host) as made:
        yield made


def listening(made: Swarm) -> set[Dial]:
    """Return the addresses of honest peers."""
    peers = [made.seeder, *(peer for _, peer in made.workers)]
    found = {("127.0.0.1", int(made.world.url.rpartition(":")[2]))}
    found |= {("127.0.0.1", peer.port) for peer in peers if peer.port is not None}
    networks = [made.world.parts.network, *(peer.network for peer in peers)]
    ends = [endpoint_of(address) for one in networks if one is not None for address in one.addresses()]
    return found | {(end.host, end.port) for end in ends if end is not None}


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_a_hundred_liars_send_nobody_anywhere(tmp_path: Path, victim: Victim) -> None:
    """Every dial of the coordinator and its honest members is counted at the socket, over HTTP and libp2p."""
    with noted_dials() as dials:
        async with attacked_swarm(tmp_path) as made:
            blocklist = await announce_lies(made, victim)
            for key in (ANNA, BEN, CORA):
                await made.worker(key, p2p="on", p2p_listen=LISTEN)
            for _, peer in made.workers:
                neighbours, network = peer.neighbours, peer.network
                assert neighbours is not None
                assert network is not None
                await until(lambda neighbours=neighbours: len(neighbours.linked) == 3)
                await until(lambda network=network: len(network.connected()) >= 3)
            published = await made.publish()
            for follower, _ in made.workers:
                assert root_of((await follower.wait_newer(-1)).weights) == published.manifest.state_root
            for liar in blocklist[:10]:  # the list that a member gets
                listed = open_peer_list((await liar.find_peers(PeersRequest())).peers, made.world.run)
                assert {record.peer for record in listed.peers} == {
                    *(key.key_id for key in (ANNA, BEN, CORA, TRAINER, COORDINATOR))
                }
            honest = listening(made)
            for liar in blocklist:
                await liar.close()
    assert victim.visits == 0
    strangers = {dial for dial in dials if dial not in honest}
    assert {host for host, _ in strangers} <= {LIARS_HOST}, "only a liar's own address is tried, by the coordinator"
    assert dials.count((LIARS_HOST, victim.port)) <= NUM_LIARS


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_false_addresses_over_libp2p_cause_no_dial(tmp_path: Path, victim: Victim) -> None:
    """Identify, provider records and the routing table name victims, before and after the coordinator is lost."""

    class Lying(Libp2pNetwork):
        def addresses(self) -> tuple[str, ...]:
            return (
                f"/ip4/{VICTIMS_HOST}/tcp/{victim.port}",
                "/ip4/169.254.169.254/tcp/80",
                "/dns4/victim.example/tcp/80",
            )

    with noted_dials() as dials:
        async with attacked_swarm(tmp_path) as made:
            for key in (ANNA, BEN):
                await made.worker(key, p2p="on", p2p_listen=LISTEN)
            networks = [peer.network for _, peer in made.workers]
            blocklist = [
                Lying(
                    SigningKey(bytes([201, number]) + bytes(30)),
                    run=made.world.run.digest,
                    settings=PeerSettings(listen=LISTEN),
                )
                for number in range(5)
            ]
            for network in networks:
                assert network is not None
                await until(lambda network=network: len(network.connected()) >= 3)
            for liar in blocklist:
                await liar.start()
                for network in networks:
                    assert network is not None
                    await liar.connect(PeerAddress(network.peer_id, network.addresses()))
                await liar.provide(made.world.run.digest)
            await made.lose_coordinator()
            for network in networks:
                assert network is not None
                hints = await network.providers(made.world.run.digest)
                named = [text for hint in hints for text in hint.addresses]
                assert not [text for text in named if VICTIMS_HOST in text or "169.254" in text or "dns" in text]
            for _, peer in made.workers:
                await until(lambda peer=peer: peer.directory.is_alone)
            for liar in blocklist:
                await liar.close()
    assert victim.visits == 0
    assert not [dial for dial in dials if dial[0] in (VICTIMS_HOST, "169.254.169.254")]
    assert {dial[0] for dial in dials} <= {"127.0.0.1"}


async def test_a_peer_that_answers_at_its_own_address_is_listed(tmp_path: Path) -> None:
    """The counterpart of the above: the same check admits an honest newcomer, over libp2p alone."""
    async with attacked_swarm(tmp_path) as made:
        run = made.world.run
        network = Libp2pNetwork(ANNA, run=run.digest, settings=PeerSettings(listen=LISTEN))
        await network.start()
        try:
            client = made.world.client(ANNA)
            asker = made.world.client(BEN)

            async def is_listed() -> bool:
                await client.find_peers(PeersRequest(addresses=network.addresses()))
                listed = open_peer_list((await asker.find_peers(PeersRequest())).peers, run)
                return {record.peer: record.addresses for record in listed.peers}.get(
                    ANNA.key_id
                ) == network.addresses()

            await made.world.until(is_listed)
        finally:
            await network.close()


async def test_one_network_neither_fills_the_list_nor_has_the_coordinator_dial_without_end() -> None:
    asked: list[str] = []

    class Dials:
        async def answers(self, address: str, peer: str) -> bool:
            asked.append(address)
            return True

        async def close(self) -> None:
            """Do nothing: there is nothing to close."""

    peers = Peers(Dials())
    for number in range(2 * limits.PEER_OFFERS_PER_NETWORK_MAX):
        key = SigningKey(bytes([202]) + number.to_bytes(31, "big"))
        record = PeerRecord(peer=key.key_id, urls=(f"http://9.9.9.9:{1024 + number}",))
        peers.offer(record, 0.0, seen_at="9.9.9.9", offers_max=10_000)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert len(asked) == limits.PEER_DIAL_BACKS_PER_MINUTE_MAX
    assert len(peers.offers) == limits.PEER_OFFERS_PER_NETWORK_MAX
    key = SigningKey(bytes([203]) * 32)
    peers.offer(PeerRecord(peer=key.key_id, urls=("http://8.8.8.8:80",)), 0.0, seen_at="8.8.8.8", offers_max=10_000)
    await until(lambda: len(asked) > limits.PEER_DIAL_BACKS_PER_MINUTE_MAX)
    assert asked[-1] == "http://8.8.8.8:80", "another network is not held up"
