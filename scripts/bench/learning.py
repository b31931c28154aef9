"""Held-out accuracy by loss and by async_level k, with three seeds per row: which loss learns, and at what lag of the sampler.

    python scripts/bench/learning.py --out DIR                     the whole grid: 126 runs, hours; resumes where it stopped
    python scripts/bench/learning.py --out DIR --minutes 10        as many runs as begin within ten minutes
    python scripts/bench/learning.py --out DIR --report            tables of the finished runs; --plot FILE draws the curves,
                                                                   --keep FILE writes them, and --out takes that FILE too
    python scripts/bench/learning.py --out scripts/bench/learning-added.jsonl --report --base aipo --losses aipo "aipo + kl" ...
    python scripts/bench/learning.py --quick [--json]              two losses, two levels, a few steps, under a minute

Engine, environment, losses and train backend in one process, without the wire. Every run of a task and a seed begins with the
same weights, trained by supervised steps until a fifth of sampled answers is right. Step n trains on rollouts of policy
max(0, n - k), sampled from its published bf16 weights by the engine that workers use. All runs take AdamW and the same learning
rate with a linear decay and no damping, so that differences in stability are visible. `grpo` is grpo_is with importance
correction switched off: it treats the rollouts as the trainer's own. Evaluation is on held-out problems that no stopping rule
used.

Each run is one JSON file in DIR: its settings, the evaluations, and each step's reward, mean |log ratio| and gradient norm.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from string import ascii_lowercase
from typing import Any, Protocol, TypeVar

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from checks import Output
from learning_loop import LearningLoop
from learning_plot import plot
from learning_report import checks, compare, keep, read, report

from prime_node.adapters.engines.torch_weights import to_torch, to_weights
from prime_node.adapters.engines.transformers_engine import TransformersEngine
from prime_node.adapters.models.hf_tokenizer import HfTokenizer
from prime_node.adapters.models.pretrained_model import pretrained_weights
from prime_node.adapters.models.tiny_model import tiny_model_files
from prime_node.adapters.training.torch_backend import TorchBackend
from prime_node.algo.losses import find_loss
from prime_node.algo.schedule import ParameterSchedule
from prime_node.broadcast.audit.safetensors_file import write_safetensors
from prime_node.cli.wire_environments import build_environments
from prime_node.ports.train_backend import OptimizerSettings
from prime_node.trainer.config import TrainerConfig
from prime_node.trainer.evaluate import Evaluator, HeldOutSets, held_out
from prime_node.trainer.lessons import Lessons
from prime_node.trainer.recipe import Recipe
from prime_protocol.assignment import Sampling
from prime_protocol.digest import digest_of
from prime_protocol.run_spec import EnvironmentSpec
from prime_protocol.weights import Weights

TASKS: dict[str, dict[str, str | int | float | bool]] = {
    "spell_backward": {"task": "spell_backward", "min_word_len": 3, "max_word_len": 6},
    "sort_letters": {"prefix": "Sort the letters: "},
}
"""Options of their environments. The first gives credit for a part of the answer; the second, a dataset made here, for none."""
SORTED_WORDS, SORTED_LETTERS = 20_000, (3, 4, 5)
"""Questions of sort_letters, and how many letters they have."""
LOSSES: dict[str, dict[str, str | float]] = {
    "aipo": {"type": "aipo"},
    "dppo_kl": {"type": "dppo_kl"},
    "grpo_is": {"type": "grpo_is"},
    "gspo": {"type": "gspo"},
    "cispo": {"type": "cispo"},
    "grpo": {"type": "grpo"},
    "gspo_wide": {"type": "gspo", "eps_low": 0.03, "eps_high": 0.04},
}
"""The losses of the table, as [trainer.loss] has them. `gspo_wide`: bounds above the mismatch of trainer and sampler."""
ADDED: dict[str, dict[str, Any]] = {
    "sapo": {"loss": {"type": "sapo"}},
    "aipo + kl": {"loss": {"type": "aipo", "kl_loss_coef": 1e-3}},
    "aipo + strong kl": {"loss": {"type": "aipo", "kl_loss_coef": 3e-2}},
    "aipo + entropy": {"loss": {"type": "aipo", "entropy_coeff": 1e-3}},
    "aipo + reinforce++": {"loss": {"type": "aipo"}, "advantage": {"type": "reinforce_plus_plus"}},
    "aipo + reinforce++ baseline": {"loss": {"type": "aipo"}, "advantage": {"type": "reinforce_plus_plus_baseline"}},
    "aipo + overlong": {"loss": {"type": "aipo"}, "advantage": {"overlong_buffer": {"len": 2, "penalty_factor": 0.5}}},
}
"""Terms and advantages that are added to the default loss, and SAPO, as [trainer] has them."""
SETTINGS: dict[str, dict[str, Any]] = {name: {"loss": loss} for name, loss in LOSSES.items()} | ADDED
LEVELS = (0, 2, 4)
SEEDS = (1, 2, 3)
GROUPS, ROLLOUTS, COMPLETION_TOKENS = 48, 8, 8
TAUGHT = 0.2
"""Sampled accuracy at which the supervised steps end."""
EVALUATIONS = 8
"""Evaluations of a run, in addition to the one before it."""


@dataclass(frozen=True)
class Row:
    """One run."""

    task: str
    loss: str
    async_level: int
    seed: int
    steps: int
    lr: float

    @property
    def name(self) -> str:
        return f"{self.task}-{self.loss}-k{self.async_level}-seed{self.seed}-{self.steps}"


def environment_spec(task: str, seed: int, folder: Path) -> EnvironmentSpec:
    """Writes the task's dataset into `folder` where it has one."""
    if task != "sort_letters":
        return EnvironmentSpec(name=task, id="reasoning_gym", seed=seed, options=TASKS[task])
    random = Random(0)
    words = ["".join(random.choices(ascii_lowercase, k=random.choice(SORTED_LETTERS))) for _ in range(SORTED_WORDS)]
    lines = [json.dumps({"question": word, "answer": "".join(sorted(word))}) + "\n" for word in words]
    path, data = folder / "sort_letters.jsonl", "".join(lines).encode()
    path.write_bytes(data)
    options = {**TASKS[task], "path": str(path), "digest": digest_of(data)}
    return EnvironmentSpec(name=task, id="jsonl", seed=seed, options=options)


class Named(Protocol):
    """A run, by what its file is called."""

    @property
    def name(self) -> str: ...


Run = TypeVar("Run", bound=Named)


class Bench:
    """The parts that all runs of a task and a seed share."""

    def __init__(self, folder: Path, out: Path, task: str, seed: int, *, evaluation: int) -> None:
        for name, data in tiny_model_files().items():
            (folder / name).write_bytes(data)
        self._folder, self._seed = folder, seed
        spec = environment_spec(task, seed, folder)
        self._environment = build_environments([spec], folder)[task]
        self._tokenizer = HfTokenizer(folder)
        stop = (self._tokenizer.stop_token_id,)
        self._sampling = Sampling(completion_tokens_max=COMPLETION_TOKENS, stop_token_ids=stop)
        self._engine = TransformersEngine(folder, threads=1, cache_bytes_max=2**26)  # as much as stays near the core
        environments = {task: self._environment}
        questions = held_out(environments, self._tokenizer, evaluation=evaluation, stopping=256)
        self._evaluator = Evaluator(self._engine, self._tokenizer, questions, self._sampling, seed=1)
        self._lessons = Lessons(environments, {task: 1.0}, self._tokenizer, seed=seed, problems=8_192, batch_size=64)
        self._start = out / f"start-{task}-seed{seed}"
        marker = Evaluator(self._engine, self._tokenizer, HeldOutSets((), questions.evaluation), self._sampling, seed=1)
        self._loop = LearningLoop(
            self._engine, self._tokenizer, self._environment, marker, self._sampling, seed, GROUPS, ROLLOUTS
        )

    async def teach(self, steps_max: int) -> None:
        """Weights to begin with, once for all losses and levels."""
        if (self._start / "model.safetensors").exists():
            return
        backend = TorchBackend(self._folder, seed=self._seed, threads=1, published_dtype="fp32")
        backend.new_optimizer(OptimizerSettings(betas=(0.9, 0.95), weight_decay=0.01))
        loss, schedule = find_loss("sft"), ParameterSchedule(2e-3, 30, 1, 1.0)
        for step in range(steps_max):
            if step and step % 5 == 0:
                weights = _rounded(backend)
                if await self._evaluator.stopping_accuracy(weights, step) >= TAUGHT:
                    break
            backend.train_step(self._lessons.batch(step), loss, lr=schedule.at(step))
        self._start.mkdir(parents=True, exist_ok=True)
        partial = self._start / "partial"
        write_safetensors(partial, backend.snapshot())
        partial.rename(self._start / "model.safetensors")

    async def run(self, row: Row) -> dict[str, Any]:
        weights = pretrained_weights(str(self._start))
        backend = TorchBackend(self._folder, weights, seed=self._seed, threads=1)
        backend.new_optimizer(OptimizerSettings(betas=(0.9, 0.95), weight_decay=0.0))
        config = TrainerConfig.load(
            {
                "trainer": {
                    **SETTINGS[row.loss],
                    "optimizer": {"lr": row.lr, "warmup_steps": 5},
                    "lr_final_share": 0.1,
                }
            }
        )
        recipe = Recipe.of(
            config,
            max_steps=row.steps,
            completion_tokens_max=COMPLETION_TOKENS,
            vocab_size=self._tokenizer.vocab_size,
        )
        found = await self._loop.run(
            backend, recipe, steps=row.steps, async_level=row.async_level, evaluations=EVALUATIONS
        )
        return {**asdict(row), **found}

    async def close(self) -> None:
        await self._evaluator.close()


def _rounded(backend: TorchBackend) -> Weights:
    """bf16, as they would be published."""
    exact = backend.snapshot()
    return to_weights(((name, to_torch(tensor)) for name, tensor in exact.items()), dtype="bf16")


# The grid


def grid(options: argparse.Namespace) -> Iterator[Row]:
    """Seeds outermost: whenever it is stopped, as many rows as possible are complete."""
    for seed, task, level, loss in itertools.product(options.seeds, options.tasks, options.levels, options.losses):
        yield Row(task, loss, level, seed, options.steps, options.lr)


async def fill(options: argparse.Namespace, out: Path, *, evaluation: int) -> None:
    """Every row of the grid that DIR does not have yet; none is begun after `--minutes`."""
    end_s = time.monotonic() + 60.0 * (math.inf if options.minutes is None else options.minutes)
    missing = missing_of(grid(options), out)
    for (seed, task), rows in itertools.groupby(missing, key=lambda row: (row.seed, row.task)):
        with tempfile.TemporaryDirectory() as folder:
            bench = Bench(Path(folder), out, task, seed, evaluation=evaluation)
            await bench.teach(options.teach_steps)
            await run_each(rows, bench.run, out, end_s=end_s)
            await bench.close()


def missing_of(runs: Iterable[Run], out: Path) -> list[Run]:
    return [run for run in runs if not (out / f"{run.name}.json").exists()]


async def run_each(
    runs: Iterable[Run], run: Callable[[Run], Awaitable[dict[str, Any]]], out: Path, *, end_s: float
) -> None:
    """Each becomes a file, whole or not at all; none is begun after `end_s`."""
    for one in runs:
        if time.monotonic() > end_s:
            return
        found = await run(one)
        partial = out / f"{one.name}.partial"
        partial.write_text(json.dumps(found))
        partial.rename(out / f"{one.name}.json")
        print(f"{one.name}: {found['evaluations'][-1]}, {found['seconds']:.0f} s", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder of the runs; one that is there is not repeated")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--lr", type=float, default=4e-4)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS, help="to run, or to report of")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--losses", nargs="+", choices=SETTINGS, default=list(LOSSES))
    parser.add_argument("--levels", type=int, nargs="+", default=LEVELS)
    parser.add_argument("--base", choices=SETTINGS, default="grpo_is", help="compare the others with this one")
    parser.add_argument("--minutes", type=float, help="begin no run after this long")
    parser.add_argument("--teach-steps", type=int, default=1_000, help="supervised steps at most")
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument("--plot", type=Path, help="draw the curves into this PNG")
    parser.add_argument("--keep", type=Path, help="write the curves there, as JSON lines")
    parser.add_argument("--quick", action="store_true", help="two losses, two levels, a few steps")
    parser.add_argument("--json", action="store_true", help="print the checks alone, as JSON")
    options = parser.parse_args()
    if options.out is None and not options.quick:
        parser.error("give --out DIR, or --quick")
    output = Output(as_json=options.json)
    with tempfile.TemporaryDirectory() as scratch:
        out, evaluation = options.out or Path(scratch), 1_024
        if options.quick:
            options.seeds, options.tasks, options.losses, options.levels = (
                (1,),
                ["spell_backward"],
                ("grpo_is", "grpo"),
                (0, 4),
            )
            options.steps, options.teach_steps, evaluation = 6, 40, 128
        if not out.is_file():
            out.mkdir(parents=True, exist_ok=True)
        if not options.report:
            asyncio.run(fill(options, out, evaluation=evaluation))
        runs = [run for run in read(out) if run["seed"] in options.seeds]
    wanted = len(options.losses) * len(options.levels) * len(options.seeds) * len(options.tasks)
    if not runs:
        sys.exit(f"no runs in {out}")
    if options.keep:
        keep(runs, options.keep)
    if options.plot:
        plot(runs, options.plot, losses=list(LOSSES))
    report(runs, losses=SETTINGS, levels=options.levels)
    compare(runs, losses=SETTINGS, levels=options.levels, base=options.base)
    print()
    return output.finish(checks(runs, wanted=wanted, quick=options.quick))


if __name__ == "__main__":
    raise SystemExit(main())
