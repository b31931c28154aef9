"""An HTTP server as a table of routes. Roles write handlers of plain values; the adapter knows the web framework."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Request:
    """What a handler sees."""

    params: Mapping[str, str]
    """Parts of the path, by the names in the route's template."""
    body: bytes
    headers: Mapping[str, str]
    """Names in lower case."""
    remote: str
    """The peer's address, for quotas and logs."""


@dataclass(frozen=True, slots=True)
class Response:
    """What a handler answers. A handler may also raise PeerError, which becomes its status and an ErrorBody."""

    body: bytes | AsyncIterator[bytes] = b""
    """An iterator may raise PeerError: the connection is cut then, since the status has long been sent."""
    status: int = 200
    content_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)
    after: Callable[[], None] | None = None
    """Called once, when the body has been written to the connection or cannot be. With an iterator, `headers` then hold the
    body's Content-Length, by which its time is bounded."""


Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class Route:
    """Example: Route("GET", "/v1/manifests/{policy_version}", handler)."""

    method: str
    path: str
    handler: Handler
    body_bytes_max: int = 0
    """A longer body is refused while it streams in, compressed or not; 0 means that no body is read."""
    is_bulk: bool = False
    """A GET that is asked for again and again over kept connections, as pieces are: the adapter spares what it can. The handler's
    `headers` say the Content-Length of an iterator."""


class WebServer(Protocol):
    """Serves until told to stop. Slow headers and slow bodies are cut off by the adapter."""

    async def start(self, routes: Sequence[Route], *, host: str, port: int) -> int:
        """Bind and serve. Port 0 picks a free one; returns the port. Raises LocalError where it cannot bind."""
        ...

    async def stop(self, *, grace_s: float) -> None:
        """Take no new request, let those under way finish for `grace_s`, then cut them."""
        ...
