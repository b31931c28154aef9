"""Dial-backs over libp2p: check that the key that a peer claims answers at an address. For coordinators and peers.

Each dial-back uses a host of its own with a fresh key, so that an answer proves a new link, and that host dials only this
address.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable

import trio
from libp2p.peer.id import ID
from multiaddr import Multiaddr

from prime_node.adapters.peers import faults
from prime_node.adapters.peers.libp2p_gate import ConnectionGater
from prime_node.adapters.peers.libp2p_host import PeerSettings, make_host
from prime_node.adapters.peers.trio_thread import TrioThread
from prime_node.ports.transport import Unreachable
from prime_protocol import limits
from prime_protocol.addresses import endpoint_of
from prime_protocol.identity import KeyId, SigningKey

log = logging.getLogger(__name__)


class Libp2pDialBack:
    """Implementation of ports.swarm.DialBack for TCP multiaddrs. Its thread starts with the first request."""

    def __init__(self) -> None:
        self._thread = TrioThread("libp2p dial-back")
        self._starting: asyncio.Task[None] | None = None

    async def answers(self, address: str, peer: KeyId) -> bool:
        """Return whether the peer's key answers at an address. Return False once the thread has ended."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._thread.start(_wait))
        try:
            await asyncio.shield(self._starting)
            return await self._thread.call(key_answers, peer, address)
        except Unreachable as error:
            log.warning("dial-backs over libp2p have stopped: %s", error)
            return False

    async def close(self) -> None:
        """Stop the thread. Idempotent."""
        if self._starting is not None:
            await self._thread.stop()


async def _wait(is_ready: Callable[[], None], stopping: trio.Event) -> None:
    is_ready()
    await stopping.wait()


async def key_answers(peer: KeyId, address: str) -> bool:
    """Return whether the peer's key answers at a TCP multiaddr. Runs on the trio side, for DIAL_BACK_S_MAX at most."""
    end = endpoint_of(address)
    if end is None or end.relay:
        return False
    gate = ConnectionGater(near=(end.host,))
    host = make_host(SigningKey(os.urandom(32)), PeerSettings(listen=(), private=True))
    gate.guard(host)
    try:
        with trio.fail_after(limits.DIAL_BACK_S_MAX), gate.opened((address,)):
            async with host.run(listen_addrs=[]):
                await host.get_network().dial_addr(Multiaddr(address), ID.from_string(peer))
                await host.close()
    except Exception as error:  # noqa: BLE001 - libp2p raises many kinds; each of them means False
        faults.note(log, f"dial-back of {peer} at {address}", error)
        return False
    return True
