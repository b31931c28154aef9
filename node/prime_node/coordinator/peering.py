"""The coordinator's libp2p host: a bootstrap peer, and a relay for peers behind NATs.

The host starts after the web server and waits for nothing. No run depends on it: if the host ends, peers continue over HTTP,
and it is opened again. The log and `prime_p2p_host_faults` report the fault.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from prime_node.broadcast.swarm.network_peer import serve_routes
from prime_node.broadcast.swarm.swarm_tasks import SwarmTasks
from prime_node.coordinator.metrics import HOST_FAULTS, HOST_METRICS
from prime_node.ports.clock import Clock
from prime_node.ports.metrics import Metrics
from prime_node.ports.peer_network import PeerNetwork
from prime_node.ports.transport import Unreachable
from prime_node.ports.web import Route

log = logging.getLogger(__name__)

SHOWN = (
    *("/v1/run", "/v1/head", "/v1/manifests/{policy_version}", "/v1/keys/{version}"),
    *("/v1/calibrations/{version}", "/v1/timestamp"),
)
"""Endpoints of the host: documents, no bytes of checkpoints."""


@dataclass(slots=True)
class PeerHost:
    """The coordinator's own libp2p host."""

    network: PeerNetwork
    clock: Clock
    metrics: Metrics

    async def open(self, routes: Sequence[Route]) -> None:
        """Start the host. Raise LocalError if the machine cannot."""
        serve_routes(self.network, [route for route in routes if route.path in SHOWN])
        await self.network.start()
        log.info("libp2p host for peers: %s", ", ".join(self.network.addresses()) or "no known address yet")

    async def keep(self) -> NoReturn:
        """Reopen the host whenever it has ended, until cancelled."""
        self.metrics.declare(*HOST_METRICS)
        self.metrics.set(HOST_FAULTS, 0.0)
        swarm_tasks = SwarmTasks(
            self.clock, on_fault=lambda num_faults: self.metrics.set(HOST_FAULTS, float(num_faults))
        )

        async def work() -> None:
            if self.network.has_ended():
                await self.network.start()
            await self.network.ended()
            raise Unreachable("the libp2p host has ended")

        await swarm_tasks.keep("the coordinator's libp2p host", work)
