"""The daemon of a gateway: the web server of a coordinator, and the link to the writer.

Handlers wait for the link. One task keeps the link open, another reports what was refused for load.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from prime_node.coordinator.api.blobs import BlobReader
from prime_node.coordinator.api.callers import Callers, caller_bounds_of
from prime_node.coordinator.config import CoordinatorConfig
from prime_node.coordinator.gateway.config import GatewayConfig
from prime_node.coordinator.gateway.relay import GatewayRelay
from prime_node.patience import first_of, in_a_hurry
from prime_node.ports.blobs import Blobs
from prime_node.ports.clock import Clock
from prime_node.ports.web import WebServer
from prime_node.ports.writer_link import WriterLink
from prime_protocol.run_spec import PinnedRun

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GatewayParts:
    """Parts of a gateway."""

    run: PinnedRun
    config: GatewayConfig
    shared: CoordinatorConfig
    """Settings of the coordinator, for the limits on callers."""
    clock: Clock
    web: WebServer
    link: WriterLink
    public: Blobs | None = None
    """Public blobs, where gateways can read them; None: the writer serves them."""
    bundles: Blobs | None = None
    """Bundles, where gateways can store them; None: the writer stores them."""


async def serve_gateway(
    parts: GatewayParts, stop: asyncio.Event, *, ready: Callable[[int], None] = lambda port: None
) -> None:
    """Serve until `stop` is set. Call `ready` with the port. Raises LocalError."""
    shared = parts.shared
    callers = Callers(proxies=shared.behind, trusted=shared.trusted)
    blobs = None if parts.public is None else BlobReader(parts.run, parts.public, serve_chunks=shared.serve_chunks)
    relay = GatewayRelay(parts.run, parts.link, callers, parts.clock, blobs, parts.bundles)
    bounds = replace(caller_bounds_of(shared), refused=relay.note_refused, claimed=relay.senders.claimed)
    port = await parts.web.start(relay.routes(), host=parts.config.host, port=parts.config.port, bounds=bounds)
    log.info("gateway of run %s on port %d", parts.run.digest[:12], port)
    ready(port)
    try:
        await first_of(stop.wait(), parts.link.keep(), relay.report_refused())
    finally:
        relay.live.close()
        await parts.web.stop(grace_s=min(shared.grace_seconds, 1.0) if in_a_hurry(stop) else shared.grace_seconds)
