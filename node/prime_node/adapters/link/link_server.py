"""The writer's side of the link: it hears gateways that know the secret, and answers their calls side by side.

A connection that has not proved the secret gives way to a newer one, first of the address that has the most: no stranger keeps
gateways out by holding connections. A silent gateway loses its link. Its calls end by themselves, and their answers are dropped,
as when a client leaves. Streams end with their link. The gateways of one address have a bounded number of links, calls and bytes
(gateway_room.py): a stolen one cannot fill the writer's memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable

from prime_node.adapters.link.call_heads import answer_head, call_of
from prime_node.adapters.link.gateway_room import ArrivingPackets, HeldCalls
from prime_node.adapters.link.sealed_frames import (
    HEAD_BYTES_MAX,
    LARGE_BYTES,
    MAGIC,
    NONCE_BYTES,
    PACKET_BYTES_MAX,
    PROOF_BYTES,
    TOGETHER_BYTES_MAX,
    BrokenLink,
    FrameKind,
    FrameOpener,
    FrameSealer,
    LinkFrame,
    is_proof,
    proof,
)
from prime_node.adapters.web.shares import Turns
from prime_node.ports.writer_link import AnswerCall, ForwardedAnswer, fault_head, fault_of
from prime_protocol.errors import ErrorCode, LocalError, RemoteError

log = logging.getLogger(__name__)

HANDSHAKE_S = 5.0
STRANGERS_MAX = 16
"""Connections that have not proved the secret yet."""
LOG_S = 1.0
"""Shortest time between two lines of the log about strangers, about the links of one address, or with a traceback."""
SILENT_S_MAX = 5.0
"""Seconds without a frame, after which a link is cut; gateways say that they are alive more often."""
UNSENT_BYTES_MAX = 2**28
"""Bytes that wait for a gateway which does not read; beyond, its link is cut."""
ALIVE_S = 0.5
"""Seconds between two signs of life. They answer nothing: what a gateway sends may wait behind a large body of its own."""
AHEAD_BYTES_MAX = 2**22
"""A body of LARGE_BYTES waits until fewer bytes than these are unsent; short answers pass it."""
PIECES_AHEAD = 2
"""Pieces of a stream that are sent before the gateway has asked for more."""
LINKS_EACH_MAX = 16
"""Links from one address; a newer one takes the place of the oldest."""


class LinkServer:
    """Implementation of ports.writer_link.GatewayListener."""

    def __init__(self) -> None:
        self.links: dict[_Link, None] = {}
        """Open connections, the oldest first, also those that have not proved the secret."""
        self.port = 0
        """Port on which it listens, once it does."""
        self.body_bytes_max = PACKET_BYTES_MAX
        """Longest body of a frame that a gateway of the run sends."""
        self.calls, self.arriving = HeldCalls(), ArrivingPackets()
        self._server: asyncio.Server | None = None
        self._lines = Turns(per_second=1.0 / LOG_S, burst=1.0)

    async def start(
        self,
        answer: AnswerCall,
        *,
        address: tuple[str, int],
        secret: bytes,
        run: str,
        body_bytes_max: int,
        may_send: Callable[[], bool] | None,
    ) -> int:
        host, port = address
        self.body_bytes_max = body_bytes_max
        longest = max(body_bytes_max, TOGETHER_BYTES_MAX) + HEAD_BYTES_MAX
        self.arriving.longest = min(longest, PACKET_BYTES_MAX)
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(self.link_factory(answer, secret, run, may_send), host, port)
        except OSError as error:
            raise LocalError(
                f"cannot listen for gateways on {host}:{port}: {error.strerror}; change coordinator.gateways_listen"
            ) from None
        self.port = self._server.sockets[0].getsockname()[1]
        return self.port

    def link_factory(
        self, answer: AnswerCall, secret: bytes, run: str, may_send: Callable[[], bool] | None
    ) -> Callable[[], asyncio.Protocol]:
        """Return a function that makes the protocol of one more connection."""
        return lambda: _Link(self, answer, secret, run, may_send)

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for link in list(self.links):
            link.cut("the coordinator stops")

    def enter(self, link: _Link) -> None:
        """Add a connection. If there are too many strangers, end the oldest of the address that has the most."""
        self.links[link] = None
        strangers = [link for link in self.links if not link.is_proven]
        if len(strangers) > STRANGERS_MAX:
            numbers = Counter(link.address for link in strangers)
            most = max(numbers.values())
            next(link for link in strangers if numbers[link.address] == most).cut("another connection took its place")

    def prove(self, link: _Link) -> None:
        """Take a link that has proved the secret. If its address has too many, end the oldest of them."""
        proven = [one for one in self.links if one.is_proven and one.address == link.address]
        for oldest in proven[:-LINKS_EACH_MAX]:
            oldest.cut("newer links of its address took its place")

    def hold(self, address: str, num_bytes: int, *, num_calls: int = 0) -> None:
        """Count a call or its bytes. Raises RemoteError if the gateways of this address have too many."""
        self.calls.hold(address, num_bytes, longest=self.body_bytes_max + HEAD_BYTES_MAX, num_calls=num_calls)

    def may_log(self, what: str, now_s: float) -> bool:
        """Return whether a line of this kind is logged: a few of each, so that neither strangers nor gateways fill the log."""
        return self._lines.try_take(what, now_s)


class _Link(asyncio.Protocol):
    """One connection of a gateway."""

    def __init__(
        self, server: LinkServer, answer: AnswerCall, secret: bytes, run: str, may_send: Callable[[], bool] | None
    ) -> None:
        self._server, self._answer, self._secret, self._run = server, answer, secret, run
        self._may_send = may_send or (lambda: True)
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self.address = ""
        """Address that it comes from."""
        self._nonce, self._shaking = secrets.token_bytes(NONCE_BYTES), bytearray()
        self._sealer: FrameSealer | None = None
        self._opener: FrameOpener | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: dict[int, asyncio.Task[None]] = {}
        """Tasks of the calls that wait for something."""
        self._room: dict[int, asyncio.Semaphore] = {}
        """Pieces that each call whose answer is being streamed may send now."""
        self._wanted: dict[int, asyncio.Future[bytes]] = {}
        self._calls: dict[int, int] = {}
        """Bytes of each call in progress."""
        self._turn, self._has_room = asyncio.Lock(), asyncio.Event()
        """Large bodies are sent one after another, while the transport has room."""
        self._has_room.set()
        self._unsent, self._is_taking = list[LinkFrame](), False
        """Frames of this turn of the loop: one packet for all of them, as soon as no more frames are being taken."""

    def read_on(self) -> None:
        """Read again: there is room for the packet that arrives."""
        self._heard_s = self._loop.time()
        if self._transport is not None and not (self._transport.is_closing() or self._transport.is_reading()):
            self._transport.resume_reading()

    @property
    def unread_bytes(self) -> int:
        """Bytes that are held of a packet which has not arrived whole."""
        return 0 if self._opener is None else self._opener.arriving[1]

    @property
    def is_proven(self) -> bool:
        """Whether it has proved the secret."""
        return self._opener is not None

    # Called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the challenge."""
        self._transport = transport  # type: ignore[assignment]  # uvloop's transports are no subclasses of asyncio.Transport
        assert self._transport is not None
        self._transport.set_write_buffer_limits(AHEAD_BYTES_MAX)
        self.address, *_ = self._transport.get_extra_info("peername") or ("",)
        self._server.enter(self)
        self._timer = self._loop.call_later(HANDSHAKE_S, self.cut, "no proof in time")
        self._write(MAGIC + self._nonce)

    def connection_lost(self, exc: Exception | None) -> None:
        """End its streams. Its calls continue: what they decide is decided."""
        self._server.links.pop(self, None)
        self._transport = None
        self._server.arriving.leave(self, self._loop.time())
        self._has_room.set()
        if self._timer is not None:
            self._timer.cancel()
        for number in self._room:
            self._tasks[number].cancel()
        for wanted in self._wanted.values():
            if not wanted.done():
                wanted.set_exception(RemoteError(ErrorCode.UNAVAILABLE, "the gateway has left"))

    def pause_writing(self) -> None:
        """Let large bodies wait."""
        self._has_room.clear()

    def resume_writing(self) -> None:
        """Send them."""
        self._has_room.set()

    def data_received(self, data: bytes) -> None:
        """Check the proof, then take frames."""
        self._heard_s, self._is_taking = self._loop.time(), True
        try:
            if self._opener is None:
                data = self._shake(data)
            if self._opener is not None and data:
                for frame in self._opener.feed(data):
                    self._take(frame)
                may_read = self._server.arriving.enter(self, self._opener.arriving[0], self._heard_s)
                if not may_read and self._transport is not None and not self._transport.is_closing():
                    self._transport.pause_reading()
        except (BrokenLink, ValueError, KeyError, TypeError) as error:
            self.cut(str(error) or type(error).__name__)
        finally:
            self._flush()

    def cut(self, reason: str) -> None:
        """End the connection."""
        if self._transport is not None:
            if self._server.may_log(f"end {self.address}" if self.is_proven else "strangers", self._loop.time()):
                log.warning("link of a gateway at %s: %s", self._transport.get_extra_info("peername"), reason)
            self._server.links.pop(self, None)
            self._transport.abort()

    # Internals

    def _shake(self, data: bytes) -> bytes:
        """Take the gateway's part of the handshake. Return what follows it. Raises BrokenLink."""
        self._shaking += data
        needed = NONCE_BYTES + PROOF_BYTES
        if len(self._shaking) < needed:
            return b""
        nonces = self._nonce + bytes(self._shaking[:NONCE_BYTES])
        if not is_proof(bytes(self._shaking[NONCE_BYTES:needed]), self._secret, "gateway", nonces, self._run):
            raise BrokenLink("it does not know the secret of this run's gateways")
        self._write(proof(self._secret, "writer", nonces, self._run))
        self._sealer = FrameSealer(proof(self._secret, "from the writer", nonces, self._run))
        key = proof(self._secret, "from the gateway", nonces, self._run)
        self._opener = FrameOpener(key, packet_bytes_max=self._server.arriving.longest)
        self._server.prove(self)
        assert self._timer is not None
        self._timer.cancel()
        self._look()
        assert self._transport is not None
        if self._server.may_log(self.address, self._loop.time()):
            log.info("a gateway at %s is linked", self._transport.get_extra_info("peername"))
        return bytes(self._shaking[needed:])

    def _look(self) -> None:
        now_s, arriving = self._loop.time(), self._server.arriving
        if now_s - self._heard_s > SILENT_S_MAX and not arriving.is_waiting(self):
            self.cut("it is silent")
        elif arriving.is_too_slow(self, self.unread_bytes, now_s):
            self.cut("its packet arrives too slowly, and others wait for the room that it takes")
        else:
            self._send(LinkFrame(FrameKind.ALIVE))
            self._timer = self._loop.call_later(ALIVE_S, self._look)

    def _take(self, frame: LinkFrame) -> None:
        match frame.kind:
            case FrameKind.CALL if frame.call in self._calls:
                raise BrokenLink("two calls of one number")
            case FrameKind.CALL:
                self._begin(frame)
            case FrameKind.MORE if frame.call in self._room:
                self._room[frame.call].release()
            case FrameKind.STOP if frame.call in self._room:
                self._tasks[frame.call].cancel()  # it may wait long for its next piece
            case FrameKind.GIVEN if frame.call in self._wanted and not self._wanted[frame.call].done():
                self._take_given(frame, self._wanted[frame.call])

    def _take_given(self, frame: LinkFrame, wanted: asyncio.Future[bytes]) -> None:
        """Pass on the parcel of a call, or why there is none."""
        try:
            if frame.head:
                raise fault_of(frame.head)
            self._server.hold(self.address, len(frame.body))
        except RemoteError as error:
            wanted.set_exception(error)
            return
        self._calls[frame.call] += len(frame.body)
        wanted.set_result(frame.body)

    def _begin(self, frame: LinkFrame) -> None:
        """Answer a call: at once if there is nothing to wait for, else in a task."""
        number, num_bytes = frame.call, frame.head_bytes + len(frame.body)
        try:
            self._server.hold(self.address, num_bytes, num_calls=1)
            self._calls[number] = num_bytes
            answer = self._answer(call_of(frame, self._want))
            if not isinstance(answer, ForwardedAnswer):
                self._tasks[number] = self._loop.create_task(self._handle(number, answer))
                return
            assert isinstance(answer.response.body, bytes)
            self._send(LinkFrame(FrameKind.ANSWER, number, answer_head(answer), answer.response.body))
        except Exception as error:  # noqa: BLE001 (it belongs to the caller)
            self._fail(number, error)
        self._end(number)

    async def _handle(self, number: int, waiting: Awaitable[ForwardedAnswer]) -> None:
        answer = None
        try:
            answer = await waiting
            await self._send_answer(number, answer)
        except Exception as error:  # noqa: BLE001 (it belongs to the caller)
            self._fail(number, error)
        finally:
            self._room.pop(number, None)
            del self._tasks[number]
            self._end(number)
            if answer is not None and answer.response.after is not None:
                answer.response.after()

    def _fail(self, number: int, error: Exception) -> None:
        """Send the error of a call."""
        if not isinstance(error, RemoteError):
            if self._server.may_log("calls", self._loop.time()):
                log.error("a call of a gateway", exc_info=error)
            error = RemoteError(ErrorCode.INTERNAL, "the coordinator failed; the error is in its log")
        self._send(LinkFrame(FrameKind.FAULT, number, fault_head(error)))

    def _end(self, number: int) -> None:
        if number in self._calls:  # else there was no room for it
            self._server.calls.let_go(self.address, self._calls.pop(number))

    async def _want(self, number: int) -> bytes:
        """Ask for the parcel that the gateway holds for a call. Raises RemoteError."""
        if self._transport is None:
            raise RemoteError(ErrorCode.UNAVAILABLE, "the gateway has left")
        wanted = self._wanted.setdefault(number, self._loop.create_future())
        try:
            self._send(LinkFrame(FrameKind.WANT, number))
            return await wanted
        finally:
            del self._wanted[number]

    async def _send_answer(self, number: int, answer: ForwardedAnswer) -> None:
        pieces, head = answer.response.body, answer_head(answer)
        if isinstance(pieces, bytes):
            await self._send_in_turn(LinkFrame(FrameKind.ANSWER, number, head, pieces))
            return
        room = self._room[number] = asyncio.Semaphore(PIECES_AHEAD)
        self._send(LinkFrame(FrameKind.ANSWER, number, {**head, "streams": True}))
        try:
            if self._transport is None:  # the gateway left before, and will never make room
                return
            async for piece in pieces:
                await room.acquire()
                await self._send_in_turn(LinkFrame(FrameKind.PIECE, number, body=piece))
        finally:
            if isinstance(pieces, AsyncIterator) and hasattr(pieces, "aclose"):
                with contextlib.suppress(RuntimeError):
                    await pieces.aclose()
        self._send(LinkFrame(FrameKind.END, number))

    async def _send_in_turn(self, frame: LinkFrame) -> None:
        if len(frame.body) < LARGE_BYTES:
            self._send(frame)
            return
        async with self._turn:
            await self._has_room.wait()
            self._flush()
            self._send(frame)
            self._flush()

    def _send(self, frame: LinkFrame) -> None:
        if self._transport is not None and self._sealer is not None:
            if not (self._unsent or self._is_taking):
                self._loop.call_soon(self._flush)
            self._unsent.append(frame)

    def _flush(self) -> None:
        unsent, self._unsent, self._is_taking = self._unsent, [], False
        if unsent and self._transport is not None and self._sealer is not None:
            self._write(self._sealer.seal(*unsent))

    def _write(self, data: bytes) -> None:
        assert self._transport is not None
        if not self._may_send() or self._transport.get_write_buffer_size() > UNSENT_BYTES_MAX:
            self.cut("nothing may be sent to it")
            return
        self._transport.write(data)
