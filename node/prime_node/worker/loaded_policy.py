"""The policy in a worker's engine, and the leases that are generated with it side by side.

Concurrency: leases enter and leave on the event loop. A swap in flight waits until no lease requires the present policy to the
end (an evaluation's does), and excludes the start of a batch. A load waits until no lease is left; the caller ensures that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from prime_node.ports.engine import EngineMismatch, SwappingEngine
from prime_protocol.schedule import SwapPolicy
from prime_protocol.weights import Weights


@dataclass
class LoadedPolicy:
    """The policy in the engine, the leases that use it, and how long the last swap to it took."""

    version: int = -1
    """Policy that the engine holds; -1 if it must be loaded again."""
    newest: int = -1
    """Newest policy that the engine has held."""
    usable_after_ms: int | None = None
    """Time from the held policy's publication until the engine had it; None if it is not meaningful for its update path."""
    swap_ms: int | None = None
    """Part of that time spent in the engine."""
    border: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Lock held by a swap, and while a batch starts, so that a batch knows its first policy."""
    unused: asyncio.Event = field(default_factory=asyncio.Event)
    """Event set while no lease uses the policy."""
    _leases: set[str] = field(default_factory=set)
    _pinning: set[str] = field(default_factory=set)
    _unpinned: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        """Begin without leases."""
        self._note()

    def enter(self, lease_id: str, *, to_the_end: bool) -> None:
        """Record a lease that uses the policy. `to_the_end`: all its tokens must be of this policy."""
        self._leases.add(lease_id)
        if to_the_end:
            self._pinning.add(lease_id)
        self._note()

    def leave(self, lease_id: str) -> None:
        """Record that a lease no longer uses the policy. Idempotent."""
        self._leases.discard(lease_id)
        self._pinning.discard(lease_id)
        self._note()

    async def swap_to(
        self,
        policy_version: int,
        weights: Weights,
        *,
        engine: SwappingEngine,
        swap: SwapPolicy,
        timed: Callable[[int], AbstractContextManager[None]],
    ) -> None:
        """Swap the engine to a newer policy while it generates, unless that is done already.

        Every lease in generation may call it. Raises EngineMismatch for all of them if one swap fails.
        """
        while True:
            await self._unpinned.wait()
            async with self.border:
                if self._pinning:
                    continue
                if self.version < 0:
                    raise EngineMismatch("a swap to a newer policy has failed")
                if self.version < policy_version:
                    try:
                        with timed(policy_version):
                            await engine.update(weights, policy_version=policy_version, swap=swap)
                    except BaseException:
                        self.version = -1
                        raise
                    self.version = policy_version
                return

    def swapped(self, version: int, *, usable_after_ms: int | None, swap_ms: int) -> None:
        """Record a swap. Its times count only if the policy is newer than an earlier one."""
        counts = usable_after_ms is not None and version > self.newest >= 0
        self.usable_after_ms, self.swap_ms = (usable_after_ms, swap_ms) if counts else (None, None)
        self.version, self.newest = version, max(version, self.newest)

    def _note(self) -> None:
        for event, holds in ((self.unused, not self._leases), (self._unpinned, not self._pinning)):
            if holds:
                event.set()
            else:
                event.clear()
