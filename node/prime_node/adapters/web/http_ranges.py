"""Ranges of blobs over persistent HTTP/1.1 connections to one peer: the path of all pieces, so of nearly every byte.

A piece needs little of HTTP: a GET with a Range, and an answer with a Content-Length. Here the answer's bytes go from the
kernel into one buffer of their size. aiohttp's general client took a third of a receiver's time (DECISIONS.md, 65). Anything
less plain is an error of the server.

A shaped line brings a packet at a time. The system wakes this process for WAKE_BYTES or the end of a body, not for each of them.

Waiting: `get` waits for a connection, then for its answer; a connection carries one request at a time. A cancelled request
closes its connection. One timer for each connection checks whether bytes still come.

Nothing that the server sends is trusted: its header is bounded, its body is as long as the caller allows, and a slow body is
given up.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from prime_node.adapters.web.http_answers import BYTES_PER_SECOND_MIN, CONNECT_S_MAX
from prime_node.ports.transport import Unreachable
from prime_protocol import limits
from prime_protocol.errors import ErrorCode, LimitExceeded, RemoteError

HEADER_BYTES_MAX = 8 * 2**10
"""Bytes of an answer's header. Most of its body comes after it, and is read into its own buffer."""
WAKE_BYTES = 32 * 2**10
"""Bytes of a body that arrive together: half of the window with which a connection begins."""

_STATUS = re.compile(rb"HTTP/1\.([01]) ([2-5][0-9]{2})( .*)?")
_LENGTH = re.compile(r"[0-9]{1,15}")


@dataclass(frozen=True, slots=True)
class RangeAnswer:
    """One answer. Example: RangeAnswer(206, {"content-length": "262144"}, b"..")."""

    status: int
    headers: Mapping[str, str]
    """Header fields by their names in lower case."""
    body: bytes


class RangeClient:
    """Sender of GET requests to one server at http://host:port, optionally with a path prefix."""

    def __init__(self, url: str, *, stall_s: float, connections_max: int) -> None:
        parts = urlsplit(url)
        self.url = url
        self._host, self._port, self._prefix = parts.hostname or "", parts.port or 80, parts.path.rstrip("/")
        self._netloc = parts.netloc.rpartition("@")[2]
        self._stall_s = stall_s
        self._idle: list[_Connection] = []
        self._turns = asyncio.Semaphore(connections_max)
        self._open: set[_Connection] = set()
        self._is_closed = False

    def close(self) -> None:
        """Close all connections. Requests in progress raise Unreachable. Idempotent."""
        self._is_closed = True
        for connection in list(self._open):
            connection.give_up(Unreachable(f"{self.url}: the connection was closed"))

    async def prepare(self) -> None:
        """Open a connection for a later request, if there is none. Raises Unreachable."""
        async with self._turns:
            if not self._open and not self._is_closed:
                self._idle.append(await self._connect())

    async def get(self, path: str, headers: Mapping[str, str], *, bytes_max: int) -> RangeAnswer:
        """Make one request and return its whole answer, of any status. Raises RemoteError or Unreachable."""
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        asked = f"GET {self._prefix}{path} HTTP/1.1\r\nHost: {self._netloc}\r\nAccept-Encoding: identity\r\n{lines}\r\n"
        request = asked.encode("latin-1")
        async with self._turns:
            while not self._is_closed:
                kept = self._idle.pop() if self._idle else None
                connection = kept or await self._connect()
                try:
                    answer = await connection.ask(request, bytes_max)
                except _ClosedBefore:
                    if kept is None:
                        raise Unreachable(f"{self.url} has closed the connection") from None
                    continue  # an idle connection was closed; a new one may work
                if connection.is_kept:
                    self._idle.append(connection)
                else:
                    connection.close()
                return answer
        raise Unreachable(f"{self.url}: the connection was closed")

    async def _connect(self) -> _Connection:
        try:
            async with asyncio.timeout(CONNECT_S_MAX):
                _, made = await asyncio.get_running_loop().create_connection(
                    lambda: _Connection(self.url, self._stall_s, self._lost), self._host, self._port
                )
        except TimeoutError:
            raise Unreachable(f"{self.url}: no answer") from None
        except OSError as error:
            raise Unreachable(f"{self.url}: {os.strerror(error.errno) if error.errno else error}") from None
        self._open.add(made)
        if self._is_closed:  # meanwhile
            made.give_up(Unreachable(f"{self.url}: the connection was closed"))
        return made

    def _lost(self, connection: _Connection) -> None:
        self._open.discard(connection)
        with contextlib.suppress(ValueError):
            self._idle.remove(connection)


class _ClosedBefore(Exception):
    """A connection that the server closed before it sent a byte of the answer."""


class _Connection(asyncio.BufferedProtocol):
    """One connection. The system writes into the buffer that `get_buffer` returns: first the header's, then the body's own."""

    def __init__(self, url: str, stall_s: float, lost: Callable[[_Connection], None]) -> None:
        self.is_kept = True
        """Whether another request may follow."""
        self._url = url
        self._stall_s = stall_s
        self._lost = lost
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._socket: Any = None
        self._timer: asyncio.TimerHandle | None = None
        self._answered: asyncio.Future[RangeAnswer] | None = None
        self._asked_s = self._moved_s = 0.0
        self._bytes_max = 0
        self._wakes_at = 1
        """Bytes that must be there before the system wakes this process."""
        self._head = bytearray(HEADER_BYTES_MAX)
        self._head_view = memoryview(self._head)
        self._begin()

    def _begin(self) -> None:
        """Wait for the header of the next answer."""
        self._status = 0
        self._headers: dict[str, str] = {}
        self._body: bytearray | None = None
        self._filled = 0
        """Bytes filled of the header's buffer, then of the body."""
        self._wake_bytes = WAKE_BYTES

    async def ask(self, request: bytes, bytes_max: int) -> RangeAnswer:
        """Send a request and return its answer.

        Raises _ClosedBefore, RemoteError or Unreachable; the connection is closed then, and by a cancellation.
        """
        if self._transport is None:
            raise _ClosedBefore
        self._bytes_max = bytes_max
        self._asked_s = self._moved_s = self._loop.time()
        self._answered = self._loop.create_future()
        self._transport.write(request)
        try:
            return await self._answered
        except BaseException:
            self.close()
            raise
        finally:
            self._answered = None

    def give_up(self, error: Exception) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_exception(error)
        self.close()

    def close(self) -> None:
        self.is_kept = False
        if self._transport is not None:
            self._transport.abort()

    # Called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # uvloop's transports are no subclasses of asyncio.Transport
        self._socket = transport.get_extra_info("socket")  # uvloop makes a new object for each call
        self._timer = self._loop.call_later(self._stall_s, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._timer is not None:
            self._timer.cancel()
        began = self._status or self._filled
        cut = Unreachable(f"{self._url}: the connection broke in the middle of an answer")
        self.give_up(cut if began else _ClosedBefore())
        self._lost(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._head_view[self._filled :] if self._body is None else memoryview(self._body)[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        self._moved_s = self._loop.time()
        self._filled += nbytes
        try:
            if self._body is None:
                self._read_header(self._filled - nbytes)
            if self._body is not None and self._filled == len(self._body):
                self._whole()
            self._wake_at(1 if self._body is None else min(self._wake_bytes, len(self._body) - self._filled))
        except RemoteError as error:
            self.give_up(error)

    def _look(self) -> None:
        """Check that bytes still come fast enough. An unused connection is closed."""
        now_s = self._loop.time()
        if self._wakes_at > 1 and now_s - self._moved_s >= self._stall_s / 2:
            self._wake_bytes = 1  # of a slow answer, fewer may be there
            self._wake_at(1)
            self._timer = self._loop.call_later(self._stall_s / 2, self._look)
            return
        allowed_s = self._asked_s + self._stall_s + (self._filled if self._body else 0) / BYTES_PER_SECOND_MIN
        if now_s - self._moved_s >= self._stall_s or (self._answered is not None and now_s > allowed_s):
            self.give_up(Unreachable(f"{self._url}: no answer, or an answer without progress"))
        else:
            pause_s = self._stall_s if self._wakes_at == 1 else self._stall_s / 2
            self._timer = self._loop.call_at(self._moved_s + pause_s, self._look)

    def _wake_at(self, num_bytes: int) -> None:
        """Let the system wake this process once so many bytes are there, or the end. Only Linux does."""
        if num_bytes != self._wakes_at and self._transport is not None and sys.platform == "linux":
            self._wakes_at = num_bytes
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)

    # The answer

    def _read_header(self, seen: int) -> None:
        """Parse the header once it is complete.

        Raises RemoteError(MALFORMED), or LimitExceeded for a body longer than allowed.
        """
        if self._answered is None or self._answered.done():
            raise RemoteError(ErrorCode.MALFORMED, f"{self._url} sends data that was not requested")
        end = self._head.find(b"\r\n\r\n", max(0, seen - 3), self._filled)
        if end < 0:
            if self._filled == HEADER_BYTES_MAX:
                raise RemoteError(ErrorCode.MALFORMED, f"{self._url} does not speak HTTP: its header has no end")
            return
        status, *lines = bytes(self._head_view[:end]).split(b"\r\n")
        found = _STATUS.fullmatch(status)
        if found is None:
            raise RemoteError(ErrorCode.MALFORMED, f"{self._url} does not speak HTTP")
        self._status = int(found[2])
        self._headers = _headers_of(lines, self._url)
        self.is_kept = found[1] == b"1" and self._headers.get("connection", "").lower() != "close"
        length = "0" if self._status == 204 else self._headers.get("content-length", "")
        if not _LENGTH.fullmatch(length) or "transfer-encoding" in self._headers:
            raise RemoteError(ErrorCode.MALFORMED, f"{self._url} does not declare the length of its answer")
        if "content-encoding" in self._headers:
            raise RemoteError(ErrorCode.MALFORMED, f"{self._url} sends a compressed answer, which was not requested")
        bytes_max = self._bytes_max if self._status < 400 else limits.ERROR_BODY_BYTES_MAX
        if int(length) > bytes_max:
            raise LimitExceeded("answer_bytes_max", int(length), bytes_max)
        begun = self._head_view[end + 4 : self._filled]
        if len(begun) > int(length):
            raise RemoteError(ErrorCode.MALFORMED, f"{self._url} sends more than it declares")
        self._body = bytearray(int(length))
        self._body[: len(begun)] = begun
        self._filled = len(begun)

    def _whole(self) -> None:
        assert self._body is not None
        assert self._answered is not None
        if not self._answered.done():
            self._answered.set_result(RangeAnswer(self._status, self._headers, bytes(self._body)))
        self._begin()


def _headers_of(lines: list[bytes], url: str) -> dict[str, str]:
    """Return the header fields by their names in lower case. Raises RemoteError(MALFORMED)."""
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.decode("latin-1").partition(":")
        name = name.lower()
        if not colon or not name or name != name.strip() or (name == "content-length" and name in headers):
            raise RemoteError(ErrorCode.MALFORMED, f"{url} does not speak HTTP: its header is not valid")
        headers[name] = value.strip()
    return headers
