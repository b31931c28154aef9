"""Supervision of the swarm's tasks: restart each after a bug, with back-off, and count and report its faults."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import NoReturn

from prime_node.patience import Backoff, causes_of, first_of
from prime_node.ports.clock import Clock
from prime_protocol.visible import printable

log = logging.getLogger(__name__)

STEADY_S = 60.0
"""Uptime in seconds after which a restarted task begins with the shortest pause again."""
REASON_CHARS_MAX = 200


@dataclass
class SwarmTasks:
    """Faults so far in one machine's swarm. Example: SwarmTasks(clock)."""

    clock: Clock
    on_fault: Callable[[int], None] = lambda num_faults: None
    """Callback for each fault, with the number of faults so far: for metrics."""
    num_faults: int = 0
    last: str = ""
    """Last fault: its part and its error."""

    def note(self, part: str, error: BaseException) -> None:
        """Count a fault of this machine and log it with its traceback."""
        self.num_faults += 1
        reasons = "; ".join(repr(cause) for cause in causes_of(error))
        self.last = f"{part}: {printable(reasons, REASON_CHARS_MAX)}"
        log.error("swarm: %s failed, %d errors so far", part, self.num_faults, exc_info=error)
        self.on_fault(self.num_faults)

    async def keep(self, part: str, work: Callable[[], Awaitable[object]]) -> NoReturn:
        """Run `work` until cancelled. It never ends by itself, so a return counts as a fault too."""
        backoff = Backoff()
        while True:
            began_s = self.clock.monotonic_s()
            try:
                await first_of(work())  # a task of its own: a TaskGroup in it forgets a cancellation
                raise RuntimeError("the task returned, but must never end")
            except Exception as error:  # noqa: BLE001 - the edge of the task: any error is reported, and the part restarts
                self.note(part, error)
                if self.clock.monotonic_s() - began_s >= STEADY_S:
                    backoff = Backoff()
                pause_s = backoff.next_s(error)
            log.warning("swarm: %s restarts in %.1f s; until then other peers serve", part, pause_s)
            await self.clock.sleep(pause_s)

    def describe(self) -> str:
        """Return a summary for the owner's screen, empty if nothing has failed.

        Example: `1 error in the swarm, see the log; ...`.
        """
        if not self.num_faults:
            return ""
        return f"{self.num_faults} error{'s' * (self.num_faults > 1)} in the swarm, see the log; the last: {self.last}"
