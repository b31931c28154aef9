"""How a libp2p host of ours is made: Noise alone, TCP, yamux, our key as its identity, and limits.

Noise alone matters: the library's default also offers plaintext, and whoever asks for that may claim any peer id.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from libp2p import new_host
from libp2p.abc import IHost
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_noise_key_pair
from libp2p.network.auto_connector import AutoConnector
from libp2p.network.config import ConnectionConfig, RetryConfig
from libp2p.rcmgr import ResourceLimits, ResourceManager
from libp2p.rcmgr.connection_limits import ConnectionLimits
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE
from multiaddr import Multiaddr

from prime_node.adapters.peers.libp2p_noise import Noise
from prime_node.adapters.peers.libp2p_yamux import Muxers
from prime_node.ports.peers import PeerAddress
from prime_protocol import limits
from prime_protocol.identity import SigningKey

HANDSHAKE_S_MAX = 10.0
"""To dial, to prove the keys and to agree on a muxer: each."""


@dataclass(frozen=True, slots=True)
class PeerSettings:
    """What one peer does on the network. Example: PeerSettings(listen=("/ip4/0.0.0.0/tcp/4001",))."""

    listen: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",)
    """Multiaddrs to listen on. A private peer listens on none."""
    announce: tuple[str, ...] = ()
    """Addresses that its owner knows to be open from outside: a forwarded port."""
    bootstrap: tuple[PeerAddress, ...] = ()
    """Peers to stay linked to: the coordinator's, and any that the contributor names."""
    private: bool = False
    """Outbound only: announces no address, serves nothing, is reserved at no relay."""
    relay: bool = False
    """Serve as a relay for peers behind NATs, and dial them back on request. For public machines."""
    lan: bool = False
    """Tell the local network of this peer, and look for others there."""
    near: tuple[str, ...] = ()
    """IP addresses of the coordinator as its owner has written it: peers in their networks may be dialled."""
    connections_max: int = limits.PEER_CONNECTIONS_MAX
    heartbeat_s: float = field(default=4.0, kw_only=True)
    """Between two signs of life; a peer that gives none for three of them is dropped."""


def make_host(
    key: SigningKey,
    settings: PeerSettings,
    *,
    advertised: Callable[[Sequence[Multiaddr]], Sequence[Multiaddr]] | None = None,
) -> IHost:
    """A host that does not run yet. `advertised` chooses what Identify tells others of its listening addresses."""
    logging.getLogger("libp2p").setLevel(logging.CRITICAL)  # it logs what peers do wrong as errors of ours
    pair = create_new_key_pair(key.to_bytes())
    connections_max = settings.connections_max
    host = new_host(
        key_pair=pair,
        sec_opt={NOISE: Noise(pair, noise_privkey=create_noise_key_pair().private_key)},
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
    swarm = host.get_network()
    swarm.retry_config = RetryConfig(max_retries=0)  # who dials again, and when, is decided here
    swarm.auto_connector = _DialsNobody(swarm)
    swarm.upgrader.muxer_multistream = Muxers(int(HANDSHAKE_S_MAX))
    assert str(host.get_id()) == key.key_id
    return host


class _DialsNobody(AutoConnector):  # type: ignore[misc]
    """The library's own would dial whomever it ever heard of until half of all allowed links are up."""

    async def maybe_connect(self) -> None:
        return


def _resources(connections_max: int) -> ResourceManager:
    return ResourceManager(
        limits=ResourceLimits(
            max_connections=connections_max,
            max_memory_mb=1_024,
            max_streams=connections_max * limits.PEER_STREAMS_MAX,
        ),
        connection_limits=ConnectionLimits(
            max_pending_inbound=limits.PEER_HANDSHAKES_MAX,
            max_pending_outbound=limits.PEER_HANDSHAKES_MAX,
            max_established_inbound=connections_max,
            max_established_outbound=connections_max,
            max_established_per_peer=limits.PEER_LINKS_MAX,
            max_established_total=connections_max,
        ),
        enable_metrics=False,
        # These refuse peers by the machine's load and after others' failures: who is refused is decided here.
        enable_memory_limits=False,
        enable_circuit_breaker=False,
        enable_graceful_degradation=False,
    )
