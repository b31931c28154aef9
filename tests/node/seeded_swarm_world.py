"""Machines that follow a run and serve it to each other, on virtual time, disturbed by faults that a seed gives.

Real: followers and a seeder, trust, downloads, the files of each machine, and what answers its peers. Simulated: the trainer
with its origin, the network, each clock. Machines crash, files rot or are cut short, the origin is away, answers are lost or
changed.

    python -m tests.node.seeded_swarm_world 7              one run, with its faults
    python -m tests.node.seeded_swarm_world 0 --to 1000    many; of one that fails, the fewest faults that still fail
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from tests.node.seeded_faults_world import FAULTY_S, NOISE, Fault, Simulation, draw_faults, run_seeds
from tests.node.seeded_parts_world import SkewedClock, hashes_as_signatures
from tests.node.table_engine import table_weights
from tests.node.worker_world import MemorySource, make_run

from prime_lab.virtual_loop import run_virtually
from prime_node.broadcast.follow.follower import Follower
from prime_node.broadcast.follow.trust import Trust
from prime_node.broadcast.seed.seeder import Seeder
from prime_node.broadcast.swarm.serving import PeerService
from prime_node.broadcast.swarm.sources import SourcePool
from prime_node.broadcast.swarm.uplink import Uplink
from prime_node.ports.transport import Unreachable
from prime_node.ports.web import Request, Route
from prime_protocol.envelope import Envelope, open_envelope
from prime_protocol.identity import SigningKey
from prime_protocol.run_spec import open_run_spec
from prime_protocol.weights import root_of

KINDS = ("crash", "crash", "cut off", "origin away", "peer's clock", "rot", "rot", "truncate", "lie")
MACHINES, POLICIES = 4, 6
CALM_S = 1_800.0
with hashes_as_signatures():
    KEYS = [SigningKey(bytes([120 + number]) * 32) for number in range(MACHINES)]


class SimulatedPeer:
    """One machine. What it has learned is on its disk, from which it starts again after a crash."""

    def __init__(self, swarm: SimulatedSwarm, number: int, folder: Path) -> None:
        self._swarm, self._number, self.folder = swarm, number, folder
        self.clock = SkewedClock()
        self.cut_off = 0
        self.routes: dict[str, Route] = {}
        self.newest = self.newest_here = -1
        self._following: asyncio.Task[Any] | None = None

    async def live(self) -> None:
        """Follow until cancelled, again after each crash."""
        while True:
            self._following = asyncio.ensure_future(self._follow())
            await asyncio.wait({self._following})
            self.routes = {}
            if not self._following.cancelled():
                self._following.result()
            await asyncio.sleep(self._swarm.drawn.uniform(0.0, 5.0))

    def crash(self) -> None:
        if self._following is not None:
            self._following.cancel()

    async def _follow(self) -> None:
        swarm, drawn = self._swarm, self._swarm.drawn
        self.newest_here = -1
        run = open_run_spec(swarm.origin.run.envelope, pinned=swarm.origin.run.digest)
        origin = SimulatedSource(swarm, self, None)
        peers = [
            (f"peer-{one}", SimulatedSource(swarm, self, swarm.machines[one]))
            for one in range(MACHINES)
            if one != self._number
        ]
        sources: list[Any] = [("origin", origin), *peers]
        trust = Trust(
            run,
            sources[:1],
            self.folder / "trust",
            clock=self.clock,
            rng=random.Random(drawn.random()),
            peers=lambda: peers,
        )
        pool = SourcePool(sources, clock=self.clock, rng=random.Random(drawn.random()))
        clock, rng = self.clock, random.Random(drawn.random())
        follower: Follower | Seeder
        if self._number == MACHINES - 1:
            follower = Seeder(
                run,
                pool,
                self.folder / "checkpoints",
                clock=clock,
                rng=rng,
                memory_bytes_max=2**20,
                parts_bytes_max=2**24,
            )
        else:
            follower = Follower(
                run, pool, self.folder / "checkpoints", clock=clock, poll_s=1.0, rng=rng, policies_kept=2
            )
        service = PeerService(
            run,
            KEYS[self._number],
            follower.have_set,
            follower.parts,
            Uplink(clock=clock),
            clock,
            follower.manifest_at_hand,
            folder=self.folder,
        )
        self.routes = {route.path: route for route in service.routes()}
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(trust.follow())
            tasks.create_task(follower.follow())
            while True:
                if isinstance(follower, Seeder):
                    await asyncio.sleep(1.0)
                    self.newest = max(self.newest, follower.seed_store.newest)
                else:
                    policy = await follower.wait_newer(self.newest_here)
                    self.newest_here = policy.version
                    assert root_of(policy.weights) == swarm.roots[policy.version], (
                        f"policy {policy.version} has other weights"
                    )
                    self.newest = max(self.newest, policy.version)
                assert not list(self.folder.rglob("evidence/*")), "an honest run was convicted"


class SimulatedSource:
    """The origin, or another machine, as one machine reaches it."""

    def __init__(self, swarm: SimulatedSwarm, asker: SimulatedPeer, other: SimulatedPeer | None) -> None:
        self._swarm, self._asker, self._other = swarm, asker, other

    async def run_spec(self) -> Envelope:
        return self._swarm.origin.run.envelope

    async def head(self, *, wait_s: float = 0.0) -> Envelope | None:
        return await self._ask("/v1/head", lambda origin: origin.head())

    async def manifest(self, policy_version: int) -> Envelope:
        path = "/v1/manifests/{policy_version}"
        return await self._ask(path, lambda origin: origin.manifest(policy_version), policy_version=policy_version)

    async def timestamp(self) -> Envelope:
        return await self._ask("/v1/timestamp", lambda origin: origin.timestamp())

    async def key_ring(self, version: int) -> Envelope:
        return await self._ask("/v1/keys/{version}", lambda origin: origin.key_ring(version), version=version)

    async def calibration(self, version: int) -> Envelope:
        path = "/v1/calibrations/{version}"
        return await self._ask(path, lambda origin: origin.calibration(version), version=version)

    async def blob(self, digest: str, *, start: int = 0, end: int | None = None) -> bytes:
        wanted = {} if end is None else {"range": f"bytes={start}-{end - 1}"}
        data = await self._asked(
            "/v1/blobs/{digest}", lambda origin: origin.blob(digest, start=start, end=end), wanted, digest=digest
        )
        assert isinstance(data, bytes)
        return data

    async def _ask(self, path: str, of_origin: Callable[[MemorySource], Any], **params: object) -> Any:
        found = await self._asked(path, of_origin, {}, **params)
        return open_envelope(found) if isinstance(found, bytes) and found else found or None

    async def _asked(
        self, path: str, of_origin: Callable[[MemorySource], Any], headers: dict[str, str], **params: object
    ) -> Any:
        swarm, other = self._swarm, self._other
        swarm.num_asked += 1
        await asyncio.sleep(swarm.drawn.uniform(0.0, 0.4))
        away = swarm.origin_away if other is None else other.cut_off or not other.routes
        if self._asker.cut_off or away or (swarm.is_noisy and swarm.drawn.random() < 0.05):
            raise Unreachable("lost")
        if other is None:
            found = await of_origin(swarm.origin)
        else:
            named = {name: str(value) for name, value in params.items()}
            response = await other.routes[path].handler(Request(named, b"", headers, "127.0.0.1"))
            found = (
                response.body if isinstance(response.body, bytes) else b"".join([part async for part in response.body])
            )
            if response.after is not None:
                response.after()
        if isinstance(found, bytes) and found and other is not None and other in swarm.liars:
            place = swarm.drawn.randrange(len(found))
            return found[:place] + bytes([found[place] ^ 1]) + found[place + 1 :]
        return found


class SimulatedSwarm:
    """One simulated run."""

    def __init__(self, seed: int, faults: Sequence[Fault], say: Callable[[str], None], folder: Path) -> None:
        self.drawn, self.say = random.Random(seed), say
        self.faults, self.is_noisy = faults, NOISE in faults
        self.origin = MemorySource(make_run())
        self.origin_away = 0
        self.roots: dict[int, str] = {}
        self.liars = set[SimulatedPeer]()
        self.num_asked = 0
        self.machines = [SimulatedPeer(self, number, folder / str(number)) for number in range(MACHINES)]
        self.origin.now_ms = SkewedClock().now_ms

    def __str__(self) -> str:
        return f"{self.num_asked} requests, policies {[machine.newest for machine in self.machines]}"

    async def train(self) -> None:
        base = None
        for version in range(POLICIES):
            weights = table_weights(version)
            signed = self.origin.publish(weights, bases=[None, base] if base else [None])
            base = signed, weights
            self.roots[version] = root_of(weights)
            await asyncio.sleep(self.drawn.uniform(1.0, 1.5 * FAULTY_S / POLICIES))

    async def disturb(self, fault: Fault) -> None:
        await asyncio.sleep(fault.at_s)
        self.say(str(fault))
        machine = self.machines[fault.who % MACHINES]
        files = sorted(path for path in machine.folder.rglob("*") if path.is_file())
        match fault.kind:
            case "crash":
                machine.crash()
            case "cut off":
                machine.cut_off += 1
                await asyncio.sleep(fault.seconds)
                machine.cut_off -= 1
            case "origin away":
                self.origin_away += 1
                await asyncio.sleep(fault.seconds)
                self.origin_away -= 1
            case "peer's clock":
                machine.clock.ahead_s = fault.amount
                await asyncio.sleep(fault.seconds)
                machine.clock.ahead_s = 0.0
            case "lie":
                self.liars.add(machine)
                await asyncio.sleep(fault.seconds)
                self.liars.discard(machine)
            case "rot" | "truncate" if files:
                path = self.drawn.choice(files)
                data = bytearray(path.read_bytes())
                place = self.drawn.randrange(len(data)) if data else 0
                if fault.kind == "truncate":
                    data = data[:place]
                elif data:
                    data[place] ^= 1 << self.drawn.randrange(8)
                path.write_bytes(data)
                self.say(f"    {path.relative_to(machine.folder)}")
                if self.drawn.random() < 0.5:
                    machine.crash()

    async def run(self) -> None:
        """Run until each machine has the last policy. Raises AssertionError."""
        tasks = [
            *(asyncio.create_task(machine.live()) for machine in self.machines),
            asyncio.create_task(self.train()),
            *(asyncio.create_task(self.disturb(fault)) for fault in self.faults),
        ]
        try:
            async with asyncio.timeout(FAULTY_S + CALM_S):
                while any(machine.newest < POLICIES - 1 for machine in self.machines):
                    await asyncio.wait(tasks, timeout=1.0, return_when=asyncio.FIRST_EXCEPTION)
                    for task in tasks:
                        if task.done():
                            task.result()
        except TimeoutError:
            newest = [machine.newest for machine in self.machines]
            raise AssertionError(f"the machines do not get past policies {newest}") from None
        finally:
            for machine in self.machines:
                machine.crash()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def simulate_swarm(
    seed: int, only: Collection[int] | None = None, say: Callable[[str], None] = lambda text: None
) -> SimulatedSwarm:
    """Run one seed, with some of its faults if `only` names them. Raises what fails."""
    faults = draw_faults(seed, KINDS)
    chosen = [faults[number] for number in (range(len(faults)) if only is None else only)]
    memory = Path("/dev/shm")
    with (
        tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder,
        hashes_as_signatures(),
    ):

        async def main() -> SimulatedSwarm:
            swarm = SimulatedSwarm(seed, chosen, say, Path(folder))
            await swarm.run()
            return swarm

        return run_virtually(main())


SWARM = Simulation("tests.node.seeded_swarm_world", lambda seed: draw_faults(seed, KINDS), simulate_swarm)

if __name__ == "__main__":
    run_seeds(SWARM)
