"""Where bundles are scored: beside the forward passes, one bundle in each lane, so that one that hangs holds up no other.

Who waits for whom: a bundle waits for a free lane; a lane, for the environments' process behind it, which a thread waits for. The
first lane is made at the start, the others when all are taken. Where another cannot be made, those that are there must do.
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
"""All of a run, by name."""


class Lanes:
    """At most `lanes_max` sets of a run's environments, each from `make`, which may block; `end` frees one."""

    def __init__(
        self, make: Callable[[], Environments], *, lanes_max: int, end: Callable[[Environments], None] = lambda _: None
    ) -> None:
        self._make, self._end = make, end
        self._room = asyncio.Semaphore(lanes_max)
        self._made: list[Environments] = []
        self._idle: list[Environments] = []

    async def open(self) -> None:
        """Make the first, so that what is wrong with an environment is known before there is work. Raises LocalError."""
        self._idle.append(await self._another())

    @contextlib.asynccontextmanager
    async def lane(self) -> AsyncIterator[Environments]:
        """A set of environments that nobody else uses meanwhile."""
        async with self._room:
            environments = await self._free()
            try:
                yield environments
            finally:
                self._idle.append(environments)

    def close(self) -> None:
        """Idempotent. Whoever waits for an answer gets none."""
        while self._made:
            self._end(self._made.pop())

    async def _free(self) -> Environments:
        """For whoever has found room. A machine that had memory or data for the first only may not have them for another."""
        while not self._idle:
            try:
                return await self._another()
            except (LocalError, OSError) as error:
                if not self._made:
                    raise
                log.warning("no further bundle is scored beside %d: %s", len(self._made), error)
            await self._room.acquire()  # and keep it: there is one lane fewer from here on
        return self._idle.pop()

    async def _another(self) -> Environments:
        made = await asyncio.to_thread(self._make)
        self._made.append(made)
        return made
