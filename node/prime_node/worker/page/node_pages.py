"""The worker's page and its API on loopback. Buttons write the same file as `prime-node pause` (control.py).

`GET /v1/node` shows everything, `POST /v1/control` orders, `POST /v1/session` begins a session. pages/loopback.py checks
who asks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from prime_node.pages.assets import PAGE_HEADERS, file_answer, index_answer
from prime_node.pages.loopback import BODY_BYTES_MAX, LoopbackGate
from prime_node.ports.web import Request, Response, Route
from prime_node.worker.control import Control, Wanted, WorkLimits, read_control, write_control
from prime_node.worker.page.node_view import node_document
from prime_node.worker.worker import Worker
from prime_protocol.errors import ErrorCode, LocalError, RemoteError

_Body = TypeVar("_Body", bound=BaseModel)
FILES_IN = "prime_node.worker.page"
"""Package whose folder `assets` has the page's files."""
_MINUTE = re.compile(r"[0-9]{1,12}", re.ASCII)


class NewSession(BaseModel):
    """Body of a request for a session."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    key: str = Field(max_length=200)


class Order(BaseModel):
    """Body of an order. What is left out stays as it is."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    wanted: Wanted | None = None
    limits: WorkLimits | None = None


class NodePages:
    """Answers of the worker's page."""

    def __init__(self, worker: Worker, gate: LoopbackGate, link: str) -> None:
        """Answer for `worker`. `link` is the run's join link without an invitation."""
        self._worker, self._gate, self._link = worker, gate, link

    def routes(self) -> Sequence[Route]:
        """Return the routes, each behind the gate."""
        gate = self._gate
        return (
            Route("GET", "/", gate.public(self._index)),
            Route("GET", "/page/{name}", gate.public(self._file)),
            Route("GET", "/v1/node", gate.private(self._node)),
            Route("POST", "/v1/session", self._session, body_bytes_max=BODY_BYTES_MAX, admit=gate.admit_key),
            Route(
                "POST",
                "/v1/control",
                gate.changing(self._control),
                body_bytes_max=BODY_BYTES_MAX,
                admit=gate.admit_change,
            ),
        )

    async def _index(self, request: Request) -> Response:
        return index_answer(request, FILES_IN)

    async def _file(self, request: Request) -> Response:
        return file_answer(request, FILES_IN)

    async def _session(self, request: Request) -> Response:
        self._gate.admit_key(request, len(request.body))  # also of a request without a body
        return _json({"session": self._gate.begin(_parsed(request.body, NewSession).key)})

    async def _node(self, request: Request) -> Response:
        since = request.query.get("since", "0")
        if _MINUTE.fullmatch(since) is None:
            raise RemoteError(ErrorCode.MALFORMED, "`since` is a number of minutes")
        return _json(node_document(self._worker, self._link, since_minute=int(since)))

    async def _control(self, request: Request) -> Response:
        order, worker = _parsed(request.body, Order), self._worker
        try:
            control = read_control(worker.folder)
        except LocalError:  # damaged: the order writes it again
            control = Control()
        changes = {name: getattr(order, name) for name in order.model_fields_set if getattr(order, name) is not None}
        at_ms = max(worker.clock.now_ms(), control.at_ms + 1)
        write_control(worker.folder, control.model_copy(update=changes | {"at_ms": at_ms}))
        return _json({"at_ms": at_ms})


def _parsed(body: bytes, model: type[_Body]) -> _Body:
    """Parse a body. Raises RemoteError(MALFORMED) with the first fault, for the person who filled the form."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(str(part) for part in fault["loc"])
        raise RemoteError(ErrorCode.MALFORMED, f"{place}: {fault['msg'].removeprefix('Value error, ')}") from None


def _json(value: Any) -> Response:
    body = json.dumps(value, separators=(",", ":")).encode()
    return Response(body, headers={"Cache-Control": "no-store", **PAGE_HEADERS})
