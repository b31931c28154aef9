"""An HTTP server as a table of routes, and what any server does alike: byte ranges and the reply to an error.

Roles write handlers over plain values; only the adapter knows the web framework.

The header Host is checked against DNS rebinding. A web page can lead a browser to an address of the page owner's choice under
the page's own name. That may be a server on the browser's own machine or network, from which the page could then read. The
header Host contains the name. So a caller at a non-public address must name an address, this machine, a name that cannot be
registered, or one that the server's owner has listed. From a public address anyone can read what the server serves anyway.
"""

from __future__ import annotations

import ipaddress
import json
import math
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache
from typing import Protocol

from prime_node.carrier import carrier
from prime_protocol.errors import ErrorCode, RemoteError

PRIVATE_DOMAINS = ("localhost", "local", "internal")
"""Domains without an owner in the public DNS, like names without a dot (RFC 6761, RFC 6762, ICANN's reservation)."""
_HOST = re.compile(r"(\[[0-9a-f:.]{2,45}(?:%25[0-9a-z._-]{1,32})?\]|[0-9a-z._-]{1,253})(?::[0-9]{1,5})?")


def is_own_host(address: str, host: str, names: Collection[str] = ()) -> bool:
    """Return whether a caller at this address may use this value of Host. `names` are further names of this server."""
    return _is_public(address) or _is_safe_host(host, names)


@lru_cache(4_096)
def parsed(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the parsed address, IPv4 for IPv4 inside IPv6; None for an invalid one."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return None
    return found.ipv4_mapped or found if isinstance(found, ipaddress.IPv6Address) else found


def _is_safe_host(host: str, names: Collection[str]) -> bool:
    """Return whether a browser's request can have this value of Host without a stranger's DNS."""
    found = _HOST.fullmatch(host.lower())
    if found is None:
        return not host  # HTTP/1.0 has none; no browser uses it
    name = found[1].strip("[]").rstrip(".")
    if name in names or "." not in name or name.rpartition(".")[2] in PRIVATE_DOMAINS:
        return True
    return parsed(name) is not None


def _is_public(address: str) -> bool:
    found = parsed(address)
    return found is not None and found.is_global


@carrier(frozen=True, slots=True)
class Sender:
    """A key that has authenticated on a connection."""

    key: str
    is_role: bool
    """Whether the run trusts the key (trainer, validator, coordinator, root). Otherwise it is a member: a key that joined."""


@carrier(frozen=True, slots=True)
class Request:
    """One request, as a handler sees it."""

    params: Mapping[str, str]
    """Parts of the path, by the names in the route's template."""
    body: bytes
    headers: Mapping[str, str]
    """Headers, with names in lower case."""
    remote: str
    """Peer's address, for quotas and logs."""
    vouch: Callable[[Sender | None], None] = lambda sender: None
    """Callback that names the request's authenticated sender, None for a stranger. The server then limits the
    connection by that key."""
    query: Mapping[str, str] = field(default_factory=dict)
    """Parameters after the question mark, where the server reads them."""


@carrier(frozen=True, slots=True)
class Response:
    """A handler's answer. A handler may also raise RemoteError, which becomes its status and an ErrorBody."""

    body: bytes | AsyncIterator[bytes] = b""
    """Body. An iterator may raise RemoteError: the connection is then cut, since the status has already been sent."""
    status: int = 200
    content_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)
    after: Callable[[], None] | None = None
    """Callback, called once when the body has been written or cannot be. With an iterator, `headers` then hold the
    body's Content-Length, which bounds its time."""


Handler = Callable[[Request], Awaitable[Response]]


class Importance(IntEnum):
    """Kinds of requests, by which an overloaded server refuses them: the lowest first."""

    STRANGERS = 0
    """Anything on a connection without a member's signature."""
    HEARTBEATS = 1
    NEW_WORK = 2
    FINISHED_WORK = 3
    """What ends work that was done: uploads, verdicts, batches."""
    ALWAYS = 4
    """Never refused for load, such as the checks of a load balancer."""


@carrier(frozen=True, slots=True)
class BodyShare:
    """A named limit that several bodies in transit share. A body may count against several."""

    name: str
    bytes_max: int
    bodies_max: int


@carrier(frozen=True, slots=True)
class BodyAdmission:
    """Admission of a body, decided before its first byte is read."""

    shares: tuple[BodyShare, ...]
    digest: str | None = None
    """Digest that the body must have, if its sender has signed one."""


Admit = Callable[[Request, int], BodyAdmission | Awaitable[BodyAdmission]]
"""Decides by a request's header, while its body is still empty, and by the length of the body to come. Raises RemoteError."""


@dataclass(frozen=True, slots=True)
class CallerBounds:
    """Per-caller limits of a server."""

    network_of: Callable[[str, str], str] = lambda address, forwarded: address
    """Function that names a caller's network, from its connection's address and the header X-Forwarded-For."""
    is_proxy: Callable[[str], bool] = lambda address: False
    """Function that returns whether an address is the operator's own reverse proxy, whose connections carry many callers."""
    is_host: Callable[[str, str], bool] = is_own_host
    """Function that returns whether a caller at this address may use this value of the header Host."""
    connects_per_second: float = math.inf
    """New connections per second from one network, sustained; bursts of five times as many are accepted."""
    lag_s_max: float = math.inf
    """Lateness of the server's event loop in seconds beyond which requests are refused, by their importance."""
    refused: Callable[[Importance, int], None] = lambda importance, count: None
    """Function that gets the kind of requests that are refused for load, and their number."""
    claimed: Callable[[bytes], Sender | None] = lambda signed: None
    """Function that returns the sender that a request's signed header names, unverified; None for a stranger's."""
    requests_per_second: float = math.inf
    """Requests per second from one network of strangers; excess requests wait. If finite, all strangers together get a
    fifth of the server's processor time."""
    member_requests_per_second: float = math.inf
    """Requests per second of one member's key over all its connections; excess requests wait. A burst of ten seconds is
    accepted."""


@dataclass(frozen=True, slots=True)
class Route:
    """One route. Example: Route("GET", "/v1/manifests/{policy_version}", handler)."""

    method: str
    path: str
    handler: Handler
    body_bytes_max: int = 0
    """Maximum body size. A longer body is refused while it streams in, compressed or not; 0 means that no body is read."""
    admit: Admit | None = None
    """Admission check, called before a body is read. None admits every body, up to its length."""
    importance: Importance = Importance.NEW_WORK
    """Kind of its members' requests, for an overloaded server."""
    is_page_file: bool = False
    """Whether this is one of the small files without which a page in a browser shows nothing. An overloaded server still answers
    some of them each second."""
    is_bulk: bool = False
    """Whether this is a GET that is repeated often over kept connections, such as for pieces. The adapter then reduces
    its overhead; the handler's `headers` give the Content-Length of an iterator."""


class WebServer(Protocol):
    """A server that runs until stopped. The adapter cuts slow headers and slow bodies."""

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
        """Bind and serve. Port 0 picks a free one; returns the port. Raises LocalError if it cannot bind.

        With `bound`, a socket that is bound already, the server listens on that one instead. `may_send` is called before
        any byte is sent, errors included; the connection is cut if it returns False.
        """

    def overload(self, path: str, sender: Callable[[], Sender | None]) -> RemoteError | None:
        """Return the error for a request that came another way and is refused for load; None for one that is answered."""

    def cut_waiting(self, within_s: float) -> None:
        """Cut the connections of requests without an answer, each at a random time within `within_s`."""

    async def stop(self, *, grace_s: float) -> None:
        """Accept no new request, let those in progress finish for `grace_s`, then cut them."""


def parse_range(text: str, size: int) -> tuple[int, int]:
    """Parse one byte range of RFC 9110 into [start, end). Raises RemoteError(BAD_RANGE).

    Example: parse_range("bytes=0-9", 100) is (0, 10).
    """
    found = re.fullmatch(r"bytes=([0-9]{0,15})-([0-9]{0,15})", text.strip())
    first, last = found.groups() if found else ("", "")
    if first:
        start, end = int(first), min(size, int(last) + 1) if last else size
    elif last:
        start, end = max(0, size - int(last)), size
    else:
        start, end = 0, 0
    if start >= end:
        raise RemoteError(ErrorCode.BAD_RANGE, f"of {size} bytes, {text[:60]!r} is no range that can be sent")
    return start, end


def explanation(error: RemoteError) -> Response:
    """Return the reply to an error: its status, and an ErrorBody."""
    body: dict[str, object] = {"code": str(error.code), "detail": error.detail[:2_000]}
    headers = {}
    if error.retry_after_s is not None:
        body["retry_after_s"] = error.retry_after_s
        headers["Retry-After"] = str(max(1, round(error.retry_after_s)))
    if error.epoch:
        body["epoch"] = error.epoch
    return Response(json.dumps(body).encode(), error.http_status, headers=headers)
