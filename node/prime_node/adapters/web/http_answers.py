"""Reading what a server sends, without trust: bounded, with patience that has an end, and with one meaning for every error."""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import os
import socket
import ssl
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Self, TypeVar

import aiohttp

from prime_node.ports.clock import Clock
from prime_protocol import limits
from prime_protocol.envelope import Envelope, WireModel, open_envelope, parse_json
from prime_protocol.errors import ErrorCode, LimitExceeded, PeerError
from prime_protocol.messages import ErrorBody

CONNECT_S_MAX = 10.0
"""To open a connection."""
STALL_S = 30.0
"""Without a single byte in either direction."""
BYTES_PER_SECOND_MIN = 1_024
"""Average of an answer's body; below this a server is no use, however steadily it drips."""
READ_BYTES = 2**19
"""Read ahead on one connection; with the default of 64 KiB a fast line waits for the loop."""
MOVED_S_MIN = 0.01
"""What moves within so short a time after something else that did counts with it."""
_PIECE_BYTES = 2**16

Reply = TypeVar("Reply", bound=WireModel)


class ExplainedRefusal(PeerError):
    """A PeerError that the server itself explained with an ErrorBody."""


class Patience:
    """Cancels what runs inside it when nothing has moved for long enough; leaves as TimeoutError."""

    def __init__(self, stall_s: float, *, wait_s: float) -> None:
        self.stall_s = stall_s
        self._loop = asyncio.get_running_loop()
        self._allowed_s = stall_s + wait_s
        self._timeout = asyncio.timeout(self._allowed_s)
        self._moved_s = self._loop.time()
        self._body_began_s: float | None = None
        self._bytes = 0

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._timeout.__aexit__(kind, error, traceback)

    def moved(self) -> None:
        """Something went through. The timer is set anew only now and then: it costs more than the bytes."""
        now_s = self._loop.time()
        if now_s - self._moved_s > MOVED_S_MIN:
            self._moved_s = now_s
            self._timeout.reschedule(now_s + self._allowed_s)

    def answered(self) -> None:
        """The answer has begun: the wait that was agreed on is over."""
        self._allowed_s = self.stall_s
        self._moved_s = self._loop.time()
        self._timeout.reschedule(self._moved_s + self._allowed_s)

    def received(self, num_bytes: int) -> None:
        """A piece of the answer's body came. Raises TimeoutError where they come too slowly on the whole."""
        now_s = self._loop.time()
        self._body_began_s = self._body_began_s or now_s
        self._bytes += num_bytes
        if now_s - self._body_began_s > self.stall_s + self._bytes / BYTES_PER_SECOND_MIN:
            raise TimeoutError
        self.moved()


def new_session(connector: aiohttp.TCPConnector) -> aiohttp.ClientSession:
    """A session that keeps no cookies, decompresses nothing and leaves all patience but connecting to its user."""
    return aiohttp.ClientSession(
        connector=connector,
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S_MAX),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        headers={"Accept-Encoding": "identity"},
        read_bufsize=READ_BYTES,
    )


async def pieces_of_body(body: bytes, patience: Patience) -> AsyncIterator[bytes]:
    for start in range(0, len(body), _PIECE_BYTES):
        yield body[start : start + _PIECE_BYTES]
        patience.moved()


async def read_bounded(answer: aiohttp.ClientResponse, patience: Patience, *, bytes_max: int) -> bytes:
    """The body, up to a bound. Raises LimitExceeded; the connection is dropped then, not drained."""
    if answer.content_length is not None and answer.content_length > bytes_max:
        answer.close()
        raise LimitExceeded("answer_bytes_max", answer.content_length, bytes_max)
    if answer.content_length is not None and answer.content_length <= READ_BYTES:
        await _until_whole(answer.content, patience)
        return answer.content.read_nowait()
    body = bytearray()
    async for piece in answer.content.iter_any():
        body += piece
        patience.received(len(piece))
        if len(body) > bytes_max:
            answer.close()
            raise LimitExceeded("answer_bytes_max", None, bytes_max)
    return bytes(body)


async def _until_whole(content: aiohttp.StreamReader, patience: Patience) -> None:
    """Wait for the end of a body that fits into what is read ahead: to wake for each packet of it costs more than its bytes."""
    seen = 0
    while not content.is_eof():
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience.stall_s / 4):
                await content.wait_eof()
        if content.total_bytes > seen:
            patience.received(content.total_bytes - seen)
            seen = content.total_bytes


async def error_of(answer: aiohttp.ClientResponse, patience: Patience, clock: Clock) -> PeerError:
    """What an answer of 400 or above means."""
    try:
        body = await read_bounded(answer, patience, bytes_max=limits.ERROR_BODY_BYTES_MAX)
    except PeerError:
        body = b""
    return explained(answer.status, body, answer.headers.get("Date"), clock)


def explained(status: int, body: bytes, date: str | None, clock: Clock) -> PeerError:
    """The same of what was read. A proxy's HTML page counts by its status alone."""
    try:
        fault = parse_json(body, ErrorBody)
    except PeerError:
        code = _CODE_OF_STATUS.get(status)
        if code is None:
            code = ErrorCode.UNAVAILABLE if status >= 500 else ErrorCode.MALFORMED
        return PeerError(code, f"HTTP {status} without an explanation")
    detail = fault.detail
    if fault.code is ErrorCode.EXPIRED:
        detail += _clock_difference(date, clock)
    return ExplainedRefusal(fault.code, detail, retry_after_s=fault.retry_after_s, epoch=fault.epoch)


def _clock_difference(date: str | None, clock: Clock) -> str:
    """A refusal's Date header holds the server's time; a contributor wants to know by how much he is off."""
    try:
        ahead_s = clock.now_ms() / 1_000 - email.utils.parsedate_to_datetime(date or "").timestamp()
    except (OverflowError, TypeError, ValueError):  # OverflowError: a year of ten digits
        return ""
    direction = "ahead of" if ahead_s > 0 else "behind"
    return f"; this machine's clock is {abs(ahead_s):.0f} s {direction} the coordinator's: set it"


def sensible(body: bytes, model: type[Reply]) -> Reply:
    """The answer of a server that said yes."""
    try:
        return parse_json(body, model)
    except PeerError as error:
        raise nonsense(error) from None


def sensible_envelope(body: bytes) -> Envelope:
    try:
        return open_envelope(body)
    except PeerError as error:
        raise nonsense(error) from None


def nonsense(error: PeerError) -> PeerError:
    """A proxy, a captive portal or a broken server. Not the coordinator's word on the request: try again."""
    return PeerError(
        ErrorCode.UNAVAILABLE, f"the answer makes no sense: {error.detail}", retry_after_s=error.retry_after_s
    )


_CODE_OF_STATUS = {
    404: ErrorCode.NOT_FOUND,
    413: ErrorCode.TOO_LARGE,
    416: ErrorCode.BAD_RANGE,
    429: ErrorCode.TOO_MANY_REQUESTS,
}


def reason_of(error: Exception) -> str:
    """Why a connection failed, without the library's own terms. Example: "Connection refused"."""
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else None
    if isinstance(cause, ssl.SSLCertVerificationError):
        return f"its certificate is not valid here: {cause.verify_message}"
    if isinstance(cause, ConnectionError) and cause.errno:
        return os.strerror(cause.errno)
    if isinstance(cause, socket.gaierror) and cause.strerror:
        return cause.strerror
    if type(error) is aiohttp.ClientOSError and error.errno is None:
        return "the link was closed while something was on its way"
    if isinstance(error, aiohttp.ClientPayloadError):
        return "cut off in the middle of an answer"
    return str(error)[:200] or type(error).__name__
