"""Jobs that the tests of several ranks run on each rank."""

from __future__ import annotations

import random
import resource
import signal
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy.typing as npt

from prime_node.adapters.models.lora import LoraSettings
from prime_node.adapters.training.ranks import Ranks
from prime_node.adapters.training.shard_copies import ShardCopies, ShardedCopy, follow_copies
from prime_node.adapters.training.sharding import PLAIN, Placement
from prime_node.adapters.training.torch_backend import TorchBackend
from prime_node.algo.losses import Distillation, find_loss
from prime_node.algo.shares import Packing
from prime_node.ports.train_backend import CriticSettings, KeptPolicy, OptimizerSettings
from prime_node.ports.train_samples import TrainingMode, TrainSample
from prime_protocol.checkpoint import EncodedCheckpoint, root_of_table
from prime_protocol.errors import LocalError
from prime_protocol.manifest import BasePolicy
from prime_protocol.weights import Weights, floats, root_of


@dataclass(frozen=True)
class Curve:
    """Result of a training job."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    metrics: Mapping[str, float]
    work: Mapping[str, float]
    weights: Mapping[str, npt.NDArray[Any]]
    root: str


def samples(count: int = 11, *, seed: int = 0, longest: int = 12) -> list[TrainSample]:
    """Return groups of up to three completions of one prompt, of different lengths; an odd number, so that shares are unequal."""
    rng = random.Random(seed)
    made: list[TrainSample] = []
    while len(made) < count:
        prompt = (258, 10, 11, *(rng.choice((20, 21)) for _ in range(rng.randrange(1, 5))), 259)
        for _ in range(min(3, count - len(made))):
            completion = tuple(rng.choice((30, 31, 32, 33)) for _ in range(rng.randrange(1, longest)))
            logprobs = tuple(-5.5 + rng.gauss(0.0, 0.3) for _ in completion)
            selected = tuple(token == 30 for token in completion)  # for the losses that choose tokens
            made.append(TrainSample(prompt, completion, logprobs, rng.gauss(0.0, 1.0), selected=selected))
    return made


def train(
    ranks: Ranks,
    *,
    model: Path,
    steps: int = 3,
    loss: str = "aipo",
    packing: str = "tree",
    micro_batch_tokens: int = 48,
    placement: Placement = PLAIN,
    lora: LoraSettings | None = None,
    optimizer: OptimizerSettings = OptimizerSettings(),  # noqa: B008 - frozen
    weights: Weights | None = None,
    published_dtype: str = "fp32",
    count: int = 11,
) -> Curve:
    backend = TorchBackend(
        model,
        weights,
        seed=5,
        packing=Packing(packing),
        row_tokens=16,
        micro_batch_tokens=micro_batch_tokens,
        published_dtype=published_dtype,
        ranks=ranks,
        placement=placement,
        lora=lora,
    )
    backend.new_optimizer(optimizer)
    return curve(backend, range(steps), loss=loss, count=count)


def curve(backend: TorchBackend, seeds: Sequence[int], *, loss: str = "aipo", count: int = 11) -> Curve:
    objective = find_loss(loss, constant_length=16)
    stats = [backend.train_step(samples(count, seed=seed), objective, lr=1e-3) for seed in seeds]
    whole = backend.snapshot()
    return Curve(
        losses=tuple(one.loss for one in stats),
        norms=tuple(one.grad_norm for one in stats),
        metrics=stats[-1].metrics if stats else {},
        work=stats[-1].work if stats else {},
        weights={name: floats(tensor) for name, tensor in whole.items()},
        root=root_of(whole),
    )


def initial(model: Path, *, seed: int) -> Weights:
    return TorchBackend(model, seed=seed, published_dtype="fp32").snapshot()


def logprobs(ranks: Ranks, *, model: Path) -> list[list[float]]:
    return TorchBackend(model, seed=5, ranks=ranks, row_tokens=16, micro_batch_tokens=48).logprobs(samples())


def token_values(
    ranks: Ranks, *, model: Path
) -> tuple[list[list[float]], list[list[list[int]]], list[list[list[int]]]]:
    """Return the score norms, and the likeliest tokens now and under a kept policy."""
    backend = TorchBackend(model, seed=5, ranks=ranks, row_tokens=16, micro_batch_tokens=48)
    backend.keep_policy(KeptPolicy.REFERENCE)
    norms, tops = backend.score_norms(samples()), backend.top_logprobs(samples(), 3)
    kept = backend.top_logprobs(samples(), 3, KeptPolicy.REFERENCE)
    return norms, [top.token_ids_NK.tolist() for top in tops], [top.token_ids_NK.tolist() for top in kept]


def critic_steps(ranks: Ranks, *, model: Path, folder: Path, packing: str = "tree") -> tuple[list[list[float]], ...]:
    """Return the critic's values before and after three steps, and after a resumption; each has another fourth step ahead."""

    def made() -> TorchBackend:
        return TorchBackend(
            model,
            seed=5,
            packing=Packing(packing),
            ranks=ranks,
            row_tokens=16,
            micro_batch_tokens=48,
            critic=CriticSettings(OptimizerSettings(eps=1e-6), cliprange_value=0.2),
        )

    def learned(backend: TorchBackend, batch: Sequence[TrainSample]) -> list[list[float]]:
        values = backend.values(batch)
        pairs = zip(batch, values, strict=True)
        backend.train_critic(
            [replace(one, values=tuple(its), returns=(1.0,) * len(its)) for one, its in pairs], lr=1e-2
        )
        return values

    backend, batch = made(), samples()
    before, *_ = (learned(backend, batch) for _ in range(3))
    backend.save(folder)()
    after = learned(backend, batch)
    going_on = backend.values(batch)
    resumed = made()
    resumed.load(folder)
    assert learned(resumed, batch) == after
    assert resumed.values(batch) == going_on
    return before, after, going_on


def late_critic(ranks: Ranks, *, model: Path, folder: Path) -> list[list[float]]:
    """Return the values of a critic that joins a run after two steps of the policy, when it has learned for one step."""

    def made(critic: CriticSettings | None) -> TorchBackend:
        return TorchBackend(model, seed=5, ranks=ranks, row_tokens=16, micro_batch_tokens=48, critic=critic)

    backend, batch = made(None), samples()
    for seed in (1, 2):
        backend.train_step(samples(seed=seed), find_loss("aipo"), lr=1e-2)
    backend.save(folder)()
    joined = made(CriticSettings(OptimizerSettings(eps=1e-6)))
    joined.load(folder)
    pairs = zip(batch, joined.values(batch), strict=True)
    joined.train_critic([replace(one, values=tuple(its), returns=(1.0,) * len(its)) for one, its in pairs], lr=1e-2)
    return joined.values(batch)


def distilled(ranks: Ranks, *, model: Path) -> Curve:
    """Train towards a teacher's likeliest tokens, in a batch that has them for some samples only."""
    teacher = TorchBackend(model, seed=6).top_logprobs(samples(), 4)
    backend = TorchBackend(model, seed=5, ranks=ranks, row_tokens=16, micro_batch_tokens=48, published_dtype="fp32")
    backend.new_optimizer(OptimizerSettings(eps=1e-6))
    objective = find_loss("aipo", distillation=Distillation())
    batch = [
        replace(sample, mode=TrainingMode.OPD, teacher_top=top) if number % 2 else sample
        for number, (sample, top) in enumerate(zip(samples(), teacher, strict=True))
    ]
    stats = [backend.train_step(batch, objective, lr=1e-3) for _ in range(2)]
    whole = backend.snapshot()
    return Curve(
        losses=tuple(one.loss for one in stats),
        norms=tuple(one.grad_norm for one in stats),
        metrics=stats[-1].metrics,
        work=stats[-1].work,
        weights={name: floats(tensor) for name, tensor in whole.items()},
        root="",
    )


def agreement(
    ranks: Ranks,
    *,
    model: Path,
    placement: Placement = PLAIN,
    lora: LoraSettings | None = None,
    weights: Weights | None = None,
) -> tuple[list[list[float]], Weights]:
    """Train a bit, and return the trainer's logprobs of some samples with the tensors that it publishes."""
    backend = TorchBackend(
        model, weights, seed=5, ranks=ranks, row_tokens=16, micro_batch_tokens=48, placement=placement, lora=lora
    )
    for seed in (1, 2):
        backend.train_step(samples(seed=seed), find_loss("aipo", constant_length=16), lr=1e-3)
    return backend.logprobs(samples()), backend.snapshot()


def reference_logprobs(ranks: Ranks, *, model: Path, folder: Path, lora: LoraSettings | None) -> tuple[bool, bool]:
    """Return whether the reference kept its logprobs while the policy moved, and again after a save and a resumption."""

    def made() -> TorchBackend:
        return TorchBackend(model, seed=5, ranks=ranks, row_tokens=16, micro_batch_tokens=48, lora=lora)

    backend, batch = made(), samples()
    before = backend.logprobs(batch)
    backend.keep_policy(KeptPolicy.REFERENCE)
    curve(backend, [1, 2])
    moved = backend.logprobs(batch) != before
    kept = backend.logprobs(batch, KeptPolicy.REFERENCE) == before
    backend.save(folder)()
    resumed = made()
    resumed.load(folder)
    return moved and kept, resumed.logprobs(batch, KeptPolicy.REFERENCE) == before


def save_and_go_on(ranks: Ranks, *, model: Path, folder: Path, published_dtype: str = "fp32") -> Curve:
    """Run the steps after the save; the save writes what was copied before them."""
    backend = _ready(model, ranks, published_dtype=published_dtype)
    curve(backend, [1, 2])
    write = backend.save(folder)
    going_on = curve(backend, [3, 4, 5])
    write()
    return going_on


def take_rows(ranks: Ranks, *, model: Path) -> bool:
    """Return whether a policy that rank 0 publishes was copied on this rank. Further replicas of HSDP get nothing."""
    backend, copies = _ready(model, ranks), ShardCopies(ranks, ranks.aside())
    backend.take_copy(0, copies)
    whole = backend.snapshot()
    backend.take_rows(1, copies, whole if ranks.is_first else None)
    copied, dealt = copies.of(0), copies.of(1)
    if ranks.copy:
        return all(tensor.data.size == 0 for tensor in dealt.values())
    return copied.keys() == dealt.keys() and root_of(copied) == root_of(dealt)


def resume(ranks: Ranks, *, model: Path, folder: Path, published_dtype: str = "fp32") -> Curve:
    backend = _ready(model, ranks, seed=77, published_dtype=published_dtype)
    backend.load(folder)
    return curve(backend, [3, 4, 5])


def save_on_a_full_disk(ranks: Ranks, *, model: Path, folder: Path) -> str:
    backend = _ready(model, ranks)
    write = backend.save(folder)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        if ranks.rank == 3:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, before[1]))
        write()
    except LocalError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    return "it was written"


def _ready(model: Path, ranks: Ranks, *, seed: int = 5, published_dtype: str = "fp32") -> TorchBackend:
    backend = TorchBackend(
        model, seed=seed, ranks=ranks, row_tokens=16, micro_batch_tokens=48, published_dtype=published_dtype
    )
    backend.new_optimizer(OptimizerSettings(eps=1e-6, grad_norm_max=0.5))
    return backend


def publish_in_shards(ranks: Ranks, *, model: Path) -> tuple[Any, ...]:
    """Two policies with a step between them: on rank 0 their tables, an anchor of the first and a delta to the second; and
    how many bytes each rank holds of a policy, and how many are left when both copies are dropped.
    """
    aside = ranks.aside()
    backend, copies = _ready(model, ranks), ShardCopies(ranks, aside)
    backend.take_copy(0, copies)
    whole = [backend.snapshot()]
    curve(backend, [1])
    backend.take_copy(1, copies)
    whole.append(backend.snapshot())
    held = sum(tensor.data.nbytes for tensor in copies.of(0).values())
    if not ranks.is_first:
        follower = threading.Thread(target=follow_copies, args=(copies, aside), daemon=True)
        follower.start()
        follower.join()
        return held, copies.held
    first, second = (ShardedCopy(number, copies, aside, raw_bytes=0) for number in range(2))
    tables = [first.tensors(), second.tensors()]
    base = BasePolicy(policy_version=0, state_root=root_of_table(tables[0]))
    encodings = []
    for copy, against in ((first, None), (second, (base, first))):
        parts: list[bytes] = []
        encoding, index = copy.encode(against, keep=lambda _, part, parts=parts: parts.append(bytes(part)))
        encodings.append(EncodedCheckpoint(encoding, index, tuple(parts)))
    first.drop()
    second.drop()
    second.drop()
    first_root = root_of(whole[0])
    aside.lead([None] * aside.count)
    return held, copies.held, whole, tables, encodings, first_root
