"""Evidence that accumulates: tokens until each kind of cheat is detected, and how often honest workers are hurt.

    python scripts/bench/evidence.py --out DIR [--seconds 200]   a small random model; resumes where it stopped
    python scripts/bench/evidence.py --quick --json         fewer tokens, under a minute; the checks alone
    python scripts/bench/evidence.py --quick --out DIR --sampler vllm/bf16      workers with vLLM
    python scripts/bench/evidence.py --model M --older 1=A --older 8=B     real policies, by `verify --policy N --export`

Everything runs under the shipped calibration. A cheat samples as its row says. `own` claims the logprobs and proofs of the model
that sampled; `rescored` claims those of the right policy by a prefill, which no comparison of logprobs or hidden states detects.
Tokens: until the evidence reaches 1e5, completion by completion (multiples of 32), median and 95th percentile over orders of the
same completions; `-` if the evidence never reaches it. Columns: all statistics together as a run uses them, and three baselines
in the same run: comparing logprobs alone, hidden states alone (TOPLOC), and the run's thresholds on single bundles of 8
completions (share rejected). ROC: share of single bundles of 8 completions that are detected when 1 in 100 honest ones is
suspected (rescored ones by margins and flips alone, because their lack of honest logprobs' noise would prove nothing).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import numpy.typing as npt
from checks import Check, Output, at_most
from evidence_cheats import CALIBRATION, LENGTH, Pair, Part, World, cheats, escalation

from prime_node.adapters.models.pretrained_model import folder_weights
from prime_node.adapters.models.tiny_model import initial_weights
from prime_node.cli import wire, wire_scorers
from prime_node.cli.wire_measurement import random_model
from prime_node.validator.calibrating import LeaseSeries, random_prompts, sample_honestly
from prime_protocol.assignment import Sampling
from prime_protocol.calibration import evidence_of
from prime_protocol.check_policy import EVIDENCE_MAX, CheckPolicy
from prime_protocol.evidence import folded, log_evidence
from prime_protocol.verify import Statistics, judge, summary, verdict_on

PROMPT_TOKENS = 24
BUNDLE = 8
"""Completions of one bundle."""


@dataclass(frozen=True)
class Size:
    tokens: int
    orders: int
    honest_workers: int
    honest_bundles: int
    bundles: int
    """Bundles of each kind, for the ROC."""


FULL = Size(tokens=16_000, orders=20, honest_workers=1_000, honest_bundles=60, bundles=400)
QUICK = Size(tokens=3_500, orders=3, honest_workers=150, honest_bundles=40, bundles=100)


def joined(parts: Sequence[Part]) -> Statistics:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def evidence_after(parts: Sequence[Statistics], pair: Pair, statistics: tuple[str, ...]) -> list[float]:
    """Nats after each bundle, of an evidence of these statistics alone."""
    wealth, logs = folded({}, {}, statistics=statistics), []
    for part in parts:
        sums = evidence_of(part, CALIBRATION, worker=pair[0], validator=pair[1]).sums
        wealth = folded(wealth, sums, statistics=statistics)
        logs.append(log_evidence(wealth))
    return logs


def tokens_needed(parts: list[Part], pair: Pair, statistics: tuple[str, ...], orders: int) -> list[float]:
    rng, found = np.random.default_rng(0), []
    for _ in range(orders):
        logs = evidence_after([parts[i] for i in rng.permutation(len(parts))], pair, statistics)
        found.append(
            next((LENGTH * (n + 1) for n, log_m in enumerate(logs) if log_m >= math.log(EVIDENCE_MAX)), math.inf)
        )
    return found


def bundles_of(parts: list[Part], num: int, seed: int) -> list[Statistics]:
    rng = np.random.default_rng(seed)
    return [joined([parts[i] for i in rng.integers(0, len(parts), BUNDLE)]) for _ in range(num)]


def alone(bundles: list[Statistics], pair: Pair, statistics: tuple[str, ...]) -> npt.NDArray[np.float64]:
    return np.array([evidence_after([bundle], pair, statistics)[0] for bundle in bundles])


def refused_share(bundles: list[Statistics], pair: Pair, *, wide: bool) -> float:
    """By the thresholds on single bundles; `wide`: as a validator judges them, by their own evidence and outer bounds."""
    policy, refused = CheckPolicy(), 0
    for bundle in bundles:
        evidence = evidence_of(bundle, CALIBRATION, worker=pair[0], validator=pair[1])
        measured = summary(bundle)
        refused += not (verdict_on(measured, evidence, policy) if wide else judge(measured, policy)).accepted
    return refused / len(bundles)


def shown(values: list[float]) -> str:
    median, high = (float(np.quantile(values, q, method="higher")) for q in (0.5, 0.95))
    return "-" if math.isinf(median) else f"{median:.0f} / {'-' if math.isinf(high) else round(high)}"


COLUMNS = {"all": CALIBRATION.statistics, "logprobs alone": ("logprob",), "hidden states alone": ("proof",)}

LIMITS = (10, 100, 100_000)
"""Limits of evidence; the honest workers above each one are counted."""
CHOICES = ("flip", "margin")
"""Statistics that can detect a rescored bundle."""


def names(arguments: argparse.Namespace) -> list[str]:
    """Return the names of all pieces."""
    return ["honest", "escalation", *cheats({}, older_of(arguments))]


def older_of(arguments: argparse.Namespace) -> dict[str, str]:
    return dict(each.split("=", 1) for each in arguments.older)


async def fill(arguments: argparse.Namespace, out: Path, size: Size) -> None:
    """Every piece that DIR does not have yet; none is begun after `--seconds`."""
    missing = [name for name in names(arguments) if not _path(out, name).exists()]
    if not missing:
        return
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.model or random_model(Path(scratch))
        weights = folder_weights(folder) if arguments.model else initial_weights(folder, 5)
        pieces = cheats(weights, older_of(arguments))
        liar, judge_engine = (
            wire_scorers.plain_scorer(each, folder, threads=1) for each in ("transformers/fp32", arguments.judge)
        )
        context = PROMPT_TOKENS + LENGTH
        engine = wire.plain_engine(arguments.sampler, folder, threads=1, context_tokens_max=context)
        prompts = random_prompts(256, vocab_size=264, tokens_max=PROMPT_TOKENS, seed=11)
        sampling = Sampling(completion_tokens_max=LENGTH, stop_token_ids=())
        leases = LeaseSeries(prompts, sampling, seed=11).first(size.tokens)
        world = World(engine, liar, judge_engine, weights, leases)
        for each in (engine, liar, judge_engine):
            await each.load(weights, policy_version=0)
        sampled = await sample_honestly(engine, leases)
        honest = await world.parts(sampled)
        honest_bundles = bundles_of(honest, size.bundles, 10**6)
        for name in missing:
            if time.perf_counter() - began > arguments.seconds:
                break
            if name == "honest":
                found: dict[str, Any] = honest_row(honest, honest_bundles, world.pair, size)
            elif name == "escalation":
                found = {"lines": escalation(folder, world, sampled)}
            else:
                made = await pieces[name](world)
                found = {
                    numbers: cheat_row(parts, numbers, honest_bundles, world.pair, size)
                    for numbers, parts in made.items()
                }
            _path(out, name).write_text(json.dumps(found | {"pair": world.pair}))
            print(f"{name}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
        for each in (engine, liar, judge_engine):
            await each.close()


def _path(out: Path, name: str) -> Path:
    return out / f"{name.replace(' ', '-')}.json"


def honest_row(honest: list[Part], bundles: list[Statistics], pair: Pair, size: Size) -> dict[str, Any]:
    """Return how near honest workers came to a ban, and the share of their bundles that the thresholds reject."""
    highest = []
    for worker in range(size.honest_workers):
        lived = bundles_of(honest, size.honest_bundles, worker)
        highest.append(max(evidence_after(lived, pair, CALIBRATION.statistics)))
    return {
        "workers": size.honest_workers,
        "bundles": size.honest_bundles,
        "hurt": {str(limit): float(np.mean(np.array(highest) >= math.log(limit))) for limit in LIMITS},
        "highest": max(highest),
        "struck": [refused_share(bundles, pair, wide=wide) for wide in (False, True)],
    }


def cheat_row(
    parts: list[Part], numbers: str, honest_bundles: list[Statistics], pair: Pair, size: Size
) -> dict[str, Any]:
    needed = {column: tokens_needed(parts, pair, of, size.orders) for column, of in COLUMNS.items()}
    bundles, shares = bundles_of(parts, size.bundles, 7), []
    for of in (CHOICES if numbers == "rescored" else COLUMNS["all"], COLUMNS["logprobs alone"]):
        limit = float(np.quantile(alone(honest_bundles, pair, of), 0.99))
        shares.append(float(np.mean(alone(bundles, pair, of) > limit)))
    return {"needed": needed, "refused": refused_share(bundles, pair, wide=True), "shares": shares}


def report(found: dict[str, dict[str, Any]]) -> None:
    honest = found["honest"]
    print(f"honest, {' judged by '.join(honest['pair'])}: {honest['workers']:,} workers of {honest['bundles']} bundles")
    print("  ever at " + ", ".join(f"{limit}: {share:.4f}" for limit, share in honest["hurt"].items()))
    print(f"  highest evidence: {honest['highest']:.2f} nats; a ban is at {math.log(EVIDENCE_MAX):.1f}")
    by_default, in_a_run = honest["struck"]
    print(f"  bundles refused by the thresholds: {by_default:.2f} by the defaults alone, {in_a_run:.2f} in a run\n")
    columns = [*(f"{name}: tokens" for name in COLUMNS), "thresholds: share of bundles", "ROC: all, logprobs"]
    print("| cheat | numbers | " + " | ".join(columns) + " |")
    print("|---" * (2 + len(columns)) + "|")
    for name, rows in found.items():
        for numbers, row in rows.items():
            if numbers in ("own", "rescored"):
                cells = [name, numbers, *(shown(values) for values in row["needed"].values()), f"{row['refused']:.2f}"]
                print("| " + " | ".join(cells) + f" | {row['shares'][0]:.2f}, {row['shares'][1]:.2f} |")
    print("", *found["escalation"]["lines"], "", sep="\n")


def checks(found: dict[str, dict[str, Any]]) -> list[Check]:
    honest = found["honest"]
    fp32 = all("fp32" in one for one in honest["pair"])

    def tokens(name: str, numbers: str) -> float:
        return float(np.median(found[name][numbers]["needed"]["all"]))

    bars = [
        ("honest workers ever at 100, share", honest["hurt"]["100"], 1e-2),
        ("honest workers ever at 10, share", honest["hurt"]["10"], 1e-1),
        ("honest bundles refused by the thresholds, share", honest["struck"][1], 0.0),
        ("greedy, tokens", tokens("greedy", "rescored"), 64),
        ("forged seeds, tokens", tokens("forged seeds", "own"), 64),
        ("temperature 0.8, tokens", tokens("temperature 0.8", "rescored"), 256),
        ("int4 weights, rescored, tokens", tokens("int4 weights", "rescored"), 1_024 if fp32 else 4_096),
    ]
    if fp32:  # bf16 on one side errs by more than such a step changes
        bars.append(("one sign step at lr 1e-4, own logprobs, tokens", tokens("one sign step, lr 1e-4", "own"), 128))
    return [at_most(name, value, bar) for name, value, bar in bars]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer tokens and workers")
    parser.add_argument("--json", action="store_true", help="print the checks as JSON and nothing else")
    parser.add_argument("--out", type=Path, help="folder of the pieces; one that is there is not repeated")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no piece after this long")
    parser.add_argument("--model", type=Path, help="folder with config.json and safetensors; else a small random model")
    parser.add_argument(
        "--older", action="append", default=[], metavar="STEPS=FOLDER", help="an older policy's weights"
    )
    samplers = ["transformers/fp32", "vllm/fp32", "vllm/bf16"]
    parser.add_argument("--sampler", default="transformers/fp32", choices=samplers, help="of workers, honest or not")
    parser.add_argument("--judge", default="transformers/fp32", choices=["transformers/fp32", "transformers/bf16"])
    arguments = parser.parse_args()
    output = Output(as_json=arguments.json)
    with tempfile.TemporaryDirectory() as scratch:
        out = arguments.out or Path(scratch)
        out.mkdir(parents=True, exist_ok=True)
        asyncio.run(fill(arguments, out, QUICK if arguments.quick else FULL))
        paths = {name: _path(out, name) for name in names(arguments)}
        if missing := [name for name, path in paths.items() if not path.exists()]:
            sys.exit(f"run it again, for {', '.join(missing)}")
        found = {name: json.loads(path.read_text()) for name, path in paths.items()}
    report(found)
    return output.finish(checks(found))


if __name__ == "__main__":
    raise SystemExit(main())
