"""Gateways of a simulated run: the real daemon and the real link, over simulated connections that break, garble and delay.

The writer's end of a connection follows the rules of its process: while that is stopped nothing leaves it, and what it held
leaves only in its term.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence

from tests.node.coordinator_world import memory_parts
from tests.node.gateway_world import SECRET
from tests.node.seeded_faults_world import Fault
from tests.node.seeded_network_world import ANSWER_S_MAX, BadNetwork, require_changes, require_head
from tests.node.seeded_parts_world import Disk, ProcessBlobs, ServedMachine, SimulatedProcess

from prime_lab.virtual_tcp import VirtualTcp
from prime_node.adapters.link.link_client import LinkClient
from prime_node.adapters.link.link_server import LinkServer
from prime_node.coordinator.gateway.config import GatewayConfig
from prime_node.coordinator.gateway.daemon import GatewayParts, serve_gateway
from prime_node.ports.writer_link import AnswerCall, ForwardedAnswer, ForwardedCall
from prime_protocol.identity import SigningKey
from prime_protocol.rollout import EngineInfo
from prime_protocol.run_spec import PinnedRun

FIRST_PORT = 8402
NUM_GATEWAYS = 2
BEHIND_GATEWAYS = (
    *("gateway crash", "gateway power", "gateway stop", "gateway's clock"),
    *("link cut", "link one way", "link late", "link garbled"),
)
"""Kinds of faults of gateways and of the links to their writers."""


class SimulatedListener(LinkServer):
    """The writer's side of the link in one simulated process."""

    def __init__(self, tcp: VirtualTcp, process: SimulatedProcess) -> None:
        super().__init__()
        self._tcp, self._process = tcp, process
        self.answering = dict[object, str]()
        """Path of each call that is being answered."""

    async def start(
        self,
        answer: AnswerCall,
        *,
        address: tuple[str, int],
        secret: bytes,
        run: str,
        body_bytes_max: int,
        may_send: Callable[[], bool] | None,
    ) -> int:
        """Listen at a simulated port."""
        self.body_bytes_max = body_bytes_max

        def noted(call: ForwardedCall) -> ForwardedAnswer | Awaitable[ForwardedAnswer]:
            answered = answer(call)
            return answered if isinstance(answered, ForwardedAnswer) else waited(call, answered)

        async def waited(call: ForwardedCall, answered: Awaitable[ForwardedAnswer]) -> ForwardedAnswer:
            self.answering[one := object()] = call.path
            try:
                return await answered
            finally:
                del self.answering[one]

        is_allowed, may_act = may_send or (lambda: True), self._process.may_act
        factory = self.link_factory(noted, secret, run, lambda: not may_act.is_set() or is_allowed())
        self._tcp.listen(address[1], self._process, factory, is_allowed)
        return address[1]


async def require_settled(
    net: BadNetwork,
    num_gateways: int,
    version: int,
    listeners: Sequence[SimulatedListener],
    worker: SigningKey,
    engine: EngineInfo,
) -> None:
    """Require that gateways show the newest policy and changes, and that writers have answered what they were asked."""
    await require_head(net, num_gateways, version)
    await require_changes(net, num_gateways, worker, engine)
    begun = [dict(listener.answering) for listener in listeners]
    await asyncio.sleep(ANSWER_S_MAX)
    left = [
        calls[one]
        for calls, listener in zip(begun, listeners, strict=True)
        for one in calls.keys() & listener.answering
    ]
    assert not left, f"a writer has not answered {left} in {ANSWER_S_MAX:.0f} s"


class SimulatedGateway(ServedMachine):
    """One gateway."""

    def __init__(
        self, name: str, run: PinnedRun, ports: Sequence[int], tcp: VirtualTcp, disk: Disk, drawn: random.Random
    ) -> None:
        self.name = name
        self._run, self._ports, self._lines = run, ports, tcp
        self._shares_storage = drawn.random() < 0.5
        super().__init__(disk, drawn, tcp)

    async def _serve(self) -> None:
        process = self.process
        self._lines.place(self.name, process)
        link = LinkClient([(self.name, port) for port in self._ports], secret=SECRET, run=self._run.digest)
        parts = GatewayParts(
            run=self._run,
            config=GatewayConfig(),
            shared=memory_parts(self._run).config,
            clock=self.clock,
            web=self.web,
            link=link,
            public=ProcessBlobs(process, self._disk.public) if self._shares_storage else None,
            bundles=ProcessBlobs(process, self._disk.bundles) if self._shares_storage else None,
        )
        self._daemon = daemon = asyncio.create_task(serve_gateway(parts, asyncio.Event()))
        try:
            await asyncio.wait({daemon})
            if not process.has_crashed:
                daemon.result()
                raise AssertionError("a gateway has ended by itself")
        finally:
            self.crash(0.0)
            await asyncio.gather(daemon, return_exceptions=True)

    async def disturb(self, fault: Fault, port: int) -> None:
        """Let one fault begin, and heal it. `port` is that of the writer whose wire is concerned."""
        wire, process = self._lines.wire(self.name, port), self.process
        match fault.kind:
            case "gateway crash" | "gateway power":
                self.crash(fault.seconds, is_silent=fault.kind == "gateway power")
            case "gateway stop":
                process.may_act.clear()
                await asyncio.sleep(fault.seconds)
                process.may_act.set()
            case "gateway's clock":
                self.clock.ahead_s = fault.amount
                await asyncio.sleep(fault.seconds)
                self.clock.ahead_s = 0.0
            case "link cut" | "link one way":
                cut = wire.passes if fault.kind == "link cut" else (wire.passes[fault.amount > 0],)
                for passes in cut:
                    passes.clear()
                await asyncio.sleep(2 * fault.seconds)
                for passes in cut:
                    passes.set()
            case "link late":
                wire.delay_s = fault.seconds / 2
                await asyncio.sleep(2 * fault.seconds)
                wire.delay_s = 0.02
            case "link garbled":
                wire.num_garbled += 1
