"""One connection of aiohttp's server, behind a filter of our own.

aiohttp parses whatever arrives, one event for each chunk of a body, and buffers requests ahead. Here each request is framed
first (request_head.py). The framework gets a header when it is complete and valid, then exactly its body, and the next header
when the previous answer has been written. Senders that arrive in a thousand tiny reads are cut off, and so are stalled
readers.
"""

from __future__ import annotations

import asyncio
import email.utils
import http
import logging
from collections.abc import Callable
from typing import Any

from aiohttp import web

from prime_node.adapters.web.connection_counts import BODY_BYTES_PER_S_MIN, ConnectionCounts, Entry
from prime_node.adapters.web.gated_transport import GatedTransport
from prime_node.adapters.web.metered import Meter
from prime_node.adapters.web.request_head import Head, find_end, read_request_head
from prime_node.adapters.web.shedding import Shedding
from prime_node.ports.web import explanation
from prime_protocol import limits
from prime_protocol.errors import ErrorCode, RemoteError

log = logging.getLogger(__name__)

READING_BYTES = 256
"""Average bytes that each read beyond the first HTTP_READINGS_MAX of a request must bring."""
HELD_BYTES_MAX = 2**20
"""Bytes held while an answer is in progress. Reading is paused then; one more read may arrive."""
REFUSED_S = 2.0
"""Seconds for which a refused connection stays open, so that its sender reads why. An unread byte would reset it."""
DROPPED_BYTES_MAX = 2**16
"""Bytes read and discarded in that time; more stays in the network."""
READER_S = 20.0
"""Seconds after which a reader slower than BODY_BYTES_PER_S_MIN is cut off."""


class GuardedHandler(web.RequestHandler):
    """One connection, closed if the header of its next request does not arrive in time."""

    __slots__ = (
        "_body_left",
        "_counts",
        "_dropped",
        "_first_header_s",
        "_has_begun",
        "_header_s_max",
        "_header_timer",
        "_held",
        "_is_held_back",
        "_may_send",
        "_meter",
        "_reader_timer",
        "_readings",
        "_request_bytes",
        "_searched",
        "_shedding",
        "_turn_timer",
        "_unsent",
        "entry",
        "expects_continue",
        "is_busy",
        "is_given_up",
        "streaming",
    )

    def __init__(
        self,
        manager: web.Server,
        connection_counts: ConnectionCounts,
        entry: Entry,
        *,
        header_s_max: float,
        first_header_s: float,
        shedding: Shedding | None = None,
        may_send: Callable[[], bool] | None = None,
    ) -> None:
        super().__init__(
            manager,
            loop=asyncio.get_running_loop(),
            access_log=None,  # type: ignore[arg-type]  # None is how aiohttp itself spells "off"
            auto_decompress=False,
            keepalive_timeout=header_s_max,
            lingering_time=REFUSED_S,
        )
        self.entry = entry
        self.is_busy = False
        """Whether a request has no whole answer yet."""
        self.expects_continue = False
        """Whether the sender waits for a go-ahead before it sends the body."""
        self.is_given_up = False
        """Whether a body is left unread, so that no other request can follow."""
        self.streaming: asyncio.Task[None] | None = None
        """The task of an answer without an end, which ends with the connection."""
        self._counts = connection_counts
        self._header_s_max = header_s_max
        self._first_header_s = first_header_s
        self._shedding, self._may_send = shedding, may_send
        self._header_timer: asyncio.TimerHandle | None = None
        self._reader_timer: asyncio.TimerHandle | None = None
        self._turn_timer: asyncio.TimerHandle | None = None
        self._held = bytearray()
        """Received bytes that were not passed to the framework."""
        self._searched = 0
        self._body_left = 0
        self._readings = self._request_bytes = self._dropped = 0
        self._is_held_back = self._has_begun = False
        self._unsent = 0
        self._meter = Meter(lambda seconds: connection_counts.spent(entry, seconds))

    # Called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the timer for the first header."""
        if self._may_send is not None:
            transport = GatedTransport(transport, self._may_send)  # type: ignore[assignment]  # it forwards what it lacks
        super().connection_made(transport)
        self._counts.has_not_asked(self.entry, self.abort)
        self._wait_for_header(self._first_header_s)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Cancel the timers and release the connection's share."""
        for timer in (self._header_timer, self._reader_timer, self._turn_timer):
            if timer is not None:
                timer.cancel()
        self._held.clear()
        if not self.entry.has_asked:
            self._counts.unread(self.entry, is_bare=not self._readings)
        self.entry.leave()
        if self.streaming is not None:
            self.streaming.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Frame received bytes, or discard them after a refusal."""
        if not data:  # how the framework asks its own parser to continue
            super().data_received(data)
            return
        self._readings += 1
        self._request_bytes += len(data)
        if self.is_given_up:
            self._dropped += len(data)
            if self._dropped > DROPPED_BYTES_MAX or self._readings > DROPPED_BYTES_MAX // READING_BYTES:
                self._hold_back()
            return
        if self._readings > limits.HTTP_READINGS_MAX + self._request_bytes // READING_BYTES:
            self.abort()
        elif self._body_left >= len(data) and not self._held:
            self._body_left -= len(data)
            super().data_received(data)
        else:
            self._held += data
            self._advance()

    def pause_writing(self) -> None:
        """Watch a slow reader."""
        super().pause_writing()
        if self.transport is not None:
            self._unsent = self.transport.get_write_buffer_size()
            self._reader_timer = asyncio.get_running_loop().call_later(READER_S, self._look_at_reader)

    def resume_writing(self) -> None:
        """Stop watching the reader."""
        if self._reader_timer is not None:
            self._reader_timer.cancel()
            self._reader_timer = None
        super().resume_writing()

    # Called by the server

    def abort(self) -> None:
        """Close the connection at once."""
        if self.transport is not None:
            self.transport.abort()

    def give_up(self) -> None:
        """Read no more. The next answer is the last one."""
        self.is_given_up = True
        self.close()

    def sends(self) -> None:
        """Record that an answer begins that takes more than one write."""
        self._counts.moves(self.entry)

    def go_on(self) -> None:
        """Send 100 Continue to a sender that waits for it."""
        if self.expects_continue and self.transport is not None:
            self.expects_continue = False
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    # Called by the framework

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Write an answer, then admit the next request."""
        found = await super().finish_response(request, resp, start_time)
        self._answered()
        return found

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Return an ErrorBody. Server faults are logged; invalid HTTP is the peer's fault, and scanners send it all day."""
        if status >= 500:
            super().handle_error(request, status, exc, message)  # logs, and raises if an answer has begun
            error = RemoteError(ErrorCode.INTERNAL, "internal error of the server; its operator finds it in the log")
        else:
            log.debug("%s does not speak HTTP: %r", self.entry.address, exc)
            error = RemoteError(ErrorCode.MALFORMED, "this is not HTTP")
        answer = error_answer(error)
        answer.force_close()
        return answer

    async def _handle_request(self, request: web.BaseRequest, *arguments: Any) -> tuple[web.StreamResponse, bool]:
        return await self._meter.run(super()._handle_request(request, *arguments))

    def _resume_transport_reading(self) -> None:
        if not self._is_held_back:
            super()._resume_transport_reading()

    # Internals

    def _advance(self) -> None:
        """Pass to the framework what it may have now."""
        try:
            while self._held and self._turn_timer is None:
                if self._body_left:
                    piece = bytes(self._held[: self._body_left])
                    del self._held[: len(piece)]
                    self._body_left -= len(piece)
                    super().data_received(piece)
                elif self.is_busy:
                    self._hold_back()
                    if len(self._held) > HELD_BYTES_MAX:
                        self.abort()
                    return
                elif not self._next_request():
                    return
        except RemoteError as error:
            self._refuse(error)

    def _next_request(self) -> bool:
        """Look for the next header. Return False if it is incomplete, or if its turn has not come. Raises RemoteError."""
        end = find_end(self._held, self._searched)
        if end < 0:
            self._searched = len(self._held)
            if not self._has_begun:
                self._has_begun = True
                self._wait_for_header(min(self._header_s_max, limits.HTTP_HEADER_S_MAX))
            return False
        head = read_request_head(bytes(self._held[:end]))
        self._counts.asks(self.entry)
        if not self._counts.bounds.is_host(self.entry.address, head.host):
            raise RemoteError(
                ErrorCode.MALFORMED,
                f"unknown host name {head.host[:100]!r}; use an IP address, or let the operator add the name to "
                "coordinator.hosts",
            )
        self._has_begun, self._searched = False, 0
        if self._shedding is not None:
            refusal = self._shedding.refusal(head, self.entry.sender)
            if refusal is not None:
                return self._shed(end, head, refusal)
        delay_s = self._counts.delay_s(self.entry, head.forwarded)
        if delay_s > 0.0:
            self._hold_back()
            self._stop_header_timer()
            self._turn_timer = asyncio.get_running_loop().call_later(delay_s, self._turn_came, end, head)
            return False
        self._begin(end, head)
        return True

    def _shed(self, end: int, head: Head, refusal: RemoteError) -> bool:
        """Refuse a request for load, and keep its connection if no body follows, of this or of HEAD. Return whether it was kept.

        Raises `refusal` otherwise.
        """
        if head.body_bytes or head.is_head:
            raise refusal
        assert self.transport is not None
        if self.transport.get_write_buffer_size() > HELD_BYTES_MAX:  # it sends on and on, and reads nothing
            self.abort()
            return False
        self._counts.unread(self.entry)
        del self._held[:end]
        self._readings, self._request_bytes = 0, len(self._held)
        self.transport.write(_plain(refusal, "keep-alive"))
        self._wait_for_header(self._header_s_max)
        self._counts.waits(self.entry, self.abort)
        return True

    def _turn_came(self, end: int, head: Head) -> None:
        self._turn_timer = None
        if self.transport is not None:
            self._go_on_reading()
            self._begin(end, head)
            self._advance()

    def _begin(self, end: int, head: Head) -> None:
        self._stop_header_timer()
        self.is_busy, self._body_left, self.expects_continue = True, head.body_bytes, head.expects_continue
        header = bytes(self._held[:end])
        del self._held[:end]
        if not self._body_left:
            self._counts.waits(self.entry, self.abort)
        self._meter.call(super().data_received, header)

    def _answered(self) -> None:
        self.is_busy = False
        self._meter.report()
        self._counts.answered(self.entry)
        self._readings, self._request_bytes = 0, len(self._held)
        if self.is_given_up or self.transport is None:
            return
        self._wait_for_header(self._header_s_max)
        self._counts.waits(self.entry, self.abort)
        self._go_on_reading()
        self._advance()

    def _refuse(self, error: RemoteError) -> None:
        """Answer a request that never reaches the framework, and end the connection."""
        self.is_given_up = True
        self._counts.unread(self.entry)
        self._held.clear()
        self._stop_header_timer()
        if self.transport is None:
            return
        log.debug("%s: %s", self.entry.address, error)
        self.transport.write(_plain(error, "close"))
        self._header_timer = asyncio.get_running_loop().call_later(REFUSED_S, self.abort)

    def _hold_back(self) -> None:
        if not self._is_held_back:
            self._is_held_back = True
            self._pause_transport_reading()

    def _go_on_reading(self) -> None:
        if self._is_held_back:
            self._is_held_back = False
            if not self._reading_paused and not self._buffer_paused:
                self._resume_transport_reading()

    def _look_at_reader(self) -> None:
        self._reader_timer = None
        if self.transport is None:
            return
        unsent = self.transport.get_write_buffer_size()
        if self._unsent - unsent < READER_S * BODY_BYTES_PER_S_MIN:
            self.abort()
            return
        self._unsent = unsent
        self._reader_timer = asyncio.get_running_loop().call_later(READER_S, self._look_at_reader)

    def _wait_for_header(self, seconds: float) -> None:
        self._stop_header_timer()
        self._header_timer = asyncio.get_running_loop().call_later(seconds, self.abort)

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None


def _plain(error: RemoteError, connection: str) -> bytes:
    """Return the whole answer to a request that never reaches the framework."""
    response = explanation(error)
    assert isinstance(response.body, bytes)
    lines = [
        f"HTTP/1.1 {response.status} {http.HTTPStatus(response.status).phrase}",
        f"Date: {email.utils.formatdate(usegmt=True)}",
        f"Content-Type: {response.content_type}",
        f"Content-Length: {len(response.body)}",
        *(f"{name}: {value}" for name, value in response.headers.items()),
        f"Connection: {connection}",
    ]
    return "\r\n".join([*lines, "\r\n"]).encode() + response.body


def error_answer(error: RemoteError) -> web.Response:
    """Return a RemoteError as the framework's answer."""
    response = explanation(error)
    assert isinstance(response.body, bytes)
    return web.Response(
        body=response.body, status=response.status, content_type=response.content_type, headers=response.headers
    )
