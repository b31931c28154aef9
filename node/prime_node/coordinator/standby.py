"""A coordinator's place among those of its run: a standby first, then the leader.

A standby follows the log and the documents of the leader, and answers every request with UNAVAILABLE, so that clients ask
another address. Waiting: it waits for its term (`Leadership.led`), for the request to stop, and for the next look at the log.
Nothing of a standby's state is shown before it leads.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

from prime_node.coordinator.api.callers import caller_bounds_of
from prime_node.coordinator.api.routes import READY_PATH
from prime_node.coordinator.assembly import Parts
from prime_node.coordinator.state.records import State
from prime_node.coordinator.state.rules import rules_of
from prime_node.coordinator.state_follower import StateFollower
from prime_node.ports.leadership import Leadership, TermLost
from prime_node.ports.web import BodyAdmission, CallerBounds, Request, Response, Route
from prime_protocol.errors import ErrorCode, RemoteError

FOLLOW_S = 0.1
"""Interval at which a standby reads the log."""
CUT_S = 0.5
"""Interval at which a coordinator whose term is over cuts what waits: not all at once, as the next one gets it all."""
STANDBY_RETRY_S = 0.5
"""Time after which a client may ask a standby again."""
STANDBY_BODY_BYTES_MAX = 2**40
"""No body is too long for a standby, which refuses each before its first byte is read."""

log = logging.getLogger(__name__)


class Succession:
    """The place of one coordinator. `ready` is called once, with the port, when it listens for the first time."""

    def __init__(self, parts: Parts, ready: Callable[[int], None]) -> None:
        self.followed: tuple[int, State] | None = None
        """Number of the last event and the state after it, once this coordinator leads and was a standby before."""
        self._parts, self._ready = parts, ready
        self._port = parts.config.port or 0
        self._is_said = self._has_followed = False

    async def lead(self, stop: asyncio.Event) -> bool:
        """Return True once this coordinator leads, False if it is to stop before. Raises LocalError."""
        leadership = self._parts.leadership
        assert leadership is not None
        follower = StateFollower(self._parts.store, rules_of(self._parts.run))
        leading: asyncio.Future[Any] = asyncio.ensure_future(leadership.led())
        stopping: asyncio.Future[Any] = asyncio.ensure_future(stop.wait())
        try:
            await asyncio.wait({leading, stopping}, timeout=FOLLOW_S, return_when=asyncio.FIRST_COMPLETED)
            if not leading.done() and self._parts.config.standby:
                await self._stand_by(leadership, follower, leading, stopping)
            await asyncio.wait({leading, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not leading.done():
                return False
            leading.result()
        finally:
            for task in (leading, stopping):
                task.cancel()
            await asyncio.wait({leading, stopping})
        await leadership.catch_up()
        if self._has_followed:
            await follower.catch_up()
            self.followed = follower.number, follower.state
        log.info("this coordinator leads")
        return True

    async def _stand_by(
        self,
        leadership: Leadership,
        follower: StateFollower,
        leading: asyncio.Future[Any],
        stopping: asyncio.Future[Any],
    ) -> None:
        async def health(request: Request) -> Response:
            return Response(b'{"ok": true, "standby": true, "event": %d}' % follower.number)

        routes = [Route("GET", "/healthz", health), *_refusals()]
        self._has_followed = True
        self.say_ready(await self.listen(routes))
        log.info("standby on port %d", self._port)
        try:
            while not (leading.done() or stopping.done()):
                await leadership.catch_up()
                await follower.catch_up()
                await asyncio.wait({leading, stopping}, timeout=FOLLOW_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await self._parts.web.stop(grace_s=0.0)

    async def listen(self, routes: Sequence[Route], bounds: CallerBounds | None = None) -> int:
        """Serve routes at the address of the settings, and return the port, which stays the same."""
        config, leadership = self._parts.config, self._parts.leadership
        self._port = await self._parts.web.start(
            routes,
            host=config.host,
            port=self._port,
            bounds=bounds or caller_bounds_of(config),
            may_send=leadership.may_answer if leadership is not None and leadership.is_leading else None,
        )
        return self._port

    def say_ready(self, port: int) -> None:
        """Name the port to the caller, the first time."""
        if not self._is_said:
            self._is_said = True
            self._ready(port)

    async def cut_waiting(self) -> None:
        """While the term is over, cut the requests that wait for the store, so that clients ask the other coordinators.

        Else they would wait for their own time limit: where the store falls silent, no connection ends by itself. Nothing is cut
        before another coordinator can lead.
        """
        leadership, clock = self._parts.leadership, self._parts.clock
        assert leadership is not None
        over_s = 0.0
        while True:
            await clock.sleep(CUT_S)
            over_s = 0.0 if leadership.may_answer() else over_s + CUT_S
            if over_s > CUT_S + self._parts.config.term_seconds / 10:
                self._parts.web.cut_waiting(CUT_S)

    def require_term(self) -> None:
        """Raise TermLost if another coordinator has taken over."""
        if self._parts.leadership is not None and not self._parts.leadership.is_leading:
            raise TermLost(
                "another coordinator of this run has taken over, so this one ends; start it again to stand by"
            )


def _refusals() -> list[Route]:
    async def refuse(request: Request) -> Response:
        raise _standby()

    def admit(request: Request, num_bytes: int) -> BodyAdmission:
        raise _standby()

    everything = "/{path:.*}"
    return [
        Route("GET", READY_PATH, refuse),
        Route("GET", everything, refuse),
        Route("POST", everything, refuse, STANDBY_BODY_BYTES_MAX, admit),
    ]


def _standby() -> RemoteError:
    return RemoteError(
        ErrorCode.UNAVAILABLE, "this coordinator is a standby: ask the one that leads", retry_after_s=STANDBY_RETRY_S
    )
