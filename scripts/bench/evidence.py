"""Evidence that adds up: how many tokens each kind of cheat lasts, and how often the honest are hurt.

    python scripts/bench/evidence.py                        a small random model; about four minutes
    python scripts/bench/evidence.py --quick --json         fewer tokens, under a minute; the checks alone
    python scripts/bench/evidence.py --model M --older 1=A --older 8=B     real policies, by `verify --policy N --export`

Everything runs under the shipped calibration. A cheat samples as its row says; `own` claims the logprobs and proofs of what it
sampled with, `rescored` those of the right policy (a liar's prefill: no comparison of logprobs or hidden states can see it).
Tokens: until the evidence reaches 1e5, completion by completion (multiples of 32), median and 95th percentile over orders of the
same completions; `-` where it never comes. Columns: all statistics together as a run uses them, and three baselines in the same
run: comparing logprobs alone, hidden states alone (TOPLOC), and the run's thresholds on single bundles of 8 completions (share
refused). ROC: share of single bundles of 8 completions that are told from honest ones where 1 in 100 honest ones is suspected
(rescored ones by margins and flips alone: it would prove nothing that they lack the noise of honest logprobs).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import numpy.typing as npt
import torch

from prime_node.adapters.engines.torch_noise import gumbel_noise
from prime_node.adapters.engines.transformers_engine import TransformersEngine
from prime_node.adapters.models.causal_model import CausalModel
from prime_node.adapters.models.pretrained_model import folder_weights
from prime_node.adapters.models.tiny_model import initial_weights
from prime_node.cli.calibrate import random_model
from prime_node.cli.shipped import shipped_calibration
from prime_node.sim.adversaries.weights import INT4_GROUP, mapped, rounded
from prime_node.validator.calibrating import make_leases, measure_pair, sample
from prime_protocol.assignment import Lease
from prime_protocol.calibration import evidence_of, speaks_for
from prime_protocol.evidence import folded, log_evidence
from prime_protocol.rollout import Rollouts
from prime_protocol.run_spec import EVIDENCE_MAX, CheckPolicy
from prime_protocol.verify import Statistics, judge, summary, widened
from prime_protocol.weights import Weights, WeightTensor

WORKER = "transformers/fp32/cpu"
LENGTH = 32
PROMPT_TOKENS = 24
BUNDLE = 8
"""Completions of one bundle."""
CALIBRATION = shipped_calibration()
Part = dict[str, npt.NDArray[np.float32]]


@dataclass(frozen=True)
class Size:
    tokens: int
    orders: int
    honest_workers: int
    honest_bundles: int
    bundles: int
    """Of each kind, for the ROC."""


FULL = Size(tokens=16_000, orders=20, honest_workers=1_000, honest_bundles=60, bundles=400)
QUICK = Size(tokens=3_500, orders=3, honest_workers=150, honest_bundles=40, bundles=100)


@dataclass
class World:
    """The right policy in an engine that samples for the cheats too, and the judge."""

    engine: TransformersEngine
    judge: TransformersEngine
    weights: Weights
    leases: list[Lease]

    @property
    def judge_class(self) -> str:
        return self.judge.info.calibration_class

    async def by(self, weights: Weights) -> list[Rollouts]:
        """The leases sampled with other weights."""
        await self.engine.load(weights, policy_version=1)
        sampled = await sample(self.engine, self.leases)
        await self.engine.load(self.weights, policy_version=0)
        return sampled

    async def at(self, **sampling: float) -> list[Rollouts]:
        """The leases sampled with the right weights and another sampling."""
        changed = [
            lease.model_copy(update={"sampling": lease.sampling.model_copy(update=sampling)}) for lease in self.leases
        ]
        return await sample(self.engine, changed)

    async def rescored(self, sampled: list[Rollouts]) -> list[Rollouts]:
        """The same tokens with the right policy's logprobs. Its proofs would be right too, so there are none to compare."""
        found = []
        for lease, rollouts in zip(self.leases, sampled, strict=True):
            blank = replace(rollouts, logprobs_T=np.zeros_like(rollouts.logprobs_T), proofs_CB=None)
            errors = await measure_pair(self.engine, [lease], [blank])
            found.append(replace(blank, logprobs_T=-np.concatenate(errors.values["logprob"])))
        return found

    async def parts(self, sampled: list[Rollouts]) -> list[Part]:
        """What the judge finds, completion by completion."""
        errors = await measure_pair(self.judge, self.leases, sampled)
        num = sum(map(len, errors.lengths))
        split = {name: np.split(np.concatenate(values), num) for name, values in errors.values.items()}
        return [dict(zip(split, values, strict=True)) for values in zip(*split.values(), strict=True)]


def joined(parts: Sequence[Part]) -> Statistics:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def evidence_after(parts: Sequence[Statistics], judge_class: str, statistics: tuple[str, ...]) -> list[float]:
    """Nats after each bundle, of an evidence of these statistics alone."""
    wealth, logs = folded({}, {}, statistics=statistics), []
    for part in parts:
        sums = evidence_of(part, CALIBRATION, worker=WORKER, validator=judge_class).sums
        wealth = folded(wealth, sums, statistics=statistics)
        logs.append(log_evidence(wealth))
    return logs


def tokens_needed(parts: list[Part], judge_class: str, statistics: tuple[str, ...], orders: int) -> list[float]:
    rng, found = np.random.default_rng(0), []
    for _ in range(orders):
        logs = evidence_after([parts[i] for i in rng.permutation(len(parts))], judge_class, statistics)
        found.append(
            next((LENGTH * (n + 1) for n, log_m in enumerate(logs) if log_m >= math.log(EVIDENCE_MAX)), math.inf)
        )
    return found


def bundles_of(parts: list[Part], num: int, seed: int) -> list[Statistics]:
    rng = np.random.default_rng(seed)
    return [joined([parts[i] for i in rng.integers(0, len(parts), BUNDLE)]) for _ in range(num)]


def alone(bundles: list[Statistics], judge_class: str, statistics: tuple[str, ...]) -> npt.NDArray[np.float64]:
    return np.array([evidence_after([bundle], judge_class, statistics)[0] for bundle in bundles])


def refused_share(bundles: list[Statistics], judge_class: str, *, wide: bool) -> float:
    """By the thresholds on single bundles; `wide`: as a validator uses them, wider where the calibration speaks for a bundle."""
    policy, refused = CheckPolicy(), 0
    for bundle in bundles:
        evidence = evidence_of(bundle, CALIBRATION, worker=WORKER, validator=judge_class)
        is_expected = speaks_for(evidence, evidence_max=EVIDENCE_MAX)
        refused += not judge(summary(bundle), widened(policy) if wide and is_expected else policy).accepted
    return refused / len(bundles)


def sign_step(weights: Weights, lr: float, seed: int) -> Weights:
    """One optimizer step in a random direction: every weight moves by the learning rate."""
    rng = np.random.default_rng(seed)
    return mapped(weights, lambda values: values + lr * rng.choice([-1.0, 1.0], values.shape))


def fewer_layers(weights: Weights) -> Weights:
    """A model without its last layer: that layer adds nothing."""
    last = max(int(name.split(".")[2]) for name in weights if name.startswith("model.layers."))
    silent = (f"layers.{last}.self_attn.o_proj", f"layers.{last}.mlp.down_proj")

    def kept(name: str, tensor: WeightTensor) -> WeightTensor:
        hidden = any(part in name for part in silent)
        return WeightTensor(tensor.dtype, tensor.shape, np.zeros_like(tensor.data)) if hidden else tensor

    return {name: kept(name, tensor) for name, tensor in weights.items()}


def changed_weights(weights: Weights, older: dict[str, str]) -> dict[str, Callable[[], Weights]]:
    """Name of a cheat -> the weights that it samples with."""
    noise = np.random.default_rng(3)
    return {
        **{
            f"policy {steps} steps older": lambda path=path: folder_weights(Path(path)) for steps, path in older.items()
        },
        "one sign step, lr 1e-6": lambda: sign_step(weights, 1e-6, 1),
        "one sign step, lr 1e-5": lambda: sign_step(weights, 1e-5, 1),
        "one sign step, lr 1e-4": lambda: sign_step(weights, 1e-4, 1),
        "int8 weights": lambda: mapped(weights, lambda v: rounded(v, group=v.shape[-1], largest=127)),
        "int4 weights": lambda: mapped(weights, lambda v: rounded(v, group=INT4_GROUP, largest=7)),
        "noise, 1 % of the spread": lambda: mapped(weights, lambda v: v + noise.normal(0, 0.01 * v.std(), v.shape)),
        "noise, 10 % of the spread": lambda: mapped(weights, lambda v: v + noise.normal(0, 0.1 * v.std(), v.shape)),
        "a layer less": lambda: fewer_layers(weights),
    }


async def cheats(world: World, older: dict[str, str]) -> list[tuple[str, str, list[Part]]]:
    """(what, whose numbers are claimed, what the judge finds)."""
    rows = []
    for name, make in changed_weights(world.weights, older).items():
        sampled = await world.by(make())
        rows.append((name, "own", await world.parts(sampled)))
        rows.append((name, "rescored", await world.parts(await world.rescored(sampled))))
    for name, temperature in (("temperature 0.95", 0.95), ("temperature 0.8", 0.8), ("greedy", 0.0)):
        sampled = await world.rescored(await world.at(temperature=temperature))
        rows.append((name, "rescored", await world.parts(sampled)))
    rows.append(("forged seeds", "own", await world.parts(await sample(world.engine, leases_like(world.leases)))))
    return rows


def leases_like(leases: list[Lease]) -> list[Lease]:
    """The same leases with other seeds."""
    rng = np.random.default_rng(99)

    def reseeded(lease: Lease) -> Lease:
        groups = (
            group.model_copy(update={"seeds": tuple(rng.integers(0, 2**62, len(group.seeds)).tolist())})
            for group in lease.groups
        )
        return lease.model_copy(update={"groups": tuple(groups)})

    return [reseeded(lease) for lease in leases]


def noisy_scores(model: CausalModel, weights: Weights, lease: Lease, sampled: Rollouts) -> npt.NDArray[np.float32]:
    """[T, V] what each token is chosen by under these weights, after the same tokens before it."""
    model.load(weights)
    found = []
    prompts = [group.prompt_token_ids for group in lease.groups for _ in group.seeds]
    for prompt, seed, completion in zip(prompts, sampled.seeds_N.tolist(), sampled.completions(), strict=True):
        rows, first_1H = model.begin([prompt], spare=LENGTH)
        later_TH = model.extend(rows, torch.tensor([completion.token_ids[:-1]]))[0]
        logits_TV = model.logits(torch.cat([first_1H, later_TH]))
        noise_TV = gumbel_noise([seed] * LENGTH, list(range(LENGTH)), logits_TV.shape[1], logits_TV.device)
        found.append((logits_TV + noise_TV).numpy())
    return np.concatenate(found)


def escalation(folder: Path, world: World, honest: list[Rollouts]) -> list[str]:
    """A cheap model that asks the right one where its own two best are closer than so many nats: what it saves, what it risks."""
    model, rows = CausalModel(folder, dtype="fp32", device="cpu"), []
    leases = [(lease, one) for lease, one in zip(world.leases, honest, strict=True) if len(lease.groups) > 1][:1]
    cheap_ones = {
        "int8": mapped(world.weights, lambda v: rounded(v, group=v.shape[-1], largest=127)),
        "int4": mapped(world.weights, lambda v: rounded(v, group=INT4_GROUP, largest=7)),
    }
    with torch.inference_mode():
        right_TV = np.concatenate([noisy_scores(model, world.weights, *each) for each in leases])
        top_T2 = np.sort(right_TV, axis=1)[:, -2:]
        near = float(np.mean(top_T2[:, 1] - top_T2[:, 0] < 0.1))
        rows.append(f"the right model's two best are within 0.1 nats at {near:.3f} of the tokens")
        for name, weights in cheap_ones.items():
            cheap_TV = np.concatenate([noisy_scores(model, weights, *each) for each in leases])
            best_T2 = np.sort(cheap_TV, axis=1)[:, -2:]
            gap_T, wrong_T = best_T2[:, 1] - best_T2[:, 0], cheap_TV.argmax(axis=1) != right_TV.argmax(axis=1)
            for nats in (0.0, 0.1, 0.3, 1.0):
                asked, flips = float(np.mean(gap_T < nats)), float(np.mean(wrong_T & (gap_T >= nats)))
                rows.append(
                    f"{name}, asks within {nats:g} nats: asks for {asked:.3f} of the tokens, {flips:.5f} of them flip"
                )
    for pair in CALIBRATION.pairs:
        if pair.worker == WORKER:
            moments = pair.moments["flip"]
            free = min(each / rate for each, rate in zip(moments.log_moments, moments.lambdas, strict=True))
            rows.append(f"flips that no evidence ever grows from, judged by {pair.validator}: {free:.5f} of the tokens")
    return rows


def shown(values: list[float]) -> str:
    median, high = (float(np.quantile(values, q, method="higher")) for q in (0.5, 0.95))
    return "-" if math.isinf(median) else f"{median:.0f} / {'-' if math.isinf(high) else round(high)}"


COLUMNS = {"all": CALIBRATION.statistics, "logprobs alone": ("logprob",), "hidden states alone": ("proof",)}

CHOICES = ("flip", "margin")
"""What a rescored bundle can be told by."""


async def run(arguments: argparse.Namespace) -> list[dict[str, object]]:
    size, said = QUICK if arguments.quick else FULL, not arguments.json
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.model or random_model(Path(scratch))
        weights = folder_weights(folder) if arguments.model else initial_weights(folder, 5)
        dtype = arguments.judge.partition("/")[2]
        engine, judge_engine = (TransformersEngine(folder, dtype=each, threads=1) for each in ("fp32", dtype))
        leases = make_leases(
            np.random.default_rng(11),
            num_tokens=size.tokens,
            vocab_size=264,
            prompt_tokens_max=PROMPT_TOKENS,
            completion_tokens_max=LENGTH,
        )
        world = World(engine, judge_engine, weights, leases)
        await engine.load(weights, policy_version=0)
        await judge_engine.load(weights, policy_version=0)
        sampled = await sample(engine, leases)
        honest = await world.parts(sampled)
        escalated = escalation(folder, world, sampled) if said else []
        rows = await cheats(world, dict(each.split("=", 1) for each in arguments.older))
        await engine.close()
        await judge_engine.close()

    judge_class = world.judge_class
    highest = []
    for worker in range(size.honest_workers):
        bundles = bundles_of(honest, size.honest_bundles, worker)
        highest.append(max(evidence_after(bundles, judge_class, CALIBRATION.statistics)))
    hurt = {limit: float(np.mean(np.array(highest) >= math.log(limit))) for limit in (10, 100, 1e5)}
    if said:
        print(
            f"honest, {WORKER} judged by {judge_class}: {size.honest_workers:,} workers of {size.honest_bundles} bundles"
        )
        print("  ever at 10, 100, 1e5: " + ", ".join(f"{share:.4f}" for share in hurt.values()))
        print(f"  highest evidence: {max(highest):.2f} nats; a ban is at {math.log(EVIDENCE_MAX):.1f}\n")
    honest_bundles = bundles_of(honest, size.bundles, 10**6)
    struck = {wide: refused_share(honest_bundles, judge_class, wide=wide) for wide in (False, True)}
    if said:
        print(
            f"honest bundles refused by the thresholds: {struck[False]:.2f} by the defaults alone, {struck[True]:.2f} in a run"
        )
    if said:
        columns = [*(f"{name}: tokens" for name in COLUMNS), "thresholds: share of bundles", "ROC: all, logprobs"]
        print("| cheat | numbers | " + " | ".join(columns) + " |")
        print("|---" * (5 + len(COLUMNS)) + "|")
    found: dict[tuple[str, str], float] = {}
    for name, numbers, parts in rows:
        needed = {column: tokens_needed(parts, judge_class, of, size.orders) for column, of in COLUMNS.items()}
        found[name, numbers] = float(np.median(needed["all"]))
        bundles = bundles_of(parts, size.bundles, 7)
        refused = refused_share(bundles, judge_class, wide=True)
        told = []
        for of in (CHOICES if numbers == "rescored" else COLUMNS["all"], COLUMNS["logprobs alone"]):
            limit = float(np.quantile(alone(honest_bundles, judge_class, of), 0.99))
            told.append(float(np.mean(alone(bundles, judge_class, of) > limit)))
        if said:
            cells = [name, numbers, *(shown(values) for values in needed.values()), f"{refused:.2f}"]
            print("| " + " | ".join(cells) + f" | {told[0]:.2f}, {told[1]:.2f} |")
    if said:
        print("", *escalated, "", sep="\n")
    fp32 = judge_class.endswith("fp32/cpu")
    bars = [
        ("honest workers ever at 100, share", hurt[100], 1e-2),
        ("honest workers ever at 10, share", hurt[10], 1e-1),
        ("honest bundles refused by the thresholds, share", struck[True], 0.0),
        ("greedy, tokens", found["greedy", "rescored"], 64),
        ("forged seeds, tokens", found["forged seeds", "own"], 64),
        ("temperature 0.8, tokens", found["temperature 0.8", "rescored"], 256),
        ("int4 weights, rescored, tokens", found["int4 weights", "rescored"], 1_024 if fp32 else 4_096),
    ]
    if fp32:  # bf16 on one side errs by more than such a step changes
        bars.append(("one sign step at lr 1e-4, own logprobs, tokens", found["one sign step, lr 1e-4", "own"], 128))
    return [{"name": name, "value": value, "bar": bar, "ok": value <= bar} for name, value, bar in bars]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer tokens and workers")
    parser.add_argument("--json", action="store_true", help="print the checks as JSON and nothing else")
    parser.add_argument("--model", type=Path, help="folder with config.json and safetensors; else a small random model")
    parser.add_argument(
        "--older", action="append", default=[], metavar="STEPS=FOLDER", help="an older policy's weights"
    )
    parser.add_argument("--judge", default="transformers/fp32", choices=["transformers/fp32", "transformers/bf16"])
    arguments = parser.parse_args()
    began = time.perf_counter()
    checks = asyncio.run(run(arguments))
    if arguments.json:
        print(json.dumps({"checks": checks}))
        return
    for check in checks:
        print(f"{'ok  ' if check['ok'] else 'BAD '} {check['name']}: {check['value']:g} (at most {check['bar']:g})")
    print(f"{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
