"""Bounds of what a libp2p host remembers of other peers."""

from __future__ import annotations

import pytest

pytest.importorskip("libp2p", reason="libp2p could not be built on this machine")

from libp2p.peer.id import ID

from prime_node.adapters.peers.libp2p_host import PeerSettings, make_host
from prime_protocol.identity import SigningKey


def test_a_host_keeps_its_own_keys_however_many_peers_it_meets() -> None:
    """Before, the thousandth peer evicted the host's own entry, and the host ended."""
    key = SigningKey(bytes([3]) * 32)
    host = make_host(key, PeerSettings(connections_max=64))
    store = host.get_peerstore()
    for number in range(5_000):
        store.add_addrs(ID(b"\x00\x24" + number.to_bytes(36, "big")), [], 7_200)
    assert len(store.peer_ids()) < 5_000
    assert ID.from_pubkey(store.privkey(host.get_id()).get_public_key()) == host.get_id()
