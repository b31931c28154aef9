"""Scoring workers: bundles are scored in parallel to forward passes, each in a worker of its own.

Concurrency: a bundle waits for a free worker. A worker waits, in a thread, for its environments' process. The first worker is
made at the start, the others when all are busy. If another one cannot be made, the existing ones remain.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping

from prime_node.ports.environment import Environment
from prime_protocol.errors import LocalError

log = logging.getLogger(__name__)

Environments = Mapping[str, Environment]
"""Environments of a run, by name."""


class ScoringWorkers:
    """Pool of at most `workers_max` sets of a run's environments. `make`, which may block, creates one; `end` frees it."""

    def __init__(
        self,
        make: Callable[[], Environments],
        *,
        workers_max: int,
        end: Callable[[Environments], None] = lambda _: None,
    ) -> None:
        self._make, self._end = make, end
        self._room = asyncio.Semaphore(workers_max)
        self._made: list[Environments] = []
        self._idle: list[Environments] = []

    async def open(self) -> None:
        """Make the first set, so that a broken environment is known before there is work. Raises LocalError."""
        self._idle.append(await self._another())

    @contextlib.asynccontextmanager
    async def worker(self) -> AsyncIterator[Environments]:
        """Hold a set of environments exclusively."""
        async with self._room:
            environments = await self._free()
            try:
                yield environments
            finally:
                self._idle.append(environments)

    def close(self) -> None:
        """Free all sets. Idempotent. Pending requests get no answer."""
        while self._made:
            self._end(self._made.pop())

    async def _free(self) -> Environments:
        """Return an idle or a new set. A machine may have had memory or data only for the first one."""
        while not self._idle:
            try:
                return await self._another()
            except (LocalError, OSError) as error:
                if not self._made:
                    raise
                log.warning("cannot start another scoring worker, so %d remain: %s", len(self._made), error)
            await self._room.acquire()  # and never release it: from here on there is one worker fewer
        return self._idle.pop()

    async def _another(self) -> Environments:
        made = await asyncio.to_thread(self._make)
        self._made.append(made)
        return made
