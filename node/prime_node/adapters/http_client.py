"""The coordinator over HTTP, for workers, validators and the trainer. SPEC.md, section "HTTP".

Nothing that a server sends is trusted. Every answer is read up to a bound of its own; redirects, compression
and cookies are refused; whatever makes no sense becomes a PeerError, and silence becomes Unreachable.

There is no fixed total time for a request: a 16 MB part over a poor line may take long and still be fine. A
request ends when nothing moved for STALL_S, or when the average falls below BYTES_PER_SECOND_MIN (slow
retrieval, as The Update Framework calls it).
"""

from __future__ import annotations

import asyncio
import email.utils
import secrets
from collections.abc import AsyncIterator, Mapping
from types import TracebackType
from typing import Self, TypeVar

import aiohttp

from prime_node.ports.clock import Clock
from prime_node.ports.transport import Unreachable
from prime_protocol import limits
from prime_protocol.digest import digest_of
from prime_protocol.envelope import Envelope, PayloadType, WireModel, open_envelope, parse_json, seal
from prime_protocol.errors import ErrorCode, LimitExceeded, PeerError
from prime_protocol.identity import SigningKey
from prime_protocol.limits import Limits
from prime_protocol.messages import (
    AdminRequest,
    BatchRequest,
    BlobHeader,
    BundleRequest,
    CheckRequest,
    CheckResultRequest,
    CheckTask,
    ErrorBody,
    HeartbeatReply,
    HeartbeatRequest,
    JoinReply,
    JoinRequest,
    LeaseRequest,
    LeaveRequest,
    NotYet,
    ReceiptList,
    ReceiptsRequest,
    Request,
    ReturnLeaseRequest,
    Stamped,
    UploadReply,
)
from prime_protocol.parcel import PARCEL_OVERHEAD_BYTES_MAX, pack_parcel

CONNECT_S_MAX = 10.0
"""To open a connection."""
STALL_S = 30.0
"""Without a single byte in either direction."""
BYTES_PER_SECOND_MIN = 1_024
"""Average of an answer's body; below this a server is no use, however steadily it drips."""
ANSWER_BYTES_MAX = limits.ENVELOPE_BYTES_MAX
"""Any answer that is no blob and no bundle."""
_PIECE_BYTES = 2**16

Reply = TypeVar("Reply", bound=WireModel)


class Refusal(PeerError):
    """A PeerError that the server itself explained with an ErrorBody."""


class HttpClient:
    """Implements WorkerPort, ValidatorPort, TrainerPort and CheckpointSource. Without a key it may only read.

    `bounds` may be set to the run's limits once the RunSpec is verified.
    """

    def __init__(
        self,
        url: str,
        *,
        run: str,
        clock: Clock,
        key: SigningKey | None = None,
        bounds: Limits | None = None,
        stall_s: float = STALL_S,
    ) -> None:
        self.url = url.rstrip("/")
        self.bounds = bounds or Limits()
        self._run = run
        self._clock = clock
        self._key = key
        self._stall_s = stall_s
        self._session: aiohttp.ClientSession | None = None
        self._head: tuple[str, Envelope] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Idempotent."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    # Public: where checkpoints come from

    async def run_spec(self) -> Envelope:
        bytes_max = limits.RUN_SPEC_BYTES_MAX * 3 // 2 + 4_096
        _, body, _ = await self._exchange("GET", "/v1/run", bytes_max=bytes_max)
        return open_envelope(body, bytes_max=bytes_max)

    async def head(self, *, wait_s: float = 0.0) -> Envelope | None:
        sent = {"If-None-Match": self._head[0]} if self._head else {}
        if wait_s >= 1.0:
            sent["Prefer"] = f"wait={int(wait_s)}"
        status, body, headers = await self._exchange("GET", "/v1/head", headers=sent, wait_s=wait_s)
        if status == 204:
            return None
        if status == 304 and self._head:
            return self._head[1]
        envelope = open_envelope(body)
        tag = headers.get("ETag")
        self._head = (tag, envelope) if tag else None
        return envelope

    async def manifest(self, policy_version: int) -> Envelope:
        _, body, _ = await self._exchange("GET", f"/v1/manifests/{policy_version}")
        return open_envelope(body)

    async def blob(self, digest: str, *, start: int = 0, end: int | None = None) -> bytes:
        wanted = {} if start == 0 and end is None else {"Range": f"bytes={start}-{'' if end is None else end - 1}"}
        if end is not None and end <= start:
            return b""
        bytes_max = self.bounds.blob_bytes_max if end is None else end - start
        status, body, _ = await self._exchange("GET", f"/v1/blobs/{digest}", headers=wanted, bytes_max=bytes_max)
        if wanted and status != 206 and not (start == 0 and end == len(body)):
            raise PeerError(ErrorCode.BAD_RANGE, f"{self.url} ignores byte ranges")
        return body

    # Worker

    async def join(self, request: JoinRequest) -> JoinReply:
        return await self._ask_for(JoinReply, request)

    async def heartbeat(self, request: HeartbeatRequest) -> HeartbeatReply:
        return await self._ask_for(HeartbeatReply, request)

    async def lease(self, request: LeaseRequest) -> Envelope | NotYet:
        return await self._ask_for_envelope(request, wait_s=request.wait_s)

    async def return_lease(self, request: ReturnLeaseRequest) -> None:
        await self._ask(request)

    async def upload(self, parcel: bytes) -> UploadReply:
        _, body = await self._post("/v1/rollouts", parcel)
        return _sensible(body, UploadReply)

    async def receipts(self, request: ReceiptsRequest) -> ReceiptList:
        return await self._ask_for(ReceiptList, request)

    async def leave(self, request: LeaveRequest) -> None:
        await self._ask(request)

    # Validator

    async def check(self, request: CheckRequest) -> CheckTask | NotYet:
        status, body = await self._ask(request, wait_s=request.wait_s)
        return _sensible(body, NotYet) if status == 202 else _sensible(body, CheckTask)

    async def bundle(self, request: BundleRequest) -> bytes:
        bytes_max = self.bounds.rollout_bytes_max + PARCEL_OVERHEAD_BYTES_MAX
        _, body = await self._ask(request, bytes_max=bytes_max)
        if digest_of(body) != request.bundle:
            raise PeerError(ErrorCode.DIGEST_MISMATCH, f"{self.url} sent another bundle than {request.bundle[:12]}")
        return body

    async def check_result(self, request: CheckResultRequest) -> None:
        await self._ask(request)

    # Trainer

    async def batch(self, request: BatchRequest) -> Envelope | NotYet:
        return await self._ask_for_envelope(request, wait_s=request.wait_s)

    async def put_blob(self, data: bytes) -> str:
        header = BlobHeader(
            body_digest=digest_of(data),
            body_bytes=len(data),
            run=self._run,
            issued_at_ms=self._clock.now_ms(),
        )
        await self._exchange("POST", "/v1/blobs", body=pack_parcel(header, data, PayloadType.BLOB, self._signing_key()))
        return header.body_digest

    async def publish(self, manifest: Envelope) -> None:
        await self._post("/v1/manifests", manifest.to_bytes())

    # Operator

    async def admin(self, request: AdminRequest) -> None:
        await self._ask(request)

    # How a request is made

    async def _ask_for(self, reply: type[Reply], request: Request) -> Reply:
        _, body = await self._ask(request)
        return _sensible(body, reply)

    async def _ask_for_envelope(self, request: Request, *, wait_s: float) -> Envelope | NotYet:
        status, body = await self._ask(request, wait_s=wait_s)
        return _sensible(body, NotYet) if status == 202 else _sensible_envelope(body)

    async def _ask(
        self, request: Request, *, wait_s: float = 0.0, bytes_max: int = ANSWER_BYTES_MAX
    ) -> tuple[int, bytes]:
        stamped = Stamped(
            run=self._run, nonce=secrets.token_hex(16), issued_at_ms=self._clock.now_ms(), request=request
        )
        envelope = seal(stamped, PayloadType.REQUEST, self._signing_key())
        path = "admin" if isinstance(request, AdminRequest) else request.action
        return await self._post(f"/v1/{path}", envelope.to_bytes(), wait_s=wait_s, bytes_max=bytes_max)

    async def _post(
        self, path: str, body: bytes, *, wait_s: float = 0.0, bytes_max: int = ANSWER_BYTES_MAX
    ) -> tuple[int, bytes]:
        """Raises Refusal where the coordinator itself says no; whatever else stands in the way may pass."""
        try:
            status, answer, _ = await self._exchange("POST", path, body=body, wait_s=wait_s, bytes_max=bytes_max)
        except Refusal:
            raise
        except PeerError as error:
            raise _nonsense(error) from None
        return status, answer

    def _signing_key(self) -> SigningKey:
        assert self._key is not None, "this client was made without a key: it may only read"
        return self._key

    async def _exchange(
        self,
        method: str,
        path: str,
        *,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        wait_s: float = 0.0,
        bytes_max: int = ANSWER_BYTES_MAX,
    ) -> tuple[int, bytes, Mapping[str, str]]:
        """One request and its whole answer: status below 400, body, headers. Raises PeerError or
        Unreachable."""
        try:
            async with _Patience(self._stall_s, wait_s=wait_s) as patience:
                sent = dict(headers or {})
                if body is not None:
                    sent |= {"Content-Length": str(len(body)), "Content-Type": "application/octet-stream"}
                async with self._connected().request(
                    method,
                    self.url + path,
                    data=None if body is None else _pieces(body, patience),
                    headers=sent,
                    allow_redirects=False,
                ) as answer:
                    patience.answered()
                    if "Content-Encoding" in answer.headers:
                        raise PeerError(ErrorCode.MALFORMED, f"{self.url} compresses its answer unasked")
                    if answer.status >= 400:
                        raise await _error_of(answer, patience, self._clock)
                    if 300 <= answer.status < 400 and answer.status != 304:
                        raise PeerError(ErrorCode.MALFORMED, f"{self.url} redirects; give the address it redirects to")
                    return answer.status, await _read(answer, patience, bytes_max=bytes_max), answer.headers
        except TimeoutError:
            raise Unreachable(f"{self.url}: no answer, or one that does not move") from None
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, OSError) as error:
            raise Unreachable(f"{self.url}: {str(error)[:200] or type(error).__name__}") from None
        except (aiohttp.ClientError, ValueError) as error:  # not HTTP, or headers that are none
            raise PeerError(ErrorCode.MALFORMED, f"{self.url} does not speak HTTP: {str(error)[:200]}") from None

    def _connected(self) -> aiohttp.ClientSession:
        """The one session, made on first use because it belongs to the running loop."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S_MAX),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                headers={"Accept-Encoding": "identity"},
            )
        return self._session


class _Patience:
    """Cancels what runs inside it when nothing has moved for long enough; leaves as TimeoutError."""

    def __init__(self, stall_s: float, *, wait_s: float) -> None:
        self._stall_s = stall_s
        self._loop = asyncio.get_running_loop()
        self._allowed_s = stall_s + wait_s
        self._timeout = asyncio.timeout(self._allowed_s)
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
        """Something went through."""
        self._timeout.reschedule(self._loop.time() + self._allowed_s)

    def answered(self) -> None:
        """The answer has begun: the wait that was agreed on is over."""
        self._allowed_s = self._stall_s
        self.moved()

    def received(self, num_bytes: int) -> None:
        """A piece of the answer's body came. Raises TimeoutError where they come too slowly on the whole."""
        now_s = self._loop.time()
        self._body_began_s = self._body_began_s or now_s
        self._bytes += num_bytes
        if now_s - self._body_began_s > self._stall_s + self._bytes / BYTES_PER_SECOND_MIN:
            raise TimeoutError
        self.moved()


async def _pieces(body: bytes, patience: _Patience) -> AsyncIterator[bytes]:
    for start in range(0, len(body), _PIECE_BYTES):
        yield body[start : start + _PIECE_BYTES]
        patience.moved()


async def _read(answer: aiohttp.ClientResponse, patience: _Patience, *, bytes_max: int) -> bytes:
    """The body, up to a bound. Raises LimitExceeded; the connection is dropped then, not drained."""
    if answer.content_length is not None and answer.content_length > bytes_max:
        answer.close()
        raise LimitExceeded("answer_bytes_max", answer.content_length, bytes_max)
    body = bytearray()
    async for piece in answer.content.iter_any():
        body += piece
        patience.received(len(piece))
        if len(body) > bytes_max:
            answer.close()
            raise LimitExceeded("answer_bytes_max", None, bytes_max)
    return bytes(body)


async def _error_of(answer: aiohttp.ClientResponse, patience: _Patience, clock: Clock) -> PeerError:
    """What an answer of 400 or above means. A proxy's HTML page counts by its status alone."""
    try:
        body = await _read(answer, patience, bytes_max=limits.ERROR_BODY_BYTES_MAX)
        fault = parse_json(body, ErrorBody)
    except PeerError:
        code = _CODE_OF_STATUS.get(answer.status)
        if code is None:
            code = ErrorCode.UNAVAILABLE if answer.status >= 500 else ErrorCode.MALFORMED
        return PeerError(code, f"HTTP {answer.status} without an explanation")
    detail = fault.detail
    if fault.code is ErrorCode.EXPIRED:
        detail += _clock_difference(answer.headers.get("Date"), clock)
    return Refusal(fault.code, detail, retry_after_s=fault.retry_after_s)


def _clock_difference(date: str | None, clock: Clock) -> str:
    """A refusal's Date header holds the server's time; a contributor wants to know by how much he is off."""
    try:
        ahead_s = clock.now_ms() / 1_000 - email.utils.parsedate_to_datetime(date or "").timestamp()
    except (TypeError, ValueError):
        return ""
    direction = "ahead of" if ahead_s > 0 else "behind"
    return f"; this machine's clock is {abs(ahead_s):.0f} s {direction} the coordinator's: set it"


def _sensible(body: bytes, model: type[Reply]) -> Reply:
    """The answer of a server that said yes."""
    try:
        return parse_json(body, model)
    except PeerError as error:
        raise _nonsense(error) from None


def _sensible_envelope(body: bytes) -> Envelope:
    try:
        return open_envelope(body)
    except PeerError as error:
        raise _nonsense(error) from None


def _nonsense(error: PeerError) -> PeerError:
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
