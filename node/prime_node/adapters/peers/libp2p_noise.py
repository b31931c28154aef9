"""Noise sessions that read everything available at once: the same bytes on the wire as the library's, for less CPU time.

The library reads the two bytes of a record's length, then its body, and so wakes its loop for every packet; a record of 64
KiB comes in dozens of packets over a home line. Here everything available is read at once, and all complete records in it are
decrypted. Records that are written together leave in one call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import trio
from libp2p.abc import IRawConnection, ISecureConn
from libp2p.crypto.keys import KeyPair, PrivateKey
from libp2p.io.exceptions import ConnectionClosedError
from libp2p.io.trio import TrioTCPStream
from libp2p.peer.id import ID
from libp2p.security.noise.io import MAX_PLAINTEXT_LENGTH, SIZE_NOISE_MESSAGE_LEN
from libp2p.security.noise.transport import Transport
from libp2p.security.secure_session import SecureSession

from prime_protocol import limits

RECEIVE_BYTES = 256 * 2**10
"""Largest read in bytes."""
SMALL_RECORD_BYTES = 2**10
"""Bytes below which a record costs more time than its bytes. An empty one is 18 on the wire."""
SMALL_RECORDS = 1_024
"""Such records of one link that are opened at once."""
SMALL_RECORDS_S = 0.064
"""Seconds that each further SMALL_RECORDS take at least. Downloads at 1 Gbit/s need an eighth of that rate."""
WRITE_S_MAX = limits.PEER_STALL_S_MAX
"""Seconds to pass one write to the system, which a reading peer takes within moments."""


class Noise(Transport):
    """The library's transport and handshake, with sessions of ours."""

    def __init__(
        self,
        pair: KeyPair,
        noise_privkey: PrivateKey,
        on_socket: Callable[[Any], None] = lambda made: None,
    ) -> None:
        """Create it. `on_socket` gets the socket of each direct link whose handshake succeeded."""
        super().__init__(pair, noise_privkey=noise_privkey)
        self._on_socket = on_socket

    async def secure_inbound(self, conn: IRawConnection) -> ISecureConn:
        """Make the handshake of an inbound link."""
        return self._made(conn, await super().secure_inbound(conn))

    async def secure_outbound(self, conn: IRawConnection, peer_id: ID) -> ISecureConn:
        """Make the handshake of an outbound link."""
        return self._made(conn, await super().secure_outbound(conn, peer_id))

    def _made(self, conn: IRawConnection, secured: SecureSession) -> ISecureConn:
        stream = getattr(conn, "stream", None)  # a relay's circuit is a stream of another link
        if isinstance(stream, TrioTCPStream) and isinstance(stream.stream, trio.SocketStream):
            self._on_socket(stream.stream.socket)
        return _Session(secured)


class _Session(SecureSession):
    """A session after the handshake. One task reads, one writes."""

    def __init__(self, made: SecureSession) -> None:
        super().__init__(
            local_peer=made.local_peer,
            local_private_key=made.local_private_key,
            remote_peer=made.remote_peer,
            remote_permanent_pubkey=made.remote_permanent_pubkey,
            is_initiator=made.is_initiator,
            conn=made.conn,
        )
        self.raw = made.conn.read_writer.read_write_closer
        self.cipher = made.conn.noise_state
        self._sealed = bytearray()
        """Bytes of an incomplete record."""
        self._opened = bytearray()
        """Decrypted bytes that were not read."""
        self._num_small = 0
        """Small records since the last pause."""
        self._small_after_s = 0.0
        """Time before which no further SMALL_RECORDS are opened."""

    async def read(self, n: int | None = None) -> bytes:
        """Return `n` bytes, fewer only at the end; without `n`, all available.

        Raises ConnectionClosedError at the end of the link.
        """
        if n == 0:
            return b""
        while len(self._opened) < (n or 1):
            if self._num_small == SMALL_RECORDS:  # one thread serves all links, and no window bounds these
                await trio.sleep_until(self._small_after_s)
                self._num_small, self._small_after_s = 0, trio.current_time() + SMALL_RECORDS_S
            else:
                data = await self.raw.read(RECEIVE_BYTES)
                if not data:
                    if n is None or not self._opened:
                        raise ConnectionClosedError("the link was closed")
                    break
                self._sealed += data
            self._open_records()
        taken = bytes(self._opened[:n])
        del self._opened[: len(taken)]
        return taken

    def _open_records(self) -> None:
        place, end = 0, len(self._sealed)
        while end - place >= SIZE_NOISE_MESSAGE_LEN and self._num_small < SMALL_RECORDS:
            begin = place + SIZE_NOISE_MESSAGE_LEN
            record_end = begin + int.from_bytes(self._sealed[place:begin], "big")
            if record_end > end:
                break
            opened = self.cipher.decrypt(bytes(self._sealed[begin:record_end]))
            self._opened += opened
            self._num_small += len(opened) < SMALL_RECORD_BYTES
            place = record_end
        del self._sealed[:place]

    async def write(self, data: bytes) -> None:
        """Write all of `data`, even if the caller is cancelled: an encrypted record that is unsent, or cut, breaks the link.

        Raises ConnectionClosedError if the other side takes nothing for WRITE_S_MAX; the link is closed then.
        """
        frames = []
        for start in range(0, len(data), MAX_PLAINTEXT_LENGTH):
            record = self.cipher.encrypt(data[start : start + MAX_PLAINTEXT_LENGTH])
            frames += [len(record).to_bytes(SIZE_NOISE_MESSAGE_LEN, "big"), record]
        with trio.CancelScope(shield=True, deadline=trio.current_time() + WRITE_S_MAX) as scope:
            await self.raw.write(b"".join(frames))
        if scope.cancelled_caught:
            await self.raw.close()
            raise ConnectionClosedError(f"the other side read nothing for {WRITE_S_MAX:g} s")
