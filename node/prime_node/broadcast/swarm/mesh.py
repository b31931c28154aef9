"""Links over the peer network that work without the coordinator, for peer discovery.

Waiting: nothing waits for it. `run` keeps a few links to other peers, whatever transport carries the bytes; otherwise lookups
in the hash table would depend on the coordinator's host. It publishes a provider record under the run's digest, and looks for
such records while the coordinator does not answer. A record only says where to try.
"""

from __future__ import annotations

import asyncio
import logging
import random
from typing import NoReturn

from prime_node.broadcast.swarm.directory import Directory
from prime_node.ports.clock import Clock
from prime_node.ports.peer_network import PeerAddress, PeerNetwork
from prime_node.ports.transport import Unreachable
from prime_protocol.identity import KeyId
from prime_protocol.run_spec import PinnedRun

log = logging.getLogger(__name__)

LINKS_WISHED = 6
"""Number of links to keep. One link that answers is enough for a lookup; the others replace it when it is lost."""
LOOK_S = 1.0
LINK_S_MAX = 15.0
TRIED_AGAIN_S = 60.0
"""Seconds for which an unreachable peer rests."""
HINT_S = 600.0
"""Seconds between two provider records of ours; records expire after a day."""
ASK_S = 20.0
"""Seconds between two lookups of others' records, while the coordinator is unreachable."""


class Mesh:
    """The links kept for discovery. Used from the event loop only."""

    def __init__(
        self, run: PinnedRun, network: PeerNetwork, directory: Directory, *, clock: Clock, rng: random.Random
    ) -> None:
        self._run = run
        self._network = network
        self._directory = directory
        self._clock = clock
        self._rng = rng
        self._rests: dict[KeyId, float] = {}
        """Time until which a peer is not tried again."""

    async def run(self) -> NoReturn:
        """Keep links until cancelled. Raises Unreachable if the network ends by itself."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch())
            tasks.create_task(self._leave_hints())
            tasks.create_task(self._read_hints())
            while True:
                self._take_over()
                await self._link_more()
                await self._clock.sleep(LOOK_S)
        raise AssertionError("the peers' event loop does not stop")

    async def _watch(self) -> NoReturn:
        await self._network.ended()
        raise Unreachable("the peer network has ended")

    def _take_over(self) -> None:
        """Pass the directory's addresses to the network.

        While no listed peer is reachable, pass the network's hints to the directory.
        """
        addresses = [PeerAddress(r.peer, r.addresses) for r in self._directory.records.values() if r.addresses]
        self._network.learn(tuple(addresses))
        for address in addresses:
            if address.peer in self._run.keys.current.coordinator:
                self._network.stay_linked(address)  # rendezvous point and relay
        if self._is_cut_off:
            self._directory.hint(self._network.known())

    @property
    def _is_cut_off(self) -> bool:
        """Whether the coordinator does not answer and no peer that it listed is linked. Only then hints count."""
        return self._directory.is_alone and self._directory.records.keys().isdisjoint(
            link.peer for link in self._network.connected()
        )

    async def _link_more(self) -> None:
        now_s = self._clock.monotonic_s()
        self._rests = {peer: until_s for peer, until_s in self._rests.items() if until_s > now_s}
        linked = {link.peer for link in self._network.connected()}
        room = LINKS_WISHED - len(linked)
        if room <= 0:
            return
        others = [
            PeerAddress(record.peer, record.addresses)
            for record in self._directory.candidates.values()
            if record.addresses
            and record.peer not in linked
            and record.peer not in self._rests
            and record.peer not in self._run.keys.current.coordinator
        ]
        # Hints may name peers that do not exist, so peers that the coordinator lists come first.
        self._rng.shuffle(others)
        others.sort(key=lambda address: address.peer not in self._directory.records)
        await asyncio.gather(*(self._link(one) for one in others[:room]))

    async def _link(self, address: PeerAddress) -> None:
        try:
            await self._network.connect(address, timeout_s=LINK_S_MAX)
        except Unreachable as error:
            self._rests[address.peer] = self._clock.monotonic_s() + TRIED_AGAIN_S
            log.debug("no link to %s: %s", address.peer, error)

    async def _leave_hints(self) -> None:
        while True:
            if self._network.connected():
                await self._network.provide(self._run.digest)
                await self._clock.sleep(HINT_S)
            else:
                await self._clock.sleep(LOOK_S)

    async def _read_hints(self) -> None:
        while True:
            if self._is_cut_off:
                self._network.learn(await self._network.providers(self._run.digest))
                await self._clock.sleep(ASK_S)
            else:
                await self._clock.sleep(LOOK_S)
