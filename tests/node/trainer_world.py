"""A trainer with a real small model on a `BatchCoordinator`. All state is in a folder, so that another trainer can continue."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.node.batch_coordinator import TRAINER, BatchCoordinator, Fuse, KilledError, make_run, write_model
from tests.time_world import VirtualClock

from prime_node.adapters.engines.transformers_engine import TransformersEngine
from prime_node.adapters.models.hf_tokenizer import HfTokenizer
from prime_node.adapters.training.torch_backend import TorchBackend
from prime_node.broadcast.publish.publisher import Publisher
from prime_node.observe import JsonLines, read_json_lines
from prime_node.ports.environment import HeldOutProblem
from prime_node.ports.train_backend import (
    CommittedTensors,
    CriticStats,
    KeptPolicy,
    Loss,
    OptimizerSettings,
    PackedBatch,
    PolicyCopy,
    StepStats,
    TrainBackend,
)
from prime_node.ports.train_samples import TopLogprobs, TrainSample
from prime_node.trainer.algorithm_config import AdamW
from prime_node.trainer.checkpointing import Checkpoints
from prime_node.trainer.committing import Committer
from prime_node.trainer.config import SftConfig, TrainerConfig
from prime_node.trainer.evaluate import Evaluator, held_out
from prime_node.trainer.further_rewards import KeptRewards
from prime_node.trainer.lessons import Lessons
from prime_node.trainer.loop import run_trainer
from prime_node.trainer.trainer import Trainer, record_published
from prime_node.training_data.feed import Feed, KeptBundles
from prime_protocol.training_state import TrainingTensor
from prime_protocol.weights import Weights, root_of


class FusedBackend:
    """Backend with points at which a fuse may blow."""

    def __init__(self, backend: TrainBackend, fuse: Fuse) -> None:
        self.inner, self._fuse = backend, fuse

    @property
    def sequence_tokens_max(self) -> int:
        return self.inner.sequence_tokens_max

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

    def logprobs(self, samples: Sequence[TrainSample], of: KeptPolicy | None = None) -> list[list[float]]:
        return self.inner.logprobs(samples, of)

    def top_logprobs(
        self, samples: Sequence[TrainSample], count: int, of: KeptPolicy | None = None
    ) -> Sequence[TopLogprobs]:
        return self.inner.top_logprobs(samples, count, of)

    def begin_critic(self) -> None:
        self.inner.begin_critic()

    def values(self, samples: Sequence[TrainSample]) -> Sequence[Sequence[float]]:
        return self.inner.values(samples)

    def train_critic(self, samples: Sequence[TrainSample], *, lr: float) -> CriticStats:
        stats = self.inner.train_critic(samples, lr=lr)
        self._fuse.passes("after train_critic")
        return stats

    def score_norms(self, samples: Sequence[TrainSample]) -> Sequence[Sequence[float]]:
        return self.inner.score_norms(samples)

    def keep_policy(self, which: KeptPolicy) -> None:
        self.inner.keep_policy(which)

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

    @property
    def numerics(self) -> str:
        return self.inner.numerics

    def commit(self, path: Path) -> CommittedTensors:
        return self.inner.commit(path)

    def restore(self, path: Path, tensors: Sequence[TrainingTensor]) -> None:
        self.inner.restore(path, tensors)


@dataclass(frozen=True)
class EchoProblem:
    """Problem whose answer is its own letter."""

    letter: str

    @property
    def prompt(self) -> str:
        return self.letter

    def is_correct(self, completion: str, *, finished: bool) -> bool:
        return finished and completion == self.letter

    def score(self, completion: str, *, finished: bool) -> float:
        return float(self.is_correct(completion, finished=finished))


class EchoEnvironment:
    """Environment (ports.environment.Environment) whose answer is the prompt's letter. Vowels are held out."""

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
    """Return a trainer in place of a process: its state is only in `folder` and in `coordinator`."""
    run, clock = coordinator.run, VirtualClock()
    coordinator.fuse = fuse or Fuse()
    model = write_model(folder / "model")
    tokenizer = HfTokenizer(model)
    environments = {"echo": EchoEnvironment()}
    questions = held_out(
        environments, tokenizer, evaluation=config.evaluation_problems, stopping=config.sft.check_problems
    )
    metrics = JsonLines(folder / "metrics.jsonl")
    critic = None if config.critic is None else config.critic.settings()
    inner = backend or TorchBackend(model, seed=config.seed, threads=1, row_tokens=config.row_tokens, critic=critic)
    return Trainer(
        run=run,
        config=config,
        backend=FusedBackend(inner, coordinator.fuse),
        feed=Feed(coordinator, run, clock=clock, copies=KeptBundles(folder / "bundles")),
        publisher=Publisher(
            coordinator,
            run,
            TRAINER,
            clock=clock,
            pending_max=run.spec.async_level,
            rules=config.publish.rules(),
            on_published=record_published(metrics),
            folder=folder,
            copy_of=inner.copy_of,
        ),
        evaluator=Evaluator(
            TransformersEngine(model, threads=1),
            tokenizer,
            questions,
            run.spec.sampling,
            seed=config.evaluation_seed,
        ),
        rewards=KeptRewards(folder / "rewards"),
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
        committer=None if run.spec.replay is None else Committer(run.spec.replay, folder / "states"),
    )


async def check_kill_in_a_step(folder: Path, config: TrainerConfig) -> None:
    """Check that a run whose trainer is killed after an optimizer step ends with the policies of one that is not killed."""
    whole, cut = (BatchCoordinator(make_run(max_steps=4, async_level=2)) for _ in range(2))
    assert await run_trainer(make_trainer(folder / "whole", whole, config=config), asyncio.Event())
    fuse = Fuse("after train_step", CONFIG.sft.steps_max + 3)
    with pytest.raises(KilledError):
        await run_trainer(make_trainer(folder / "cut", cut, config=config, fuse=fuse), asyncio.Event())
    assert await run_trainer(make_trainer(folder / "cut", cut, config=config), asyncio.Event())
    assert cut.roots == whole.roots


def rows(folder: Path, field: str) -> list[dict[str, object]]:
    """Return the metrics' rows that have this field."""
    return [row for row in read_json_lines(folder / "metrics.jsonl") if field in row]


def root_of_backend(trainer: Trainer) -> str:
    return root_of(trainer.backend.snapshot())
