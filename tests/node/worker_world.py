"""A run in memory: real keys, envelopes, manifests, leases and checks, without a network.

`MemoryCoordinator` is a small honest coordinator with a validator inside; `MemorySource` a mirror that can be made to fail
or lie. `JumpClock` hardly waits: whoever sleeps finds that the time has passed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from tests.node.table_engine import STOP_TOKEN, VOCAB_SIZE, prefill

from prime_node.ports.transport import Unreachable
from prime_protocol.assignment import GroupAssignment, Lease, Problem, Sampling
from prime_protocol.checkpoint import encode_checkpoint, root_of_table, tensor_table
from prime_protocol.chunk_index import HEAD_BYTES, ROW
from prime_protocol.digest import digest_of
from prime_protocol.envelope import Envelope, PayloadType, parse_json, seal
from prime_protocol.errors import ErrorCode, PeerError
from prime_protocol.identity import SigningKey
from prime_protocol.key_ring import ChainPoint, KeyChain, KeyRing, RoleKeys
from prime_protocol.manifest import (
    BasePolicy,
    Manifest,
    PartEntry,
    Provenance,
    SignedManifest,
    sign_manifest,
)
from prime_protocol.messages import (
    HeartbeatReply,
    HeartbeatRequest,
    JoinReply,
    JoinRequest,
    LeaseRequest,
    LeaveRequest,
    NotYet,
    ReceiptList,
    ReceiptsRequest,
    ReturnLeaseRequest,
    UploadReply,
)
from prime_protocol.parcel import open_parcel
from prime_protocol.rollout import RolloutHeader, parse_body
from prime_protocol.run_spec import EnvironmentSpec, ModelFile, PinnedRun, RunSpec, open_run_spec
from prime_protocol.timestamp import Timestamp
from prime_protocol.verdict import BundleStatus, Receipt, RejectReason, Verdict
from prime_protocol.verify import check_assignment, judge, measure
from prime_protocol.weights import Weights

ROOT, COORDINATOR, TRAINER, WORKER, STRANGER = (SigningKey(bytes([number]) * 32) for number in range(1, 6))
MODEL_FILES = {"config.json": b'{"model_type": "table"}', "tokenizer.json": b"{}"}


class JumpClock:
    """Implements ports.clock.Clock. Time moves when somebody sleeps, by as much as he sleeps: a second takes 10 us or so."""

    def __init__(self) -> None:
        self.seconds = 1_000_000.0

    def now_ms(self) -> int:
        return int(self.seconds * 1_000)

    def monotonic_s(self) -> float:
        return self.seconds

    async def sleep(self, seconds: float) -> None:
        until = self.seconds + max(0.0, seconds)
        await asyncio.sleep(max(0.0005, seconds * 1e-5))
        self.seconds = max(self.seconds, until)


async def until(condition: Callable[[], object]) -> None:
    """Let others run until it holds."""
    for _ in range(20_000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it never came true")


def names_in(folder: Path, pattern: str = "*") -> list[str]:
    return sorted(path.name for path in folder.glob(pattern))


def make_run(**changes: object) -> PinnedRun:
    """A signed, pinned RunSpec. Leases last for ever unless said otherwise, since JumpClock runs fast."""
    fields: dict[str, object] = {
        "name": "test",
        "created_at_ms": 0,
        "keys": RoleKeys(
            root=(ROOT.key_id,),
            coordinator=(COORDINATOR.key_id,),
            trainer=(TRAINER.key_id,),
            validator=(COORDINATOR.key_id,),
        ),
        "model_files": tuple(
            ModelFile(name=name, digest=digest_of(data), size=len(data)) for name, data in MODEL_FILES.items()
        ),
        "vocab_size": VOCAB_SIZE,
        "environments": (EnvironmentSpec(name="toy", id="toy"),),
        "sampling": Sampling(completion_tokens_max=8, stop_token_ids=(STOP_TOKEN,)),
        "max_steps": 1_000,
        "groups_per_step": 2,
        "rollouts_per_group": 4,
        "lease_seconds": 1e6,
        "heartbeat_seconds": 100.0,
    }
    envelope = seal(RunSpec.model_validate(fields | changes), PayloadType.RUN_SPEC, ROOT)
    return open_run_spec(envelope, pinned=envelope.digest)


def next_ring(
    chain: KeyChain,
    *signers: SigningKey,
    published: ChainPoint | None = None,
    trainer_threshold: int = 1,
    **keys: tuple[SigningKey, ...],
) -> Envelope:
    """The key ring after the chain's newest, with other keys for the roles that are given."""
    named = {role: tuple(key.key_id for key in held) for role, held in keys.items()}
    ring = KeyRing(
        run=chain.run,
        version=chain.version + 1,
        previous=chain.digest,
        keys=chain.current.model_copy(update=named | {"trainer_threshold": trainer_threshold}),
        published=published or chain.published,
        created_at_ms=0,
    )
    return seal(ring, PayloadType.KEY_RING, *signers)


def policy_of(signed: SignedManifest) -> BasePolicy:
    """How a delta names its base."""
    return BasePolicy(policy_version=signed.manifest.policy_version, state_root=signed.manifest.state_root)


def rows_of(index: bytes) -> list[tuple[int, int, str]]:
    """(size, count, digest) of every chunk of an index."""
    rows = np.frombuffer(index, dtype=ROW, offset=HEAD_BYTES)
    return [(int(row["size"]), int(row["count"]), row["digest"].tobytes().hex()) for row in rows]


class MemorySource:
    """Implements ports.transport.PublicSource, and publishes. Its public attributes may be spoilt by a test."""

    def __init__(self, run: PinnedRun) -> None:
        self.run = run
        self.manifests: dict[int, Envelope] = {}
        self.blobs = {digest_of(data): data for data in MODEL_FILES.values()}
        self.shown_head: Envelope | None = None
        self.away = False
        self.blobs_asked: list[str] = []
        self.before_blob: Callable[[str], None] = lambda _: None
        self.key_rings: list[Envelope] = []
        self.key = COORDINATOR
        self.now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000
        self.shown_timestamp: Envelope | None = None
        """Instead of one that is made when it is asked for and names the head."""

    def publish(
        self,
        weights: Weights,
        *,
        base: tuple[SignedManifest, Weights] | None = None,
        bases: Sequence[tuple[SignedManifest, Weights] | None] = (),
        previous: SignedManifest | None = None,
        key: SigningKey = TRAINER,
        part_bytes: int = 2**24,
        **changes: object,
    ) -> SignedManifest:
        """The next policy, after `previous` or after what is published; an anchor unless `base` or `bases` are given."""
        if previous is None and self.manifests:
            previous = self.signed(max(self.manifests))
        version = 0 if previous is None else previous.manifest.policy_version + 1
        encoded = [
            encode_checkpoint(weights, None if one is None else (policy_of(one[0]), one[1]), part_bytes=part_bytes)
            for one in bases or [base]
        ]
        tensors = tensor_table(weights)
        fields: dict[str, object] = {
            "run": self.run.digest,
            "policy_version": version,
            "previous": None if previous is None else previous.digest,
            "model_config_digest": digest_of(MODEL_FILES["config.json"]),
            "state_root": root_of_table(tensors),
            "tensors": tensors,
            "encodings": tuple(one.encoding for one in encoded),
            "produced_by": Provenance(
                step=version - 1,
                optimizer_steps=version,
                batch=None if version == 0 else digest_of(b"batch %d" % version),
                software="test",
            ),
            "created_at_ms": 0,
        }
        signed = sign_manifest(Manifest.model_validate(fields | changes), key)
        self.blobs |= {digest_of(blob): blob for one in encoded for blob in one.blobs}
        self.manifests[version] = self.shown_head = signed.envelope
        return signed

    def publish_spoilt(self, weights: Weights, index: bytes, *parts: bytes) -> SignedManifest:
        """An anchor over an index, and perhaps parts, of the trainer's own making."""
        honest = encode_checkpoint(weights)
        blobs = (index, *(parts or honest.parts))
        entries = tuple(PartEntry(digest=digest_of(blob), size=len(blob)) for blob in blobs)
        lied = honest.encoding.model_copy(update={"index": entries[0], "parts": entries[1:]})
        signed = self.publish(weights, encodings=(lied,))
        self.blobs |= {digest_of(blob): blob for blob in blobs}
        return signed

    def signed(self, policy_version: int) -> SignedManifest:
        envelope = self.manifests[policy_version]
        return SignedManifest(parse_json(envelope.payload, Manifest), envelope.digest, envelope)

    def save(self, folder: Path) -> None:
        """The published layout on a disk."""
        (folder / "manifests").mkdir(parents=True)
        (folder / "run.json").write_bytes(self.run.envelope.to_bytes())
        for version, envelope in self.manifests.items():
            (folder / f"manifests/{version:08d}.json").write_bytes(envelope.to_bytes())
        if self.shown_head is not None:
            (folder / "head.json").write_bytes(self.shown_head.to_bytes())
        if self.shown_timestamp is not None:
            (folder / "timestamp.json").write_bytes(self.shown_timestamp.to_bytes())
        for version, envelope in enumerate(self.key_rings, start=1):
            (folder / "keys").mkdir(exist_ok=True)
            (folder / f"keys/{version:04d}.json").write_bytes(envelope.to_bytes())
        for digest, data in self.blobs.items():
            path = folder / "blobs" / digest[:2] / digest
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)

    async def run_spec(self) -> Envelope:
        self._check_reachable()
        return self.run.envelope

    async def head(self, *, wait_s: float = 0.0) -> Envelope | None:
        self._check_reachable()
        return self.shown_head

    async def manifest(self, policy_version: int) -> Envelope:
        self._check_reachable()
        if policy_version not in self.manifests:
            raise PeerError(ErrorCode.NOT_FOUND, f"no manifest {policy_version}")
        return self.manifests[policy_version]

    async def key_ring(self, version: int) -> Envelope:
        self._check_reachable()
        if version > len(self.key_rings):
            raise PeerError(ErrorCode.NOT_FOUND, f"no key ring {version}")
        return self.key_rings[version - 1]

    async def timestamp(self) -> Envelope:
        self._check_reachable()
        return self.shown_timestamp or self.timestamp_of(self.shown_head, key=self.key)

    def timestamp_of(
        self, head: Envelope | None, /, *, age_s: float = 0.0, key: SigningKey = COORDINATOR, **changes: object
    ) -> Envelope:
        """What an honest coordinator would have signed `age_s` ago, but for `changes`."""
        point = None
        if head is not None:
            point = ChainPoint(policy_version=parse_json(head.payload, Manifest).policy_version, manifest=head.digest)
        issued_at_ms = self.now_ms() - round(age_s * 1_000)
        fields: dict[str, object] = {
            "run": self.run.digest,
            "head": point,
            "key_ring": len(self.key_rings),
            "issued_at_ms": issued_at_ms,
            "expires_at_ms": issued_at_ms + 600_000,
        }
        return seal(Timestamp.model_validate(fields | changes), PayloadType.TIMESTAMP, key)

    async def blob(self, digest: str, *, start: int = 0, end: int | None = None) -> bytes:
        self._check_reachable()
        self.before_blob(digest)
        self.blobs_asked.append(digest)
        if digest not in self.blobs:
            raise PeerError(ErrorCode.NOT_FOUND, f"no blob {digest}")
        return self.blobs[digest][start:end]

    def _check_reachable(self) -> None:
        if self.away:
            raise Unreachable("connection refused")


class MemoryCoordinator(MemorySource):
    """Implements ports.transport.WorkerPort for one worker, WORKER, and judges what it uploads at once."""

    def __init__(self, run: PinnedRun, clock: JumpClock) -> None:
        super().__init__(run)
        self.clock = clock
        self.now_ms = clock.now_ms
        self.policies: dict[int, Weights] = {}
        self.joined = 0
        self.known = False
        self.left = False
        self.draining = False
        self.ban_reason: str | None = None
        self.ban_at_join: str | None = None
        self.clock_ahead_s = 0.0
        self.leases: dict[str, Lease] = {}
        self.returned: list[str] = []
        self.verdicts: dict[str, Verdict] = {}
        self.receipts_signed: list[Receipt] = []
        self.leases_max = 10**9
        self.after_upload: Callable[[], None] = lambda: None
        self._slot = 0

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
        return JoinReply(step=0, head=max(self.manifests, default=-1), server_time_ms=self._now_ms())

    async def heartbeat(self, request: HeartbeatRequest) -> HeartbeatReply:
        self._check_worker()
        return HeartbeatReply(step=0, head=max(self.manifests, default=-1), draining=self.draining)

    async def lease(self, request: LeaseRequest) -> Envelope | NotYet:
        self._check_worker()
        await asyncio.sleep(0)
        if len(self.leases) >= self.leases_max:
            return NotYet(reason="no work left", retry_after_s=0.5)
        seeds = iter(range(self._slot * 1_000, (self._slot + 2) * 1_000))
        groups = tuple(
            GroupAssignment(
                slot=request.policy_version * self.run.spec.groups_per_step + number,
                problem=Problem(environment="toy", index=self._slot + number),
                prompt_token_ids=(1 + (self._slot + number) % 8,),
                seeds=tuple(next(seeds) for _ in range(self.run.spec.rollouts_per_group)),
            )
            for number in range(max(1, min(2, request.rollouts_max // self.run.spec.rollouts_per_group)))
        )
        self._slot += len(groups)
        lease = Lease(
            run=self.run.digest,
            lease_id=digest_of(str(self._slot).encode()),
            worker=WORKER.key_id,
            step=request.policy_version,
            policy_version=request.policy_version,
            policy_digest=request.policy_digest,
            groups=groups,
            sampling=self.run.spec.sampling,
            issued_at_ms=self._now_ms(),
            expires_at_ms=self._now_ms() + int(self.run.spec.lease_seconds * 1_000),
        )
        self.leases[lease.lease_id] = lease
        return seal(lease, PayloadType.LEASE, self.key)

    async def return_lease(self, request: ReturnLeaseRequest) -> None:
        self._check_worker()
        self.returned.append(request.lease_id)

    async def upload(self, parcel: bytes) -> UploadReply:
        self._check_worker()
        bundle = digest_of(parcel)
        if bundle not in self.verdicts:
            opened = open_parcel(parcel, body_bytes_max=self.run.spec.limits.rollout_bytes_max)
            header = parse_json(opened.envelope.verify(PayloadType.ROLLOUT, trusted=[WORKER.key_id]), RolloutHeader)
            self.verdicts[bundle] = verdict = self._judge(header, opened.check_body(header))
            self._write_receipt(bundle, header, verdict)
        self.after_upload()
        return UploadReply(bundle=bundle, verdict=None)

    async def receipts(self, request: ReceiptsRequest) -> ReceiptList:
        self._check_worker()
        signed = [seal(one, PayloadType.RECEIPT, self.key) for one in self.receipts_signed[request.after :]]
        return ReceiptList(receipts=tuple(one.to_bytes().decode() for one in signed), next=len(self.receipts_signed))

    async def leave(self, request: LeaveRequest) -> None:
        self._check_worker()
        self.left, self.known = True, False

    def _judge(self, header: RolloutHeader, body: memoryview) -> Verdict:
        rollouts = parse_body(header, body, self.run.spec.limits)
        lease = self.leases.get(header.lease_id)
        if lease is None or self._now_ms() > lease.expires_at_ms:
            return Verdict.refuse(RejectReason.LEASE_EXPIRED)
        verdict = check_assignment(header, rollouts, lease, vocab_size=VOCAB_SIZE)
        if not verdict.accepted:
            return verdict
        measured = measure(rollouts, prefill(self.policies[lease.policy_version], lease, rollouts))
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
            raise PeerError(ErrorCode.UNKNOWN_WORKER, "join first")

    def _check_ban(self) -> None:
        if self.ban_reason is not None:
            raise PeerError(ErrorCode.BANNED, self.ban_reason)

    def _now_ms(self) -> int:
        return self.clock.now_ms() + int(self.clock_ahead_s * 1_000)
