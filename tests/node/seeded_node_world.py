"""One coordinator of a simulated run: the real daemon over a simulated disk, server, clock and term."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, replace
from typing import Any

from tests.node.coordinator_world import make_run, memory_parts
from tests.node.gateway_world import SECRET
from tests.node.seeded_gateway_world import SimulatedListener
from tests.node.seeded_leader_world import LeaderRow, SimulatedTerm
from tests.node.seeded_parts_world import (
    Disk,
    NoMetrics,
    ProcessBlobs,
    ProcessDocuments,
    ProcessStore,
    ServedMachine,
    hashes_as_signatures,
)

from prime_lab.virtual_tcp import VirtualTcp
from prime_node.coordinator.assembly import Parts
from prime_node.coordinator.daemon import serve_coordinator
from prime_protocol.errors import TransientFault
from prime_protocol.run_spec import PinnedRun


@dataclass(frozen=True)
class Setting:
    """What a simulated run is made of."""

    run: PinnedRun
    steps: int
    parts: Parts
    pace: float = 1.0
    """Share of the usual time that peers and network take."""


def setting_of(steps: int, *, pace: float = 1.0, **settings: object) -> Setting:
    """Return the setting of a run of so many steps."""
    with hashes_as_signatures():
        run = make_run(max_steps=steps, heartbeat_seconds=5.0, lease_seconds=15.0, groups_per_step=2)
    parts = memory_parts(run, scrub_hours=0.0, requests_per_second=1_000, **settings)
    return Setting(run, steps, parts, pace)


SHORT = setting_of(3, snapshot_events=10, tick_seconds=1.0)
ENDS = (OSError, TransientFault)
"""What ends a coordinator that a service starts again."""


class SimulatedNode(ServedMachine):
    """One coordinator."""

    def __init__(
        self,
        setting: Setting,
        disk: Disk,
        drawn: random.Random,
        row: LeaderRow | None,
        tcp: VirtualTcp | None = None,
        port: int = 0,
    ) -> None:
        """With `tcp`, it hears gateways at `port`."""
        self._parts = setting.parts
        self.port, self._row = port, row
        self.term: SimulatedTerm | None = None
        self.listener: SimulatedListener | None = None
        super().__init__(disk, drawn, tcp)

    async def _serve(self) -> None:
        disk, process = self._disk, self.process
        self.term = None if self._row is None else SimulatedTerm(self._row, process, self._drawn)
        made: dict[str, Any] = {
            "metrics": NoMetrics(),
            "clock": self.clock,
            "store": ProcessStore(process, disk.store),
            "bundles": ProcessBlobs(process, disk.bundles),
            "public": ProcessBlobs(process, disk.public),
            "published": ProcessDocuments(process, disk.published),
            "private": ProcessDocuments(process, disk.private),
            "web": self.web,
            "leadership": self.term,
        }
        changed: dict[str, object] = {} if self.term is None else {"standby": True}
        if self._tcp is not None:
            made["gateways"] = self.listener = SimulatedListener(self._tcp, process)
            made["gateway_secret"] = SECRET
            changed["gateways_listen"] = f"127.0.0.1:{self.port}"
        made["config"] = self._parts.config.model_copy(update=changed)
        parts = replace(self._parts, **made)
        self._daemon = daemon = asyncio.create_task(serve_coordinator(parts, asyncio.Event()))
        try:
            await asyncio.wait({daemon})
            if not (process.has_crashed or daemon.cancelled() or _may_end(daemon.exception())):
                daemon.result()
        finally:
            process.end()
            daemon.cancel()
            await asyncio.gather(daemon, return_exceptions=True)
            self.web.end()
            if self._tcp is not None:
                self._tcp.end(process, is_silent=False)
            if self.term is not None:
                await self.term.end()


def _may_end(error: BaseException | None) -> bool:
    """Return whether an error is one with which a coordinator may end, to be started again."""
    if isinstance(error, BaseExceptionGroup):
        return error.split(ENDS)[1] is None
    return isinstance(error, ENDS)
