"""The web server on aiohttp.

By itself, aiohttp closes neither a stalled header nor a stalled body. It decompresses request bodies, and its size limit does
not apply to streamed ones. So connections are counted before they are made (connection_counts.py), and requests are framed
before aiohttp sees them (guarded_handler.py). Bodies are read here: after the route has admitted their sender, counted on
arrival, uncompressed, and at a minimum speed that rises with their size.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from aiohttp import ClientConnectionError, web

from prime_node.adapters.web.connection_counts import (
    BODY_BYTES_PER_S_MIN,
    BODY_GRACE_S,
    ConnectionCounts,
    Entry,
    Listener,
    connections_max,
    send_s_max,
)
from prime_node.adapters.web.guarded_handler import GuardedHandler, error_answer
from prime_node.adapters.web.plain_gets import BulkRoutes, PlainGets
from prime_node.adapters.web.shares import HeldBytes, Shares
from prime_node.adapters.web.shedding import Shedding
from prime_node.ports.web import BodyAdmission, BodyShare, CallerBounds, Request, Response, Route, Sender
from prime_protocol import limits
from prime_protocol.digest import digest_of
from prime_protocol.errors import ErrorCode, LimitExceeded, LocalError, RemoteError

log = logging.getLogger(__name__)

HEADER_S_MAX = 75.0
"""Seconds from the start of a connection, or its last answer, to the start of the next header.

Idle connections are kept as long.
"""
BODY_STALL_S_MAX = 20.0
"""Seconds without a byte after which a body is given up, however fast it came before."""
BODY_S_MAX = 300.0
"""Seconds, after the grace, in which a body of any length must be complete: so the minimum speed rises with its length."""
STREAMED_BYTES = 2**21
"""Memory that an answer in pieces takes: a piece of 1 MiB at the handler, and one at the transport."""
FEW_CONNECTIONS = 4_096
"""Number of connections below which the operator is warned that the process can hold no more."""
LARGE_BYTES = 2**16
"""Bytes above which an answer is written in pieces of this length, and counted while it is sent to a stranger."""
HASHED_APART_BYTES = 2**20
"""Bytes above which a body's digest is computed in a thread."""


class AiohttpServer:
    """Implementation of ports.web.WebServer."""

    def __init__(
        self,
        *,
        header_s_max: float = HEADER_S_MAX,
        body_grace_s: float = BODY_GRACE_S,
        body_stall_s_max: float = BODY_STALL_S_MAX,
        body_s_max: float = BODY_S_MAX,
        on_socket: Callable[[socket.socket], None] = lambda made: None,
    ) -> None:
        """Create it. `on_socket` gets the socket of each connection."""
        self._header_s_max = header_s_max
        self._on_socket = on_socket
        self._body_grace_s = body_grace_s
        self._body_stall_s_max, self._body_s_max = body_stall_s_max, body_s_max
        self._bodies, self.answers = Shares(), Shares()
        self._listener: Listener | None = None
        self._manager: web.Server | None = None
        self._runner: web.AppRunner | None = None
        self._bulk: BulkRoutes | None = None
        self._counts: ConnectionCounts | None = None
        self.shedding: Shedding | None = None
        """Overload of this server, if its bounds limit the lateness."""
        self._may_send: Callable[[], bool] | None = None

    async def start(
        self,
        routes: Sequence[Route],
        *,
        host: str,
        port: int,
        bounds: CallerBounds | None = None,
        bound: socket.socket | None = None,
        may_send: Callable[[], bool] | None = None,
    ) -> int:
        """Serve `routes` and return the port. Raises LocalError if the address is unavailable.

        With `bound`, a socket that is bound already, the server listens on it instead; the port is then 0. With `may_send`,
        which a server with bulk routes does not have, a connection is cut where it returns False before any byte.
        """
        self._may_send = may_send
        app = web.Application(middlewares=[_explain_unknown])
        for route in routes:
            app.router.add_route(route.method, route.path, self._adapt(route), expect_handler=_say_nothing_yet)
            if route.method == "GET" and not route.is_bulk:  # a HEAD would take a slot and send nothing
                app.router.add_route("HEAD", route.path, self._adapt(route))
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        self._manager = self._runner.server
        most = connections_max()
        if most < FEW_CONNECTIONS:
            log.warning(
                "at most %d connections: the limit of open files is low; raise it (ulimit -n, LimitNOFILE)", most
            )
        bounds = bounds or CallerBounds()
        self._counts = ConnectionCounts(bounds, asyncio.get_running_loop().time, connections_max=most)
        if bounds.lag_s_max < math.inf:
            self.shedding = Shedding(routes, bounds)
            self.shedding.start()
        if any(route.is_bulk for route in routes):
            self._bulk = BulkRoutes(
                routes,
                idle_s_max=self._header_s_max,
                is_host=self._counts.bounds.is_host,
                hand_over=self._guarded,
            )
        self._listener = Listener(self._counts, self._connection, self._on_socket)
        try:
            if bound is not None:
                self._listener.open_on(bound)
                return 0
            return await self._listener.open(host, port)
        except OSError as error:
            await self._runner.cleanup()
            raise LocalError(
                f"cannot listen on {host}:{port}: {error.strerror}; choose another port, or stop the process that listens there"
            ) from None

    def overload(self, path: str, sender: Callable[[], Sender | None]) -> RemoteError | None:
        if self.shedding is None or not self.shedding.pressure:
            return None
        return self.shedding.refusal_of(path, sender())

    def cut_waiting(self, within_s: float) -> None:
        for connection in () if self._manager is None else self._manager.connections:
            assert isinstance(connection, GuardedHandler)
            if connection.is_busy:
                asyncio.get_running_loop().call_later(random.uniform(0.0, within_s), connection.abort)

    async def stop(self, *, grace_s: float) -> None:
        """Accept no more connections, and end the open ones after `grace_s` seconds at most."""
        if self._listener is None or self._manager is None or self._runner is None:
            return
        self._listener.close()
        if self.shedding is not None:
            self.shedding.stop()
        if self._bulk is not None:
            await self._bulk.close(grace_s)
        self._manager.pre_shutdown()  # closes idle connections
        await self._manager.shutdown(max(grace_s, 0.01))  # for aiohttp, 0 means no limit
        await self._runner.cleanup()
        self._listener = None

    def _connection(self, entry: Entry) -> asyncio.Protocol:
        if self._bulk is None:
            return self._guarded(entry, self._header_s_max)
        return PlainGets(self._bulk, entry)

    def _guarded(self, entry: Entry, first_header_s: float) -> GuardedHandler:
        assert self._manager is not None
        assert self._counts is not None
        return GuardedHandler(
            self._manager,
            self._counts,
            entry,
            header_s_max=self._header_s_max,
            first_header_s=first_header_s,
            shedding=self.shedding,
            may_send=self._may_send,
        )

    def _adapt(self, route: Route) -> Any:
        async def handle(request: web.Request) -> web.StreamResponse:
            guard = _guard_of(request)
            plain = Request(
                params=dict(request.match_info),
                body=b"",
                headers={name.lower(): value for name, value in request.headers.items()},
                remote=request.remote or "",
                vouch=guard.entry.vouch,
                query=dict(request.query),
            )
            try:
                if not request.body_exists or request.content_length == 0:
                    return await self._send(request, await route.handler(plain))
                with contextlib.closing(await self._admitted(request, route, plain)) as held:
                    body = await self._read_body(request, held)
                    response = await route.handler(replace(plain, body=body))
                return await self._send(request, response)
            except RemoteError as error:
                answer = error_answer(error)
                if guard.is_given_up:
                    answer.force_close()  # sets the header, too
                return answer

        return handle

    async def _admitted(self, request: web.Request, route: Route, plain: Request) -> _Body:
        """Return the shares that a body will count against. Nothing of it has been read. Raises RemoteError."""
        length = request.content_length or 0
        try:
            if "Content-Encoding" in request.headers:
                raise RemoteError(ErrorCode.MALFORMED, "a compressed body is not accepted here")
            if length > route.body_bytes_max:
                raise LimitExceeded("body_bytes_max", length, route.body_bytes_max)
            admission = BodyAdmission(()) if route.admit is None else route.admit(plain, length)
            if not isinstance(admission, BodyAdmission):
                admission = await admission
            return _Body(length, admission.digest, self._bodies.open(admission.shares))
        except RemoteError:
            _guard_of(request).give_up()
            raise

    async def _read_body(self, request: web.Request, body: _Body) -> bytes:
        """Read the whole body, checked against the announced length and digest. Raises RemoteError."""
        guard, loop = _guard_of(request), asyncio.get_running_loop()
        chunks: list[bytes] = []
        num_bytes, began_s = 0, loop.time()
        bytes_per_s_min = max(BODY_BYTES_PER_S_MIN, body.length / self._body_s_max)
        guard.go_on()
        try:
            while True:
                due_s = began_s + self._body_grace_s + num_bytes / bytes_per_s_min
                async with asyncio.timeout_at(min(due_s, loop.time() + self._body_stall_s_max)):
                    chunk = await request.content.readany()
                if not chunk:
                    break
                body.held.add(len(chunk))
                num_bytes += len(chunk)
                chunks.append(chunk)
        except TimeoutError:
            guard.give_up()
            raise RemoteError(ErrorCode.MALFORMED, "the body arrived too slowly") from None
        except (ConnectionError, ClientConnectionError, web.RequestPayloadError):
            guard.give_up()
            raise RemoteError(ErrorCode.MALFORMED, "the body is incomplete") from None
        except RemoteError:
            guard.give_up()
            raise
        whole = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        if body.digest is not None and await _digest_of(whole) != body.digest:
            raise RemoteError(ErrorCode.DIGEST_MISMATCH, "the body does not match its signed header")
        return whole

    async def _send(self, request: web.Request, response: Response) -> web.StreamResponse:
        headers = {**response.headers, "Content-Type": response.content_type}
        is_large = not isinstance(response.body, bytes) or len(response.body) > LARGE_BYTES
        if isinstance(response.body, bytes) and not is_large and response.after is None:
            return web.Response(body=response.body, status=response.status, headers=headers)
        guard = _guard_of(request)
        guard.sends()
        entry, held = guard.entry, None
        try:
            if is_large and not (entry.is_proxy or (entry.sender is not None and entry.sender.is_role)):
                held = self.answers.open(_answers_to(entry))
                held.add(len(response.body) if isinstance(response.body, bytes) else STREAMED_BYTES)
            return await _stream(request, response, headers)
        finally:
            if held is not None:
                held.close()
            if response.after is not None:
                response.after()


@dataclass(frozen=True, slots=True)
class _Body:
    """A request body that is being received."""

    length: int
    digest: str | None
    held: HeldBytes

    def close(self) -> None:
        """Release the body's shares."""
        self.held.close()


def _answers_to(entry: Entry) -> tuple[BodyShare, BodyShare]:
    """Return the shares of a large answer to a client without a key of the run's roles."""
    if entry.sender is not None:
        each_max, all_max = limits.MEMBERS_ANSWER_BYTES_EACH_MAX, limits.MEMBERS_ANSWER_BYTES_MAX
        return (
            BodyShare(f"answers to {entry.sender.key}", each_max, limits.HTTP_MEMBERS_EACH_MAX),
            BodyShare("answers to members", all_max, limits.HTTP_MEMBERS_MAX),
        )
    each_max, all_max = limits.STRANGERS_ANSWER_BYTES_EACH_MAX, limits.STRANGERS_ANSWER_BYTES_MAX
    return (
        BodyShare(f"answers to {entry.network}", each_max, limits.HTTP_STRANGERS_EACH_MAX),
        BodyShare("answers to strangers", all_max, limits.HTTP_STRANGERS_MAX),
    )


def _guard_of(request: web.Request) -> GuardedHandler:
    guard = request.protocol
    assert isinstance(guard, GuardedHandler)
    return guard


async def _say_nothing_yet(request: web.Request) -> None:
    """Send nothing in place of aiohttp's own answer to Expect: the body is requested once its sender is admitted."""


async def _digest_of(body: bytes) -> str:
    return digest_of(body) if len(body) <= HASHED_APART_BYTES else await asyncio.to_thread(digest_of, body)


@web.middleware
async def _explain_unknown(request: web.Request, handler: Any) -> web.StreamResponse:
    """Turn aiohttp's own errors (no such path, wrong method) into the common error format."""
    try:
        response: web.StreamResponse = await handler(request)
        return response
    except web.HTTPException as error:
        answer = error_answer(
            RemoteError(ErrorCode.NOT_FOUND, f"{request.method} {request.path[:100]}: {error.reason}")
        )
        if request.body_exists:
            _guard_of(request).give_up()
            answer.force_close()
        return answer


async def _stream(request: web.Request, response: Response, headers: dict[str, str]) -> web.StreamResponse:
    if isinstance(response.body, bytes):
        headers["Content-Length"] = str(len(response.body))
    stream = web.StreamResponse(status=response.status, headers=headers)
    is_sized = isinstance(response.body, bytes) or "Content-Length" in response.headers
    guard = _guard_of(request)
    guard.streaming = None if is_sized else asyncio.current_task()  # it may have nothing to send for long
    try:
        # The client may disconnect at any time; that is no error.
        with contextlib.suppress(ClientConnectionError, ConnectionError):
            await stream.prepare(request)
            if request.method != "HEAD":
                # Sized bodies have a deadline; others may be endless streams.
                async with asyncio.timeout(send_s_max(response) if is_sized else None):
                    await _copy(response.body, stream)
    except (TimeoutError, RemoteError):
        if request.transport is not None:
            # A stalled reader must not hold what `after` returns; a cut body must not look complete.
            request.transport.abort()
    finally:
        guard.streaming = None
    return stream


async def _copy(body: bytes | AsyncIterator[bytes], stream: web.StreamResponse) -> None:
    if isinstance(body, bytes):
        view = memoryview(body)
        for start in range(0, len(body), LARGE_BYTES):
            await stream.write(view[start : start + LARGE_BYTES])
    else:
        async for chunk in body:
            await stream.write(chunk)
    await stream.write_eof()
