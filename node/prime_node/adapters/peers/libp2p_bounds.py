"""Bounds on what the libp2p library reads of strangers. It has no settings for them, so some of its functions are replaced here.

One thread serves all links, and nothing interrupts the library in it: to write a peer id of 64 KiB as text takes it seconds, one
of 4 MiB hours. What it stores of a peer, it passes on to others that ask.
"""

from __future__ import annotations

from typing import Any

from libp2p.crypto.keys import KeyType
from libp2p.crypto.serialization import key_type_to_public_key_deserializer
from libp2p.exceptions import ParseError
from libp2p.host import basic_host
from libp2p.identity.identify.pb.identify_pb2 import Identify
from libp2p.identity.update import update_peerstore_from_identify
from libp2p.io.abc import ReadWriteCloser
from libp2p.kad_dht import kad_dht, peer_routing, provider_store
from libp2p.kad_dht.pb.kademlia_pb2 import Message
from libp2p.peer.id import ID
from libp2p.peer.peerstore import PeerStore
from libp2p.protocol_muxer import multiselect_communicator
from libp2p.relay.circuit_v2 import protocol, transport
from libp2p.utils.varint import read_varint_prefixed_bytes_limited

from prime_protocol import limits

PEER_ID_BYTES_MAX = 64
"""Bytes of a peer id. That of an Ed25519 key has 38."""
PROTOCOL_CHARS_MAX = 256
"""Characters of the name of a protocol."""
ADDRESS_BYTES_MAX = limits.PEER_ADDRESS_CHARS_MAX
"""Bytes of one binary multiaddr."""
OBSERVED_BYTES_MAX = 64
"""Bytes of the multiaddr at which a peer sees us. An IP address and a port take 20."""
NEGOTIATION_BYTES_MAX = 2**10
"""One message of multistream-select, which names a protocol. The library reads as many bytes as a stranger announces."""
TABLE_MESSAGE_BYTES_MAX = 2**16
"""One message of the hash table; the library's own limit is 4 MiB."""
TABLE_PEERS_MAX = 20
"""Peers in one list of such a message, as many as an honest peer returns."""


def bound_library() -> None:
    """Replace the library's functions. Idempotent."""
    for kind in (KeyType.RSA, KeyType.Secp256k1):  # all our keys are Ed25519
        key_type_to_public_key_deserializer.pop(kind.value, None)
    ID.__init__ = _id_of_bounded_size
    multiselect_communicator.read_delim = _read_short
    basic_host.update_peerstore_from_identify = _store_identified
    for module in (kad_dht, peer_routing, provider_store):
        module.MAX_DHT_MESSAGE_SIZE = TABLE_MESSAGE_BYTES_MAX
        module.maybe_consume_signed_record = _cut_message
    for module in (protocol, transport):
        module.maybe_consume_signed_record = _leave_record_out


def _id_of_bounded_size(self: ID, peer_id_bytes: bytes) -> None:
    """Make a peer id. Raises ValueError for one that is too long: the time to write it as text grows with its square."""
    if len(peer_id_bytes) > PEER_ID_BYTES_MAX:
        raise ValueError(f"a peer id of {len(peer_id_bytes)} bytes, more than {PEER_ID_BYTES_MAX}")
    self._bytes = peer_id_bytes


async def _read_short(reader: ReadWriteCloser) -> bytes:
    """Read one message of multistream-select. Raises ParseError for one that is too long or has no end of line, IOException."""
    message: bytes = await read_varint_prefixed_bytes_limited(reader, NEGOTIATION_BYTES_MAX)
    if not message.endswith(b"\n"):
        raise ParseError("a message of multistream-select without an end of line")
    return message[:-1]


async def _store_identified(store: PeerStore, peer: ID, message: Identify) -> None:
    """Cut a peer's Identify message before the library reads it.

    The library parses 1,000 addresses and keeps any number of protocols. The signed record repeats the addresses. The time for
    the address at which the peer sees us grows with the square of its length: 12 kB take half a minute, 1 MiB days.
    """
    if len(message.observed_addr) > OBSERVED_BYTES_MAX:
        message.ClearField("observed_addr")
    _keep(message.listen_addrs, ADDRESS_BYTES_MAX, limits.PEER_ADDRESSES_MAX)
    _keep(message.protocols, PROTOCOL_CHARS_MAX, limits.PEER_PROTOCOLS_MAX)
    message.ClearField("signedPeerRecord")
    await update_peerstore_from_identify(store, peer, message)


def _cut_message(message: Any, host: object, peer: ID | None = None) -> bool:
    """Cut the lists of a hash table's message, and leave signed records out, which repeat them. Return True: nothing is wrong.

    The library calls this first for each message, and then for each peer in it. It would keep a record of any size for each key,
    and send it to all that ask for peers.
    """
    if isinstance(message, Message):
        for peers in (message.providerPeers, message.closerPeers):
            del peers[TABLE_PEERS_MAX:]
            for one in peers:
                _keep(one.addrs, ADDRESS_BYTES_MAX, limits.PEER_ADDRESSES_MAX)
    return True


def _leave_record_out(message: object, host: object, peer: ID | None = None) -> bool:
    """Leave out the signed record of a message to or of a relay. Return True: nothing is wrong."""
    return True


def _keep(texts: Any, length_max: int, number_max: int) -> None:
    """Keep the first elements of a repeated field that are short enough."""
    texts[:] = [text for text in texts[: 2 * number_max] if len(text) <= length_max][:number_max]
