"""Answer plain GET requests of bulk routes without the framework, since nearly all of a peer's answers are pieces.

A connection begins here. A request is answered here as long as it arrives complete in one read and is a GET of a bulk route
without special headers. Anything else (another route, a body, a header in two packets) is handed over, and the connection
with it, permanently. So only one parser sees each request, and this one rejects everything that it need not understand. For
each piece, aiohttp's server took a third of a sender's processor time (DECISIONS.md, 65).

Waiting: an answer waits for its handler, then until the transport has taken it; the next request waits for that. A client
that disconnects cancels its answer. A timer checks whether the connection is used, and whether its reader reads.
"""

from __future__ import annotations

import asyncio
import email.utils
import http
import logging
import math
import re
from collections.abc import Callable, Sequence

from prime_node.adapters.web.connection_counts import Entry, send_s_max
from prime_node.ports.web import Handler, Request, Response, Route, explanation
from prime_protocol.errors import RemoteError

log = logging.getLogger(__name__)

LOOKS = 8
"""Number of timer checks in the time that a connection may be idle."""
_REQUEST = re.compile(rb"GET (/[!-~]{1,300}) HTTP/1\.1\r\n((?:[A-Za-z-]{1,40}: ?[!-~](?:[ -~]{0,8000})\r\n){1,16})\r\n")
_NOT_PLAIN = {"connection", "content-length", "expect", "transfer-encoding", "upgrade"}
_REASONS = {status.value: status.phrase for status in http.HTTPStatus}


class BulkRoutes:
    """The bulk routes, and the state that all connections share."""

    def __init__(
        self,
        routes: Sequence[Route],
        *,
        idle_s_max: float,
        is_host: Callable[[str, str], bool],
        hand_over: Callable[[Entry, float], asyncio.Protocol],
    ) -> None:
        """Serve the bulk routes among `routes`.

        `is_host` returns whether a client at this address may ask for this Host. `hand_over` makes the protocol that takes
        over a connection whose next header may still take that many seconds.
        """
        self.connections: set[PlainGets] = set()
        self.idle_s_max = idle_s_max
        self.is_host = is_host
        self.hand_over = hand_over
        self._paths = [
            (re.compile(re.sub(r"\{(\w+)\}", r"(?P<\1>[^/?#%]+)", route.path)), route.handler)
            for route in routes
            if route.is_bulk
        ]

    def find(self, data: bytes, remote: str) -> tuple[Handler, Request] | None:
        """Return the handler and the request, if the request is plain."""
        found = _REQUEST.fullmatch(data)
        if found is None:
            return None
        path = found[1].decode("ascii")
        for pattern, handler in self._paths:
            if asked := pattern.fullmatch(path):
                lines = (line.split(":", 1) for line in found[2].decode("ascii").split("\r\n")[:-1])
                headers = {name.lower(): value.strip() for name, value in lines}
                if headers.keys() & _NOT_PLAIN or not self.is_host(remote, headers.get("host", "")):
                    return None
                return handler, Request(params=asked.groupdict(), body=b"", headers=headers, remote=remote)
        return None

    async def close(self, grace_s: float) -> None:
        """Let answers in progress end within `grace_s`, then cut all connections."""
        tasks = [connection.task for connection in self.connections if connection.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=grace_s)
        for connection in list(self.connections):
            connection.abort()


class PlainGets(asyncio.Protocol):
    """One connection, until it is handed over."""

    def __init__(self, shared: BulkRoutes, entry: Entry) -> None:
        self.task: asyncio.Task[None] | None = None
        """Answer in progress."""
        self._shared = shared
        self._entry = entry
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = math.inf
        """Time at which the next request, or the reader's acceptance of the answer, is due."""
        self._next = b""
        """Bytes that came while an answer was in progress."""
        self._room = asyncio.Event()
        """Event that the transport accepts more."""
        self._room.set()

    def abort(self) -> None:
        """Close the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    # Called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the idle timer."""
        self._transport = transport  # type: ignore[assignment]  # uvloop's transports are no subclasses of asyncio.Transport
        self._shared.connections.add(self)
        self._due_s = self._loop.time() + self._shared.idle_s_max
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        """Release the connection's share and cancel its answer."""
        self._entry.leave()
        self._leave()
        self._transport = None
        if self.task is not None:
            self.task.cancel()

    def pause_writing(self) -> None:
        """Make the answer wait for its reader."""
        self._room.clear()

    def resume_writing(self) -> None:
        """Let the answer continue."""
        self._room.set()

    def data_received(self, data: bytes) -> None:
        """Answer a plain request, or hand the connection over."""
        if self.task is not None:
            self._next += data
            assert self._transport is not None
            self._transport.pause_reading()  # one request ahead is enough
            return
        asked = self._shared.find(data, self._entry.address)
        if asked is None:
            self._hand_over(data)
        else:
            self._due_s = math.inf
            self.task = self._loop.create_task(self._answer(*asked))

    # Internals

    def _leave(self) -> None:
        self._shared.connections.discard(self)
        if self._timer is not None:
            self._timer.cancel()

    def _hand_over(self, data: bytes) -> None:
        assert self._transport is not None
        self._leave()
        transport, self._transport = self._transport, None
        other = self._shared.hand_over(self._entry, max(0.0, self._due_s - self._loop.time()))
        transport.set_protocol(other)
        other.connection_made(transport)
        other.data_received(data)

    def _look(self) -> None:
        if self._loop.time() >= self._due_s:
            self.abort()
        else:
            self._timer = self._loop.call_later(self._shared.idle_s_max / LOOKS, self._look)

    async def _answer(self, handler: Handler, request: Request) -> None:
        response: Response | None = None
        try:
            try:
                response = await handler(request)
            except RemoteError as error:
                response = explanation(error)
            self._due_s = self._loop.time() + send_s_max(response)
            await self._send(response)
        except RemoteError:
            self.abort()  # a cut body must not look complete
        except Exception:
            log.exception("GET of %s", request.params)
            self.abort()
        finally:
            self.task = None
            if response is not None and response.after is not None:
                response.after()
        self._due_s = self._loop.time() + self._shared.idle_s_max
        if self._next and self._transport is not None:
            data, self._next = self._next, b""
            self._transport.resume_reading()
            self.data_received(data)

    async def _send(self, response: Response) -> None:
        headers = {
            "Date": email.utils.formatdate(usegmt=True),
            "Content-Type": response.content_type,
            **response.headers,
        }
        if isinstance(response.body, bytes):
            headers["Content-Length"] = str(len(response.body))
        lines = [f"HTTP/1.1 {response.status} {_REASONS.get(response.status, '')}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        head = "\r\n".join([*lines, "\r\n"]).encode("latin-1")
        if isinstance(response.body, bytes):
            await self._write(head, response.body)
        else:
            await self._write(head)
            async for chunk in response.body:
                await self._write(chunk)

    async def _write(self, *data: bytes) -> None:
        if self._transport is not None:
            self._transport.writelines(data)
            await self._room.wait()
