"""Failures that one host's gossip survives."""

from __future__ import annotations

import pytest

pytest.importorskip("libp2p", reason="libp2p could not be built on this machine")

import trio
from libp2p import new_host
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.peer.id import ID

from prime_node.adapters.peers.libp2p_gossip import Gossip


async def _nobody_is_blamed(peer: str, why: str) -> None:
    raise AssertionError(f"{peer}: {why}")


def test_a_blocked_peer_whose_link_ends_meanwhile_does_not_end_the_host() -> None:
    gossip = Gossip(new_host(), _nobody_is_blamed)
    peer = ID.from_pubkey(create_new_key_pair().public_key)

    class Ending:
        async def reset(self) -> None:
            gossip.pubsub._handle_dead_peer(peer)

    gossip.pubsub.peers[peer] = Ending()
    trio.run(gossip.pubsub._teardown_if_connected, peer)
    assert peer not in gossip.pubsub.peers
