"""A small honest coordinator in memory with a validator inside, which judges uploads at once, and workers that it serves."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from pathlib import Path

from tests.builder import build_lease
from tests.node.table_engine import VOCAB_SIZE, TableEngine, equipped, prefill, table_weights
from tests.node.worker_world import WORKER, MemorySource, make_run
from tests.time_world import VirtualClock

from prime_node.broadcast.follow.follower import Follower
from prime_node.broadcast.follow.trust import Trust
from prime_node.broadcast.swarm.sources import SourcePool
from prime_node.ports.engine import Engine
from prime_node.worker.config import WorkerConfig
from prime_node.worker.worker import Equipment, Worker
from prime_protocol.assignment import GroupAssignment, Lease, Problem
from prime_protocol.digest import digest_of
from prime_protocol.envelope import Envelope, PayloadType, parse_json, seal
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.manifest import SignedManifest
from prime_protocol.parcel import open_parcel
from prime_protocol.replies import (
    HeartbeatReply,
    JoinReply,
    MachineStanding,
    NotYet,
    ReceiptList,
    Standing,
    UploadReply,
)
from prime_protocol.requests import (
    HeartbeatRequest,
    JoinRequest,
    LeaseRequest,
    LeaveRequest,
    ReceiptsRequest,
    ReturnLeaseRequest,
)
from prime_protocol.rollout import EngineInfo, RolloutHeader, parse_body
from prime_protocol.run_spec import PinnedRun
from prime_protocol.telemetry import Speed
from prime_protocol.verdict import BundleStatus, Receipt, RejectReason, Verdict
from prime_protocol.verify import check_assignment, judge, statistics, summary
from prime_protocol.weights import Weights

LEASES_AT_ONCE = 8
"""Leases granted while the virtual clock shows one time: each needs threads, and it moves only while no thread works."""


class MemoryCoordinator(MemorySource):
    """Fake of ports.transport.WorkerPort for one worker, WORKER, which judges uploads at once."""

    def __init__(self, run: PinnedRun, clock: VirtualClock) -> None:
        super().__init__(run)
        self.clock = clock
        self.now_ms = clock.now_ms
        self.policies: dict[int, Weights] = {}
        self.joined = 0
        self.beats: list[HeartbeatRequest] = []
        self.known = False
        self.left = False
        self.draining = False
        self.notice = ""
        self.ban_reason: str | None = None
        self.ban_at_join: str | None = None
        self.clock_ahead_s = 0.0
        self.leases: dict[str, Lease] = {}
        self.returned: list[str] = []
        self.failed: list[str] = []
        self.cancels: set[str] = set()
        self.verdicts: dict[str, Verdict] = {}
        self.receipts_signed: list[Receipt] = []
        self.leases_max = 10**9
        self.first_problem = 0
        self.speeds: list[Speed | None] = []
        self.engines: list[EngineInfo] = []
        self.after_upload: Callable[[], None] = lambda: None
        self._slot = 0
        self._leased_s, self._at_once = 0.0, 0

    def publish_policy(self, weights: Weights) -> SignedManifest:
        signed = self.publish(weights)
        self.policies[signed.manifest.policy_version] = weights
        return signed

    @property
    def accepted(self) -> int:
        return sum(verdict.accepted for verdict in self.verdicts.values())

    async def join(self, request: JoinRequest) -> JoinReply:
        self._check_reachable()
        self.ban_reason = self.ban_at_join or self.ban_reason
        self._check_ban()
        self.known = True
        self.joined += 1
        self.engines.append(request.engine)
        return JoinReply(step=0, head=max(self.manifests, default=-1), server_time_ms=self._now_ms())

    async def heartbeat(self, request: HeartbeatRequest) -> HeartbeatReply:
        self._check_worker()
        self.beats.append(request)
        cancelled = tuple(lease for lease in request.holding or () if lease in self.cancels)
        head = max(self.manifests, default=-1)
        return HeartbeatReply(step=0, head=head, draining=self.draining, notice=self.notice, cancelled=cancelled)

    async def lease(self, request: LeaseRequest) -> Envelope | NotYet:
        self._check_worker()
        self.speeds.append(request.speed)
        await asyncio.sleep(0)
        if request.policy_version not in self.manifests:
            return NotYet(reason=f"policy {request.policy_version} is not published here", retry_after_s=0.5)
        if self.manifests[request.policy_version].digest != request.policy_digest:
            raise RemoteError(ErrorCode.CHAIN_BROKEN, "fetch the policy again")
        self._at_once = self._at_once + 1 if self._leased_s == self.clock.seconds else 1
        self._leased_s = self.clock.seconds
        if len(self.leases) >= self.leases_max or self._at_once > LEASES_AT_ONCE:
            return NotYet(reason="no work left", retry_after_s=0.5)
        seeds = iter(range(self._slot * 1_000, (self._slot + 2) * 1_000))
        groups = tuple(
            GroupAssignment(
                slot=request.policy_version * self.run.spec.groups_per_step + number,
                problem=Problem(environment="toy", index=self.first_problem + self._slot + number),
                prompt_token_ids=(1 + (self._slot + number) % 8,),
                seeds=tuple(next(seeds) for _ in range(self.run.spec.rollouts_per_group)),
            )
            for number in range(max(1, min(2, request.rollouts_max // self.run.spec.rollouts_per_group)))
        )
        self._slot += len(groups)
        lease = build_lease(
            self.run,
            WORKER,
            groups,
            lease_id=digest_of(str(self._slot).encode()),
            step=request.policy_version,
            policy_version=request.policy_version,
            policy_digest=request.policy_digest,
            issued_at_ms=self._now_ms(),
            expires_at_ms=self._now_ms() + int(self.run.spec.lease_seconds * 1_000),
        )
        self.leases[lease.lease_id] = lease
        return seal(lease, PayloadType.LEASE, self.key)

    async def return_lease(self, request: ReturnLeaseRequest) -> None:
        self._check_worker()
        if request.lease_id not in self.leases:
            raise RemoteError(ErrorCode.LEASE_UNKNOWN, "no such lease")
        self.returned.append(request.lease_id)
        self.failed += [request.lease_id] if request.failed else []

    async def upload(self, parcel: bytes) -> UploadReply:
        self._check_worker()
        bundle = digest_of(parcel)
        if bundle not in self.verdicts:
            opened = open_parcel(parcel, body_bytes_max=self.run.spec.limits.rollout_bytes_max)
            header = parse_json(opened.envelope.verify(PayloadType.ROLLOUT, trusted=[WORKER.key_id]), RolloutHeader)
            if header.lease_id not in self.leases:
                raise RemoteError(ErrorCode.LEASE_UNKNOWN, "no such lease; request a new one")
            self.verdicts[bundle] = verdict = self._judge(header, opened.check_body(header))
            self._write_receipt(bundle, header, verdict)
        self.after_upload()
        is_late = self.verdicts[bundle].reason is RejectReason.LEASE_EXPIRED
        return UploadReply(bundle=bundle, verdict=self.verdicts[bundle] if is_late else None)

    async def receipts(self, request: ReceiptsRequest) -> ReceiptList:
        self._check_reachable()
        if not self.joined:
            raise RemoteError(ErrorCode.UNKNOWN_WORKER, "join first")
        signed = [seal(one, PayloadType.RECEIPT, self.key) for one in self.receipts_signed[request.after :]]
        return ReceiptList(receipts=tuple(one.to_bytes().decode() for one in signed), next=len(self.receipts_signed))

    async def standing(self, key: str) -> Standing:
        self._check_reachable()
        if key != WORKER.key_id:
            raise RemoteError(ErrorCode.NOT_FOUND, "this key has no standing")
        tokens = sum(receipt.num_tokens for receipt in self.receipts_signed)
        machine = MachineStanding(
            worker=key, name="worker", state="idle", accepted=self.accepted, refused=0, tokens=tokens
        )
        return Standing(
            contributor=key, rank=1, contributors=3, tokens=tokens, all_tokens=2 * tokens, machines=(machine,)
        )

    async def leave(self, request: LeaveRequest) -> None:
        self._check_worker()
        self.left, self.known = True, False

    def _judge(self, header: RolloutHeader, body: memoryview) -> Verdict:
        rollouts = parse_body(header, body, self.run.spec.limits)
        lease = self.leases[header.lease_id]
        if lease.lease_id in self.returned or self._now_ms() > lease.expires_at_ms:
            return Verdict.refuse(RejectReason.LEASE_EXPIRED)
        if header.lease_digest != digest_of(lease.model_dump_json().encode()):
            return Verdict.refuse(RejectReason.WRONG_ASSIGNMENT, "the header does not name the lease")
        verdict = check_assignment(header, rollouts, lease, vocab_size=VOCAB_SIZE)
        if not verdict.accepted:
            return verdict
        measured = summary(statistics(rollouts, prefill(self.policies[lease.policy_version], lease, rollouts)))
        return judge(measured, self.run.spec.checks)

    def _write_receipt(self, bundle: str, header: RolloutHeader, verdict: Verdict) -> None:
        receipt = Receipt(
            run=self.run.digest,
            worker=WORKER.key_id,
            lease_id=header.lease_id,
            bundle=bundle,
            step=header.step,
            policy_version=header.policy_version,
            num_rollouts=header.num_rollouts,
            num_tokens=8,
            status=BundleStatus.ACCEPTED if verdict.accepted else BundleStatus.REFUSED,
            reason=verdict.reason,
            at_ms=self._now_ms(),
        )
        self.receipts_signed.append(receipt)

    def _check_worker(self) -> None:
        self._check_reachable()
        self._check_ban()
        if not self.known:
            raise RemoteError(ErrorCode.UNKNOWN_WORKER, "join first")

    def _check_ban(self) -> None:
        if self.ban_reason is not None:
            raise RemoteError(ErrorCode.BANNED, self.ban_reason)

    def _now_ms(self) -> int:
        return self.clock.now_ms() + int(self.clock_ahead_s * 1_000)


class WorkerWorld:
    """A coordinator with policy 0 published, and workers on one folder."""

    def __init__(self, folder: Path, *, pinned: PinnedRun | None = None, policies: int = 1) -> None:
        self.folder = folder
        self.clock = VirtualClock(tick_s=50.0)
        self.coordinator = MemoryCoordinator(pinned or make_run(), self.clock)
        for version in range(policies):
            self.coordinator.publish_policy(table_weights(version))
        self.stop = asyncio.Event()
        self.said: list[str] = []

    def worker(
        self,
        engine: Engine | None = None,
        *,
        equip: Callable[[], Awaitable[Equipment]] | None = None,
        announced: EngineInfo | None = None,
        **settings: object,
    ) -> Worker:
        engine = engine or TableEngine()
        config = WorkerConfig.model_validate(
            {
                "rollouts_max": 8,
                "grace_seconds": 1e5,
                "status_seconds": 500.0,
                "poll_seconds": 0.01,
                "receipts_seconds": 0.1,
                "wait_seconds": 0.0,
            }
            | settings
        )
        follower = Follower(
            self.coordinator.run,
            SourcePool([("coordinator", self.coordinator)], clock=self.clock, rng=random.Random(1)),
            self.folder / "checkpoints",
            clock=self.clock,
            poll_s=config.poll_seconds,
            policies_kept=config.policies_kept,
            rng=random.Random(1),
        )
        return Worker(
            run=self.coordinator.run,
            config=config,
            key=WORKER,
            coordinator=self.coordinator,
            engine_info=announced or engine.info,
            equip=equip or equipped(engine),
            follower=follower,
            trust=Trust(
                self.coordinator.run, [("coordinator", self.coordinator)], self.folder / "trust", clock=self.clock
            ),
            folder=self.folder,
            clock=self.clock,
            rng=random.Random(1),
            say=self.said.append,
        )

    def stop_when(self, condition: Callable[[], bool]) -> None:
        """Ask the worker to stop after the upload at which `condition` holds."""

        def look() -> None:
            if condition():
                self.stop.set()

        self.coordinator.after_upload = look

    def status(self) -> dict[str, object]:
        return dict(json.loads((self.folder / "status.json").read_text()))
