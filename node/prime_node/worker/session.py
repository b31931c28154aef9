"""A worker's session with its coordinator: joined, known, draining, banned.

Every request of a worker goes through here, so that one place decides what an error means. Unreachable or busy: retry
after a growing pause. Unknown worker (the coordinator lost its state, or this worker was away too long): join again.
Key in use by another machine: wait until that one stops. Banned: end. The caller handles any other error.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from typing import NoReturn, TypeVar

from prime_node.patience import SAY_AGAIN_S, Backoff, Switch, may_pass, without_numbers
from prime_node.ports.clock import Clock
from prime_node.ports.transport import Unreachable, WorkerPort
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.requests import HeartbeatRequest, JoinRequest, LeaveRequest
from prime_protocol.rollout import EngineInfo
from prime_protocol.run_spec import PinnedRun

log = logging.getLogger(__name__)

T = TypeVar("T")
CLOCK_DIFFERENCE_S_NOTED = 10.0
"""Clock difference above which a warning is logged; requests are refused from REQUEST_AGE_S_MAX on."""


class KeyBanned(Exception):
    """The coordinator has banned this key from the run. The text is its reason."""


class Session:
    """The coordinator's last answers, and how to send it requests."""

    def __init__(
        self,
        run: PinnedRun,
        port: WorkerPort,
        request: JoinRequest,
        *,
        clock: Clock,
        rng: random.Random,
        accepted: Switch | None = None,
    ) -> None:
        self.run = run
        self.port = port
        self.name = request.session
        """Name of this process's session: the coordinator lets one machine at a time use a key."""
        self.step = 0
        self.head = -1
        self.notice = ""
        self.in_use = ""
        """Reason why the coordinator does not admit this machine; empty if it does."""
        self.accepted = accepted or Switch()
        """Switch that is on while the coordinator counts this machine as its key's user, as far as known."""
        self.draining = asyncio.Event()
        """Event set once the coordinator wants no more work from this worker."""
        self.away_since_s: float | None = None
        """Monotonic time of the first request without an answer; None while the coordinator answers."""
        self._request = request
        self._clock = clock
        self._rng = rng
        self._clock_behind_ms = 0
        self._said = "", 0.0
        """Reason that was logged last, and when."""
        self._joins = 0
        self._joining = asyncio.Lock()

    @property
    def joined(self) -> bool:
        """Return whether the coordinator has ever accepted a join."""
        return self._joins > 0

    def server_now_ms(self) -> int:
        """Return the coordinator's time, by the clock difference measured when joining."""
        return self._clock.now_ms() + self._clock_behind_ms

    async def join(self) -> None:
        """Join, retrying until it succeeds. Raises KeyBanned, or RemoteError if a retry cannot help."""
        await self.ask(self._join)

    async def compare_clocks(self) -> None:
        """Join again, which measures the difference of the clocks. Raises as `attempt` does."""
        await self.attempt(self._join)

    async def describe(self, engine: EngineInfo) -> None:
        """Join again if the engine, now that it is built, is not the one that was announced. Raises as `join` does."""
        if engine == self._request.engine:
            return
        log.warning("the engine is %s, and was announced as %s; joining again", engine, self._request.engine)
        self._request = self._request.model_copy(update={"engine": engine})
        await self.join()

    async def leave(self) -> None:
        """Announce that this worker leaves, once. Optional: four missed heartbeats have the same effect."""
        try:
            await self.port.leave(LeaveRequest(session=self.name))
        except (RemoteError, Unreachable) as error:
            log.info("leaving was not confirmed by the coordinator: %s", error)

    async def heartbeat(
        self, state: Callable[[], HeartbeatRequest], *, cancel: Callable[[tuple[str, ...]], None]
    ) -> NoReturn:
        """Send heartbeats forever and record the coordinator's answers. Raises KeyBanned.

        `cancel` gets the leases that the coordinator can no longer use.
        """
        logged = ""
        while True:
            reply = await self.ask(lambda: self.port.heartbeat(state()))
            self.step, self.head, self.in_use = reply.step, reply.head, ""
            self.accepted.turn(on=True)
            # The notice says why there is no lease. If the next heartbeat lacks it, it was transient: log only one that stays.
            if reply.notice and reply.notice == self.notice != logged and not reply.draining:
                log.info("the coordinator says: %s", reply.notice)
                logged = reply.notice
            self.notice = reply.notice
            if reply.draining:
                self.draining.set()
            cancel(reply.cancelled)
            await self._clock.sleep(self.run.spec.heartbeat_seconds)

    async def ask(self, call: Callable[[], Awaitable[T]]) -> T:
        """Return the answer, however long it takes. Raises KeyBanned, and RemoteError if the same request cannot succeed."""
        backoff = Backoff(self._rng)
        while True:
            try:
                return await self.attempt(call)
            except (Unreachable, RemoteError) as error:
                if not may_pass(error) and not (isinstance(error, RemoteError) and error.code is ErrorCode.IN_USE):
                    raise
                pause_s = backoff.next_s(error)
                self._say(str(error), pause_s)
            await self._clock.sleep(pause_s)

    async def attempt(self, call: Callable[[], Awaitable[T]]) -> T:
        """Try once, or twice if it must join again first. Raises KeyBanned, RemoteError or Unreachable."""
        joins = self._joins
        try:
            try:
                return self._heard(await call())
            except RemoteError as error:
                if error.code is not ErrorCode.UNKNOWN_WORKER:
                    raise
            await self._join_again(joins)
            return self._heard(await call())
        except Unreachable:
            self.away_since_s = self.away_since_s or self._clock.monotonic_s()
            raise
        except RemoteError as error:
            self.away_since_s = None
            if error.code is ErrorCode.IN_USE:
                self.in_use = error.detail
            if error.code in (ErrorCode.IN_USE, ErrorCode.BANNED):
                self.accepted.turn(on=False)
            if error.code is ErrorCode.UNKNOWN_FIELD:  # coordinators are upgraded first (SPEC.md, section 18)
                detail = (
                    f"the coordinator runs an older release ({error.detail}): install that release, or wait until its "
                    "operator updates"
                )
                raise RemoteError(error.code, detail) from None
            if error.code is ErrorCode.BANNED:
                raise KeyBanned(error.detail) from None
            if error.code is ErrorCode.UNKNOWN_WORKER:
                raise RemoteError(
                    ErrorCode.UNAVAILABLE,
                    (
                        "the coordinator refuses this worker's requests as unknown right "
                        "after it joined; report this to the operator"
                    ),
                ) from None
            raise

    def _say(self, reason: str, pause_s: float) -> None:
        """Log a failure that lasts, now and then: several tasks ask at the same time, perhaps for days."""
        now_s, (said, said_s) = self._clock.monotonic_s(), self._said
        if pause_s > 1.0 and (without_numbers(reason) != said or now_s - said_s >= SAY_AGAIN_S):
            self._said = without_numbers(reason), now_s
            log.warning("%s; trying again in %.1f s", reason, pause_s)

    def _heard(self, reply: T) -> T:
        self.away_since_s = None
        return reply

    async def _join_again(self, joins_before: int) -> None:
        """Join once, although several callers may have seen the same error."""
        async with self._joining:
            if self._joins == joins_before:
                log.info("the coordinator does not know this worker (any more); joining again")
                await self._join()

    async def _join(self) -> None:
        asked_ms = self._clock.now_ms()
        reply = await self.port.join(self._request)
        self._clock_behind_ms = reply.server_time_ms - (asked_ms + self._clock.now_ms()) // 2
        if abs(self._clock_behind_ms) > CLOCK_DIFFERENCE_S_NOTED * 1_000:
            direction = "behind" if self._clock_behind_ms > 0 else "ahead of"
            log.warning(
                "this machine's clock is %.0f s %s the coordinator's; set it, or requests are refused",
                abs(self._clock_behind_ms) / 1_000,
                direction,
            )
        if reply.notice:
            log.warning("the coordinator says: %s", reply.notice)
        self.step, self.head, self.in_use = reply.step, reply.head, ""
        self.accepted.turn(on=True)
        self._joins += 1
