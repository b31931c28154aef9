"""A short run that promises its re-execution, with trainers that cheat, and its re-execution by a stranger."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tests.node.batch_coordinator import COORDINATOR, TRAINER, BatchCoordinator, Fuse, make_run, tiny_files, write_model
from tests.node.trainer_world import CONFIG, EchoEnvironment, make_trainer
from tests.time_world import VirtualClock

from prime_node.adapters.models.hf_tokenizer import HfTokenizer
from prime_node.adapters.training.leading_backend import dismiss, follow
from prime_node.adapters.training.ranks import Ranks
from prime_node.adapters.training.torch_backend import TorchBackend
from prime_node.cli.wire_training import train_backend
from prime_node.ports.train_backend import CommittedTensors, Loss, PackedBatch, StepStats
from prime_node.ports.train_samples import TrainSample
from prime_node.replay.finding import RecordedSource, ReplayReport, StepFinding
from prime_node.replay.material import Material, ReplayProgress
from prime_node.replay.reexecution import Reexecution
from prime_node.trainer.config import TrainerConfig
from prime_node.trainer.lessons import Lessons
from prime_node.trainer.loop import run_trainer
from prime_node.trainer.pinned_recipe import config_of, recipe_document
from prime_node.trainer.step_runner import StepRunner
from prime_node.training_data.feed import Feed, StepBatch
from prime_protocol.digest import digest_of
from prime_protocol.envelope import Envelope, PayloadType, seal
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.identity import SigningKey
from prime_protocol.manifest import PartEntry, open_manifest
from prime_protocol.replay import ReplayPolicy
from prime_protocol.replies import NotYet, TrainBatch
from prime_protocol.requests import BatchRequest
from prime_protocol.run_spec import PinnedRun

STEPS = 4


class PublishedRun(BatchCoordinator):
    """Coordinator in memory that publishes batches and bundles: implementation of ports.transport.ReplaySource."""

    def __init__(self, run: PinnedRun) -> None:
        super().__init__(run)
        self.batches: dict[tuple[int, int], Envelope] = {}
        self.blobs |= {digest_of(data): data for data in tiny_files().values()}

    async def batch(self, request: BatchRequest) -> Envelope | NotYet:
        answer = await super().batch(request)
        if isinstance(answer, Envelope):
            self.batches[request.step, request.part] = answer
        return answer

    async def public_batch(self, step: int, part: int) -> Envelope:
        return self.batches[step, part]

    async def blob(self, digest: str, *, start: int = 0, end: int | None = None) -> bytes:
        if digest in self.bundles:
            return self.bundles[digest]
        return await super().blob(digest, start=start, end=end)

    async def key_ring(self, version: int) -> Envelope:
        raise RemoteError(ErrorCode.NOT_FOUND, "no key ring")

    async def calibration(self, version: int) -> Envelope:
        raise RemoteError(ErrorCode.NOT_FOUND, "no amendment")

    async def timestamp(self) -> Envelope:
        raise RemoteError(ErrorCode.NOT_FOUND, "no timestamp")


class CheatingBackend(TorchBackend):
    """Backend of a trainer that does not do what its manifests say."""

    lr_factor = 1.0
    packed_as: Callable[[Sequence[TrainSample]], Sequence[TrainSample]] = staticmethod(lambda samples: samples)
    flips_state = False

    def pack(self, samples: Sequence[TrainSample]) -> PackedBatch:
        return super().pack(self.packed_as(samples))

    def train_step(self, samples: Sequence[TrainSample] | PackedBatch, loss: Loss, *, lr: float) -> StepStats:
        return super().train_step(samples, loss, lr=self.lr_factor * lr)

    def commit(self, path: Path) -> CommittedTensors:
        found = super().commit(path)
        if not self.flips_state:
            return found
        data = bytearray(path.read_bytes())
        data[-1] ^= 0x40  # a master's exponent: the last tensor by name is one
        path.write_bytes(data)
        return replace(found, parts=(PartEntry(digest=digest_of(bytes(data)), size=len(data)),))


def one_more_reward(samples: Sequence[TrainSample]) -> list[TrainSample]:
    """Change what one completion of a batch is worth."""
    first, *rest = samples
    return [replace(first, advantage=first.advantage + 0.1), *rest]


def one_group_less(samples: Sequence[TrainSample]) -> list[TrainSample]:
    """Drop the first prompt of a batch."""
    return [one for one in samples if one.prompt_token_ids != samples[0].prompt_token_ids]


def replayable_run(
    config: TrainerConfig = CONFIG,
    *,
    state_every: int = 2,
    max_steps: int = STEPS,
    promise: Mapping[str, Any] | None = None,
    **changes: Any,
) -> PublishedRun:
    """Return a run that pins the settings, before its first policy.

    `promise` has further fields of its ReplayPolicy, and `changes` are those of `make_run`.
    """
    policy = ReplayPolicy(recipe=digest_of(recipe_document(config)), state_every=state_every, **(promise or {}))
    return PublishedRun(make_run(max_steps=max_steps, replay=policy, **changes))


def changed(**settings: object) -> TrainerConfig:
    """Return the settings of these tests with others in their place, checked as those of a file."""
    return TrainerConfig.model_validate(CONFIG.model_dump() | settings)


async def trained(
    folder: Path,
    published: PublishedRun,
    config: TrainerConfig = CONFIG,
    *,
    model: Path | None = None,
    ranks: Ranks | None = None,
    fuse: Fuse | None = None,
    **cheat: object,
) -> PublishedRun:
    """Train the whole run, with cheats of the backend if some are given. `model`: another one than the tiny one."""
    model = model or write_model(folder / "model")
    backend = train_backend(config, published.run.spec, ranks, model=model)
    if cheat:
        backend = CheatingBackend(model, seed=config.seed, threads=1, row_tokens=config.row_tokens)
        for name, value in cheat.items():
            setattr(backend, name, value)
    assert await run_trainer(
        make_trainer(folder, published, config=config, backend=backend, fuse=fuse), asyncio.Event()
    )
    return published


def signing_again(published: PublishedRun, version: int, **made: object) -> PublishedRun:
    """Return a copy in which the trainer states something else of how it made a policy. Later policies are left out."""
    found = copy(published)
    manifest = published.manifests[version].manifest
    manifest = manifest.model_copy(update={"produced_by": manifest.produced_by.model_copy(update=made)})
    signed = open_manifest(seal(manifest, PayloadType.MANIFEST, TRAINER), published.run)
    found.manifests = [*published.manifests[:version], signed]
    return found


def with_batches(
    published: PublishedRun, step: int, batches: Sequence[TrainBatch], *, key: SigningKey = COORDINATOR
) -> PublishedRun:
    """Return a copy whose step trains on these batches, by the word of coordinator and trainer."""
    envelopes: list[Envelope] = []
    for batch in batches:
        chained = {"previous": envelopes[-1].digest} if envelopes and batch.previous is not None else {}
        envelopes.append(seal(batch.model_copy(update=chained), PayloadType.BATCH, key))
    found = signing_again(published, step + 1, batch=envelopes[-1].digest)
    found.batches = published.batches | {(step, part): envelope for part, envelope in enumerate(envelopes)}
    return found


def with_state(
    published: PublishedRun, version: int, change: Callable[[dict[str, Any], bytearray], None], **made: object
) -> PublishedRun:
    """Return a copy whose policy commits to a training state with another index, or with other bytes of its tensors."""
    digest = published.manifests[version].manifest.produced_by.training_state
    assert digest is not None
    fields = json.loads(published.blobs[digest])
    data = bytearray(b"".join(published.blobs[part["digest"]] for part in fields["parts"]))
    change(fields, data)
    held = bytes(data)
    fields["parts"] = [{"digest": digest_of(held), "size": len(held)}]
    index = json.dumps(fields).encode()
    found = signing_again(published, version, training_state=digest_of(index), **made)
    found.blobs = published.blobs | {digest_of(held): held, digest_of(index): index}
    return found


async def mirrored(published: PublishedRun, folder: Path, config: TrainerConfig = CONFIG) -> Path:
    """Write what the run publishes to a folder, as a mirror has it."""
    source = RecordedSource(published, folder)
    published.blobs[digest_of(recipe_document(config))] = recipe_document(config)
    await source.run_spec()
    await source.head()
    for version in range(len(published.manifests)):
        await source.manifest(version)
    for step, part in published.batches:
        await source.public_batch(step, part)
    for digest in (*published.blobs, *published.bundles):
        await source.blob(digest)
    return folder


def outcomes_on_ranks(ranks: Ranks, folder: str) -> list[str]:
    """Train on these ranks, re-execute on them, and return what the first one finds of each step, and the arithmetic's name."""
    if not ranks.is_first:
        for _ in ("trainer", "re-execution"):
            follow(ranks)
        return []

    async def both() -> list[str]:
        config = CONFIG.model_copy(update={"evaluate_every": 0})
        published = await trained(Path(folder), replayable_run(config), config, ranks=ranks)
        dismiss(ranks)
        report = await replayed(published, Path(folder), ranks=ranks)
        dismiss(ranks)
        return [*(str(one.outcome) for one in report.steps), str(published.manifests[1].manifest.produced_by.numerics)]

    return asyncio.run(both())


async def no_further_checks(batch: StepBatch, finding: StepFinding) -> None:
    """Leave rewards and ledger to their own tests."""


async def replayed(
    published: PublishedRun,
    folder: Path,
    steps: Sequence[int] = range(STEPS),
    *,
    genesis: bool = False,
    row_tokens: int | None = None,
    tolerance: bool = False,
    model: Path | None = None,
    ranks: Ranks | None = None,
    check: Callable[[StepBatch, StepFinding], Awaitable[None]] = no_further_checks,
    progress: ReplayProgress | None = None,
) -> ReplayReport:
    """Re-execute steps from what the run publishes. `row_tokens`: another packing, which is other arithmetic."""
    run = published.run
    assert run.spec.replay is not None
    material = Material(published, run, run.spec.replay, progress or ReplayProgress())
    config = config_of(await material.recipe(), run.spec.replay, trusted_code=("own_losses:half",))
    model = model or write_model(folder / "model")
    packed = config.model_copy(update={"row_tokens": row_tokens or config.row_tokens})
    on_pass = partial(material.progress.note, "passes")
    backend = train_backend(packed, run.spec, ranks, model=model, on_pass=on_pass)
    feed = Feed(material, run, clock=VirtualClock(), kept=True)
    lessons = Lessons(
        {"echo": EchoEnvironment()},
        {"echo": 1.0},
        HfTokenizer(model),
        seed=config.seed,
        problems=config.sft.problems,
        batch_size=config.sft.batch_size,
    )
    runner = StepRunner(run=run, config=config, backend=backend, feed=feed, lessons=lessons, clock=VirtualClock())
    report = ReplayReport(run.digest, pinned=True)
    work = Reexecution(material, runner, report, folder, check, tolerance)
    try:
        if genesis:
            await work.genesis()
        await work.steps(steps, head=await material.head())
    finally:
        runner.end_thread()
        await feed.close()
    return report
