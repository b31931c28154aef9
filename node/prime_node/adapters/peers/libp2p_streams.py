"""Requests and replies over libp2p streams, on the trio side.

One stream for each peer, protocol and direction stays open: opening costs several round trips, a request on it one. The side
that opened it asks; several requests are in progress, and replies come in any order (prime_protocol.peer_frames).

Waiting: an asker waits for its reply or its timeout. The stream's reader dispatches replies and waits for nothing, because
yamux resets a stream whose reader stalls for seconds. The answering side also reads on while handlers work, and refuses
excess requests instead of waiting.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from math import inf
from typing import Any

import trio
from libp2p.abc import IHost, INetStream
from libp2p.peer.id import ID

from prime_node.adapters.peers import faults
from prime_node.adapters.peers.libp2p_yamux import Stream
from prime_node.ports.peer_network import DeferredAnswer
from prime_node.ports.transport import Unreachable
from prime_protocol import limits
from prime_protocol.addresses import endpoint_of
from prime_protocol.errors import ErrorCode, LimitExceeded, RemoteError
from prime_protocol.peer_frames import (
    REPLY_HEADER_BYTES,
    REQUEST_HEADER_BYTES,
    pack_answer,
    pack_refusal,
    pack_request,
    parse_refusal,
    parse_reply_header,
    parse_request_header,
)

log = logging.getLogger(__name__)

READ_BYTES = 256 * 2**10
OPEN_S_MAX = 10.0
"""Seconds to agree on a protocol."""
WINDOW_MORE_BYTES = 2**20
"""Bytes of replies in progress on one stream, beyond yamux's 256 KiB."""

Serve = Callable[[str, bytes], Awaitable[bytes | DeferredAnswer]]
"""Function (key id of the asker, request) -> answer. It runs on the trio side, and so does the answer's `after`."""


@dataclass
class _Asked:
    """A request that waits for its reply."""

    reply_bytes_max: int
    settled: trio.Event = field(default_factory=trio.Event)
    reply: bytes = b""
    error: RemoteError | Unreachable | None = None


class AskingStream:
    """An open stream of our own to a peer."""

    def __init__(self, stream: INetStream, peer: str) -> None:
        self._stream = stream
        self._reader = _Reader(stream)
        self._peer = peer
        self._asked: dict[int, _Asked] = {}
        self._next = 0
        self.is_open = True

    @property
    def is_relayed(self) -> bool:
        """Whether the stream runs over a relay."""
        return leads_through_relay(getattr(self._stream, "swarm_conn", self._stream))

    async def ask(self, payload: bytes, *, reply_bytes_max: int) -> bytes:
        """Send a request and return its reply. Raises RemoteError or Unreachable; the caller sets the deadline."""
        number, asked = self._next, _Asked(reply_bytes_max)
        self._next = (self._next + 1) % 2**32
        self._asked[number] = asked
        try:
            await self._write(pack_request(number, payload))
            await asked.settled.wait()
        finally:
            self._asked.pop(number, None)
        if asked.error is not None:
            raise asked.error
        return asked.reply

    async def read_replies(self) -> None:
        """Dispatch replies until the stream ends."""
        why: Exception = Unreachable(f"{self._peer} closed the stream")
        try:
            while True:
                await self._read_reply()
        except Exception as error:  # noqa: BLE001 - libp2p raises many kinds; each of them ends this stream
            faults.note(log, f"replies of {self._peer}", error)
            why = error
        finally:
            self.is_open = False
            for asked in self._asked.values():
                asked.error = Unreachable(f"the link to {self._peer} broke: {why!r}")
                asked.settled.set()
            await reset(self._stream)

    async def _read_reply(self) -> None:
        header = parse_reply_header(await self._reader.exactly(REPLY_HEADER_BYTES, stall_s=inf))
        asked = self._asked.get(header.number)  # None: the asker was cancelled
        bytes_max = limits.ERROR_BODY_BYTES_MAX if header.refused else asked.reply_bytes_max if asked else 0
        if header.num_bytes > bytes_max:
            await self._reader.skip(header.num_bytes)
            error: RemoteError = LimitExceeded("reply_bytes_max", header.num_bytes, bytes_max)
            reply = b""
        else:
            reply = await self._reader.exactly(header.num_bytes)
        if asked is None:
            await trio.lowlevel.checkpoint()  # the other side may send any number of these, which are in memory already
            return
        if header.refused and header.num_bytes <= bytes_max:
            try:
                error = parse_refusal(reply)
            except RemoteError as nonsense:
                error = nonsense
        asked.reply = reply
        asked.error = error if header.refused or header.num_bytes > bytes_max else None
        asked.settled.set()

    async def _write(self, frame: bytes) -> None:
        """Write a frame. One that is cut short would shift all that follow, so it ends the stream.

        A write cancelled before it left, as happens in the end game, ends nothing.
        """
        try:
            await _send(self._stream, frame)
        except BaseException as error:
            if not isinstance(error, Exception) and not self._stream.muxed_stream.is_cut:
                raise
            self.is_open = False
            await reset(self._stream)
            if isinstance(error, Exception):
                raise Unreachable(f"the link to {self._peer} broke: {error!r}") from None
            raise


class Streams:
    """Streams of a host. `nursery` is the host's: readers live in it."""

    def __init__(self, host: IHost, nursery: trio.Nursery) -> None:
        self._host = host
        self._nursery = nursery
        self._open: dict[tuple[str, str], AskingStream] = {}
        self._opening: dict[tuple[str, str], trio.Lock] = {}
        self._answering: Counter[str] = Counter()
        self._held: Counter[str] = Counter()

    async def ask(self, peer: str, protocol: str, payload: bytes, *, reply_bytes_max: int) -> bytes:
        """Send a request and return its reply. Raises RemoteError or Unreachable; the caller sets the deadline."""
        stream = await self._stream(peer, protocol)
        return await stream.ask(payload, reply_bytes_max=reply_bytes_max)

    def serve(self, protocol: str, answer: Serve, *, request_bytes_max: int) -> None:
        async def handle(stream: INetStream) -> None:
            peer = str(stream.muxed_conn.peer_id)
            if self._held[peer] >= limits.PEER_STREAMS_MAX:
                await reset(stream)
                return
            self._held[peer] += 1
            try:
                await self._answer_all(stream, peer, answer, request_bytes_max)
            except Exception as error:  # noqa: BLE001 - the edge of the task: a peer's stream never ends the host
                faults.note(log, f"the stream of {peer}", error)
            finally:
                self._held[peer] -= 1
                if not self._held[peer]:
                    del self._held[peer]
                await reset(stream)

        self._host.set_stream_handler(protocol, handle)

    async def _stream(self, peer: str, protocol: str) -> AskingStream:
        """Return the open stream to a peer; a direct one as soon as there is a direct link."""
        name = (peer, protocol)
        if (stream := self._usable(name)) is not None:
            return stream
        async with self._opening.setdefault(name, trio.Lock()):
            if (stream := self._usable(name)) is None:  # otherwise another task has opened it
                self._open[name] = stream = AskingStream(await self._new(peer, protocol), peer)
                self._nursery.start_soon(self._read, name, stream)
            return stream

    def _usable(self, name: tuple[str, str]) -> AskingStream | None:
        stream = self._open.get(name)
        if stream is None or not stream.is_open or (stream.is_relayed and self.has_direct_link(name[0])):
            return None
        return stream

    async def _read(self, name: tuple[str, str], stream: AskingStream) -> None:
        await stream.read_replies()
        if self._open.get(name) is stream:
            del self._open[name]
            self._opening.pop(name, None)

    async def _new(self, peer: str, protocol: str) -> INetStream:
        if not self.links(peer):
            raise Unreachable(f"no link to {peer}")
        try:
            with trio.fail_after(OPEN_S_MAX):
                stream = await self._host.new_stream(ID.from_string(peer), [protocol])
                await _widen(stream)
                return stream
        except trio.TooSlowError:
            raise Unreachable(f"{peer} did not open a stream within {OPEN_S_MAX:g} s") from None
        except Exception as error:  # noqa: BLE001 - libp2p raises many kinds: no protocol, no stream, no link
            if "not supported" in f"{error!r} {error.__cause__!r}":
                raise RemoteError(ErrorCode.NOT_FOUND, f"{peer} does not serve {protocol}") from None
            faults.note(log, f"a stream to {peer}", error)
            raise Unreachable(f"{peer} opens no stream: {error!r}") from None

    def links(self, peer: str) -> list[Any]:
        """Return the open links to a peer."""
        connections = self._host.get_network().connections.get(_id_of(peer)) or []
        return [link for link in list(connections) if not link.is_closed]

    def hosts(self, peer: str) -> tuple[str, ...]:
        """Return the IP addresses at which a peer's direct links end."""
        return hosts_of(self.links(peer))

    def all_hosts(self) -> frozenset[str]:
        """Return the IP addresses at which any peer's direct links end."""
        peers = [str(peer) for peer in list(self._host.get_network().connections)]
        return frozenset(host for peer in peers for host in self.hosts(peer))

    def has_direct_link(self, peer: str) -> bool:
        """Return whether there is a link to a peer without a relay."""
        return any(not leads_through_relay(link) for link in self.links(peer))

    async def _answer_all(self, stream: INetStream, peer: str, answer: Serve, request_bytes_max: int) -> None:
        reader = _Reader(stream)
        async with trio.open_nursery() as nursery:
            while True:
                header = await reader.exactly(REQUEST_HEADER_BYTES, stall_s=inf)
                number, num_bytes = parse_request_header(header)
                # Refusals are awaited, so that a flood of refused requests is read no faster than it takes its refusals.
                if num_bytes > request_bytes_max:
                    await reader.skip(num_bytes)
                    refused: RemoteError = LimitExceeded("request_bytes_max", num_bytes, request_bytes_max)
                    await _send(stream, pack_refusal(number, refused))
                    continue
                payload = await reader.exactly(num_bytes)
                if self._answering[peer] >= limits.PEER_REQUESTS_MAX:
                    refused = RemoteError(
                        ErrorCode.TOO_MANY_REQUESTS, f"{limits.PEER_REQUESTS_MAX} of your requests are in progress"
                    )
                    await _send(stream, pack_refusal(number, refused))
                    continue
                self._answering[peer] += 1
                nursery.start_soon(self._answer, stream, peer, answer, number, payload)

    async def _answer(self, stream: INetStream, peer: str, answer: Serve, number: int, payload: bytes) -> None:
        given: bytes | DeferredAnswer = b""
        try:
            try:
                given = await answer(peer, payload)
                frame = pack_answer(number, given.payload if isinstance(given, DeferredAnswer) else given)
            except RemoteError as error:
                frame = pack_refusal(number, error)
            except Unreachable as error:
                frame = pack_refusal(number, RemoteError(ErrorCode.UNAVAILABLE, str(error)))
            except Exception:
                log.exception("a request of %s could not be answered", peer)
                frame = pack_refusal(number, RemoteError(ErrorCode.INTERNAL, "this peer failed to answer; see its log"))
            await _send(stream, frame)
        finally:
            settle_answer(given)
            self._answering[peer] -= 1
            if not self._answering[peer]:
                del self._answering[peer]


def settle_answer(given: bytes | DeferredAnswer) -> None:
    """Call the `after` of an answer that was sent, or will not be."""
    if isinstance(given, DeferredAnswer):
        given.after()


_relayed: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
_hosts: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
"""IP address by link. It never changes, every request needs it, and formatting a link's addresses takes 0.1 ms."""


def leads_through_relay(link: Any) -> bool:
    """Return whether a link, or the link of a stream, is a circuit of a relay."""
    known = _relayed.get(link)
    if known is None:
        try:
            known = any("p2p-circuit" in str(address) for address in link.get_transport_addresses())
        except Exception as error:  # noqa: BLE001 - a link that is closing has no addresses
            faults.note(log, "addresses of a link", error)
            return False
        _relayed[link] = known
    return known


def hosts_of(links: Iterable[Any]) -> tuple[str, ...]:
    """Return the IP addresses at which the direct ones of these links end. Example: ("203.0.113.7",)."""
    return tuple(dict.fromkeys(host for link in links if (host := _host_of(link))))


def _host_of(link: Any) -> str:
    known = _hosts.get(link)
    if known is None:
        try:
            texts = [str(address).split("/p2p/")[0] for address in link.get_transport_addresses()]
        except Exception as error:  # noqa: BLE001 - a link that is closing has no addresses
            faults.note(log, "addresses of a link", error)
            return ""
        ends = [end.host for text in texts if (end := endpoint_of(text)) is not None]
        known = _hosts[link] = "" if leads_through_relay(link) or not ends else ends[0]
    return known


@functools.lru_cache(limits.KNOWN_PEERS_MAX)
def _id_of(peer: str) -> ID:
    return ID.from_string(peer)


async def _widen(stream: INetStream) -> None:
    """Widen a stream's receive window. Our reader never blocks, so this costs at most the bytes in progress."""
    muxed: Stream = stream.muxed_stream
    muxed.target_recv_window += WINDOW_MORE_BYTES
    muxed.recv_window += WINDOW_MORE_BYTES
    await muxed.send_window_update(WINDOW_MORE_BYTES)


async def reset(stream: INetStream) -> None:
    """End a stream at once; never raises and never hangs."""
    with contextlib.suppress(Exception), trio.CancelScope(deadline=trio.current_time() + 1.0, shield=True):
        await stream.reset()


async def _send(stream: INetStream, frame: bytes) -> None:
    """Write a whole frame. The muxed stream has a lock of its own; each further one is a turn of the loop."""
    await stream.muxed_stream.write(frame)


class _Reader:
    """A reader that reads a stream ahead, and reports to the link how much it lacks."""

    def __init__(self, stream: INetStream) -> None:
        self._stream: Stream = stream.muxed_stream
        self._ahead = bytearray()

    async def exactly(self, num_bytes: int, *, stall_s: float = limits.PEER_STALL_S_MAX) -> bytes:
        """Return exactly `num_bytes`.

        Raises MuxedStreamEOF at the end of the stream, trio.TooSlowError after `stall_s` of silence.
        """
        while (missing := num_bytes - len(self._ahead)) > 0:
            self._stream.missing_bytes = missing
            if stall_s == inf:
                self._ahead += await self._stream.read(READ_BYTES)
            else:
                with trio.fail_after(stall_s):
                    self._ahead += await self._stream.read(READ_BYTES)
        self._stream.missing_bytes = 0
        taken = bytes(self._ahead[:num_bytes])
        del self._ahead[:num_bytes]
        return taken

    async def skip(self, num_bytes: int) -> None:
        while num_bytes:
            num_bytes -= len(await self.exactly(min(num_bytes, READ_BYTES)))
