"""The coordinator's libp2p host: a bootstrap peer, a relay for peers behind NATs, and the first to announce a head.

The host starts after the web server and waits for nothing; announcements wait for a new head. No run depends on it: if the host
ends, peers continue over HTTP, and it is opened again. The log and `prime_p2p_host_faults` report the fault.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from prime_node.broadcast.swarm.gossiped_heads import TOPIC, announce
from prime_node.broadcast.swarm.network_peer import serve_routes
from prime_node.broadcast.swarm.swarm_tasks import SwarmTasks
from prime_node.coordinator.api.statements import TimestampSigner
from prime_node.coordinator.manifests import PublishedManifests
from prime_node.coordinator.metrics import HOST_FAULTS, HOST_METRICS
from prime_node.coordinator.state.effects import Topic
from prime_node.coordinator.waiting import Notifications
from prime_node.ports.clock import Clock
from prime_node.ports.metrics import Metrics
from prime_node.ports.peer_network import GossipJudgement, PeerNetwork
from prime_node.ports.transport import Unreachable
from prime_node.ports.web import Route
from prime_protocol import limits
from prime_protocol.identity import KeyId
from prime_protocol.manifest import SignedManifest

log = logging.getLogger(__name__)

SHOWN = ("/v1/run", "/v1/head", "/v1/manifests/{policy_version}", "/v1/keys/{version}", "/v1/timestamp")
"""Endpoints of the host: documents, no bytes of checkpoints."""


@dataclass(slots=True)
class PeerHost:
    """The coordinator's own libp2p host."""

    network: PeerNetwork
    clock: Clock
    metrics: Metrics
    notifications: Notifications
    manifests: PublishedManifests
    timestamps: TimestampSigner

    async def open(self, routes: Sequence[Route]) -> None:
        """Start the host. Raise LocalError if the machine cannot."""
        network = self.network
        serve_routes(network, [route for route in routes if route.path in SHOWN])
        network.subscribe(TOPIC, _judge, _hear)
        await network.start()
        log.info("libp2p host for peers: %s", ", ".join(network.addresses()) or "no known address yet")

    async def keep(self) -> NoReturn:
        """Announce heads, and reopen the host when it has ended, until cancelled."""
        self.metrics.declare(*HOST_METRICS)
        self.metrics.set(HOST_FAULTS, 0.0)
        swarm_tasks = SwarmTasks(
            self.clock, on_fault=lambda num_faults: self.metrics.set(HOST_FAULTS, float(num_faults))
        )

        async def work() -> None:
            if self.network.has_ended():
                await self.network.start()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._announce_heads())
                await self.network.ended()
                raise Unreachable("the libp2p host has ended")

        await swarm_tasks.keep("the coordinator's libp2p host", work)

    async def _announce_heads(self) -> None:
        """Announce every new head, until the daemon stops or the host has ended."""
        announced = self.manifests.head

        def is_told(head: SignedManifest | None) -> bool:
            return head is None or (announced is not None and head.digest == announced.digest)

        while True:
            head = await self.notifications.until(
                Topic.HEAD, lambda: self.manifests.head, is_worth_waiting=is_told, wait_s=limits.WAIT_S_MAX
            )
            if head is None or is_told(head):
                continue
            announced = head
            stamp = self.timestamps.newest
            names_it = stamp is not None and stamp[0].policy_version == head.manifest.policy_version
            if not await announce(self.network, head.envelope, stamp[1] if stamp is not None and names_it else None):
                return


async def _judge(sender: KeyId, data: bytes) -> GossipJudgement:
    """The coordinator ignores gossiped heads: it gets them from the trainer."""
    return GossipJudgement.IGNORE


async def _hear(author: KeyId, data: bytes) -> None:
    raise AssertionError("nothing was accepted")
