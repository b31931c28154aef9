"""Honest bf16 workers and cheats on a real model (SmolLM2-135M): rejected bundles, bans, and tokens until a ban.

    .venv/bin/python scripts/bench/real_model.py --out DIR [--model FOLDER] [--json]    resumes where it stopped
    .venv/bin/python scripts/bench/real_model.py --out DIR --quick [--json]             a few dozen completions
    .venv/bin/python scripts/bench/real_model.py --out DIR --judge vllm [--quick]       another judge

vLLM samples in bf16 on the CPU with one thread. With `--judge transformers` it is judged in fp32, with `--judge vllm` by the
same build in bf16; claims of other weights must then show within two completions. The prompts are short chats. Honest work is
some 12,000 tokens: half of it makes a calibration, the other half is judged by it, resampled to bundles of 8 completions and to
lives. With --quick and transformers the calibration is configs/calibration-smollm2.json. A cheat by sampling claims the right
logprobs. Only statistics that the calibration has count, without proofs of hidden states.

Letters: C completions, K lambdas of all statistics, W workers, T tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
from checks import Check, Output, at_most

from prime_node.cli import wire, wire_scorers
from prime_node.cli.shipped import config_path, read_calibration
from prime_node.ports.engine import Engine, Scorer
from prime_node.validator.alternatives import Alternative, evidence_of_lives, sample_alternative, tokens_until_ban
from prime_node.validator.calibrating import Errors, local_lease, measure_pair
from prime_node.worker.cheats import INT4_GROUP, mapped, quantised
from prime_protocol.assignment import GroupAssignment, Lease, Problem, Sampling
from prime_protocol.calibration import Calibration, PairMoments, evidence_of
from prime_protocol.evidence import Moments
from prime_protocol.noise import SEED_MAX
from prime_protocol.rollout import Rollouts
from prime_protocol.run_spec import EVIDENCE_MAX, CheckPolicy
from prime_protocol.verify import summary, verdict_on
from prime_protocol.weights import Weights, WeightTensor

GROUP, LENGTH = 8, 48
"""Completions of a bundle, and their maximum length in tokens."""
SAMPLER = "vllm/bf16"
JUDGES = {"transformers": "transformers/fp32", "vllm": "vllm/bf16"}
DEVICE = "cpu"
COMPLETIONS_MAX = 2
"""Completions within which a judge of the same build must see a claim of other weights."""
STEP_SHARE = 0.005
"""Share of the weights whose last bit a training step changes at a learning rate of about 1e-6."""
BUNDLES_MIN = 1.3
"""No bar is below this many bundles: evidence is looked at after whole bundles."""
TOPICS = ("rain", "a bridge", "the sea", "bread", "a clock", "winter", "the moon", "a garden", "iron", "a river")
QUESTIONS = (
    "Describe {} in one sentence.",
    "What is {} good for?",
    "Write a line of verse about {}.",
    "What is {a} + {b}?",
)


@dataclass(frozen=True)
class Size:
    honest_prompts: int
    prompts: int
    """Prompts of each cheat; every prompt gets GROUP completions."""
    lives: int
    bundles: int
    """Bundles of a life."""


FULL = Size(honest_prompts=44, prompts=12, lives=200, bundles=10_000)
QUICK = Size(honest_prompts=3, prompts=1, lives=20, bundles=500)


@dataclass(frozen=True)
class Cheat:
    """A cheat and its bar: tokens until a ban, in the median."""

    alternative: Alternative
    tokens_max: float
    is_rescored: bool = True
    """Whether it claims the right logprobs."""


def rounded(levels: int, group: int | None = None) -> Callable[[Weights], Weights]:
    return lambda weights: mapped(
        weights, lambda values: quantised(values, group=group or values.shape[-1], largest=levels)
    )


def stepped_back(weights: Weights) -> Weights:
    """Return weights like those of one training step before: in some places the last bit of bf16 differs."""
    rng, found = np.random.default_rng(7), {}
    for name, tensor in weights.items():
        values = tensor.data.copy()
        values.reshape(-1)[rng.integers(0, values.size, int(STEP_SHARE * values.size))] ^= 1
        found[name] = WeightTensor(tensor.dtype, tensor.shape, values)
    return found


CHEATS = (
    Cheat(Alternative("temperature 0.95", {"temperature": 0.95}), 1_500),
    Cheat(Alternative("temperature 0.9", {"temperature": 0.9}), 300),
    Cheat(Alternative("temperature 0.8", {"temperature": 0.8}), 100),
    Cheat(Alternative("top-p 0.9", {"top_p": 0.9}), 200),
    Cheat(Alternative("greedy", {"temperature": 0.0}), 100),
    Cheat(Alternative("int8 weights", change=rounded(127)), 300, is_rescored=False),
    Cheat(Alternative("int4 weights", change=rounded(7, INT4_GROUP)), 100, is_rescored=False),
)
SAME_BUILD_CHEATS = (
    *CHEATS,
    Cheat(Alternative("one step older", change=stepped_back), math.inf, is_rescored=False),
)
"""Cheats that a judge of the workers' build is tried on too."""
HONEST = Alternative("honest")


@dataclass(frozen=True)
class Bench:
    """What is measured, and where it is kept."""

    out: Path
    judge: str
    size: Size

    @property
    def is_same_build(self) -> bool:
        return self.judge == SAMPLER

    @property
    def cheats(self) -> Sequence[Cheat]:
        return SAME_BUILD_CHEATS if self.is_same_build else CHEATS

    @property
    def classes(self) -> tuple[str, str]:
        """Classes of the engines that sample and that judge."""
        return f"{SAMPLER}/{DEVICE}", f"{self.judge}/{DEVICE}"

    def path_of(self, one: Alternative) -> Path:
        return self.out / f"{one.name.replace(' ', '-')}.npz"


def leases_of(model: Path, num_prompts: int, seed: int) -> list[Lease]:
    """Return leases of one group each, over chats about sums and simple things."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    rng, found = np.random.default_rng(seed), []
    for number in range(num_prompts):
        a, b = rng.integers(10, 100, 2)
        text = QUESTIONS[number % len(QUESTIONS)].format(TOPICS[rng.integers(len(TOPICS))], a=a, b=b)
        chat = [{"role": "user", "content": text}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        seeds = tuple(rng.integers(0, SEED_MAX, GROUP, endpoint=True).tolist())
        problem = Problem(environment="chat", index=number)
        group = GroupAssignment(slot=0, problem=problem, prompt_token_ids=tuple(prompt), seeds=seeds)
        sampling = Sampling(completion_tokens_max=LENGTH, stop_token_ids=(tokenizer.eos_token_id,))
        found.append(local_lease((group,), sampling))
    return found


async def fill(bench: Bench, model: Path) -> None:
    """Sample and judge every piece that DIR does not have yet."""
    pieces = [HONEST, *(cheat.alternative for cheat in bench.cheats)]
    missing = [one for one in pieces if not bench.path_of(one).exists()]
    if not missing:
        return
    weights = wire.plain_weights(model, random_seed=None)
    engine = wire.plain_engine(SAMPLER, model, threads=1, context_tokens_max=128)
    await engine.load(weights, policy_version=0)
    sampled = []
    for one in missing:
        num, seed = (bench.size.honest_prompts, 1) if one is HONEST else (bench.size.prompts, 2)
        leases = leases_of(model, num, seed)
        sampled.append((one, leases, await _sampled(engine, weights, leases, one)))
    await engine.close()
    judge = wire_scorers.plain_scorer(bench.judge, model, threads=1, context_tokens_max=128)
    await judge.load(weights, policy_version=0)
    for one, leases, rollouts in sampled:
        await _judge(judge, leases, rollouts, bench.path_of(one))
    await judge.close()


async def _sampled(engine: Engine, weights: Weights, leases: Sequence[Lease], one: Alternative) -> list[Rollouts]:
    rollouts = await sample_alternative(engine, weights, leases, one)
    print(f"{one.name}: {sum(each.num_tokens for each in rollouts)} tokens sampled", flush=True)
    return rollouts


async def _judge(judge: Scorer, leases: Sequence[Lease], rollouts: Sequence[Rollouts], path: Path) -> None:
    errors = await measure_pair(judge, leases, rollouts)
    print(f"{path.stem}: {errors.summary()}", flush=True)
    arrays: dict[str, Any] = {name: np.concatenate(values) for name, values in errors.values.items()}
    np.savez(path, lengths=np.concatenate(errors.lengths), **arrays)


def errors_in(path: Path) -> Errors:
    stored = dict(np.load(path))
    lengths = stored.pop("lengths")
    return Errors({name: [values] for name, values in stored.items()}, [lengths])


def halves(errors: Errors) -> tuple[Errors, Errors]:
    """Return every other completion in each half. Proofs belong to completions in order, one for each 32 tokens begun."""
    lengths_C = np.concatenate(errors.lengths)
    found = (Errors(), Errors())
    for half, made in enumerate(found):
        made.lengths.append(lengths_C[half::2])
        for name, values in errors.values.items():
            sizes_C = -(-lengths_C // 32) if name == "proof" else lengths_C
            split = np.split(np.concatenate(values), np.cumsum(sizes_C)[:-1])
            made.values[name] = [np.concatenate(split[half::2])]
    return found


def rejected(errors: Errors, policy: CheckPolicy, classes: tuple[str, str], num: int) -> int:
    """Return how many of `num` resampled bundles a validator rejects."""
    lengths_C = np.concatenate(errors.lengths)
    split = {
        name: np.split(np.concatenate(values), np.cumsum(-(-lengths_C // 32) if name == "proof" else lengths_C)[:-1])
        for name, values in errors.values.items()
    }
    assert policy.calibration is not None
    rng, found = np.random.default_rng(1), 0
    for _ in range(num):
        drawn = rng.integers(0, len(lengths_C), GROUP)
        bundle = {name: np.concatenate([parts[index] for index in drawn]) for name, parts in split.items()}
        evidence = evidence_of(bundle, policy.calibration, worker=classes[0], validator=classes[1])
        found += not verdict_on(summary(bundle), evidence, policy).accepted
    return found


def banned(errors: Errors, moments: Mapping[str, Moments], size: Size) -> int:
    """Return how many resampled lives end with a ban."""
    is_banned = np.zeros(size.lives, bool)
    for _, evidence_W in islice(evidence_of_lives(errors, moments, workers=size.lives), size.bundles):
        is_banned |= evidence_W >= math.log(EVIDENCE_MAX)
    return int(is_banned.sum())


def report(bench: Bench, *, is_quick: bool) -> list[Check]:
    """Return the checks of what is in DIR."""
    size, (worker, validator) = bench.size, bench.classes
    honest = errors_in(bench.path_of(HONEST))
    if is_quick and not bench.is_same_build:
        calibration = read_calibration(config_path("calibration-smollm2.json"))
        moments = calibration.moments_of(worker=worker, validator=validator)
    else:
        known, honest = halves(honest)
        moments = known.moments()
        calibration = Calibration(pairs=(PairMoments(worker=worker, validator=validator, moments=moments),))
    print(f"honest: {honest.summary()}")
    policy = CheckPolicy(calibration=calibration)
    checks = [
        at_most("honest bundles of 8 rejected, of 500", rejected(honest, policy, bench.classes, 500), 0),
        at_most(f"honest lives banned, of {size.lives} x {size.bundles:,} bundles", banned(honest, moments, size), 0),
    ]
    for cheat in bench.cheats:
        errors = errors_in(bench.path_of(cheat.alternative))
        length = float(np.concatenate(errors.lengths).mean())
        name = f"{cheat.alternative.name}, tokens until a ban, median"
        if bench.is_same_build and not cheat.is_rescored:
            needed = tokens_until_ban(errors, moments, is_rescored=False, group=1)
            checks.append(at_most(f"{name}, of single completions", needed, round(COMPLETIONS_MAX * length)))
            continue
        needed = tokens_until_ban(errors, moments, is_rescored=cheat.is_rescored)
        checks.append(at_most(name, needed, round(max(cheat.tokens_max, BUNDLES_MIN * GROUP * length))))
    return checks


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for what is sampled and judged")
    parser.add_argument(
        "--model", type=Path, help="folder of SmolLM2-135M-Instruct; default: scripts/models.py smollm2"
    )
    parser.add_argument(
        "--quick", action="store_true", help="a few dozen completions, with the calibration in configs/"
    )
    parser.add_argument("--json", action="store_true", help="print the checks as JSON and nothing else")
    parser.add_argument("--judge", choices=JUDGES, default="transformers", help="the engine that judges")
    options = parser.parse_args()
    output, judge = Output(as_json=options.json), JUDGES[options.judge]
    bench = Bench(options.out / options.judge, judge, QUICK if options.quick else FULL)
    bench.out.mkdir(parents=True, exist_ok=True)
    asyncio.run(fill(bench, options.model or built_model()))
    return output.finish(report(bench, is_quick=options.quick))


def built_model() -> Path:
    """Return the folder that scripts/models.py builds."""
    script = Path(__file__).parents[1] / "models.py"
    return Path(
        subprocess.run([sys.executable, script, "smollm2"], check=True, capture_output=True, text=True).stdout.strip()
    )


if __name__ == "__main__":
    raise SystemExit(main())
