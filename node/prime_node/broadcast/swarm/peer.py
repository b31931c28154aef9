"""One peer of the swarm: it serves what is stored, offers itself, and links to others. For workers, seeders and the trainer.

Waiting: nothing waits for a peer. What it serves and fetches is in the have-set and the pool that it was given. A part of it
that fails restarts after a pause and is reported (swarm_tasks.py), so a run never stops because of its swarm.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import NoReturn

from prime_node.broadcast.swarm.directory import Directory
from prime_node.broadcast.swarm.mesh import Mesh
from prime_node.broadcast.swarm.neighbours import Neighbours
from prime_node.broadcast.swarm.serving import PeerService
from prime_node.broadcast.swarm.swarm_config import SwarmConfig
from prime_node.broadcast.swarm.swarm_tasks import SwarmTasks
from prime_node.patience import Switch, cancel_all, unless
from prime_node.ports.peer_network import PeerNetwork
from prime_node.ports.transport import Unreachable
from prime_node.ports.web import CallerBounds, WebServer, is_own_host
from prime_protocol.addresses import network_of
from prime_protocol.errors import LocalError
from prime_protocol.requests import PeersRequest
from prime_protocol.visible import number_of

log = logging.getLogger(__name__)

STOP_S = 1.0
"""Grace period in seconds for answers in progress when the peer stops."""


@dataclass
class Peer:
    """The parts of a peer. Call `running` once."""

    config: SwarmConfig
    service: PeerService
    web: WebServer
    directory: Directory
    swarm_tasks: SwarmTasks
    """Faults so far."""
    neighbours: Neighbours | None = None
    """Links to peers; None for a machine that only serves: the trainer."""
    network: PeerNetwork | None = None
    """Network that reaches peers behind a NAT."""
    mesh: Mesh | None = None
    """Keeper of links over that network."""
    accepted: Switch | None = None
    """Switch that, if given, lets the swarm see this machine only while on: another machine may use the same key."""
    port: int | None = None
    """Port that it serves on."""
    _task: asyncio.Task[None] | None = field(default=None, init=False)

    def offer(self) -> PeersRequest:
        """Return the request to the coordinator, with our addresses if we serve."""
        if self.config.private:
            return PeersRequest()
        return PeersRequest(port=self.port, addresses=() if self.network is None else self.network.addresses())

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Serve and link while the context is open. Raises LocalError if the port is unavailable."""
        if not self.config.private:
            names = {name.lower().rstrip(".") for name in self.config.hosts}
            bounds = CallerBounds(
                network_of=lambda address, _: network_of(address),
                is_host=lambda address, host: is_own_host(address, host, names),
            )
            routes = self.service.routes()
            self.port = await self.web.start(routes, host=self.config.host, port=self.config.port, bounds=bounds)
            log.info("serving peers on port %d", self.port)
        if self.network is not None and self.accepted is None:
            await self.network.start()
        work = self._run if self.accepted is None else functools.partial(self._run_while, self.accepted)
        self._task = asyncio.create_task(self.swarm_tasks.keep("taking part", work))
        try:
            yield
        finally:
            await cancel_all(self._task)
            self.service.close()
            if self.network is not None:
                await self.network.close()
            await self.web.stop(grace_s=STOP_S)
            self.service.uplink.close()

    @property
    def num_linked(self) -> int:
        """Return the number of peers that this machine is linked to."""
        return 0 if self.neighbours is None else len(self.neighbours.linked)

    def describe(self) -> str:
        """Return a summary for the owner's screen. Example: `4 peers, 120.5 MB sent`."""
        if self.config.private:
            standing = "private"
        elif self.directory.reachable is False:
            standing = f"not reachable on port {self.port} (forward it, or set swarm.private)"
        else:
            standing = f"port {self.port}"
        if self.network is not None:
            punched, tried = self.network.punched()
            standing += f", libp2p {self.network.reachability()}"
            standing += f" (hole punching worked for {punched} of {tried} peers)" if tried else ""
            standing += (
                "; pieces of the other peers come through reachable peers and the coordinator"
                if punched < tried
                else ""
            )
        summary = (
            f"{number_of(self.num_linked, 'peer')}, {self.service.uplink.served_bytes / 1e6:.1f} MB sent, {standing}"
        )
        return "; ".join(filter(None, (summary, self.swarm_tasks.describe())))

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            if self.neighbours is not None:
                tasks.create_task(
                    self.swarm_tasks.keep("links to peers", functools.partial(self.neighbours.run, self.offer))
                )
            else:
                asking = functools.partial(self.directory.run, offer_of=self.offer)
                tasks.create_task(self.swarm_tasks.keep("peers' directory", asking))
            if (uplink := self.service.uplink).links is not None:
                tasks.create_task(self.swarm_tasks.keep("room on the uplink", uplink.leave_room))
            if self.mesh is not None:
                tasks.create_task(
                    self.swarm_tasks.keep("the peer network", functools.partial(self._keep_links, self.mesh))
                )

    async def _run_while(self, accepted: Switch) -> NoReturn:
        """Open the network and take part while `accepted` is on; leave and close it otherwise."""
        while True:
            await accepted.on()
            try:
                await unless(accepted.off(), self._open_and_run())
            finally:
                if self.network is not None:
                    await self.network.close()

    async def _open_and_run(self) -> None:
        if self.network is not None:
            starting = asyncio.ensure_future(self.network.start())
            try:
                await asyncio.shield(starting)
            except asyncio.CancelledError:  # a half-open network cannot be closed
                await asyncio.gather(starting, return_exceptions=True)
                raise
            except (LocalError, Unreachable) as error:
                self.swarm_tasks.note("the peer network", error)  # `_keep_links` opens it again
        await self._run()

    async def _keep_links(self, mesh: Mesh) -> None:
        """Run the mesh; reopen the peer network if it has ended.

        Peers are reachable over HTTP too, so the rest of the swarm keeps running.
        """
        if self.network is not None and self.network.has_ended():
            await self.network.start()
        await mesh.run()
