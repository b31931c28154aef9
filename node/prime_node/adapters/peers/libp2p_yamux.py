"""yamux for links that carry many bytes: the library's frames and bookkeeping, for less CPU time.

The library waits twice for each frame, under three locks and two cancel scopes, and polls a closed window every 10 ms. Here
all available frames are taken in one turn, a reader gets what is buffered, a writer that waits for the window is woken, and
what one call writes leaves together. trio switches tasks only at an await: code without one needs no lock.
https://github.com/hashicorp/yamux/blob/master/spec.md

Waiting: the link's reader waits for bytes and, if it answers a frame, for the link's writer. Readers of streams wait for it,
writers for the other side's credit, STALL_S at most. Invariants: no stream holds more unread bytes than it gave credit for,
a link sends no more bytes than all its streams gave credit for, ended ones included, and none to a stream that never was,
and the other side has at most PEER_STREAMS_MAX streams open, whatever protocol they agree on.
"""

from __future__ import annotations

import logging
import struct

import trio
from libp2p.abc import IMuxedConn, ISecureConn
from libp2p.io.exceptions import IOException
from libp2p.network.connection.exceptions import RawConnError
from libp2p.peer.id import ID
from libp2p.stream_muxer.exceptions import MuxedStreamEOF, MuxedStreamError, MuxedStreamReset
from libp2p.stream_muxer.muxer_multistream import MuxerMultistream
from libp2p.stream_muxer.yamux import yamux as library

from prime_node.adapters.peers import faults
from prime_protocol import limits

log = logging.getLogger(__name__)

STALL_S = limits.PEER_STALL_S_MAX
"""Seconds without credit after which a writer gives its stream up."""
WRITE_BYTES = 256 * 2**10
"""Bytes of one stream that leave together, in frames of 64 KiB; then another stream has its turn."""
SHORT_BYTES = 32 * 2**10
"""Bytes below which the link is left alone for PAUSE_S, if a reader waits for more than that."""
PAUSE_S = 0.01
"""Seconds of that pause. At 100 Mbit/s 125 kB arrive in this time, which any socket holds."""
SMALL_BYTES = 2**10
"""Bytes below which a frame costs more time than its bytes."""
SMALL_FRAMES = 256
"""Such frames of one link that are processed at once."""
SMALL_S = 0.064
"""Seconds that each further SMALL_FRAMES take at least. Downloads at 1 Gbit/s need a fourth of that rate."""
CLOSE_S_MAX = 1.0
"""Timeout in seconds for closing the socket of a cancelled link, which may be a relay's stream."""

_HEADER = struct.Struct(library.YAMUX_HEADER_FORMAT)


class Muxers(MuxerMultistream):
    """The negotiation of yamux, with our implementation."""

    def __init__(self, negotiate_s: int) -> None:
        super().__init__({library.PROTOCOL_ID: Yamux}, negotiate_s)

    async def new_conn(self, conn: ISecureConn, peer_id: ID) -> IMuxedConn:
        """Agree on yamux and return the link."""
        protocol, _ = await self._selector.select(conn, conn.is_initiator, self.negotiate_timeout)
        return self._annotate_connection(Yamux(conn, peer_id, is_initiator=conn.is_initiator), conn, protocol)


class ProtocolError(IOException):
    """A violation of yamux by the other side: the link ends."""


class Stream(library.YamuxStream):
    """One stream of a link."""

    conn: Yamux

    def __init__(self, stream_id: int, conn: Yamux, is_initiator: bool) -> None:
        super().__init__(stream_id, conn, is_initiator)
        self.missing_bytes = 0
        """Bytes that its reader lacks, if known."""
        self.credited = trio.Event()
        self.is_cut = False
        """Whether a write ended after some of its bytes had left."""
        self._writing = trio.Lock()
        self._uncredited_bytes = 0

    async def read(self, n: int | None = -1) -> bytes:
        """Return available bytes, `n` at most. Raises MuxedStreamEOF or MuxedStreamReset."""
        wanted = -1 if n is None else n
        buffer = await self._wait()
        data = bytes(buffer if wanted < 0 else buffer[:wanted])
        del buffer[: len(data)]
        self._uncredited_bytes += len(data)
        if self._uncredited_bytes >= self.target_recv_window // 2 and not self.recv_closed:
            credit, self._uncredited_bytes = self._uncredited_bytes, 0
            self.recv_window += credit
            credit += self._apply_autotune_epoch(len(buffer))
            self.conn.credit += credit
            await self.send_window_update(credit)
        if self.closed and not buffer:
            await self.conn._finalize_stream(self, fully_closed=True)
        return data

    async def _wait(self) -> bytearray:
        """Wait until something has arrived."""
        conn, name = self.conn, self.stream_id
        buffers: dict[int, bytearray] = conn.stream_buffers
        while not (buffer := buffers.get(name)):
            if self.reset_received:
                raise MuxedStreamReset("the stream was reset")
            if buffer is None or self.recv_closed or self.closed or conn.event_shutting_down.is_set():
                raise MuxedStreamEOF("the stream has ended")
            await conn.stream_events[name].wait()
            if name in conn.stream_events:
                conn.stream_events[name] = trio.Event()
        return buffer

    async def write(self, data: bytes) -> None:
        """Write all of `data`, after what others are writing.

        Raises MuxedStreamError if the stream is closed or cut, or gets no credit for STALL_S.

        A cancelled write has sent nothing, unless `is_cut` says that the stream is unusable.
        """
        async with self._writing:
            if self.is_cut:
                raise MuxedStreamError("an earlier write was cut")
            sent = 0
            try:
                while sent < len(data):
                    if self.send_window <= 0 or self.send_closed or self.closed:
                        await self._until_credited()
                    end = sent + min(self.send_window, len(data) - sent, WRITE_BYTES)
                    frames = []
                    for start in range(sent, end, library.MAX_MESSAGE_SIZE):
                        body = data[start : min(end, start + library.MAX_MESSAGE_SIZE)]
                        frames += [_HEADER.pack(0, library.TYPE_DATA, 0, self.stream_id, len(body)), body]
                    await self.conn._write_frame(b"".join(frames))
                    self.send_window -= end - sent
                    sent = end
            finally:
                self.is_cut = self.is_cut or 0 < sent < len(data)

    async def _until_credited(self) -> None:
        with trio.move_on_after(STALL_S):
            while self.send_window <= 0 and not (self.send_closed or self.closed):
                self.credited = trio.Event()
                await self.credited.wait()
        if self.send_closed or self.closed:
            raise MuxedStreamError("the stream is closed")
        if self.send_window <= 0:
            raise MuxedStreamError(f"the other side granted no window for {STALL_S:g} s")


class Yamux(library.Yamux):
    """One link, over a session of libp2p_noise.py."""

    streams: dict[int, Stream]
    _rtt: float

    def __init__(self, secured_conn: ISecureConn, peer_id: ID, is_initiator: bool | None = None) -> None:
        super().__init__(secured_conn, peer_id, is_initiator=is_initiator)
        self._header = b""
        """Bytes of an incomplete header."""
        self._body: tuple[int, int] | None = None
        """Stream and missing bytes of an incomplete frame."""
        self._flags = 0
        """Flags of that frame, which apply at its end."""
        self.num_handlers = 0
        """Running handlers of streams that the other side opened. A handler can outlast its stream."""
        self.credit = 0
        """Bytes that the other side may still send, to open streams and to those that it does not know to have ended."""
        self._newest = 0
        """The highest number of a stream that the other side opened."""
        self._num_small = 0
        """Small frames since the last pause."""
        self._small_after_s = 0.0
        """Time before which no further SMALL_FRAMES are processed."""

    async def open_stream(self) -> Stream:
        """Open a stream. Raises MuxedStreamError."""
        await self.stream_backlog_semaphore.acquire()
        stream = Stream(self.next_stream_id, self, True)
        stream._owns_backlog_slot = True
        try:
            if self.event_shutting_down.is_set():
                raise MuxedStreamError("the link is closing")
            self.next_stream_id += 2
            self.credit += library.DEFAULT_WINDOW_SIZE
            self._add(stream)
            await self._answer(library.TYPE_WINDOW_UPDATE, library.FLAG_SYN, stream.stream_id)
        except BaseException as error:
            stream.closed = True
            await self._forget(stream)
            if isinstance(error, (IOException, RawConnError)):
                raise MuxedStreamError(f"no stream was opened: {error}") from error
            raise
        return stream

    async def handle_incoming(self) -> None:
        """Process incoming bytes until the link ends."""
        try:
            while not self.event_shutting_down.is_set():
                data = await self.secured_conn.read()
                await self.take_in(data)
                if len(data) < SHORT_BYTES and any(one.missing_bytes > SHORT_BYTES for one in self.streams.values()):
                    await trio.sleep(PAUSE_S)
        except Exception as error:  # noqa: BLE001 - the edge of the task: what a peer sends never ends the host
            faults.note(log, f"the link to {self.peer_id}", error)
        await self._cleanup_on_error()

    async def close(self, error_code: int = library.GO_AWAY_NORMAL) -> None:
        """Notify the other side, then close the socket, even if the caller is cancelled: no other task closes it."""
        try:
            await super().close(error_code)
        finally:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + CLOSE_S_MAX):
                await self.secured_conn.close()

    async def _cleanup_on_error(self) -> None:
        waiting = list(self.streams.values())
        await super()._cleanup_on_error()
        for stream in waiting:
            stream.credited.set()

    async def _write_frame(self, data: bytes) -> None:
        async with self._write_lock:
            await self.secured_conn.write(data)

    async def take_in(self, data: bytes) -> None:
        """Process bytes of the link, wherever they were cut. Raises ProtocolError."""
        place = 0
        while place < len(data):
            if self._body is not None:
                place = await self._take_body(data, place)
                continue
            begin, place = place, place + library.HEADER_SIZE - len(self._header)
            self._header += data[begin:place]
            if len(self._header) == library.HEADER_SIZE:
                header, self._header = self._header, b""
                await self._take_frame(*_HEADER.unpack(header))

    async def _take_body(self, data: bytes, place: int) -> int:
        assert self._body is not None
        name, missing = self._body
        part = data[place : place + missing]
        if name in self.streams:  # the rest of a reset stream's frame is dropped
            self.stream_buffers[name] += part
            self.stream_events[name].set()
        missing -= len(part)
        self._body = (name, missing) if missing else None
        if not missing:
            await self._close_by(self._flags, name)
        return place + len(part)

    async def _take_frame(self, version: int, kind: int, flags: int, name: int, number: int) -> None:
        if version or kind > library.TYPE_GO_AWAY:
            raise ProtocolError(f"a frame of version {version} and kind {kind}")
        if kind == library.TYPE_GO_AWAY:
            raise ProtocolError(f"the other side closed the connection with code {number}")
        if kind != library.TYPE_DATA or number < SMALL_BYTES:
            await self._count_small()
        if kind == library.TYPE_PING:
            await self._take_ping(flags, number)
            return
        if flags & library.FLAG_SYN:
            await self._accept(name)
        stream = self.streams.get(name)
        if kind == library.TYPE_WINDOW_UPDATE:
            if stream is not None and number:
                stream.send_window += number
                stream.credited.set()
        elif number:
            if name >= (self.next_stream_id if name % 2 == self.is_initiator_value else self._newest + 1):
                raise ProtocolError(f"{number} bytes for stream {name}, which was never open")
            if number > (self.credit if stream is None else stream.recv_window):
                raise ProtocolError(f"{number} bytes more than the window of stream {name} allows")
            self.credit -= number
            if stream is not None:
                stream.recv_window -= number
            self._body, self._flags = (name, number), flags
            return
        await self._close_by(flags, name)

    async def _count_small(self) -> None:
        """Wait where small frames come fast: one thread serves all links, and a line carries more than it can process."""
        self._num_small += 1
        if self._num_small == SMALL_FRAMES:
            await trio.sleep_until(self._small_after_s)
            self._num_small, self._small_after_s = 0, trio.current_time() + SMALL_S

    async def _take_ping(self, flags: int, number: int) -> None:
        if flags & library.FLAG_SYN:
            await self._answer(library.TYPE_PING, library.FLAG_ACK, 0, number)
        elif flags & library.FLAG_ACK:
            took_s = trio.current_time() - self._ping_sent_time
            self._rtt = (self._rtt + took_s) / 2 if self._rtt else took_s
            self._ping_event.set()

    async def _accept(self, name: int) -> None:
        if name % 2 == self.is_initiator_value or not name:
            raise ProtocolError(f"stream {name} is not the other side's to open")
        if name in self.streams:
            raise ProtocolError(f"stream {name} is open already")
        self._newest = max(self._newest, name)
        self.credit += library.DEFAULT_WINDOW_SIZE
        num_open = sum(not stream.is_initiator for stream in self.streams.values())
        if max(num_open, self.num_handlers) >= limits.PEER_STREAMS_MAX:
            await self._answer(library.TYPE_WINDOW_UPDATE, library.FLAG_RST, name)
            return
        stream = Stream(name, self, False)
        self._add(stream)
        await self._answer(library.TYPE_WINDOW_UPDATE, library.FLAG_ACK, name)
        await self.new_stream_send_channel.send(stream)

    async def _close_by(self, flags: int, name: int) -> None:
        """Apply the flags that end a stream's direction or the stream."""
        stream = self.streams.get(name)
        if stream is None or not flags & (library.FLAG_FIN | library.FLAG_RST):
            return
        stream.recv_closed = True
        if flags & library.FLAG_RST:
            stream.reset_received = True
        stream.closed = stream.closed or stream.send_closed or stream.reset_received
        self.stream_events[name].set()
        stream.credited.set()
        if stream.closed:
            await self._finalize_stream(stream, fully_closed=True)

    async def _answer(self, kind: int, flags: int, name: int, number: int = 0) -> None:
        await self._write_frame(_HEADER.pack(0, kind, flags, name, number))

    def _add(self, stream: Stream) -> None:
        self.streams[stream.stream_id] = stream
        self.stream_buffers[stream.stream_id] = bytearray()
        self.stream_events[stream.stream_id] = trio.Event()

    async def _forget(self, stream: Stream) -> None:
        with trio.CancelScope(shield=True):
            await self._finalize_stream(stream, fully_closed=True)
