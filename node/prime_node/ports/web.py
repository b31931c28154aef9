"""An HTTP server as a table of routes. Roles write handlers of plain values; the adapter knows the web framework."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Sender:
    """A key that has proved itself on a connection."""

    key: str
    is_role: bool
    """The run trusts the key (trainer, validator, coordinator, root). Otherwise it is a member: a key that joined."""


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
    vouch: Callable[[Sender | None], None] = lambda sender: None
    """Tells the server whose request it was, None for a stranger's. The server then bounds the connection by the key."""


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
class BodyShare:
    """A bound that several bodies on their way in have in common, by its name. A body may count against several."""

    name: str
    bytes_max: int
    bodies_max: int


@dataclass(frozen=True, slots=True)
class BodyAdmission:
    """What was found out about a body before its first byte is read."""

    shares: tuple[BodyShare, ...]
    digest: str | None = None
    """The digest that the body must have, where its sender has signed one."""


Admit = Callable[[Request, int], BodyAdmission]
"""Decides by the header of a request, whose body is still empty, and the length of the body to come. Raises PeerError."""


@dataclass(frozen=True, slots=True)
class CallerBounds:
    """How a server bounds its callers."""

    network_of: Callable[[str, str], str] = lambda address, forwarded: address
    """The name of a caller's network, from the address of its connection and the header X-Forwarded-For."""
    is_proxy: Callable[[str], bool] = lambda address: False
    """Is this the address of a reverse proxy of the operator's own? Its connections are many callers'."""
    is_host: Callable[[str, str], bool] = lambda address, host: True
    """May a caller at this address ask for this value of the header Host?"""
    connects_per_second: float = math.inf
    """New connections from one network, sustained; a burst of five times as many is taken."""
    requests_per_second: float = math.inf
    """Requests from one network of strangers; those beyond wait. Where it is finite, all strangers together get a fifth of the
    server's time."""
    member_requests_per_second: float = math.inf
    """Requests of one member's key over all its connections; those beyond wait. A burst of ten seconds is taken."""


@dataclass(frozen=True, slots=True)
class Route:
    """Example: Route("GET", "/v1/manifests/{policy_version}", handler)."""

    method: str
    path: str
    handler: Handler
    body_bytes_max: int = 0
    """A longer body is refused while it streams in, compressed or not; 0 means that no body is read."""
    admit: Admit | None = None
    """Called before a body is read. None lets every body in, up to its length."""
    is_bulk: bool = False
    """A GET that is asked for again and again over kept connections, as pieces are: the adapter spares what it can. The handler's
    `headers` say the Content-Length of an iterator."""


class WebServer(Protocol):
    """Serves until told to stop. Slow headers and slow bodies are cut off by the adapter."""

    async def start(self, routes: Sequence[Route], *, host: str, port: int, walls: CallerBounds | None = None) -> int:
        """Bind and serve. Port 0 picks a free one; returns the port. Raises LocalError where it cannot bind."""
        ...

    async def stop(self, *, grace_s: float) -> None:
        """Take no new request, let those under way finish for `grace_s`, then cut them."""
        ...
