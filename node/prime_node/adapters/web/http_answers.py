"""Read answers of untrusted servers: with bounds, time limits, and one meaning for every error."""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import os
import socket
import ssl
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, Self, TypeVar

import aiohttp

from prime_node.ports.clock import Clock
from prime_protocol import limits
from prime_protocol.envelope import Envelope, WireModel, open_envelope, parse_json
from prime_protocol.errors import ErrorCode, LimitExceeded, RemoteError
from prime_protocol.replies import ErrorBody

CONNECT_S_MAX = 10.0
"""Seconds to open a connection."""
STALL_S = 30.0
"""Seconds without a single byte in either direction."""
BYTES_PER_SECOND_MIN = 1_024
"""Lowest average speed of an answer's body; a slower server is useless, however steadily it sends."""
READ_BYTES = 2**19
"""Bytes read ahead on one connection; with the default of 64 KiB a fast line waits for the loop."""
MOVED_S_MIN = 0.01
"""Seconds after a recorded movement within which further ones count with it."""
INTERIM_ANSWERS_MAX = 8
"""Answers of status 1xx before the answer to a request. Nothing here asks for any."""
CHUNKS_FREE, CHUNK_BYTES_MIN = 2**10, 64
"""Chunks of a body of unknown length that may be of any size, and the average size of more."""
_PIECE_BYTES = 2**16

Reply = TypeVar("Reply", bound=WireModel)


class ExplainedRefusal(RemoteError):
    """A RemoteError that the server itself explained with an ErrorBody."""


class _Answer(aiohttp.ClientResponse):
    """An answer; too many interim ones before it end the connection.

    aiohttp reads interim answers in a loop without a bound, a setting or a hook. If they arrive faster than it reads, the loop
    never waits, so no timeout ends it. Therefore `start` counts the reads, in place of the connection's own function.
    """

    async def start(self, connection: Any) -> aiohttp.ClientResponse:
        """Read the head of the answer. Raises ValueError after INTERIM_ANSWERS_MAX."""
        protocol, read, left = connection.protocol, connection.protocol.read, INTERIM_ANSWERS_MAX + 1

        async def read_few() -> Any:
            nonlocal left
            if left == 0:
                raise ValueError("it sends interim answers without end")
            left -= 1
            return await read()

        protocol.read = read_few
        try:
            return await super().start(connection)
        finally:
            del protocol.read


class Patience:
    """A timeout that cancels its body when nothing has moved for long enough; it raises TimeoutError."""

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
        """Record that bytes went through. The timer is reset only at intervals, because a reset costs more than the bytes."""
        now_s = self._loop.time()
        if now_s - self._moved_s > MOVED_S_MIN:
            self._moved_s = now_s
            self._timeout.reschedule(now_s + self._allowed_s)

    def answered(self) -> None:
        """Record that the answer has begun: the agreed wait is over."""
        self._allowed_s = self.stall_s
        self._moved_s = self._loop.time()
        self._timeout.reschedule(self._moved_s + self._allowed_s)

    def received(self, num_bytes: int) -> None:
        """Record a piece of the answer's body. Raises TimeoutError if the average is too slow."""
        now_s = self._loop.time()
        self._body_began_s = self._body_began_s or now_s
        self._bytes += num_bytes
        if now_s - self._body_began_s > self.stall_s + self._bytes / BYTES_PER_SECOND_MIN:
            raise TimeoutError
        self.moved()


def new_session(connector: aiohttp.TCPConnector) -> aiohttp.ClientSession:
    """Return a session without cookies and decompression; it limits only the time to connect."""
    return aiohttp.ClientSession(
        connector=connector,
        response_class=_Answer,
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S_MAX),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        headers={"Accept-Encoding": "identity"},
        read_bufsize=READ_BYTES,
    )


async def pieces_of_body(body: bytes, patience: Patience) -> AsyncIterator[bytes]:
    """Yield a body in pieces, recording progress."""
    for start in range(0, len(body), _PIECE_BYTES):
        yield body[start : start + _PIECE_BYTES]
        patience.moved()


async def read_bounded(answer: aiohttp.ClientResponse, patience: Patience, *, bytes_max: int) -> bytes:
    """Read the body, up to a bound. Raises LimitExceeded; the connection is dropped then, not drained.

    Raises RemoteError for small chunks: in chunks of one byte, each megabyte takes a second of the processor.
    """
    if answer.content_length is not None and answer.content_length > bytes_max:
        answer.close()
        raise LimitExceeded("answer_bytes_max", answer.content_length, bytes_max)
    if answer.content_length is not None and answer.content_length <= READ_BYTES:
        await _until_whole(answer.content, patience)
        return answer.content.read_nowait()
    body, num_chunks = bytearray(), 0
    while not answer.content.at_eof():  # iter_chunks never ends for the second answer without a body
        piece, ends_chunk = await answer.content.readchunk()
        body += piece
        patience.received(len(piece))
        num_chunks += ends_chunk
        if num_chunks > CHUNKS_FREE + len(body) // CHUNK_BYTES_MIN:
            answer.close()
            raise RemoteError(ErrorCode.MALFORMED, f"{answer.url.origin()} sends its answer in tiny chunks")
        if len(body) > bytes_max:
            answer.close()
            raise LimitExceeded("answer_bytes_max", None, bytes_max)
    return bytes(body)


async def _until_whole(content: aiohttp.StreamReader, patience: Patience) -> None:
    """Wait for the end of a body that fits into the read buffer: waking for each of its packets costs more than its bytes."""
    seen = 0
    while not content.is_eof():
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience.stall_s / 4):
                await content.wait_eof()
        if content.total_bytes > seen:
            patience.received(content.total_bytes - seen)
            seen = content.total_bytes


async def error_of(answer: aiohttp.ClientResponse, patience: Patience, clock: Clock) -> RemoteError:
    """Return the error that an answer of 400 or above means."""
    try:
        body = await read_bounded(answer, patience, bytes_max=limits.ERROR_BODY_BYTES_MAX)
    except RemoteError:
        body = b""
    return explained(answer.status, body, answer.headers.get("Date"), clock)


def explained(status: int, body: bytes, date: str | None, clock: Clock) -> RemoteError:
    """Return the error that a status and a body mean. For a proxy's HTML page, the status alone counts."""
    try:
        fault = parse_json(body, ErrorBody)
    except RemoteError:
        code = _CODE_OF_STATUS.get(status)
        if code is None:
            code = ErrorCode.UNAVAILABLE if status >= 500 else ErrorCode.MALFORMED
        hint = ": is it the address of a coordinator?" if status < 500 else ""
        return RemoteError(code, f"HTTP {status} without an explanation{hint}")
    detail = fault.detail
    if fault.code is ErrorCode.EXPIRED:
        detail += _clock_difference(date, clock)
    return ExplainedRefusal(fault.code, detail, retry_after_s=fault.retry_after_s, epoch=fault.epoch)


def _clock_difference(date: str | None, clock: Clock) -> str:
    """Return a hint on this machine's clock error, from the server's time in the Date header of a refusal."""
    try:
        ahead_s = clock.now_ms() / 1_000 - email.utils.parsedate_to_datetime(date or "").timestamp()
    except (OverflowError, TypeError, ValueError):  # OverflowError: a year of ten digits
        return ""
    direction = "ahead of" if ahead_s > 0 else "behind"
    return f"; this machine's clock is {abs(ahead_s):.0f} s {direction} the coordinator's: set it"


def sensible(body: bytes, model: type[Reply]) -> Reply:
    """Parse the body of a successful answer. Raises RemoteError(UNAVAILABLE)."""
    try:
        return parse_json(body, model)
    except RemoteError as error:
        raise nonsense(error) from None


def sensible_envelope(body: bytes) -> Envelope:
    """Parse the envelope of a lease or a batch from a successful answer. Raises RemoteError(UNAVAILABLE)."""
    try:
        return open_envelope(body, bytes_max=limits.WORK_BYTES_MAX)
    except RemoteError as error:
        raise nonsense(error) from None


def nonsense(error: RemoteError) -> RemoteError:
    """Return the error for an unintelligible answer, from a proxy, a captive portal or a broken server.

    It is not the coordinator's decision on the request, so it is transient.
    """
    return RemoteError(
        ErrorCode.UNAVAILABLE, f"the answer is not valid: {error.detail}", retry_after_s=error.retry_after_s
    )


_CODE_OF_STATUS = {
    404: ErrorCode.NOT_FOUND,
    413: ErrorCode.TOO_LARGE,
    416: ErrorCode.BAD_RANGE,
    429: ErrorCode.TOO_MANY_REQUESTS,
}


def reason_of(error: Exception) -> str:
    """Return why a connection failed, without the library's own terms. Example: "Connection refused"."""
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else None
    if isinstance(cause, ssl.SSLCertVerificationError):
        return f"its certificate is not valid here: {cause.verify_message}"
    if isinstance(cause, socket.gaierror) and cause.strerror:
        return f"its name cannot be resolved: {cause.strerror}"
    if cause is not None and cause.errno and not isinstance(cause, ssl.SSLError):
        return os.strerror(cause.errno)
    if type(error) is aiohttp.ClientOSError and error.errno is None:
        return "the connection was closed during a transfer"
    if isinstance(error, aiohttp.ClientPayloadError):
        return "the connection broke in the middle of an answer"
    return str(error)[:200] or type(error).__name__
