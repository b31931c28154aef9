"""Peers of one run find each other on a local network (here: loopback), and those of another run, or private ones, do not."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator

import pytest
from tests.time_world import until

pytest.importorskip("libp2p", reason="libp2p could not be built on this machine")

from prime_node.adapters.peers.libp2p_host import PeerSettings
from prime_node.adapters.peers.libp2p_network import Libp2pNetwork
from prime_node.adapters.peers.mdns import LocalPeers, local_addresses, read_records
from prime_node.ports.peer_network import PeerAddress
from prime_protocol import limits
from prime_protocol.identity import SigningKey

ANNA, BEN, CORA = (SigningKey(bytes([90 + number]) * 32) for number in range(3))
pytestmark = pytest.mark.xdist_group("mdns")  # one multicast group for the whole machine
LISTEN = ("/ip4/127.0.0.1/tcp/0",)


def fresh_run() -> str:
    """Return a run id that keeps this test apart from concurrent ones on this machine."""
    return os.urandom(32).hex()


@contextlib.asynccontextmanager
async def network(key: SigningKey, run: str, *, private: bool = False) -> AsyncIterator[Libp2pNetwork]:
    made = Libp2pNetwork(key, run=run, settings=PeerSettings(listen=LISTEN, lan=True, private=private))
    await made.start()
    try:
        yield made
    finally:
        await made.close()


async def test_peers_of_one_run_find_each_other_and_link() -> None:
    run = fresh_run()
    async with network(ANNA, run) as anna, network(BEN, run) as ben, network(CORA, run, private=True) as cora:
        await until(lambda: anna.known() and ben.known())
        [found] = anna.known()
        assert found == PeerAddress(BEN.key_id, ben.addresses())
        assert (await anna.connect(found)).is_direct
        assert cora.known() == ()


async def test_another_run_in_the_same_house_is_not_met() -> None:
    async with network(ANNA, fresh_run()) as anna:
        run = fresh_run()
        async with network(BEN, run) as ben, network(CORA, run) as cora:
            await until(lambda: ben.known() and cora.known())
        assert anna.known() == ()


async def test_a_machine_without_a_network_continues() -> None:
    local = LocalPeers(ANNA.key_id, fresh_run(), found=lambda address: None)
    await local.start([])
    await local.close()
    await local.close()


PLACE = f"/ip4/192.168.1.7/tcp/4001/p2p/{BEN.key_id}".encode()


@pytest.mark.parametrize(
    ("records", "found"),
    [
        ({b"dnsaddr": PLACE}, (PeerAddress(BEN.key_id, ("/ip4/192.168.1.7/tcp/4001",)),)),
        ({b"other": PLACE}, ()),
        ({b"dnsaddr": None}, ()),
        ({b"dnsaddr": b"\xff\xfe"}, ()),
        ({b"dnsaddr": b"/ip4/192.168.1.7/tcp/4001/p2p/nobody"}, ()),
        ({b"dnsaddr": b"/ip4/" + b"1" * 300 + PLACE}, ()),
        ({b"dnsaddr": PLACE, b"dnsaddr1": PLACE.replace(BEN.key_id.encode(), CORA.key_id.encode())}, ()),
    ],
)
def test_a_record_names_one_peer_or_none(records: dict[bytes, bytes | None], found: tuple[PeerAddress, ...]) -> None:
    assert read_records(records) == found


def test_a_record_names_no_more_addresses_than_are_dialled() -> None:
    records: dict[bytes, bytes | None] = {
        b"dnsaddr%d" % number: PLACE.replace(b"4001", b"%d" % (4001 + number)) for number in range(20)
    }
    [found] = read_records(records)
    assert len(found.addresses) == limits.PEER_ADDRESSES_MAX


def test_a_peer_that_listens_everywhere_announces_addresses_that_others_can_dial() -> None:
    assert local_addresses(["/ip4/127.0.0.1/tcp/4001", "/ip4/127.0.0.1/udp/4001"]) == ("/ip4/127.0.0.1/tcp/4001",)
    addresses = local_addresses(["/ip4/0.0.0.0/tcp/4001"])
    assert not [address for address in addresses if "/127." in address or "/0.0.0.0/" in address]
