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
from itertools import zip_longest
from typing import Any, TypeVar

import trio
from libp2p.abc import IHost, INetStream
from libp2p.kad_dht.common import BUCKET_SIZE
from libp2p.kad_dht.kad_dht import DHTMode, KadDHT, _encode_key
from libp2p.kad_dht.peer_routing import PeerRouting
from libp2p.kad_dht.provider_store import ProviderStore
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo

from prime_node.adapters.peers import faults
from prime_node.adapters.peers.libp2p_relay import HostsOf, network_at
from prime_node.adapters.peers.libp2p_streams import reset
from prime_node.fair_places import has_place, to_end
from prime_node.ports.peer_network import PeerAddress
from prime_protocol import limits
from prime_protocol.digest import digest_of

log = logging.getLogger(__name__)

LOOKUP_S_MAX = 20.0
MEET_S = (0.2, 1.0, 4.0)
"""Seconds after which to check whether a new peer takes part in the table, which Identify reveals."""
KEYS_MAX = 256
"""Digests whose providers are remembered. A run needs one."""
OF_ONE_ANSWER_MAX = 4
"""Providers that one answer may add to a search: a liar names any number."""
STREAMS_MAX = 64
"""Incoming streams of the table that are answered concurrently."""
STREAMS_NETWORK_MAX = 16
"""Incoming streams of one network; further ones are reset."""
STREAM_S_MAX = 10.0
"""Seconds after which such a stream is reset: an idle one holds a place. The library opens one for each question."""

_T = TypeVar("_T")
Proven = Callable[[str, Sequence[Any]], list[Any]]
"""Function from a provider's key id and addresses to those addresses that may be passed on."""


class _Records(ProviderStore):
    """Records of providers. The library keeps what a provider names, and of a digest the first providers for two days."""

    def __init__(self, host: IHost, routing: PeerRouting, hosts_of: HostsOf, proven: Proven) -> None:
        super().__init__(host, routing)
        self._hosts_of, self._proven = hosts_of, proven
        self._networks: dict[tuple[bytes, str], str] = {}
        """Network of each record, by digest and key id."""

    def add_provider(self, key: bytes, provider: PeerInfo) -> None:
        """Keep a record with proven addresses, in place of one of the network with most if there is no other place."""
        peer, is_own = str(provider.peer_id), provider.peer_id == self.local_peer_id
        addresses = provider.addrs if is_own else self._proven(peer, provider.addrs)
        if not addresses:
            return
        network = peer if is_own else network_at(self._hosts_of(peer))
        of_key, networks = self.providers.get(key, {}), self._networks
        if not of_key and len(self.providers) >= KEYS_MAX:
            firsts = {digest: networks[digest, next(iter(found))] for digest, found in self.providers.items()}
            if (ended := to_end(firsts, network)) is None:
                return
            del self.providers[ended]
        elif peer not in of_key and len(of_key) >= BUCKET_SIZE:
            if (crowded := to_end({one: networks[key, one] for one in of_key}, network)) is None:
                return
            del of_key[crowded]
        networks[key, peer] = network
        super().add_provider(key, PeerInfo(provider.peer_id, addresses))
        if len(networks) > 2 * KEYS_MAX * BUCKET_SIZE:  # most of its records have ended
            self._networks = {(each, one): networks[each, one] for each, its in self.providers.items() for one in its}


class _Search(ProviderStore):
    """One search. The library's own asks no peer if its host has a record itself, so one stranger's record would end it."""

    def __init__(self, host: IHost, routing: PeerRouting) -> None:
        super().__init__(host, routing)
        self.answers: list[list[PeerInfo]] = []
        """Providers that each peer has named."""

    def add_provider(self, key: bytes, provider: PeerInfo) -> None:
        """Keep nothing of an answer."""

    async def _get_providers_from_peer_with_closers(self, peer_id: ID, key: bytes) -> tuple[list[PeerInfo], list[ID]]:
        named, closer = await super()._get_providers_from_peer_with_closers(peer_id, key)
        self.answers.append(named[:OF_ONE_ANSWER_MAX])
        return self.answers[-1], closer


class _Table(KadDHT):
    """A table that bounds the streams of one network and their duration. The library bounds only their number."""

    def __init__(self, host: IHost, mode: DHTMode, hosts_of: HostsOf, proven: Proven) -> None:
        super().__init__(host, mode, enable_values=False)
        self.provider_store = _Records(host, self.peer_routing, hosts_of, proven)
        self._inbound_limiter = trio.CapacityLimiter(STREAMS_MAX)
        self._hosts_of = hosts_of
        self._answering: Counter[str] = Counter()

    async def handle_stream(self, stream: INetStream) -> None:
        network = network_at(self._hosts_of(str(stream.muxed_conn.peer_id)))
        held, taken = self._answering[network], self._answering.total()
        if not has_place(held, taken, most=STREAMS_MAX, share=STREAMS_NETWORK_MAX):
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
        proven: Proven,
    ) -> None:
        """Join the table. `choose` returns the addresses of a hint that may be dialled."""
        self._host = host
        self._choose = choose
        self._run = run
        self._private = private
        self._hosts_of, self._proven = hosts_of, proven
        self.table = _Table(host, DHTMode.CLIENT if private else DHTMode.SERVER, hosts_of, proven)

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
        """Return peers that claim to provide a digest, unverified: peers, and addresses of each, from all answers in turn."""
        key = _encode_key(self._key(digest))
        search = _Search(self._host, self.table.peer_routing)
        try:
            with trio.move_on_after(LOOKUP_S_MAX):
                await search.find_providers(key, OF_ONE_ANSWER_MAX * limits.PEER_HINTS_MAX)
        except Exception as error:  # noqa: BLE001 - no hint, and nothing else
            faults.note(log, f"finding hints for {digest[:12]} failed", error)
        by_peer: dict[str, list[tuple[str, ...]]] = {}
        for info in _in_turns([self.table.provider_store.get_providers(key), *search.answers]):
            by_peer.setdefault(str(info.peer_id), []).append(self._texts(info))
        by_peer.pop(str(self._host.get_id()), None)
        # In turn here too: a liar names others' keys with addresses of its own.
        hints = {peer: tuple(dict.fromkeys(_in_turns(answers))) for peer, answers in by_peer.items()}
        most = limits.PEER_HINT_ADDRESSES_MAX
        return tuple(PeerAddress(peer, texts[:most]) for peer, texts in hints.items() if texts)[: limits.PEER_HINTS_MAX]

    def _key(self, digest: str) -> str:
        return digest_of(f"{self._run} {digest}".encode())

    def _texts(self, named: PeerInfo) -> tuple[str, ...]:
        """Return the addresses to dial; of a linked peer only those that its link comes from, whatever others say."""
        peer, addresses = str(named.peer_id), named.addrs
        if self._hosts_of(peer):
            addresses = self._proven(peer, addresses)
        texts = [text for one in addresses if len(text := str(one).split("/p2p/")[0]) <= limits.PEER_ADDRESS_CHARS_MAX]
        return tuple(self._choose(texts))


def _in_turns(lists: Sequence[Sequence[_T]]) -> list[_T]:
    """Return the first of each list, then the second of each, and so on."""
    return [one for turn in zip_longest(*lists) for one in turn if one is not None]
