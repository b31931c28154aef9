"""The worker's page and its API on loopback. Buttons write the same file as `prime-node pause` (control.py).

`GET /v1/node` shows everything, `POST /v1/control` orders, `POST /v1/session` begins a session. pages/loopback.py checks
who asks.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

from prime_node.pages.loopback import LoopbackGate
from prime_node.pages.loopback_routes import json_answer, order_route, page_routes, parsed_form
from prime_node.ports.web import Request, Response, Route
from prime_node.worker.control import Control, Wanted, WorkLimits, read_control, write_control
from prime_node.worker.page.node_view import node_document
from prime_node.worker.worker import Worker
from prime_protocol.errors import ErrorCode, LocalError, RemoteError

FILES_IN = "prime_node.worker.page"
"""Package whose folder `assets` has the page's files."""
_MINUTE = re.compile(r"[0-9]{1,12}", re.ASCII)


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
            *page_routes(gate, FILES_IN),
            Route("GET", "/v1/node", gate.private(self._node)),
            order_route(gate, "/v1/control", self._control),
        )

    async def _node(self, request: Request) -> Response:
        since = request.query.get("since", "0")
        if _MINUTE.fullmatch(since) is None:
            raise RemoteError(ErrorCode.MALFORMED, "`since` is a number of minutes")
        return json_answer(node_document(self._worker, self._link, since_minute=int(since)))

    async def _control(self, request: Request) -> Response:
        order, worker = parsed_form(request.body, Order), self._worker
        try:
            control = read_control(worker.folder)
        except LocalError:  # damaged: the order writes it again
            control = Control()
        changes = {name: getattr(order, name) for name in order.model_fields_set if getattr(order, name) is not None}
        at_ms = max(worker.clock.now_ms(), control.at_ms + 1)
        write_control(worker.folder, control.model_copy(update=changes | {"at_ms": at_ms}))
        return json_answer({"at_ms": at_ms})
