"""The web server on aiohttp.

aiohttp closes neither a stalled header nor a stalled body by itself, decompresses request bodies, and its size limit does not
hold for streamed ones. So here: `_GuardedHandler` gives each connection a time to send its next header; `_read_body` counts the
bytes as they come, demands a minimum speed and refuses compressed bodies; connections and the memory for bodies are bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import ClientConnectionError, web

from prime_node.adapters.web.http_replies import BODY_BYTES_PER_S_MIN, BODY_GRACE_S, explanation, send_s_max
from prime_node.adapters.web.plain_gets import BulkRoutes, PlainGets
from prime_node.ports.web import Request, Response, Route
from prime_protocol import limits
from prime_protocol.errors import ErrorCode, LimitExceeded, LocalError, PeerError

log = logging.getLogger(__name__)

HEADER_S_MAX = 75.0
"""From the start of a connection, or its last answer, to the end of the next header. An idle connection is kept as long."""
BODY_STALL_S_MAX = 20.0
"""A body of which no byte comes for so long is given up, however fast it came before."""
UNSENT_BYTES_MAX = 2**17
"""Of an answer in the system's buffers before its first packet is sent. What lies there is lost when the asker withdraws, and its
slot would be given back with the piece unsent."""
BODIES_BYTES_MAX = 2**30
"""Memory for bodies on their way in, all connections together."""
REQUESTS_BYTES_MAX = 2**28
"""The same for routes that take no more than a signed request; so uploads cannot crowd them out."""


@dataclass(slots=True)
class _Memory:
    """How much of its share the bodies on their way in take."""

    bytes_max: int
    num_bytes: int = 0


class AiohttpServer:
    """Implements ports.web.WebServer."""

    def __init__(
        self,
        *,
        header_s_max: float = HEADER_S_MAX,
        body_grace_s: float = BODY_GRACE_S,
        body_stall_s_max: float = BODY_STALL_S_MAX,
    ) -> None:
        self._header_s_max = header_s_max
        self._body_grace_s = body_grace_s
        self._body_stall_s_max = body_stall_s_max
        self._uploads = _Memory(BODIES_BYTES_MAX)
        self._requests = _Memory(REQUESTS_BYTES_MAX)
        self._server: asyncio.Server | None = None
        self._manager: web.Server | None = None
        self._runner: web.AppRunner | None = None
        self._bulk: BulkRoutes | None = None

    async def start(self, routes: Sequence[Route], *, host: str, port: int) -> int:
        app = web.Application(middlewares=[_explain_unknown])
        for route in routes:
            app.router.add_route(route.method, route.path, self._adapt(route))
            if route.method == "GET":
                app.router.add_route("HEAD", route.path, self._adapt(route))
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        self._manager = self._runner.server
        assert self._manager is not None
        if any(route.is_bulk for route in routes):
            self._bulk = BulkRoutes(
                routes, idle_s_max=self._header_s_max, is_full=self._is_full, hand_over=self._guarded
            )
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(self._connection, host, port, backlog=1_024, reuse_address=True)
        except OSError as error:
            await self._runner.cleanup()
            raise LocalError(
                f"cannot listen on {host}:{port}: {error.strerror}; choose another port, or end what listens there"
            ) from None
        for listening in self._server.sockets:
            _keep_little_unsent(listening)
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    async def stop(self, *, grace_s: float) -> None:
        if self._server is None or self._manager is None or self._runner is None:
            return
        self._server.close()
        if self._bulk is not None:
            await self._bulk.close(grace_s)
        self._manager.pre_shutdown()  # closes idle connections
        await self._manager.shutdown(max(grace_s, 0.01))  # 0 means to aiohttp: without an end
        await self._runner.cleanup()
        self._server = None

    def _connection(self) -> asyncio.Protocol:
        if self._bulk is None:
            return self._guarded(self._header_s_max)
        return PlainGets(self._bulk)

    def _is_full(self) -> bool:
        assert self._manager is not None
        plain = 0 if self._bulk is None else len(self._bulk.connections)
        return len(self._manager.connections) + plain >= limits.HTTP_CONNECTIONS_MAX

    def _guarded(self, first_header_s: float) -> _GuardedHandler:
        assert self._manager is not None
        return _GuardedHandler(self._manager, header_s_max=self._header_s_max, first_header_s=first_header_s)

    def _adapt(self, route: Route) -> Any:
        memory = self._requests if route.body_bytes_max <= limits.REQUEST_BYTES_MAX else self._uploads

        async def handle(request: web.Request) -> web.StreamResponse:
            guard = request.protocol
            assert isinstance(guard, _GuardedHandler)
            guard.header_came()
            try:
                body = await self._read_body(request, route.body_bytes_max, memory)
                try:
                    response = await route.handler(
                        Request(
                            params=dict(request.match_info),
                            body=body,
                            headers={name.lower(): value for name, value in request.headers.items()},
                            remote=request.remote or "",
                        )
                    )
                finally:
                    memory.num_bytes -= len(body)
            except PeerError as error:
                answer = _error(error)
                if guard.is_given_up:
                    answer.force_close()  # says so in the header, too
                return answer
            else:
                return await _send(request, response)
            finally:
                guard.answered()

        return handle

    async def _read_body(self, request: web.Request, bytes_max: int, memory: _Memory) -> bytes:
        """The body, counted in `memory` until the caller is done with it. Raises PeerError."""
        if not request.body_exists:
            return b""
        if "Content-Encoding" in request.headers:
            raise _closing(request, PeerError(ErrorCode.MALFORMED, "a compressed body is not accepted here"))
        if (request.content_length or 0) > bytes_max:
            raise _closing(request, LimitExceeded("body_bytes_max", request.content_length, bytes_max))
        chunks: list[bytes] = []
        num_bytes = 0
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        try:
            while True:
                due_s = began_s + self._body_grace_s + num_bytes / BODY_BYTES_PER_S_MIN
                async with asyncio.timeout_at(min(due_s, loop.time() + self._body_stall_s_max)):
                    chunk = await request.content.readany()
                if not chunk:
                    return chunks[0] if len(chunks) == 1 else b"".join(chunks)
                num_bytes += len(chunk)
                memory.num_bytes += len(chunk)
                chunks.append(chunk)
                if num_bytes > bytes_max:
                    raise LimitExceeded("body_bytes_max", None, bytes_max)
                if memory.num_bytes > memory.bytes_max:
                    raise PeerError(ErrorCode.UNAVAILABLE, "too many uploads at once", retry_after_s=2.0)
        except TimeoutError:
            memory.num_bytes -= num_bytes
            raise _closing(request, PeerError(ErrorCode.MALFORMED, "the body came too slowly")) from None
        except (ConnectionError, ClientConnectionError, web.RequestPayloadError):
            memory.num_bytes -= num_bytes
            raise _closing(request, PeerError(ErrorCode.MALFORMED, "the body broke off")) from None
        except PeerError as error:
            memory.num_bytes -= num_bytes
            raise _closing(request, error) from None
        except BaseException:
            memory.num_bytes -= num_bytes
            raise


class _GuardedHandler(web.RequestHandler):
    """One connection, which is cut when the header of its next request does not come in time."""

    __slots__ = ("_first_header_s", "_header_s_max", "_header_timer", "is_given_up")

    def __init__(self, manager: web.Server, *, header_s_max: float, first_header_s: float) -> None:
        super().__init__(
            manager,
            loop=asyncio.get_running_loop(),
            access_log=None,  # type: ignore[arg-type]  # None is how aiohttp itself spells "off"
            auto_decompress=False,
            keepalive_timeout=header_s_max,
            lingering_time=2.0,
        )
        self._header_s_max = header_s_max
        self._first_header_s = first_header_s
        self._header_timer: asyncio.TimerHandle | None = None
        self.is_given_up = False  # a body was not read to its end, so no other request can follow

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        assert self._manager is not None
        assert self.transport is not None  # uvloop's transports are no subclasses of asyncio.Transport
        if len(self._manager.connections) > limits.HTTP_CONNECTIONS_MAX:
            self.transport.abort()
            return
        self._wait_for_header(self._first_header_s)

    def connection_lost(self, exc: BaseException | None) -> None:
        self.header_came()
        super().connection_lost(exc)

    def header_came(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """What is no HTTP is a peer's fault, and scanners send it all day: not the traceback with which aiohttp tells of it."""
        if status >= 500:
            return super().handle_error(request, status, exc, message)
        log.debug("%s does not speak HTTP: %r", request.remote, exc)
        answer = _error(PeerError(ErrorCode.MALFORMED, "this is no HTTP"))
        answer.force_close()
        return answer

    def answered(self) -> None:
        self._wait_for_header(self._header_s_max)

    def _wait_for_header(self, seconds: float) -> None:
        self.header_came()
        if self.transport is not None:
            self._header_timer = asyncio.get_running_loop().call_later(seconds, self.transport.abort)


def _keep_little_unsent(listening: socket.socket) -> None:
    """Of this socket and those that it accepts, where the system knows the option (Linux, macOS)."""
    option = getattr(socket, "TCP_NOTSENT_LOWAT", None)
    if option is not None:
        with contextlib.suppress(OSError):  # it only spares bytes
            listening.setsockopt(socket.IPPROTO_TCP, option, UNSENT_BYTES_MAX)


def _closing(request: web.Request, error: PeerError) -> PeerError:
    """An error after which the rest of the body is not read: the connection cannot be used again."""
    guard = request.protocol
    assert isinstance(guard, _GuardedHandler)
    guard.is_given_up = True
    guard.close()
    return error


@web.middleware
async def _explain_unknown(request: web.Request, handler: Any) -> web.StreamResponse:
    """What aiohttp itself answers (no such path, wrong method) looks like every other error."""
    try:
        response: web.StreamResponse = await handler(request)
        return response
    except web.HTTPException as error:
        return _error(PeerError(ErrorCode.NOT_FOUND, f"{request.method} {request.path[:100]}: {error.reason}"))


def _error(error: PeerError) -> web.Response:
    told = explanation(error)
    assert isinstance(told.body, bytes)
    return web.Response(body=told.body, status=told.status, content_type=told.content_type, headers=told.headers)


async def _send(request: web.Request, response: Response) -> web.StreamResponse:
    headers = {**response.headers, "Content-Type": response.content_type}
    if isinstance(response.body, bytes) and response.after is None:
        return web.Response(body=response.body, status=response.status, headers=headers)
    stream = web.StreamResponse(status=response.status, headers=headers)
    try:
        # The client may go away at any time; that is his business.
        with contextlib.suppress(ClientConnectionError, ConnectionError):
            await stream.prepare(request)
            if request.method != "HEAD":
                # What holds something scarce has a time; others may be streams without an end.
                async with asyncio.timeout(None if response.after is None else send_s_max(response)):
                    await _copy(response.body, stream)
    except (TimeoutError, PeerError):
        if request.transport is not None:
            # A reader that stands still must not hold what `after` gives back; a body that broke off must not look whole.
            request.transport.abort()
    finally:
        if response.after is not None:
            response.after()
    return stream


async def _copy(body: bytes | AsyncIterator[bytes], stream: web.StreamResponse) -> None:
    if isinstance(body, bytes):
        await stream.write(body)
    else:
        async for chunk in body:
            await stream.write(chunk)
    await stream.write_eof()
