"""The operator's page: `prime-node operate open` serves it to a browser on this machine, until Ctrl-C.

The coordinator has no part in it, and its public port no such route. This process holds the key, signs the same orders as the
commands, and sends them to the coordinator. The browser gets a session, never a key of the run (pages/loopback.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket as sockets
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from prime_node.cli import wire
from prime_node.cli.operator import Operator
from prime_node.cli.run_status import named_keys, status_at
from prime_node.pages.loopback import LoopbackGate, is_loopback_host, json_answer, order_route, page_routes, parsed_form
from prime_node.ports.web import CallerBounds, Request, Response, Route
from prime_protocol.errors import ErrorCode, LocalError, RemoteError
from prime_protocol.key_ring import Role
from prime_protocol.requests import AdminRequest

HOST = "127.0.0.1"
FORWARDED_PORT = 8411
"""Port that the shown ssh command forwards."""
FILES_IN = "prime_node.cli.operate_page"
"""Package whose folder `assets` has the page's files."""
HIDDEN = ("workers", "usable", "evaluations", "steps", "validators")
"""Parts of the status that the page does not show as they are."""
SHOWN = ("worker", "name", "state", "active", "accepted", "refused", "strikes", "newcomer", "banned")
"""Fields of a worker that the page shows."""


class InviteOrder(BaseModel):
    """Body of a request for an invitation."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    keys: int = Field(ge=1, le=10_000)
    days: float = Field(ge=0.001, le=3_650)


@dataclass(frozen=True, slots=True)
class OperatorPages:
    """Answers of the operator's page."""

    operator: Operator
    gate: LoopbackGate

    def routes(self) -> list[Route]:
        """Return the routes, each behind the gate."""
        gate = self.gate
        return [
            *page_routes(gate, FILES_IN),
            Route("GET", "/v1/view", gate.private(self._view)),
            Route("GET", "/v1/keys/{ending}", gate.private(self._find)),
            order_route(gate, "/v1/order", self._order),
            order_route(gate, "/v1/invite", self._invite),
        ]

    async def _view(self, request: Request) -> Response:
        """Return what the page shows: the public status, and what the run's folder knows."""
        run, url = self.operator.run, self.operator.link.url
        with _coordinator_asked():
            status = await status_at(url)
        workers = status.get("workers")
        return json_answer(
            {
                **{name: value for name, value in status.items() if name not in HIDDEN},
                "title": run.spec.title or run.spec.name,
                "folder": str(self.operator.run_dir.path),
                "workers_max": run.spec.limits.workers_max,
                "roles": [str(role) for role in Role],
                "workers": [{name: one.get(name) for name in SHOWN} for one in workers] if workers else [],
            }
        )

    async def _find(self, request: Request) -> Response:
        """Return the keys with an ending, also of workers that the status does not list."""
        with _coordinator_asked():
            return json_answer({"keys": await named_keys(self.operator.link.url, request.params["ending"])})

    async def _order(self, request: Request) -> Response:
        order = parsed_form(request.body, AdminRequest)
        with _coordinator_asked():
            await self.operator.order(order)
        return json_answer({})

    async def _invite(self, request: Request) -> Response:
        order = parsed_form(request.body, InviteOrder)
        return json_answer({"link": str(self.operator.invite(keys=order.keys, days=order.days))})


async def serve_page(
    operator: Operator, stop: asyncio.Event, *, port: int, socket: Path | None, shown: Callable[[str], None]
) -> int:
    """Serve the page until `stop` is set, and show its address: a further one once the last is used. Raises LocalError."""
    server, bounds = wire.web_server(), CallerBounds(is_host=is_loopback_host)
    with contextlib.ExitStack() as stack:
        bound = None if socket is None else stack.enter_context(private_socket(socket))
        address = ""
        gate = LoopbackGate(lambda key: shown(f"Opened. For another browser: {address}{key}"))
        taken = await server.start(
            OperatorPages(operator, gate).routes(), host=HOST, port=port, bounds=bounds, bound=bound
        )
        if socket is None:
            address = f"http://{HOST}:{taken}/#"
        else:
            address = f"http://localhost:{FORWARDED_PORT}/#"
            shown(f"Listening on {socket}. On your own machine: ssh -N -L {FORWARDED_PORT}:{socket} THIS-HOST")
        shown(f"Operate {operator.run.spec.name}: {address}{gate.key}")
        shown("The first browser that opens this address operates the run. Ctrl-C ends the page.")
        try:
            await stop.wait()
        finally:
            await server.stop(grace_s=0.5)
    return 0


@contextlib.contextmanager
def private_socket(path: Path) -> Iterator[sockets.socket]:
    """Bind a Unix socket that only this user can connect to, and remove it at the end. Raises LocalError."""
    made = sockets.socket(sockets.AF_UNIX)
    try:
        _remove_abandoned(path)
        before = os.umask(0o177)
        try:
            made.bind(str(path))
        finally:
            os.umask(before)
    except OSError as error:
        made.close()
        raise LocalError(f"cannot listen on {path}: {error.strerror or error}; leave out --socket") from None
    try:
        yield made
    finally:
        made.close()
        path.unlink(missing_ok=True)


def _remove_abandoned(path: Path) -> None:
    """Remove a socket without a listener. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISSOCK(path.lstat().st_mode):
            with sockets.socket(sockets.AF_UNIX) as tried, contextlib.suppress(ConnectionRefusedError):
                tried.connect(str(path))
                return  # it is in use: binding fails
            path.unlink()


@contextlib.contextmanager
def _coordinator_asked() -> Iterator[None]:
    """Turn an error of this machine, such as a coordinator that does not answer, into an answer to the page."""
    try:
        yield
    except LocalError as error:
        raise RemoteError(ErrorCode.UNAVAILABLE, str(error)) from None
