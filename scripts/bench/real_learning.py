"""What async_level k, LoRA and a small learning rate do to the learning of SmolLM2-135M: configs/smollm2.toml in one process.

    python scripts/bench/real_learning.py --out DIR [--variant NAME ...] [--steps 24]     some 15 minutes a variant on two cores
    python scripts/bench/real_learning.py --out DIR --report [--plot FILE] [--keep FILE]  DIR, or a FILE that --keep wrote
    python scripts/bench/real_learning.py --quick [--json]                                two steps at k = 0, two minutes

The model (scripts/models.py smollm2), the problems, the groups of a step and the optimizer are configs/smollm2.toml's. Rollouts
come from the transformers engine in fp32 on the published bf16 weights, without the wire and without validators, so that nothing
but the variant differs: all variants get the same problems and the same noise. Accuracy is of sampled answers to 256 held-out
problems; its standard error is at most 0.031. Each finished variant is one JSON file in DIR, and is not run again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from checks import Check, Output, at_least, at_most
from learning_loop import LearningLoop
from learning_report import by_tenth
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from prime_node.adapters.engines.transformers_engine import TransformersEngine
from prime_node.adapters.models.hf_tokenizer import HfTokenizer
from prime_node.adapters.models.lora import LoraSettings
from prime_node.adapters.models.pretrained_model import pretrained_weights
from prime_node.adapters.training.torch_backend import TorchBackend
from prime_node.cli.wire_environments import build_environments
from prime_node.trainer.config import TrainerConfig
from prime_node.trainer.evaluate import Evaluator, HeldOutSets, held_out
from prime_node.trainer.recipe import Recipe
from prime_protocol.assignment import Sampling
from prime_protocol.run_spec import EnvironmentSpec

ROOT = Path(__file__).parents[2]
CONFIG = tomllib.loads((ROOT / "configs" / "smollm2.toml").read_text())
LEARNING_RATE = CONFIG["trainer"]["optimizer"]["lr"]
PROBLEMS = CONFIG["trainer"]["evaluation_problems"]
EVALUATIONS = 3
SEED = 7
LAG_0_NATS_MAX = 1e-4
"""Bar of |log ratio| between the trainer and an fp32 engine at lag 0: both compute with the published weights."""


@dataclass(frozen=True)
class Variant:
    """What differs from configs/smollm2.toml."""

    async_level: int = 2
    lr: float = LEARNING_RATE
    rank: int | None = None
    """Rank of LoRA adapters of all linear layers, with alpha = 2 rank; None trains all weights."""


VARIANTS = {
    "k = 2": Variant(),
    "k = 0": Variant(async_level=0),
    "k = 4": Variant(async_level=4),
    "k = 2, lr 1e-6": Variant(lr=1e-6),
    "k = 2, LoRA of rank 16, lr 1e-4": Variant(lr=1e-4, rank=16),
    "k = 2, LoRA of rank 16, lr 1e-5": Variant(rank=16),
}


def model_folder() -> Path:
    """Return the folder of SmolLM2, which is built on first use."""
    command = [sys.executable, str(ROOT / "scripts" / "models.py"), "smollm2"]
    return Path(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split()[-1])


def loop_of(folder: Path, problems: int) -> LearningLoop:
    """Return the loop with the run's environment, sampling and held-out problems."""
    run, [environment] = CONFIG["run"], CONFIG["run"]["environments"]
    name = environment["name"]
    environments = build_environments([EnvironmentSpec(**environment)], folder)
    tokenizer, engine = HfTokenizer(folder), TransformersEngine(folder)
    sampling = Sampling(completion_tokens_max=run["completion_tokens_max"], stop_token_ids=(tokenizer.stop_token_id,))
    questions = held_out(environments, tokenizer, evaluation=problems, stopping=0)
    evaluator = Evaluator(engine, tokenizer, HeldOutSets((), questions.evaluation), sampling, seed=1)
    groups, rollouts = run["groups_per_step"], run["rollouts_per_group"]
    return LearningLoop(engine, tokenizer, environments[name], evaluator, sampling, SEED, groups, rollouts)


async def learn(folder: Path, loop: LearningLoop, name: str, *, steps: int, evaluations: int) -> dict[str, Any]:
    """Train one variant."""
    variant = VARIANTS[name]
    trainer = {key: CONFIG["trainer"][key] for key in ("row_tokens", "micro_batch_tokens")}
    config = TrainerConfig.load(
        {"trainer": {**trainer, "optimizer": {**CONFIG["trainer"]["optimizer"], "lr": variant.lr}}}
    )
    lora = None if variant.rank is None else LoraSettings(rank=variant.rank, alpha=2 * variant.rank)
    backend = TorchBackend(folder, pretrained_weights(str(folder)), seed=SEED, lora=lora, **trainer)
    backend.new_optimizer(config.optimizer.settings())
    recipe = Recipe.of(
        config,
        max_steps=CONFIG["run"]["max_steps"],
        completion_tokens_max=CONFIG["run"]["completion_tokens_max"],
        vocab_size=loop.tokenizer.vocab_size,
    )
    found = await loop.run(backend, recipe, steps=steps, async_level=variant.async_level, evaluations=evaluations)
    return {"variant": name, **asdict(variant), "steps": steps, **found}


async def fill(names: Sequence[str], out: Path, *, steps: int) -> None:
    """Train the variants that DIR does not have."""
    folder = model_folder()
    loop = loop_of(folder, PROBLEMS)
    for name in names:
        path = out / f"{list(VARIANTS).index(name)}.json"
        if not path.exists():
            found = await learn(folder, loop, name, steps=steps, evaluations=EVALUATIONS)
            partial = path.with_suffix(".partial")
            partial.write_text(json.dumps(found))
            partial.rename(path)
            print(f"{name}: {found['evaluations']}, {found['seconds']:.0f} s", file=sys.stderr, flush=True)
    await loop.evaluator.close()


async def quick() -> list[Check]:
    """Two steps at k = 0, with 16 held-out problems."""
    folder = model_folder()
    loop = loop_of(folder, 16)
    found = await learn(folder, loop, "k = 0", steps=2, evaluations=1)
    await loop.evaluator.close()
    return [lag_0(found)]


def lag_0(run: Mapping[str, Any]) -> Check:
    return at_most(
        "distance of the logprobs of trainer and fp32 engine at lag 0, nats, worst step's mean",
        max(run["log_ratio_abs"]),
        LAG_0_NATS_MAX,
    )


def gained(run: Mapping[str, Any]) -> float:
    """Return the accuracy that a run gained."""
    return float(run["evaluations"][-1]["sampled"]) - float(run["evaluations"][0]["sampled"])


def checks_of(runs: Mapping[str, Mapping[str, Any]]) -> list[Check]:
    found = [
        at_least(f"{name}: sampled accuracy gained in {run['steps']} steps", gained(run), 0.0)
        for name, run in runs.items()
    ]
    return [*found, lag_0(runs["k = 0"])] if "k = 0" in runs else found


def report(runs: Mapping[str, Mapping[str, Any]]) -> None:
    for name, run in runs.items():
        marks = ", ".join(f"{mark['sampled']:.2f} at {mark['step']}" for mark in run["evaluations"])
        print(
            f"{name}: {marks}; reward by tenth {by_tenth(run['reward'])}; |log ratio| {by_tenth(run['log_ratio_abs'])}"
        )


def plot(runs: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Draw the accuracy of each variant."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for name, run in runs.items():
        marks = run["evaluations"]
        axes.plot([mark["step"] for mark in marks], [mark["sampled"] for mark in marks], marker="o", label=name)
    axes.set_xlabel("step")
    axes.set_ylabel("sampled accuracy, held out")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=90)


def read(out: Path) -> dict[str, dict[str, Any]]:
    """Return the runs of a folder, or of a file of `--keep`."""
    texts = out.read_text().splitlines() if out.is_file() else [path.read_text() for path in sorted(out.glob("*.json"))]
    return {run["variant"]: run for run in map(json.loads, texts)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder of the runs; one that is there is not repeated")
    parser.add_argument("--variant", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument("--plot", type=Path, help="draw the curves into this PNG")
    parser.add_argument("--keep", type=Path, help="write the runs there, as JSON lines")
    parser.add_argument("--quick", action="store_true", help="two steps at k = 0")
    parser.add_argument("--json", action="store_true", help="print the checks alone, as JSON")
    options = parser.parse_args()
    output = Output(as_json=options.json)
    if options.quick:
        return output.finish(asyncio.run(quick()))
    if options.out is None:
        parser.error("give --out DIR, or --quick")
    if not options.report:
        options.out.mkdir(parents=True, exist_ok=True)
        asyncio.run(fill(options.variant, options.out, steps=options.steps))
    runs = read(options.out)
    if options.keep:
        lines = [{name: value for name, value in run.items() if name != "seconds"} for run in runs.values()]
        options.keep.write_text("".join(json.dumps(line) + "\n" for line in lines))
    if options.plot:
        plot(runs, options.plot)
    report(runs)
    return output.finish(checks_of(runs))


if __name__ == "__main__":
    raise SystemExit(main())
