"""What the pages on loopback have in common: their files, the request for a session, orders, and JSON both ways."""

from __future__ import annotations

import json
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from prime_node.pages.assets import PAGE_HEADERS, file_answer, index_answer
from prime_node.pages.loopback import BODY_BYTES_MAX, LoopbackGate
from prime_node.ports.web import Handler, Request, Response, Route
from prime_protocol.errors import ErrorCode, RemoteError

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
