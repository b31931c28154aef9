"""Signed requests to one server and its bounded answers, over HTTP. http_client.py has the endpoints.

Nothing that a server sends is trusted. Every answer has a bound of its own; redirects, compression and cookies are refused.
An invalid answer becomes a RemoteError, and silence becomes Unreachable.

A request has no total time limit: a 16 MB part over a poor line may take long and still be fine. It ends when nothing moved
for STALL_S, or when the average falls below BYTES_PER_SECOND_MIN (slow retrieval, in TUF's terms).
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Self, TypeVar
from urllib.parse import urlsplit

import aiohttp

from prime_node.adapters.web.http_answers import (
    STALL_S,
    ExplainedRefusal,
    Patience,
    error_of,
    new_session,
    nonsense,
    pieces_of_body,
    read_bounded,
    reason_of,
    sensible,
    sensible_envelope,
)
from prime_node.adapters.web.noted_resolver import NotedResolver, has_tls, proxy_for, shown_proxy, with_host
from prime_node.patience import Backoff
from prime_node.ports.clock import Clock
from prime_node.ports.transport import THROUGH, Unreachable
from prime_node.traces import sent_context
from prime_protocol import limits
from prime_protocol.body_claim import CLAIM_HEADER, REQUEST_HEADER, claim_of
from prime_protocol.digest import digest_of
from prime_protocol.envelope import Envelope, PayloadType, WireModel, open_envelope, seal
from prime_protocol.errors import ErrorCode, LimitExceeded, RemoteError
from prime_protocol.identity import SigningKey
from prime_protocol.limits import Limits
from prime_protocol.replies import NotYet
from prime_protocol.requests import AdminRequest, Request, Stamped

log = logging.getLogger(__name__)

CONNECTIONS_MAX = 100
"""Connections to one server; further requests wait for one."""
ELSEWHERE_STALL_S = 10.0
"""Time without progress after which another address is asked, if there is one."""
UNKNOWN_EPOCH = "0" * 32
"""Epoch sent until the coordinator has named its own; it is never a real one."""
ANSWER_BYTES_MAX = limits.ENVELOPE_BYTES_MAX
"""Bound of any answer except a blob or a bundle."""

Reply = TypeVar("Reply", bound=WireModel)
Message = tuple[bytes, Mapping[str, str]]
"""Body and headers of a request."""


class HttpExchange:
    """Sender of requests to the server at `url`. Without a key it can only read.

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
        connections_max: int = CONNECTIONS_MAX,
        uses_proxy: bool = True,
    ) -> None:
        """With `uses_proxy`, requests go through the proxy of this machine's settings, if it has one."""
        self.url = url.rstrip("/")
        """Address that is asked now."""
        self.needs_tls = has_tls(self.url)
        """Whether the first URL has TLS: then nothing is sent without it."""
        self._others: tuple[str, ...] = ()
        self.bounds = bounds or Limits()
        self._run = run
        self._clock = clock
        self._key = key
        self._stall_s = stall_s
        self._connections_max = connections_max
        self._uses_proxy = uses_proxy
        self._session: aiohttp.ClientSession | None = None
        self._resolver = NotedResolver(urlsplit(self.url).hostname or "")
        self._head: tuple[str, Envelope] | None = None
        self.epoch = UNKNOWN_EPOCH
        """Epoch that the coordinator named last."""

    def also_at(self, urls: Sequence[str]) -> None:
        """Name the signed addresses at which the same server, or one that takes over from it, may answer.

        A request is sent to the next one where an address does not answer, or its server cannot. Their order differs by key, so
        that clients whose server fails spread over all others. An address that leads into another network than the first URL is
        left out (noted_resolver.py), and one without TLS if the first URL has it.
        """
        found = {each.rstrip("/") for each in urls if self._resolver.may_ask(urlsplit(each).hostname or "")}
        for url in sorted(url for url in found if self.needs_tls and not has_tls(url)):
            log.warning("%s is not asked: the join link's coordinator is asked over TLS, and this address is not", url)
            found.discard(url)
        drawn = self._key.key_id if self._key is not None else secrets.token_hex(16)
        self._others = tuple(sorted(found - {self.url}, key=lambda url: digest_of(f"{drawn} {url}".encode())))

    @property
    def hosts(self) -> frozenset[str]:
        """IP address in the first URL, or the addresses that its name has resolved to so far."""
        return self._resolver.hosts

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the session. Idempotent."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _statement(self, path: str, payload_bytes_max: int) -> Envelope:
        """Fetch an envelope of a bounded payload, in base64 and with its signatures."""
        bytes_max = payload_bytes_max * 3 // 2 + 4_096
        _, body, _ = await self._exchange("GET", path, bytes_max=bytes_max)
        return open_envelope(body, bytes_max=bytes_max)

    async def _ask_for(self, reply: type[Reply], request: Request) -> Reply:
        _, body = await self._ask(request)
        return sensible(body, reply)

    async def _ask_for_envelope(self, request: Request, *, wait_s: float) -> Envelope | NotYet:
        status, body = await self._ask(request, wait_s=wait_s, bytes_max=limits.WORK_BYTES_MAX)
        if status != 202:
            return sensible_envelope(body)
        if len(body) > limits.ERROR_BODY_BYTES_MAX:
            raise nonsense(LimitExceeded("ERROR_BODY_BYTES_MAX", len(body), limits.ERROR_BODY_BYTES_MAX))
        return sensible(body, NotYet)

    async def _ask(
        self, request: Request, *, wait_s: float = 0.0, bytes_max: int = ANSWER_BYTES_MAX
    ) -> tuple[int, bytes]:
        action = "admin" if isinstance(request, AdminRequest) else request.action

        def signed() -> bytes:
            stamped = Stamped(
                run=self._run,
                nonce=secrets.token_hex(16),
                issued_at_ms=self._clock.now_ms(),
                epoch=self.epoch,
                request=request,
            )
            return seal(stamped, PayloadType.REQUEST, self._signing_key()).to_bytes()

        return await self._post(action, signed, is_request=True, wait_s=wait_s, bytes_max=bytes_max)

    async def _post(
        self,
        action: str,
        body_of: Callable[[], bytes],
        *,
        is_request: bool = False,
        wait_s: float = 0.0,
        bytes_max: int = ANSWER_BYTES_MAX,
    ) -> tuple[int, bytes]:
        """Sign and send; retry once if the coordinator names another epoch: it has restarted, or is new to us.

        Raises ExplainedRefusal if the coordinator itself refuses; any other failure is transient.
        """
        try:
            return await self._send(action, body_of, is_request, wait_s, bytes_max)
        except ExplainedRefusal as error:
            if error.code is not ErrorCode.WRONG_EPOCH or not error.epoch:
                raise
            self.epoch = error.epoch
            return await self._send(action, body_of, is_request, wait_s, bytes_max)

    async def _send(
        self, action: str, body_of: Callable[[], bytes], is_request: bool, wait_s: float, bytes_max: int
    ) -> tuple[int, bytes]:
        """Send a request in a header if it fits, else announce its body in one: so the server knows the sender first.

        It is signed again for each address: the first one may have passed it on to the same coordinator.
        """

        def message() -> Message:
            body, headers = body_of(), sent_context()
            if is_request and len(body) <= limits.HEADER_ENVELOPE_BYTES_MAX:
                return b"", headers | {REQUEST_HEADER: body.decode()}
            if self._key is None:
                return body, headers
            nonce, now_ms = secrets.token_hex(16), self._clock.now_ms()
            claim = claim_of(
                body, self._key, run=self._run, action=action, nonce=nonce, now_ms=now_ms, epoch=self.epoch
            )
            return body, headers | {CLAIM_HEADER: claim}

        try:
            status, answer, _ = await self._exchange(
                "POST", f"/v1/{action}", message=message, wait_s=wait_s, bytes_max=bytes_max
            )
        except ExplainedRefusal:
            raise
        except RemoteError as error:
            raise nonsense(error) from None
        return status, answer

    def _signing_key(self) -> SigningKey:
        assert self._key is not None, "this client has no key, so it can only read"
        return self._key

    async def _exchange(
        self,
        method: str,
        path: str,
        *,
        headers: Mapping[str, str] | None = None,
        message: Callable[[], Message] | None = None,
        wait_s: float = 0.0,
        bytes_max: int = ANSWER_BYTES_MAX,
    ) -> tuple[int, bytes, Mapping[str, str]]:
        """Make one request and return its whole answer: status below 400, body, headers. Raises RemoteError or Unreachable.

        Each known address is asked once, until one can answer. The next request begins with that one. After an address that
        does not answer, the next one is asked at once; after a refusal, with a pause as long as the server asks for or longer:
        behind other addresses there may be the same busy coordinator. `message` makes body and headers for each of them.
        """
        left, backoff = len(self._others), Backoff()
        while True:
            asked = self.url
            body, sent = (None, headers) if message is None else message()
            try:
                return await self._ask_at(asked, method, path, body, sent, wait_s, bytes_max)
            except (Unreachable, RemoteError) as error:
                if isinstance(error, RemoteError) and error.code is not ErrorCode.UNAVAILABLE:
                    raise
                if self.url == asked and self._others:  # else another request has changed it already
                    self.url, self._others = self._others[0], (*self._others[1:], asked)
                if left == 0:
                    raise
                left -= 1
                if isinstance(error, RemoteError):
                    await self._clock.sleep(backoff.next_s(error))

    async def _ask_at(
        self,
        url: str,
        method: str,
        path: str,
        body: bytes | None,
        headers: Mapping[str, str] | None,
        wait_s: float,
        bytes_max: int,
    ) -> tuple[int, bytes, Mapping[str, str]]:
        session, proxy = self._connected(), proxy_for(url) if self._uses_proxy else None
        where = url if proxy is None else f"{url} {THROUGH} {shown_proxy(proxy)}"
        host, at, named = urlsplit(url).hostname or "", url, {}
        try:
            if proxy is not None and (there := await self._resolver.asked_of_proxy(host)) != host:
                at, named = with_host(url, there), {"Host": urlsplit(url).netloc.rpartition("@")[2]}
            self._resolver.let_pass(proxy)
            stall_s = min(self._stall_s, ELSEWHERE_STALL_S) if self._others else self._stall_s
            async with Patience(stall_s, wait_s=wait_s) as patience:
                sent = {**named, **self._standing_headers(), **(headers or {})}
                if body is not None:
                    sent |= {"Content-Length": str(len(body)), "Content-Type": "application/octet-stream"}
                async with session.request(
                    method,
                    at + path,
                    data=pieces_of_body(body, patience) if body else body,
                    headers=sent,
                    allow_redirects=False,
                    proxy=proxy,
                    server_hostname=host if named else None,
                ) as answer:
                    patience.answered()
                    if "Content-Encoding" in answer.headers:
                        raise RemoteError(
                            ErrorCode.MALFORMED, f"{url} sends a compressed answer, which was not requested"
                        )
                    if answer.status >= 400:
                        raise await error_of(answer, patience, self._clock)
                    if 300 <= answer.status < 400 and answer.status != 304:
                        raise RemoteError(ErrorCode.MALFORMED, f"{url} redirects; give the address it redirects to")
                    return answer.status, await read_bounded(answer, patience, bytes_max=bytes_max), answer.headers
        except TimeoutError:
            raise Unreachable(f"{where}: no answer, or an answer without progress") from None
        except aiohttp.ClientHttpProxyError as error:
            raise Unreachable(f"{where}: it refuses: {error.status} {error.message[:100]}") from None
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, OSError) as error:
            raise Unreachable(f"{where}: {reason_of(error)}") from None
        except (aiohttp.ClientError, ValueError) as error:  # not HTTP, or invalid headers
            raise RemoteError(ErrorCode.MALFORMED, f"{url} does not speak HTTP: {str(error)[:200]}") from None
        except RuntimeError:  # aiohttp's error for a closed session: a peer was dropped with requests in progress
            if not session.closed:
                raise
            raise Unreachable(f"{url}: the connection was closed") from None

    def _standing_headers(self) -> Mapping[str, str]:
        """Headers of every request."""
        return {}

    def _connected(self) -> aiohttp.ClientSession:
        """Return the session, made on first use because it belongs to the running loop."""
        if self._session is None:
            connector = aiohttp.TCPConnector(
                limit=self._connections_max,
                resolver=self._resolver,
                use_dns_cache=False,  # the answer for a name depends on whether the request's proxy has it
            )
            self._session = new_session(connector)
        return self._session
