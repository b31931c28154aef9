"""Who may use a page on loopback: the browser of this machine's user, and no site that this browser visits.

Each request is checked in this order:

(1) `Host` names this machine, not a stranger's name that resolves to it (DNS rebinding).
(2) `Origin` and `Sec-Fetch-Site`, where a browser sends them, are the page's own; a change needs an `Origin` (CSRF).
(3) All but the page's own files, which are public, need a session in the header `Authorization`. A cookie would not do: a
    browser sends it to all ports of this machine.

A session begins with a key that the page's address carries in its fragment, which browsers do not send. A key is valid once.
An address in a terminal's history, a process list or a browser's history is thus worth nothing after its use. Another user of the
machine who watches the list of processes may use it first.

The pages have in common: their files, the request for a session, orders, and JSON both ways.
"""

from __future__ import annotations

import hmac
import json
import re
import secrets
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from prime_node.pages.assets import PAGE_HEADERS, file_answer, index_answer
from prime_node.ports.web import BodyAdmission, Handler, Request, Response, Route
from prime_protocol.errors import ErrorCode, RemoteError

SESSIONS_MAX = 8
"""Browser tabs that may use the page; a further one ends the oldest session."""
BODY_BYTES_MAX = 4_096
_HOST = re.compile(r"(?:127\.0\.0\.1|localhost|\[::1\])(?::[0-9]{1,5})?", re.ASCII | re.IGNORECASE)
_OWN_SITES = frozenset({"same-origin", "none"})


class LoopbackGate:
    """Check of requests, and the sessions that have begun."""

    def __init__(self, on_key: Callable[[str], None] = lambda key: None) -> None:
        """Make the first key. `on_key` gets each further one, so that the page's address can be made of it."""
        self.on_key = on_key
        self._sessions: deque[str] = deque(maxlen=SESSIONS_MAX)
        self._key = secrets.token_urlsafe(32)

    @property
    def key(self) -> str:
        """Return the key that begins the next session."""
        return self._key

    def renew(self) -> None:
        """Make another key; the present one is void."""
        self._key = secrets.token_urlsafe(32)
        self.on_key(self._key)

    def public(self, handler: Handler) -> Handler:
        """Return the handler of what needs no session, behind rule (1), and behind (2) but for a link on another site.

        So a click on the address in a terminal that runs in a browser opens the page.
        """

        async def checked(request: Request) -> Response:
            _check_origin(request, changes=False, links=True)
            return await handler(request)

        return checked

    def private(self, handler: Handler) -> Handler:
        """Return the handler of a reading request, behind all rules."""

        async def checked(request: Request) -> Response:
            self._check(request, changes=False)
            return await handler(request)

        return checked

    def admit_change(self, request: Request, num_bytes: int) -> BodyAdmission:
        """Check a request that changes something, before its body is read. Raises RemoteError."""
        self._check(request, changes=True)
        return BodyAdmission(())

    def changing(self, handler: Handler) -> Handler:
        """Return the handler of a changing request. One without a body has passed no admission."""

        async def checked(request: Request) -> Response:
            self._check(request, changes=True)
            return await handler(request)

        return checked

    def admit_key(self, request: Request, num_bytes: int) -> BodyAdmission:
        """Check a request that begins a session, before its body is read. Raises RemoteError."""
        _check_origin(request, changes=True)
        return BodyAdmission(())

    def begin(self, key: str) -> str:
        """Begin a session with the present key. Raises RemoteError if it is another, or was used before."""
        if not _same(key, self._key):
            raise RemoteError(ErrorCode.WRONG_ROLE, "this address was used before, or is not complete")
        session = secrets.token_urlsafe(32)
        self._sessions.append(session)
        self.renew()
        return session

    def _check(self, request: Request, *, changes: bool) -> None:
        _check_origin(request, changes=changes)
        scheme, _, shown = request.headers.get("authorization", "").partition(" ")
        known = [_same(shown, session) for session in self._sessions]  # (3)
        if scheme.lower() != "bearer" or not any(known):
            raise RemoteError(ErrorCode.WRONG_ROLE, "this page needs a new address")


def _same(one: str, other: str) -> bool:
    """Compare two texts in a time that does not depend on where they differ. A header may hold any bytes."""
    return hmac.compare_digest(one.encode(errors="surrogateescape"), other.encode())


def is_loopback_host(address: str, host: str) -> bool:
    """Return whether `host`, of a request from any address, names this machine itself."""
    return _HOST.fullmatch(host) is not None


def _check_origin(request: Request, *, changes: bool, links: bool = False) -> None:
    host, origin = request.headers.get("host", ""), request.headers.get("origin")
    if not is_loopback_host(request.remote, host):  # (1)
        raise RemoteError(ErrorCode.WRONG_ROLE, "this page is for this machine's user")
    site = "none" if links else request.headers.get("sec-fetch-site", "none")  # (2)
    is_own = origin == f"http://{host}" if origin is not None else not changes
    if not is_own or site not in _OWN_SITES:
        raise RemoteError(ErrorCode.WRONG_ROLE, "a request of another site")


Form = TypeVar("Form", bound=BaseModel)


class NewSession(BaseModel):
    """Body of a request for a session."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    key: str = Field(max_length=200)


def page_routes(gate: LoopbackGate, package: str) -> tuple[Route, ...]:
    """Return the routes of a page's files, which are in the folder `assets` of `package`, and of sessions."""

    async def index(request: Request) -> Response:
        return index_answer(request, package)

    async def file(request: Request) -> Response:
        return file_answer(request, package)

    async def session(request: Request) -> Response:
        gate.admit_key(request, len(request.body))  # also of a request without a body
        return json_answer({"session": gate.begin(parsed_form(request.body, NewSession).key)})

    return (
        Route("GET", "/", gate.public(index)),
        Route("GET", "/page/{name}", gate.public(file)),
        Route("POST", "/v1/session", session, body_bytes_max=BODY_BYTES_MAX, admit=gate.admit_key),
    )


def order_route(gate: LoopbackGate, path: str, handler: Handler) -> Route:
    """Return the route of a request that changes something."""
    return Route("POST", path, gate.changing(handler), body_bytes_max=BODY_BYTES_MAX, admit=gate.admit_change)


def parsed_form(body: bytes, model: type[Form]) -> Form:
    """Parse a body. Raises RemoteError(MALFORMED) with the first fault, for the person who filled the form."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(map(str, fault["loc"]))
        said = fault["msg"].removeprefix("Value error, ")
        raise RemoteError(ErrorCode.MALFORMED, f"{place}: {said}" if place else said) from None


def json_answer(value: Any) -> Response:
    """Return a value as JSON that no browser keeps."""
    body = json.dumps(value, separators=(",", ":")).encode()
    return Response(body, headers={"Cache-Control": "no-store", **PAGE_HEADERS})
