"""A trainer's world in memory: real keys, envelopes, bundles, blobs and manifests; a real small model; no network.

`BatchCoordinator` makes the same batch for the same step, takes publications in only where they verify, and can be away. A
`Fuse` ends whoever passes a named place for the n-th time, as kill -9 would: nothing after that place happens.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from prime_node.adapters.engines.transformers_engine import TransformersEngine
from prime_node.adapters.models.hf_tokenizer import HfTokenizer
from prime_node.adapters.models.tiny_model import model_files
from prime_node.adapters.training.torch_backend import TorchBackend
from prime_node.broadcast.publish.publisher import Publisher
from prime_node.observe import JsonLines, read_json_lines
from prime_node.ports.environment import HeldOutProblem
from prime_node.ports.train_backend import (
    Loss,
    OptimizerSettings,
    PackedBatch,
    PolicyCopy,
    StepStats,
    TrainBackend,
    TrainSample,
)
from prime_node.ports.transport import Unreachable
from prime_node.replay.feed import Feed
from prime_node.trainer.checkpointing import Checkpoints
from prime_node.trainer.config import AdamW, SftConfig, TrainerConfig
from prime_node.trainer.evaluate import Evaluator, held_out
from prime_node.trainer.lessons import Lessons
from prime_node.trainer.trainer import Trainer, record_published
from prime_protocol.adapters import AdapterSpec
from prime_protocol.assignment import GroupAssignment, Lease, Problem, Sampling
from prime_protocol.chain import check_link, check_manifest
from prime_protocol.checkpoint import CheckpointDecoder
from prime_protocol.chunk_index import open_index
from prime_protocol.digest import digest_of
from prime_protocol.envelope import Envelope, PayloadType, seal
from prime_protocol.errors import ErrorCode, PeerError
from prime_protocol.identity import SigningKey
from prime_protocol.key_ring import RoleKeys
from prime_protocol.manifest import Provenance, SignedManifest, open_manifest
from prime_protocol.messages import BatchGroup, BatchRequest, BundleRequest, NotYet, TrainBatch
from prime_protocol.parcel import pack_parcel
from prime_protocol.rollout import Completion, EngineInfo, FinishReason, RolloutHeader, pack_body, rollouts_for
from prime_protocol.run_spec import EnvironmentSpec, ModelFile, PinnedRun, RunSpec
from prime_protocol.schedule import Schedule
from prime_protocol.weights import Weights, root_of

ROOT, COORDINATOR, TRAINER, VALIDATOR, WORKER, STRANGER = (SigningKey(bytes([n]) * 32) for n in range(1, 7))
STOP_TOKEN = 256
GROUPS, ROLLOUTS = 3, 4


@lru_cache
def tiny_files() -> Mapping[str, bytes]:
    return model_files(hidden_size=32, num_layers=2, num_heads=2, intermediate_size=48)


def write_model(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in tiny_files().items():
        (folder / name).write_bytes(data)
    return folder


def make_run(
    *, max_steps: int = 5, async_level: int = 2, adapters: AdapterSpec | None = None, **schedule: object
) -> PinnedRun:
    spec = RunSpec(
        name="test",
        created_at_ms=0,
        keys=RoleKeys(
            root=(ROOT.key_id,),
            coordinator=(COORDINATOR.key_id,),
            trainer=(TRAINER.key_id,),
            validator=(VALIDATOR.key_id,),
        ),
        model_files=tuple(
            ModelFile(name=name, digest=digest_of(data), size=len(data)) for name, data in tiny_files().items()
        ),
        vocab_size=264,
        environments=(EnvironmentSpec(name="echo", id="echo"),),
        sampling=Sampling(completion_tokens_max=4, stop_token_ids=(STOP_TOKEN,)),
        async_level=async_level,
        schedule=Schedule.model_validate(schedule),
        max_steps=max_steps,
        groups_per_step=GROUPS,
        rollouts_per_group=ROLLOUTS,
        adapters=adapters,
    )
    envelope = seal(spec, PayloadType.RUN_SPEC, ROOT)
    return PinnedRun(envelope.digest, spec, envelope)


class JumpClock:
    """Time moves when somebody sleeps, and nobody really waits."""

    def __init__(self) -> None:
        self.seconds = 1_000.0

    def now_ms(self) -> int:
        return int(self.seconds * 1_000)

    def monotonic_s(self) -> float:
        return self.seconds

    async def sleep(self, seconds: float) -> None:
        self.seconds += seconds
        await asyncio.sleep(0)


class KilledError(Exception):
    """Stands for kill -9: nobody catches it on purpose."""


class Fuse:
    """Blows at the n-th passage of one place. Example: Fuse("after publish", 2)."""

    def __init__(self, place: str = "", at: int = 1) -> None:
        self._place, self._at = place, at
        self.passed: Counter[str] = Counter()

    def passes(self, place: str) -> None:
        self.passed[place] += 1
        if place == self._place and self.passed[place] == self._at:
            raise KilledError(place)


class BatchCoordinator:
    """Implements ports.transport.TrainerPort."""

    def __init__(self, run: PinnedRun) -> None:
        self.run = run
        self.fuse = Fuse()
        self.blobs: dict[str, bytes] = {}
        self.bundles: dict[str, bytes] = {}
        self.manifests: list[SignedManifest] = []
        self.durable_step = 0
        self.away = 0
        """So many requests get no answer."""
        self.refused = 0
        """So many have got none."""
        self.forgets = 0
        """So many publications are told that a blob is not there."""
        self._decoded: dict[str, Weights] = {}
        self.gate = asyncio.Event()
        """Publications wait for it."""
        self.gate.set()
        self.takes_in_max = 10**9
        """Further publications get no answer for ever."""
        self.asked: list[int] = []
        """Steps that a batch was asked for."""
        self._moved = asyncio.Event()

    async def until(self, happened: Callable[[], bool]) -> None:
        """Wait for something that only a request can bring about."""
        while not happened():
            self._moved.clear()
            await self._moved.wait()

    async def run_spec(self) -> Envelope:
        return self.run.envelope

    async def head(self, *, wait_s: float = 0.0) -> Envelope | None:
        self._answer()
        return self.manifests[-1].envelope if self.manifests else None

    async def manifest(self, policy_version: int) -> Envelope:
        self._answer()
        if policy_version >= len(self.manifests):
            raise PeerError(ErrorCode.NOT_FOUND, f"no manifest {policy_version}")
        return self.manifests[policy_version].envelope

    async def blob(self, digest: str, *, start: int = 0, end: int | None = None) -> bytes:
        if digest not in self.blobs:
            raise PeerError(ErrorCode.NOT_FOUND, f"no blob {digest}")
        return self.blobs[digest][start:end]

    async def batch(self, request: BatchRequest) -> Envelope | NotYet:
        self.asked.append(request.step)
        self._answer()
        self.fuse.passes("batch")
        self.durable_step = max(self.durable_step, request.durable_step)
        if request.step < self.durable_step:
            raise PeerError(ErrorCode.NOT_FOUND, f"batch {request.step} is forgotten")
        policy_version = max(0, request.step - self.run.spec.async_level)
        if policy_version >= len(self.manifests):
            await asyncio.sleep(0.001)
            return NotYet(reason=f"policy {policy_version} is not published", retry_after_s=0.1)
        bundle, groups = make_bundle(self.run, request.step, self.manifests[policy_version])
        self.bundles[digest_of(bundle)] = bundle
        size = len(groups) // self.run.spec.schedule.batches_per_step
        previous: Envelope | None = None
        for part in range(request.part + 1):
            batch = TrainBatch(
                run=self.run.digest,
                step=request.step,
                groups=groups[part * size : (part + 1) * size],
                part=part,
                previous=None if previous is None else previous.digest,
            )
            previous = seal(batch, PayloadType.BATCH, COORDINATOR)
        assert previous is not None
        return previous

    async def bundle(self, request: BundleRequest) -> bytes:
        self._answer()
        self.fuse.passes("bundle")
        return self.bundles[request.bundle]

    async def put_blob(self, data: bytes) -> str:
        self._answer()
        self.fuse.passes("put_blob")
        self.blobs[digest_of(data)] = data
        return digest_of(data)

    async def publish(self, manifest: Envelope) -> None:
        self._answer()
        await self.gate.wait()
        if len(self.manifests) >= self.takes_in_max:
            await asyncio.Event().wait()
        self.fuse.passes("before publish")
        signed = open_manifest(manifest, self.run)
        if self.forgets:
            self.forgets -= 1
            raise PeerError(ErrorCode.NOT_FOUND, "a blob is not here; upload it first")
        if signed.digest not in {known.digest for known in self.manifests}:
            check_manifest(signed.manifest, self.run)
            check_link(signed.manifest, self.manifests[-1] if self.manifests else None)
            self.decode(signed)
            self.manifests.append(signed)
            self._moved.set()
        self.fuse.passes("after publish")

    def decode(self, signed: SignedManifest) -> Weights:
        """The weights behind a manifest, every byte of every encoding checked, once."""
        if signed.digest in self._decoded:
            return self._decoded[signed.digest]
        manifest = signed.manifest
        for encoding in manifest.encodings:
            base = None if encoding.base is None else self.decode(self.manifests[encoding.base.policy_version])
            index = open_index(self.blobs[encoding.index.digest], encoding, manifest.tensors)
            decoder = CheckpointDecoder(manifest, encoding, index, base)
            for number, part in enumerate(encoding.parts):
                decoder.feed_part(number, self.blobs[part.digest])
            self._decoded[signed.digest] = decoder.finish()
        return self._decoded[signed.digest]

    @property
    def roots(self) -> list[str]:
        return [signed.manifest.state_root for signed in self.manifests]

    def _answer(self) -> None:
        self._moved.set()
        if self.away:
            self.away -= 1
            self.refused += 1
            raise Unreachable("connection refused")


def provenance(version: int) -> Provenance:
    """Of a policy that a test publishes by itself."""
    batch = digest_of(b"batch %d" % (version - 1)) if version else None
    return Provenance(step=version - 1, optimizer_steps=version, batch=batch, software="test")


def make_bundle(run: PinnedRun, step: int, policy: SignedManifest) -> tuple[bytes, tuple[BatchGroup, ...]]:
    """One step's rollouts by WORKER: a pure function of its arguments. Every third group has equal rewards."""
    rng = random.Random(step)
    slots = range(step * GROUPS, (step + 1) * GROUPS)
    lease = Lease(
        run=run.digest,
        lease_id=digest_of(b"%d" % step),
        worker=WORKER.key_id,
        step=step,
        policy_version=policy.manifest.policy_version,
        policy_digest=policy.digest,
        groups=tuple(
            GroupAssignment(
                slot=slot,
                problem=Problem(environment="echo", index=slot),
                prompt_token_ids=(258, 97 + slot % 26, 98, 259),
                seeds=tuple(rng.randrange(2**62) for _ in range(ROLLOUTS)),
            )
            for slot in slots
        ),
        sampling=run.spec.sampling,
        issued_at_ms=0,
        expires_at_ms=10**12,
    )
    completions = [_completion(rng) for _ in range(lease.num_rollouts)]
    body, raw_bytes = pack_body(rollouts_for(lease, completions))
    header = RolloutHeader(
        body_digest=digest_of(body),
        body_bytes=len(body),
        run=run.digest,
        worker=WORKER.key_id,
        lease_id=lease.lease_id,
        step=step,
        policy_version=lease.policy_version,
        policy_digest=lease.policy_digest,
        num_rollouts=lease.num_rollouts,
        decompressed_bytes=raw_bytes,
        engine=EngineInfo(name="test", version="1", dtype="fp32", device="cpu"),
        created_at_ms=0,
    )
    parcel = pack_parcel(header, body, PayloadType.ROLLOUT, WORKER)
    groups = tuple(
        BatchGroup(
            slot=group.slot,
            problem=group.problem,
            prompt_token_ids=group.prompt_token_ids,
            worker=WORKER.key_id,
            policy_version=lease.policy_version,
            bundle=digest_of(parcel),
            first=index * ROLLOUTS,
            rewards=(0.5,) * ROLLOUTS if index == 2 else tuple(rng.random() for _ in range(ROLLOUTS)),
        )
        for index, group in enumerate(lease.groups)
    )
    return parcel, groups


def _completion(rng: random.Random) -> Completion:
    tokens = [rng.randrange(97, 123) for _ in range(rng.randrange(1, 4))] + [STOP_TOKEN]
    return Completion(tuple(tokens), tuple(-5.6 + rng.random() / 10 for _ in tokens), FinishReason.STOP)


class FusedBackend:
    """A backend with places where a fuse may blow."""

    def __init__(self, backend: TrainBackend, fuse: Fuse) -> None:
        self.inner, self._fuse = backend, fuse

    def new_optimizer(self, settings: OptimizerSettings) -> None:
        self.inner.new_optimizer(settings)
        self._fuse.passes("after new_optimizer")

    def pack(self, samples: Sequence[TrainSample]) -> PackedBatch:
        return self.inner.pack(samples)

    def train_step(self, samples: Sequence[TrainSample] | PackedBatch, loss: Loss, *, lr: float) -> StepStats:
        self._fuse.passes("before train_step")
        stats = self.inner.train_step(samples, loss, lr=lr)
        self._fuse.passes("after train_step")
        return stats

    def keep_proximal(self) -> None:
        self.inner.keep_proximal()

    def proximal_logprobs(self, samples: Sequence[TrainSample]) -> Sequence[Sequence[float]]:
        return self.inner.proximal_logprobs(samples)

    def snapshot(self) -> Weights:
        return self.inner.snapshot()

    def copy_of(self, weights: Weights) -> PolicyCopy:
        return self.inner.copy_of(weights)

    def copy(self) -> PolicyCopy:
        self._fuse.passes("copy")
        return self.inner.copy()

    def save(self, folder: Path) -> Callable[[], None]:
        write = self.inner.save(folder)
        self._fuse.passes("within save")

        def write_until_killed() -> None:
            write()
            self._fuse.passes("within write")

        return write_until_killed

    def load(self, folder: Path) -> None:
        self.inner.load(folder)


@dataclass(frozen=True)
class EchoProblem:
    """Say the letter again."""

    letter: str

    @property
    def prompt(self) -> str:
        return self.letter

    def is_correct(self, completion: str, *, finished: bool) -> bool:
        return finished and completion == self.letter

    def score(self, completion: str, *, finished: bool) -> float:
        return float(self.is_correct(completion, finished=finished))


class EchoEnvironment:
    """Implements ports.environment.Environment: one letter in, the same letter out. Vowels are held out."""

    TRAINED, HELD_OUT = "bcdfghjklmnpqrstvwxyz", "aeiou"

    def prompt(self, index: int) -> str:
        return self.TRAINED[index % len(self.TRAINED)]

    def answer(self, index: int) -> str:
        return self.prompt(index)

    def score(self, index: int, completion: str, *, finished: bool) -> float:
        return EchoProblem(self.prompt(index)).score(completion, finished=finished)

    def held_out(self, count: int) -> list[HeldOutProblem]:
        return [EchoProblem(letter) for letter in self.HELD_OUT[:count]]


CONFIG = TrainerConfig(
    seed=3,
    optimizer=AdamW(lr=1e-3, warmup_steps=2),
    lr_damping_nats=0.01,
    lr_final_share=0.1,
    sft=SftConfig(steps_max=3, check_every=2, check_problems=2, batch_size=4, optimizer=AdamW(lr=1e-3)),
    evaluate_every=2,
    evaluation_problems=3,
    checkpoint_every=2,
    row_tokens=16,
)


def make_trainer(
    folder: Path,
    coordinator: BatchCoordinator,
    *,
    fuse: Fuse | None = None,
    config: TrainerConfig = CONFIG,
    backend: TrainBackend | None = None,
) -> Trainer:
    """A trainer process, so to say: its parts live in `folder` and in `coordinator`, and nowhere else."""
    run, clock = coordinator.run, JumpClock()
    coordinator.fuse = fuse or Fuse()
    model = write_model(folder / "model")
    tokenizer = HfTokenizer(model)
    environments = {"echo": EchoEnvironment()}
    questions = held_out(
        environments, tokenizer, evaluation=config.evaluation_problems, stopping=config.sft.check_problems
    )
    metrics = JsonLines(folder / "metrics.jsonl")
    inner = backend or TorchBackend(model, seed=config.seed, threads=1, row_tokens=config.row_tokens)
    return Trainer(
        run=run,
        config=config,
        backend=FusedBackend(inner, coordinator.fuse),
        feed=Feed(coordinator, run, clock=clock),
        publisher=Publisher(
            coordinator,
            run,
            TRAINER,
            clock=clock,
            pending_max=run.spec.async_level,
            rules=config.publish.rules(),
            on_published=record_published(metrics),
            copy_of=inner.copy_of,
        ),
        evaluator=Evaluator(
            TransformersEngine(model, threads=1),
            tokenizer,
            questions,
            run.spec.sampling,
            seed=config.evaluation_seed,
        ),
        lessons=Lessons(
            environments,
            {"echo": 1.0},
            tokenizer,
            seed=config.seed,
            problems=config.sft.problems,
            batch_size=config.sft.batch_size,
        ),
        checkpoints=Checkpoints(folder / "checkpoints", run=run.digest, kept=config.checkpoints_kept),
        metrics=metrics,
        clock=clock,
    )


def rows(folder: Path, field: str) -> list[dict[str, object]]:
    """The metrics' rows that have this field."""
    return [row for row in read_json_lines(folder / "metrics.jsonl") if field in row]


def root_of_backend(trainer: Trainer) -> str:
    return root_of(trainer.backend.snapshot())
