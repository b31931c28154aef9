"""A whole coordinator with workers, a validator and a trainer on virtual time, disturbed by faults that a seed gives.

Real: the daemon with its timers, signatures, state machine, journal, snapshots, ledger. Simulated: the network between the peers
and it, its disk, each clock, and what the peers compute. The network delays, reorders, repeats and loses requests and answers. A
crash ends the daemon at any moment; a write in progress is then on the disk or not. Each third seed has two coordinators, of
which one leads by the real rules of terms and the other is a standby; one may be stopped, or lose the database. Each fourth
one has two gateways in front of them, which crash too, and whose links break, are late or garble what they carry.

    python -m tests.node.seeded_world 179                  one run, with its faults
    python -m tests.node.seeded_world 179 --only 0,4       the same with some of its faults
    python -m tests.node.seeded_world 0 --to 5000          many; of one that fails, the fewest faults that still fail
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field

from tests.node.coordinator_world import ANNA, BEN, COORDINATOR, ENGINE, TRAINER, VALIDATOR, make_manifest, make_parcel
from tests.node.seeded_faults_world import ALONE, FAULTY_S, NOISE, PAIRED, Fault, Simulation, draw_faults, run_seeds
from tests.node.seeded_gateway_world import BEHIND_GATEWAYS, FIRST_PORT, NUM_GATEWAYS, SimulatedGateway, require_settled
from tests.node.seeded_leader_world import LeaderRow
from tests.node.seeded_network_world import BadNetwork, look_at_gateway, name_of, take_timestamp
from tests.node.seeded_node_world import SHORT, Setting, SimulatedNode
from tests.node.seeded_parts_world import Disk, checked_after_each_event, hashes_as_signatures, replaced

from prime_lab.virtual_loop import run_virtually
from prime_lab.virtual_tcp import VirtualTcp
from prime_node.adapters.link import link_client
from prime_node.coordinator.assignments import Assigner
from prime_node.coordinator.journal_replay import JournalReplay
from prime_node.coordinator.state.rules import rules_of
from prime_node.coordinator.state_follower import restore_state
from prime_node.patience import Backoff
from prime_node.ports.transport import Unreachable
from prime_protocol.assignment import Lease
from prime_protocol.digest import digest_of
from prime_protocol.envelope import PayloadType, open_envelope, parse_json
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.identity import SigningKey
from prime_protocol.ledger import LedgerChain, LedgerHead
from prime_protocol.manifest import Manifest
from prime_protocol.parcel import pack_parcel
from prime_protocol.replies import CheckTask, TrainBatch
from prime_protocol.requests import (
    BatchRequest,
    BlobHeader,
    CheckRequest,
    CheckResultRequest,
    JoinRequest,
    LeaseRequest,
)
from prime_protocol.timestamp import Timestamp
from prime_protocol.verdict import BundleStatus, Receipt, RejectReason, Verdict

PEERS = (ANNA, BEN, TRAINER, VALIDATOR)
CALM_S = 900.0
"""Time after it in which the run must reach its last step."""
WAIT_S = 8.0
"""Time that clients let the coordinator wait for something new."""


@dataclass
class Cluster:
    """One simulated run. What its peers were promised is compared in the end."""

    seed: int
    only: Collection[int] | None = None
    """Numbers of the faults that take place; None: all."""
    say: Callable[[str], None] = lambda text: None
    setting: Setting = SHORT
    on_policy: Callable[[int], Awaitable[None]] | None = None
    """Callback after each publication."""
    drawn: random.Random = field(init=False)
    head: Manifest | None = None
    head_digest: str = ""
    promised: dict[str, str] = field(default_factory=dict)
    """Lease of each bundle whose upload was acknowledged."""
    accepted: set[str] = field(default_factory=set)
    """Bundles whose acceptance was acknowledged."""
    batches: dict[int, str] = field(default_factory=dict)
    """Digest of each batch that the trainer got."""
    trained: Counter[int] = field(default_factory=Counter)
    heads: list[LedgerHead] = field(default_factory=list)
    stamps: dict[SigningKey, Timestamp] = field(default_factory=dict)
    """Newest timestamp that each peer took."""
    is_done: bool = False

    def __str__(self) -> str:
        return f"{len(self.promised)} uploads, {len(self.accepted)} accepted, {len(self.heads)} ledger heads"

    def __post_init__(self) -> None:
        self.drawn = random.Random(self.seed)
        is_paired, drawn = self.seed % 3 == 0, faults_of(self.seed)
        self.tcp = VirtualTcp(self.seed) if has_gateways(self.seed) else None
        numbers = range(len(drawn)) if self.only is None else self.only
        self.faults = [drawn[number] for number in numbers]
        self.disk = Disk()
        self.net = BadNetwork(self.setting.run, self.drawn)
        self.net.pace = self.setting.pace
        self.net.is_noisy = NOISE in self.faults
        row = LeaderRow() if is_paired else None
        ports = [FIRST_PORT + number for number in range(2 if is_paired else 1)]
        self.nodes = [SimulatedNode(self.setting, self.disk, self.drawn, row, self.tcp, port) for port in ports]
        self.gateways = [
            SimulatedGateway(f"gateway {number}", self.setting.run, ports, self.tcp, self.disk, self.drawn)
            for number in range(NUM_GATEWAYS)
            if self.tcp is not None
        ]
        self.net.places, self.net.has_gateways = [*self.gateways, *self.nodes], bool(self.gateways)

    # The peers

    async def work(self, key: SigningKey) -> None:
        """Lease, generate, upload, until the run is over."""
        await self.net.message(
            key, "join", JoinRequest(name=key.key_id[-4:], software="1", engine=ENGINE, rollouts_max=64)
        )
        while not self.is_done:
            if self.head is None:
                await asyncio.sleep(0.5)
                continue
            request = LeaseRequest(
                policy_version=self.head.policy_version,
                policy_digest=self.head_digest,
                rollouts_max=2,
                wait_s=WAIT_S,
                holding=(),
            )
            try:
                status, body = await self.net.message(key, "lease", request)
                if status != 200:
                    await asyncio.sleep(0.5)
                    continue
                lease = parse_json(open_envelope(body).verify(PayloadType.LEASE, trusted=(COORDINATOR.key_id,)), Lease)
                assert lease.worker == key.key_id, "a worker got the lease of another one"
                await self.pause(0.1, 4.0)
                parcel = make_parcel(lease, key)
                _, body = await self.net.ask(key, "rollouts", lambda parcel=parcel: parcel)
                reply = json.loads(body)
                if not reply.get("verdict"):
                    assert reply["bundle"] in self.disk.stored, "a bundle was acknowledged that is not on the disk"
                    self.promised[reply["bundle"]] = lease.lease_id
            except RemoteError as error:
                if error.code is ErrorCode.UNKNOWN_WORKER:
                    await self.net.message(
                        key, "join", JoinRequest(name="again", software="1", engine=ENGINE, rollouts_max=64)
                    )
                elif error.code not in (ErrorCode.LEASE_UNKNOWN, ErrorCode.CHAIN_BROKEN):
                    raise

    async def judge(self) -> None:
        """Judge bundles, until the run is over."""
        while not self.is_done:
            status, body = await self.net.message(VALIDATOR, "check", CheckRequest(policy_versions=(), wait_s=WAIT_S))
            if status != 200:
                continue
            task = CheckTask.model_validate_json(body)
            await self.pause(0.0, 1.0)
            is_good = self.drawn.random() < 0.8
            verdict = Verdict.accept() if is_good else Verdict.refuse(RejectReason.UNVERIFIABLE)
            rewards = (1.0,) * task.lease.num_rollouts if is_good else ()
            result = CheckResultRequest(bundle=task.bundle, verdict=verdict, rewards=rewards)
            try:
                await self.net.message(VALIDATOR, "check_result", result)
            except RemoteError as error:
                if error.code is not ErrorCode.NOT_FOUND:  # another validator has it, or it is settled
                    raise
            else:
                if is_good:
                    self.accepted.add(task.bundle)

    async def train(self) -> None:
        """Publish policies, and ask for batches, until the last policy is out."""
        signed, parts = make_manifest(self.setting.run, None)
        for step in range(self.setting.steps + 1):
            for part in parts:
                await self.net.ask(TRAINER, "blobs", lambda part=part: self.blob(part))
            await self.net.ask(TRAINER, "manifests", signed.envelope.to_bytes)
            self.head, self.head_digest = signed.manifest, signed.digest
            if self.on_policy is not None:
                await self.on_policy(step)
            if step == self.setting.steps:
                self.is_done = True
                return
            durable = self.drawn.randrange(max(1, step)) if step else 0
            batch = await self.batch(step, max(0, step - 1) if durable else 0)
            signed, parts = make_manifest(self.setting.run, signed, batch=batch)

    async def batch(self, step: int, durable_step: int) -> str:
        """Return the digest of a step's batch, which is the same each time."""
        request = BatchRequest(step=step, durable_step=durable_step, wait_s=WAIT_S)
        while True:
            status, body = await self.net.message(TRAINER, "batch", request)
            if status == 200:
                break
        envelope = open_envelope(body)
        if self.batches.setdefault(step, envelope.digest) != envelope.digest:
            raise AssertionError(f"step {step} has two batches")
        for group in parse_json(envelope.payload, TrainBatch).groups:
            self.trained[group.slot] += 1
        await self.pause(0.1, 2.0)
        if self.drawn.random() < 0.3:  # a trainer that was killed asks again
            _, again = await self.net.message(TRAINER, "batch", request)
            assert open_envelope(again).digest == envelope.digest, f"step {step} has another batch after a restart"
        return envelope.digest

    async def pause(self, least_s: float, most_s: float) -> None:
        """Wait as a peer that works."""
        await asyncio.sleep(self.setting.pace * self.drawn.uniform(least_s, most_s))

    def blob(self, data: bytes) -> bytes:
        header = BlobHeader(
            body_digest=digest_of(data),
            body_bytes=len(data),
            run=self.setting.run.digest,
            issued_at_ms=self.net.clock_of(TRAINER).now_ms(),
            epoch=self.net.epoch,
        )
        return pack_parcel(header, data, PayloadType.BLOB, TRAINER)

    async def look(self) -> None:
        """Read the ledger's head and the timestamp as peers do: what was shown binds the coordinator."""
        while not self.is_done:
            await asyncio.sleep(self.drawn.uniform(0.5, 5.0))
            stamps: list[Timestamp] = []
            with contextlib.suppress(Unreachable, RemoteError):
                _, body = await self.net.deliver(
                    "/v1/ledger", b"", place=self.drawn.randrange(max(2, len(self.net.places)))
                )
                self.heads.append(parse_json(open_envelope(body).payload, LedgerHead))
            with contextlib.suppress(Unreachable, RemoteError):
                _, body = await self.net.deliver(
                    "/v1/timestamp", b"", place=self.drawn.randrange(max(2, len(self.net.places)))
                )
                stamps.append(parse_json(open_envelope(body).payload, Timestamp))
            for stamp in stamps:
                for peer in PEERS:
                    take_timestamp(self.stamps, self.net.clock_of(peer), peer, stamp)
            if self.gateways and self.head is not None:
                with contextlib.suppress(Unreachable, RemoteError):
                    await look_at_gateway(self.net, self.drawn.randrange(len(self.gateways)), self.head)

    # The faults

    async def disturb(self, fault: Fault) -> None:
        """Let one fault begin at its time, and heal it."""
        await asyncio.sleep(fault.at_s)
        self.say(str(fault))
        peer = PEERS[fault.who % len(PEERS)]
        node = self.nodes[fault.who % len(self.nodes)]
        if fault.kind in BEHIND_GATEWAYS:
            await self.gateways[fault.who // 2].disturb(fault, node.port)
            return
        process = node.process
        match fault.kind:
            case "crash":
                node.crash(fault.seconds, is_silent=fault.amount > 0)
            case "cut off":
                self.net.cut_off[name_of(peer)] += 1
                await asyncio.sleep(fault.seconds)
                self.net.cut_off[name_of(peer)] -= 1
            case "slow disk":
                process.slow = 100.0
                await asyncio.sleep(fault.seconds)
                process.slow = 1.0
            case "clock" | "clock and crash" | "peer's clock":
                clock = self.net.clock_of(peer) if fault.kind == "peer's clock" else node.clock
                clock.ahead_s = fault.amount
                await asyncio.sleep(fault.seconds)
                if fault.kind == "clock and crash":
                    node.crash(0.0)
                    await asyncio.sleep(fault.seconds / 2)
                clock.ahead_s = 0.0
            case "rot":
                stored = [digest async for digest in self.disk.bundles.digests()]
                if stored:
                    self.disk.rotten.add(self.drawn.choice(stored))
            case "stop":
                process.may_act.clear()
                await asyncio.sleep(fault.seconds)
                process.may_act.set()
            case "no database":
                if node.term is not None:
                    term = node.term
                    term.has_database = False
                    await asyncio.sleep(fault.seconds)
                    term.has_database = True

    # The run

    async def run(self, calm_s: float = CALM_S) -> None:
        """Run to the last step and check what was promised. Raises AssertionError."""
        keepers = [asyncio.create_task(node.keep()) for node in self.nodes]
        keepers += [asyncio.create_task(gateway.keep()) for gateway in self.gateways]
        peers = [
            asyncio.create_task(work)
            for work in (self.work(ANNA), self.work(BEN), self.judge(), self.train(), self.look())
        ]
        disturbing = [asyncio.create_task(self.disturb(fault)) for fault in self.faults]
        tasks = (*keepers, *peers, *disturbing)
        try:
            async with asyncio.timeout(FAULTY_S + calm_s):
                while not self.is_done:
                    watched = {task for task in tasks if not task.done() or task in keepers}
                    done, _ = await asyncio.wait(watched, timeout=1.0, return_when=asyncio.FIRST_EXCEPTION)
                    for task in (*done, *(task for task in tasks if task.done())):
                        task.result()
                if self.gateways:
                    await asyncio.gather(*disturbing)
                    writers = [node.listener for node in self.nodes if node.listener]
                    await require_settled(self.net, len(self.gateways), self.setting.steps, writers, ANNA, ENGINE)
        except TimeoutError:
            raise AssertionError(f"the run stands still at policy {self.head and self.head.policy_version}") from None
        finally:
            for task in (*peers, *disturbing):
                task.cancel()
            await asyncio.gather(*peers, *disturbing, return_exceptions=True)
            for task in keepers:
                task.cancel()
            await asyncio.gather(*keepers, return_exceptions=True)
        await self.check()

    async def check(self) -> None:
        """Compare the disk with what peers were promised."""
        lines: list[bytes] = []
        while page := await self.disk.store.ledger(start=len(lines), limit=10**6):
            lines += [line.encode() for line in page]
        chain, digests, final = LedgerChain(self.setting.run.digest), [self.setting.run.digest], dict[str, Receipt]()
        for line in lines:
            receipt, _ = chain.follow(line)
            digests.append(chain.digest)
            final[receipt.bundle] = receipt
        for shown in self.heads:
            assert shown.num_entries < len(digests), "a ledger head that was shown is longer than the ledger"
            assert digests[shown.num_entries] == shown.digest, "a ledger head that was shown contradicts the ledger"
        _, state = await restore_state(self.disk.store, rules_of(self.setting.run))
        for bundle, lease in self.promised.items():
            stored, pending = await self.disk.store.receipt(bundle), state.bundles.get(bundle)
            assert stored or pending, f"bundle {bundle[:12]} was acknowledged and is lost"
            assert pending is None or pending.lease.lease_id == lease, f"bundle {bundle[:12]} has another lease"
            assert stored is None or stored.lease_id == lease, f"bundle {bundle[:12]} has another lease"
        for bundle in self.accepted:
            assert final[bundle].status is BundleStatus.ACCEPTED, f"bundle {bundle[:12]} was accepted, and is no more"
        leases = Counter(receipt.lease_id for receipt in final.values())
        assert max(leases.values(), default=1) == 1, "a lease was redeemed by two bundles"
        assert max(self.trained.values(), default=1) == 1, "a slot was trained twice"
        assigner = Assigner(self.setting.run, secret=self.setting.parts.secret, environments={}, tokenizer=None)
        folded = await JournalReplay(self.disk.store, self.setting.run, assigner, None, self.disk.published).fold()
        assert (folded.ledger.digest, folded.notes) == (chain.digest, [])
        archived = sum(chapter.num_bytes for chapter in await self.disk.store.chapters())
        is_full = archived > 2**29 * self.setting.parts.config.journal_gib_max  # half of its bound
        assert folded.first == 1 or is_full, "the journal's beginning is lost"


def simulate(seed: int, only: Collection[int] | None = None, say: Callable[[str], None] = lambda text: None) -> Cluster:
    """Run one seed, with some of its faults if `only` names them. Raises what fails."""
    pauses = replaced(link_client, Backoff=lambda: Backoff(random.Random(seed)))
    with hashes_as_signatures(), checked_after_each_event(), pauses:
        cluster = Cluster(seed, only, say)
        run_virtually(cluster.run(), cluster.tcp)
        return cluster


def faults_of(seed: int) -> list[Fault]:
    """Return the faults of a seed. Each third one has a standby."""
    kinds = PAIRED if seed % 3 == 0 else ALONE
    return draw_faults(seed, (*kinds, *BEHIND_GATEWAYS) if has_gateways(seed) else kinds)


def has_gateways(seed: int) -> bool:
    return seed % 4 == 3


RUNS = Simulation("tests.node.seeded_world", faults_of, simulate)

if __name__ == "__main__":
    run_seeds(RUNS)
