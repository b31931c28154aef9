"""The leader's term in PostgreSQL, kept by a thread with a connection of its own, so that a busy event loop does not lose it.

Waiting: the thread waits for the server, each time a term at most, and pauses between renewals or looks. The event loop waits for
the thread alone: in `led`, in `lost` and in `end`. A connection that fails is made again; meanwhile the term may end by itself,
and then nothing is answered until a renewal succeeds or another coordinator has taken over.

leader_terms.py has the rules, and schema/postgres the row with its functions.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Awaitable, Callable

import asyncpg

from prime_node.adapters.name_lookups import patient_loop
from prime_node.adapters.storage.leader_terms import (
    LOOKS_PER_TERM,
    RENEWALS_PER_TERM,
    HeldTerm,
    TermRow,
    WatchedTerm,
)
from prime_protocol.errors import LocalError, TransientFault

TERM_SECONDS = 2.0
"""Default length of a term without a renewal."""
EPOCHS_APART = 2**32
"""Most by which the next epoch is greater, at random. So no term has the number of one that a database lost which went back: a
failover to an older copy would give two leaders the same."""
PATIENCE_SECONDS = 60.0
"""Time to begin a term, longer than the longest one, where the coordinator does not stand by."""
_LOOK = "SELECT epoch, holder, renewals, term_ms FROM leader"
_BEGIN = (
    "UPDATE leader SET epoch = epoch + $5, renewals = renewals + 1, holder = $3, term_ms = $4"
    " WHERE epoch = $1 AND renewals = $2 RETURNING epoch"
)
_RENEW = "UPDATE leader SET renewals = renewals + 1 WHERE epoch = $1 RETURNING epoch"
_END = "UPDATE leader SET renewals = renewals + 1, term_ms = 0 WHERE epoch = $1"
# TimeoutError is an OSError; no host that takes writes is an InternalClientError
_FAULTS = (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError)

log = logging.getLogger(__name__)


class TermKeeper:
    """The thread. Created in the event loop that waits for it."""

    def __init__(self, connect: Callable[[], Awaitable[asyncpg.Connection]], *, term_s: float, place: str) -> None:
        self.holder = f"{socket.gethostname()}, process {os.getpid()}"
        self._connect, self._term_s, self._place = connect, term_s, place
        self._loop = asyncio.get_running_loop()
        self._held: HeldTerm | None = None
        self._watched = WatchedTerm()
        self._leads, self._lost, self._seen, self._ended = (asyncio.Event() for _ in range(4))
        self._is_ending = threading.Event()
        self._fault: BaseException | None = None
        """What ended the thread, other than `end` and another coordinator."""
        self._other = ""
        self._thread = threading.Thread(target=self._run, name="term", daemon=True)
        self._thread.start()

    @property
    def epoch(self) -> int | None:
        """Epoch of the term that was begun; None before."""
        return None if self._held is None else self._held.epoch

    @property
    def is_lost(self) -> bool:
        """Whether another coordinator has taken over."""
        return self._held is not None and self._held.is_lost

    def may_answer(self) -> bool:
        return self._held is not None and self._held.may_answer(now_s())

    async def begun(self, *, is_patient: bool) -> int:
        """Return the epoch once a term has begun.

        Raises LocalError if another coordinator is alive, TransientFault if the server does not answer, unless `is_patient`.
        Raises the error that ended the thread.
        """
        waiting = [self._leads, self._ended, *([] if is_patient else [self._seen])]
        tasks = [asyncio.ensure_future(event.wait()) for event in waiting]
        try:
            await asyncio.wait(
                tasks, timeout=None if is_patient else PATIENCE_SECONDS, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            for task in tasks:
                task.cancel()
        if self._fault is not None:
            raise self._fault
        if self.epoch is None and not self._seen.is_set():
            raise TransientFault(f"{self._place} does not answer: check the server, then start the coordinator again")
        if self.epoch is None:
            raise LocalError(
                f"{self._place} is used by the coordinator on {self._other}: stop that one first, "
                "or let this one wait for its end with coordinator.standby = true"
            )
        return self.epoch

    async def lost(self) -> None:
        """Return once another coordinator has taken over. Raises the error that ended the thread."""
        await self._lost.wait()
        if self._fault is not None:
            raise self._fault

    async def end(self) -> None:
        """End the term, so that another coordinator takes over at once, and the thread. Idempotent."""
        self._is_ending.set()
        await self._ended.wait()

    # In the thread

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=patient_loop) as runner:
            runner.run(self._keep())

    async def _keep(self) -> None:
        connection: asyncpg.Connection | None = None
        try:
            while not (self._is_ending.is_set() or self.is_lost):
                begun_s = now_s()
                try:
                    async with asyncio.timeout(self._term_s):
                        if connection is None:
                            connection = await self._connect()
                        await (self._look(connection) if self._held is None else self._renew(connection, self._held))
                except asyncpg.NumericValueOutOfRangeError:
                    raise LocalError(
                        f"{self._place} holds a term that no coordinator wrote: its numbers cannot be counted up. Put back a "
                        "copy of the database, and check who may write there"
                    ) from None
                except _FAULTS as error:
                    log.warning(
                        "%s does not answer about the coordinators' term: %s", self._place, str(error) or "too late"
                    )
                    if connection is not None:
                        connection.terminate()
                    connection = None
                pauses = LOOKS_PER_TERM if self._held is None else RENEWALS_PER_TERM
                await asyncio.to_thread(self._is_ending.wait, max(0.0, begun_s + self._term_s / pauses - now_s()))
            if connection is not None:
                with contextlib.suppress(*_FAULTS):
                    async with asyncio.timeout(self._term_s):
                        if self._held is not None and not self.is_lost:
                            await connection.execute(_END, self._held.epoch)
                        await connection.close()
        except Exception as error:
            self._fault = error  # for those who wait for the thread
            log.exception("the coordinators' term in %s is no longer kept", self._place)
        finally:
            if connection is not None:
                connection.terminate()
            if self._held is not None:
                self._held.lost()
            for event in (self._lost, self._ended):
                self._tell(event)

    async def _look(self, connection: asyncpg.Connection) -> None:
        asked_s = now_s()
        found = await connection.fetchrow(_LOOK)
        if found is None:
            raise LocalError(f"{self._place} has no row of the coordinators' term: put back a copy of the database")
        row = TermRow(*found)
        if self._watched.is_over(row, asked_s=asked_s, seen_s=now_s()):
            sent_s = now_s()
            by = 1 + secrets.randbelow(EPOCHS_APART)
            held_ms = round(1_000 * self._term_s)
            epoch = await connection.fetchval(_BEGIN, row.epoch, row.renewals, self.holder, held_ms, by)
            if epoch is not None:
                held = HeldTerm(self._term_s, epoch)
                held.renewed(sent_s=sent_s)
                self._held = held
                self._tell(self._leads)
        elif self._watched.num_renewals:
            self._other = row.holder or "another machine"
            self._tell(self._seen)

    async def _renew(self, connection: asyncpg.Connection, held: HeldTerm) -> None:
        sent_s = now_s()
        if await connection.fetchval(_RENEW, held.epoch) is None:
            held.lost()
            self._tell(self._lost)
        else:
            held.renewed(sent_s=sent_s)

    def _tell(self, event: asyncio.Event) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(event.set)


def now_s() -> float:
    """Return seconds of a clock that counts while this machine sleeps, where the system has one."""
    return time.clock_gettime(_CLOCK)


_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
