"""Provider records in libp2p's Kademlia DHT, on the trio side. Hints only.

The table lists local entries first, returns stale ones and takes seconds after churn, and anyone may write anything into it.
So nothing depends on it: a hint is an address to try, and what is fetched there is verified like everything else. It serves
to find a first peer when the coordinator is unreachable. Keys are hashed with the run, because the library has one protocol
name for all tables.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import trio
from libp2p.abc import IHost, INetStream
from libp2p.kad_dht.kad_dht import DHTMode, KadDHT
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo

from prime_node.adapters.peers import faults
from prime_node.adapters.peers.libp2p_relay import HostsOf, network_at
from prime_node.adapters.peers.libp2p_streams import reset
from prime_node.ports.peer_network import PeerAddress
from prime_protocol import limits
from prime_protocol.digest import digest_of

log = logging.getLogger(__name__)

LOOKUP_S_MAX = 20.0
MEET_S = (0.2, 1.0, 4.0)
"""Seconds after which to check whether a new peer takes part in the table, which Identify reveals."""
KEYS_MAX = 4_096
"""Digests whose providers are remembered; the oldest are dropped first."""
STREAMS_MAX = 64
"""Incoming streams of the table that are answered concurrently."""
STREAMS_NETWORK_MAX = 16
"""Incoming streams of one network; further ones are reset."""
STREAM_S_MAX = 10.0
"""Seconds after which such a stream is reset: an idle one holds a place. The library opens one for each question."""


class _Table(KadDHT):
    """A table that bounds the streams of one network and their duration. The library bounds only their number."""

    def __init__(self, host: IHost, mode: DHTMode, hosts_of: HostsOf) -> None:
        super().__init__(host, mode, enable_values=False)
        self._inbound_limiter = trio.CapacityLimiter(STREAMS_MAX)
        self._hosts_of = hosts_of
        self._answering: Counter[str] = Counter()

    async def handle_stream(self, stream: INetStream) -> None:
        network = network_at(self._hosts_of(str(stream.muxed_conn.peer_id)))
        if self._answering[network] >= STREAMS_NETWORK_MAX:
            await reset(stream)
            return
        self._answering[network] += 1
        try:
            with trio.move_on_after(STREAM_S_MAX) as scope:
                await super().handle_stream(stream)
            if scope.cancelled_caught:
                await reset(stream)
        finally:
            self._answering[network] -= 1
            if not self._answering[network]:
                del self._answering[network]


class Hints:
    """One host's part of the table. A private peer only asks."""

    def __init__(
        self,
        host: IHost,
        *,
        run: str,
        private: bool,
        hosts_of: HostsOf,
        choose: Callable[[Sequence[str]], Sequence[str]],
        proven: Callable[[str, Sequence[Any]], list[Any]],
    ) -> None:
        """Join the table.

        `choose` returns the addresses of a hint that may be dialled. `proven` returns the addresses of a provider, by its key
        id, that may be passed on.
        """
        self._host = host
        self._choose = choose
        self._run = run
        self._private = private
        self.table = _Table(host, DHTMode.CLIENT if private else DHTMode.SERVER, hosts_of)
        self._tell_only(proven)

    async def meet(self, peer: str) -> None:
        """Add a linked peer to the table, if it takes part."""
        for pause_s in MEET_S:
            await trio.sleep(pause_s)
            try:
                if await self.table.add_peer(ID.from_string(peer)):
                    return
            except Exception as error:  # noqa: BLE001 - a hint is lost, and nothing else
                faults.note(log, f"table of hints: adding {peer} failed", error)

    async def provide(self, digest: str) -> None:
        """Publish a provider record for a digest."""
        if self._private:
            return
        try:
            with trio.move_on_after(LOOKUP_S_MAX):
                await self.table.provide(self._key(digest))
        except Exception as error:  # noqa: BLE001 - a hint is lost, and nothing else
            faults.note(log, f"publishing a hint for {digest[:12]} failed", error)

    async def providers(self, digest: str) -> tuple[PeerAddress, ...]:
        """Return peers that claim to provide a digest, unverified."""
        found = []
        try:
            with trio.move_on_after(LOOKUP_S_MAX):
                found = await self.table.find_providers(self._key(digest), limits.PEER_HINTS_MAX)
        except Exception as error:  # noqa: BLE001 - no hint, and nothing else
            faults.note(log, f"finding hints for {digest[:12]} failed", error)
        by_peer = {
            str(info.peer_id): self._texts(info.addrs) for info in found
        }  # the table may list a peer more than once
        by_peer.pop(str(self._host.get_id()), None)
        return tuple(PeerAddress(peer, texts) for peer, texts in by_peer.items() if texts)[: limits.PEER_HINTS_MAX]

    def _key(self, digest: str) -> str:
        return digest_of(f"{self._run} {digest}".encode())

    def _texts(self, addresses: Sequence[object]) -> tuple[str, ...]:
        texts = [text for one in addresses if len(text := str(one).split("/p2p/")[0]) <= limits.PEER_ADDRESS_CHARS_MAX]
        return tuple(self._choose(texts))[: limits.PEER_HINT_ADDRESSES_MAX]

    def _tell_only(self, proven: Callable[[str, Sequence[Any]], list[Any]]) -> None:
        """Drop unproven addresses and the oldest digests: the library would keep whatever a provider names, and pass it on."""
        store, own = self.table.provider_store, self._host.get_id()
        add = store.add_provider

        def add_provider(key: bytes, provider: PeerInfo) -> None:
            addresses = provider.addrs if provider.peer_id == own else proven(str(provider.peer_id), provider.addrs)
            if addresses:
                if key not in store.providers and len(store.providers) >= KEYS_MAX:
                    del store.providers[next(iter(store.providers))]
                add(key, PeerInfo(provider.peer_id, addresses))

        store.add_provider = add_provider
