"""Make our libp2p hosts: Noise alone, TCP, yamux, our key as the identity, and limits.

Noise alone matters: the library's default also offers plaintext, and a peer that asks for that can claim any peer id.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from libp2p import new_host
from libp2p.abc import IHost, INetStream, INetworkService
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_noise_key_pair
from libp2p.identity.identify_push.identify_push import ID_PUSH
from libp2p.network.auto_connector import AutoConnector
from libp2p.network.config import ConnectionConfig, RetryConfig
from libp2p.peer.id import ID
from libp2p.peer.peerstore import PeerStore
from libp2p.rcmgr import ResourceLimits, ResourceManager
from libp2p.rcmgr.connection_limits import ConnectionLimits
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE
from multiaddr import Multiaddr

from prime_node.adapters.peers import faults
from prime_node.adapters.peers.libp2p_bounds import bound_library
from prime_node.adapters.peers.libp2p_inbound import InboundLinks
from prime_node.adapters.peers.libp2p_noise import Noise
from prime_node.adapters.peers.libp2p_streams import reset
from prime_node.adapters.peers.libp2p_yamux import Muxers, Yamux
from prime_node.ports.peer_network import PeerAddress
from prime_protocol import limits
from prime_protocol.identity import SigningKey

HANDSHAKE_S_MAX = 10.0
"""Timeout in seconds of each step: to dial, to prove the keys and to agree on a muxer."""
KNOWN_PEERS_MAX = 8 * limits.PEER_CONNECTIONS_MAX
"""Peers remembered by the library, with addresses and keys."""
OLDEST_PEERS = 64
"""Entries that one eviction looks at, at most."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PeerSettings:
    """Settings of one peer on the network. Example: PeerSettings(listen=("/ip4/0.0.0.0/tcp/4001",))."""

    listen: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",)
    """Multiaddrs to listen on. A private peer listens on none."""
    announce: tuple[str, ...] = ()
    """Addresses that its owner knows to be reachable from outside: a forwarded port."""
    bootstrap: tuple[PeerAddress, ...] = ()
    """Peers to stay linked to: the coordinator's, and any that the contributor names."""
    private: bool = False
    """Whether it is outbound only: it announces no address, serves nothing, and has no reservation at a relay."""
    relay: bool = False
    """Whether it is a relay for peers behind NATs, and dials them back on request. For public machines."""
    lan: bool = False
    """Whether it announces itself on the local network, and looks for others there."""
    near: tuple[str, ...] = ()
    """IP addresses of the coordinator as the owner configured them: peers in their networks may be dialled."""
    connections_max: int = limits.PEER_CONNECTIONS_MAX
    on_socket: Callable[[Any], None] = field(default=lambda made: None, kw_only=True)
    """Function that gets the socket of each direct link, in the network's thread."""
    heartbeat_s: float = field(default=4.0, kw_only=True)
    """Seconds between two heartbeats; a peer that misses three is dropped."""


def make_host(
    key: SigningKey,
    settings: PeerSettings,
    *,
    advertised: Callable[[Sequence[Multiaddr]], Sequence[Multiaddr]] | None = None,
) -> IHost:
    """Make a host that does not run yet. `advertised` chooses which listening addresses Identify passes on."""
    logging.getLogger("libp2p").setLevel(logging.CRITICAL)  # it logs what peers do wrong as errors of ours
    pair = create_new_key_pair(key.to_bytes())
    connections_max = settings.connections_max
    host = new_host(
        key_pair=pair,
        peerstore_opt=_OwnKept(ID.from_pubkey(pair.public_key)),
        sec_opt={NOISE: Noise(pair, create_noise_key_pair().private_key, settings.on_socket)},
        muxer_preference="YAMUX",
        listen_addrs=[Multiaddr(address) for address in settings.listen] or None,
        negotiate_timeout=int(HANDSHAKE_S_MAX),
        resource_manager=_resources(connections_max),
        connection_config=ConnectionConfig(
            max_connections=connections_max,
            min_connections=0,
            low_watermark=0,
            high_watermark=connections_max,
            max_connections_per_peer=limits.PEER_LINKS_MAX,
            dial_timeout=HANDSHAKE_S_MAX,
            inbound_upgrade_timeout=HANDSHAKE_S_MAX,
            outbound_upgrade_timeout=HANDSHAKE_S_MAX,
            outbound_stream_protocol_negotiation_timeout=HANDSHAKE_S_MAX,
            inbound_stream_protocol_negotiation_timeout=HANDSHAKE_S_MAX,
        ),
        addrs_factory=advertised,
    )
    host.remove_stream_handler(ID_PUSH)  # no peer needs it, and it would let peers repeat Identify at any rate
    swarm = host.get_network()
    swarm.retry_config = RetryConfig(max_retries=0)  # our own code decides about redialling
    swarm.auto_connector = _DialsNobody(swarm)
    swarm.upgrader.muxer_multistream = Muxers(int(HANDSHAKE_S_MAX))
    swarm._handle_inbound_connection = InboundLinks(swarm, connections_max).take
    _count_handlers(swarm)
    assert str(host.get_id()) == key.key_id
    return host


bound_library()


def _count_handlers(swarm: INetworkService) -> None:
    """Count each link's running stream handlers, so that streams that end at once cannot start any number of them.

    Then reset a stream that the other side has ended: the library leaves it half open, and it would count permanently.
    """
    handle = swarm.common_stream_handler

    async def counted(stream: INetStream) -> None:
        link: Yamux = stream.muxed_conn
        link.num_handlers += 1
        try:
            await handle(stream)
        except Exception as error:  # noqa: BLE001 - the edge of the task: what a peer sends never ends the host
            faults.note(log, f"a stream of {link.peer_id}", error)
            await reset(stream)
        finally:
            link.num_handlers -= 1
            if stream.muxed_stream.recv_closed and not stream.muxed_stream.closed:
                await reset(stream)

    swarm.set_stream_handler(counted)


class _OwnKept(PeerStore):
    """A peer store that keeps the host's own keys and evicts the oldest peers, those without addresses first.

    The library's own sorts all peers for each stranger that is too many, and then evicts the host's own entry.
    """

    def __init__(self, own: ID) -> None:
        super().__init__(max_peers=KNOWN_PEERS_MAX)
        self._own = own

    def _enforce_peer_limit(self) -> None:
        """Evict the first of the oldest entries that has no address. The passed ones count as the newest from now on."""
        peers = self.peer_data_map
        while len(peers) > self.max_peers:
            for looks in range(1, OLDEST_PEERS + 1):
                peer = next(iter(peers))
                entry = peers.pop(peer)
                has_address = bool(entry.get_addrs()) and not entry.is_expired()
                if peer != self._own and (looks == OLDEST_PEERS or not has_address):
                    self.peer_record_map.pop(peer, None)
                    break
                peers[peer] = entry


class _DialsNobody(AutoConnector):
    """A connector that never dials. The library's own dials any known peer until half of all allowed links are up."""

    async def maybe_connect(self) -> None:
        return


def _resources(connections_max: int) -> ResourceManager:
    # The library counts a handshake as a link, and its end as another one. ConnectionConfig bounds the links themselves.
    most = connections_max + 2 * limits.PEER_HANDSHAKES_MAX
    return ResourceManager(
        limits=ResourceLimits(
            max_connections=most,
            max_memory_mb=1_024,
            # Streams wait for a place without a timeout. The other sides' alone never fill this, because yamux bounds them.
            max_streams=2 * connections_max * limits.PEER_STREAMS_MAX,
        ),
        connection_limits=ConnectionLimits(
            max_established_inbound=most,
            max_established_outbound=most,
            max_established_per_peer=limits.PEER_LINKS_MAX,
            max_established_total=most,
        ),
        enable_metrics=False,
        # These refuse peers by the machine's load and after others' failures; our own code decides which peers to refuse.
        enable_memory_limits=False,
        enable_circuit_breaker=False,
        enable_graceful_degradation=False,
    )
