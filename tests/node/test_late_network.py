"""A peer network that is made when it starts, so that joining does not wait for the import of libp2p."""

from __future__ import annotations

import pytest
from tests.node.worker_world import TRAINER, WORKER

from prime_lab.memory_network import MemoryNetwork, MemorySwitch, memory_address
from prime_node.adapters.peers.late_network import LateNetwork
from prime_node.ports.peer_network import PeerAddress, PeerNetwork, Reachability
from prime_node.ports.transport import Unreachable
from prime_protocol.errors import LocalError
from prime_protocol.identity import KeyId

RUN = "0" * 64


async def greet(peer: KeyId, request: bytes) -> bytes:
    return b"hello " + request


async def test_it_serves_what_was_registered_before_its_network_was_made() -> None:
    switch, made = MemorySwitch(), list[MemoryNetwork]()

    def make() -> PeerNetwork:
        made.append(MemoryNetwork(switch, WORKER.key_id, run=RUN))
        return made[-1]

    late, other = LateNetwork(WORKER.key_id, make, private=False), MemoryNetwork(switch, TRAINER.key_id, run=RUN)
    late.serve("/greet", greet, request_bytes_max=100)
    await other.start()
    address = PeerAddress(WORKER.key_id, (memory_address(WORKER.key_id),))

    assert (made, late.addresses(), late.connected(), late.known()) == ([], (), (), ())
    assert late.reachability() is Reachability.UNKNOWN
    with pytest.raises(Unreachable, match="has not started"):
        await late.connect(PeerAddress(TRAINER.key_id, (memory_address(TRAINER.key_id),)))

    await late.start()
    await other.connect(address)
    answer = await other.request(WORKER.key_id, "/greet", b"you", timeout_s=5.0, reply_bytes_max=100)
    assert answer == b"hello you"
    assert [linked.peer for linked in late.connected()] == [TRAINER.key_id]
    await late.close()
    await late.start()
    assert len(made) == 1, "it is made once, and started again"


async def test_a_network_that_cannot_be_made_is_tried_again_at_the_next_start() -> None:
    faults = [LocalError("libp2p is torn")]

    def make() -> PeerNetwork:
        if faults:
            raise faults.pop()
        return MemoryNetwork(MemorySwitch(), WORKER.key_id, run=RUN)

    late = LateNetwork(WORKER.key_id, make, private=True)
    with pytest.raises(LocalError, match="torn"):
        await late.start()
    assert late.has_ended()
    await late.close()
    await late.start()
    assert not late.has_ended()
