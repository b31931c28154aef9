"""A peer that requests hole punching cannot make others dial, or send packets to, a machine that is not its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from tests.time_world import until

pytest.importorskip("libp2p", reason="libp2p could not be built on this machine")

from multiaddr import Multiaddr
from tests.security.dials import noted_dials

from prime_node.adapters.peers import libp2p_meeting, libp2p_nat
from prime_node.adapters.peers.libp2p_host import PeerSettings
from prime_node.adapters.peers.libp2p_network import Libp2pNetwork
from prime_node.ports.peer_network import PeerAddress
from prime_protocol.errors import RemoteError
from prime_protocol.identity import SigningKey

RUN = "a" * 64
LISTEN = ("/ip4/127.0.0.1/tcp/0",)
VICTIM = "127.0.0.99"
NAMED = (
    f"/ip4/{VICTIM}/tcp/4001",
    f"/ip4/{VICTIM}/udp/4001/quic-v1",
    "/ip4/169.254.169.254/tcp/80",
    "/dns4/victim.example/tcp/80",
)
KEYS = sorted((SigningKey(bytes([number]) * 32) for number in range(60, 64)), key=lambda key: key.key_id)
MakePeer = Callable[..., Awaitable[Libp2pNetwork]]


@pytest.fixture
async def peer() -> AsyncIterator[MakePeer]:
    made: list[Libp2pNetwork] = []

    async def make(key: SigningKey, **settings: object) -> Libp2pNetwork:
        network = Libp2pNetwork(key, run=RUN, settings=PeerSettings(listen=LISTEN, **settings))  # type: ignore[arg-type]
        made.append(network)
        await network.start()
        return network

    yield make
    for network in made:
        await network.close()


def where(network: Libp2pNetwork) -> PeerAddress:
    return PeerAddress(network.peer_id, network.addresses())


@pytest.mark.slow
@pytest.mark.parametrize("leads", ["the liar leads", "the other side leads"])
async def test_a_hole_is_punched_only_towards_where_the_relay_sees_the_peer(
    peer: MakePeer, leads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libp2p_nat, "PUNCH_S_MAX", 8.0)  # one round of the library, and the begin of the next
    liars_key, honest_key = (KEYS[0], KEYS[3]) if leads == "the liar leads" else (KEYS[3], KEYS[0])
    relay = await peer(KEYS[1], relay=True)
    honest = await peer(honest_key, bootstrap=(where(relay),))
    liar = await peer(liars_key, bootstrap=(where(relay),))
    for one in (honest, liar):
        await one.connect(where(relay))
    assert honest.running is not None
    assert honest.running.holes is not None
    assert liar.running is not None
    assert liar.running.holes is not None
    assert await honest.thread.call(honest.running.holes.reserve, relay.peer_id)

    async def lie() -> list[bytes]:
        return [Multiaddr(address).to_bytes() for address in NAMED]

    liar.running.holes.punching._get_observed_addrs = lie  # type: ignore[method-assign]
    circuit = f"{relay.addresses()[0]}/p2p/{relay.peer_id}/p2p-circuit"
    with noted_dials() as dials:
        await liar.connect(PeerAddress(honest.peer_id, (circuit,)), timeout_s=20.0)
        await until(lambda: honest.punched()[1] > 0)
    assert {host for host, _ in dials} <= {"127.0.0.1"}


async def test_the_relay_shows_a_peers_address_only_to_peers_that_asked_for_it(
    peer: MakePeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libp2p_meeting, "MEET_S_MAX", 2.0)
    relay = await peer(KEYS[1], relay=True)
    curious, other = await peer(KEYS[0]), await peer(KEYS[2])
    for one in (curious, other):
        await one.connect(where(relay))
    answer = await curious.request(relay.peer_id, "meet", other.peer_id.encode(), timeout_s=20.0, reply_bytes_max=1_024)
    assert answer == b""
    both = await asyncio.gather(
        curious.request(relay.peer_id, "meet", other.peer_id.encode(), timeout_s=20.0, reply_bytes_max=1_024),
        other.request(relay.peer_id, "meet", curious.peer_id.encode(), timeout_s=20.0, reply_bytes_max=1_024),
    )
    assert both == [b"127.0.0.1", b"127.0.0.1"]


async def test_a_flood_of_dial_backs_to_one_address_is_refused(peer: MakePeer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh keys do not help: dials count by their destination address."""
    monkeypatch.setattr("prime_protocol.limits.PEER_DIAL_BACKS_PER_MINUTE_MAX", 4)
    helper = await peer(KEYS[1])
    wanted = "\n".join(f"/ip4/127.0.0.1/tcp/{port}" for port in range(1, 5)).encode()

    async def ask(seed: int) -> str:
        asker = await peer(SigningKey(bytes([seed]) * 32))
        await asker.connect(where(helper))
        try:
            await asker.request(helper.peer_id, "dial-back", wanted, timeout_s=60.0, reply_bytes_max=4_096)
        except RemoteError as error:
            return error.detail
        return ""

    with noted_dials() as dials:
        answers = [await ask(seed) for seed in range(210, 214)]
    assert "too many dial-backs to your address" in answers
    assert len([port for _, port in dials if port < 5]) <= 8, "the minute may end once meanwhile"
