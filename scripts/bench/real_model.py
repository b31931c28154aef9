"""Honest bf16 workers and cheats on a real model (SmolLM2-135M): rejected bundles, bans, and tokens until a ban.

    .venv/bin/python scripts/bench/real_model.py --out DIR [--model FOLDER] [--json]    resumes where it stopped
    .venv/bin/python scripts/bench/real_model.py --quick [--json]                       a few dozen completions
    .venv/bin/python scripts/bench/real_model.py --out DIR --judge vllm [--quick]       another judge
    .venv/bin/python scripts/bench/real_model.py --out DIR --sampler vllm/bf16-fp32head workers whose head computes in fp32

vLLM samples in bf16 on the CPU with one thread. With `--judge transformers` it is judged in fp32, with `--judge vllm` by the
workers' build and arithmetic; claims of other weights must then show within two completions. The prompts are short chats.
Honest work is some 50,000 tokens: half of it makes a calibration, the other half is judged by it, resampled to bundles of 8
completions and to lives. With --quick and transformers the calibration is configs/calibration-smollm2.json. A cheat by sampling
claims the right logprobs. All statistics of a run count but proofs of hidden states. A full run also trains a policy that is
twenty steps away, for workers that are so far behind, and prints what small cheats without a bar take.

Next to each bar, on the same rollouts: how many bundles TOPLOC's rule refuses and how many a bound on the mean error of the
logprobs, both where a cheat claims its own numbers; and how many nats a token shows in our statistics (`information`): a test
of these with an error of 1e-5 needs about ln(1e5) / nats tokens at least. With --quick, samples are too few for that.

Letters: C completions, K lambdas of all statistics, W workers, T tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import numpy.typing as npt
from checks import Check, Output, at_most
from real_cheats import CHEATS, HONEST, SAME_BUILD_CHEATS, SLOW, UNSEEN, VERY_SLOW, Cheat
from real_evidence import banned, halves, rejected, tokens_until_caught, uncalibrated
from real_samples import GROUP, Measured, Piece, Samples, leases_of

from prime_node.adapters.models.pretrained_model import folder_weights
from prime_node.broadcast.audit.safetensors_file import read_weights
from prime_node.cli.shipped import config_path, read_calibration
from prime_node.validator.alternatives import Alternative
from prime_node.validator.calibrating import Errors
from prime_protocol.calibration import Calibration, PairMoments
from prime_protocol.check_policy import EVIDENCE_MAX, CheckPolicy

SAMPLER = "vllm/bf16"
SAMPLERS = (SAMPLER, "vllm/bf16-fp32head")
DEVICE = "cpu"
COMPLETIONS_MAX = 2
"""Completions within which a judge of the same build must see a claim of other weights."""
RATES = (1e-5, 3e-6)
"""Learning rates of the steps that an older policy is behind: that of configs/smollm2.toml, and a smaller one."""
BUNDLES_MIN = 1.3
"""No bar is below this many bundles: evidence is looked at after whole bundles."""
LOGPROB_BOUND = 1.5
"""Bound on a bundle's mean error, as a multiple of the largest honest one."""
SHARES = (("median", 0.5), ("95 %", 0.95))
BINS = 4
"""Bins of a statistic, in which `information` counts tokens."""


@dataclass(frozen=True)
class Size:
    honest_prompts: int
    prompts: int
    """Prompts of each cheat; every prompt gets GROUP completions."""
    slow_prompts: int
    """Prompts of cheats whose bar is SLOW tokens or more: a single bundle says little about several."""
    very_slow_prompts: int
    """Prompts of cheats whose bar is VERY_SLOW tokens or more."""
    lives: int
    bundles: int
    """Bundles of a life."""
    honest_seed: int
    """Seed of the honest prompts. Those of --quick differ from the ones that the calibration in configs/ was made from."""


FULL = Size(
    honest_prompts=160, prompts=12, slow_prompts=12, very_slow_prompts=24, lives=200, bundles=10_000, honest_seed=1
)
QUICK = Size(honest_prompts=3, prompts=1, slow_prompts=4, very_slow_prompts=4, lives=20, bundles=500, honest_seed=4)


@dataclass(frozen=True)
class Bench:
    """What is measured, and where it is kept."""

    samples: Samples
    size: Size
    further: Sequence[Cheat] = ()
    """Cheats that only a full run tries."""

    @property
    def is_same_build(self) -> bool:
        return self.samples.judge == self.samples.sampler

    @property
    def cheats(self) -> Sequence[Cheat]:
        return (*(SAME_BUILD_CHEATS if self.is_same_build else CHEATS), *self.further)

    @property
    def classes(self) -> tuple[str, str]:
        """Classes of the engines that sample and that judge."""
        return f"{self.samples.sampler}/{DEVICE}", f"{self.samples.judge}/{DEVICE}"

    @property
    def honest(self) -> Piece:
        return Piece(HONEST, self.size.honest_prompts, self.size.honest_seed)

    def piece(self, cheat: Cheat) -> Piece:
        size, is_finite = self.size, cheat.tokens_max < math.inf
        is_slow, is_very_slow = (is_finite and cheat.tokens_max >= bound for bound in (SLOW, VERY_SLOW))
        return cheat.piece(size.very_slow_prompts if is_very_slow else size.slow_prompts if is_slow else size.prompts)


def information(honest: Errors, cheat: Errors, names: Sequence[str]) -> float:
    """Return the nats by which a cheat's token differs from honest ones in these statistics together, counted in bins.

    It is the divergence of the cheat's tokens from the honest ones: the rate at which the best test of these bins gains.
    """
    mine, theirs = (_binned(errors, honest, cheat, names) for errors in (honest, cheat))
    size = 1 + max(mine.max(), theirs.max())
    q, p = ((np.bincount(found, minlength=size) + 0.5) / (len(found) + 0.5 * size) for found in (mine, theirs))
    return float((p * np.log(p / q)).sum())


def _binned(errors: Errors, honest: Errors, cheat: Errors, names: Sequence[str]) -> npt.NDArray[np.int64]:
    """Return the bin of each token [T]. Values of 0 have their own bin; the others are divided by their quantiles."""
    found_T = np.zeros(errors.num_tokens, np.int64)
    for name in names:
        both = np.concatenate([*honest.values[name], *cheat.values[name]])
        edges = np.unique(np.quantile(both[both != 0], np.linspace(0, 1, BINS + 1)[1:-1]))
        values_T = np.concatenate(errors.values[name])
        found_T = found_T * (BINS + 1) + np.where(values_T == 0, BINS, np.searchsorted(edges, values_T))
    return found_T


def refused_by_logprobs(errors: Errors, bound: float) -> float:
    """Return the share of bundles whose mean error of the logprobs is above a bound."""
    return float((_bundle_means(errors) > bound).mean())


def _bundle_means(errors: Errors) -> npt.NDArray[np.float64]:
    lengths_C, values_T = np.concatenate(errors.lengths), np.concatenate(errors.values["logprob"])
    sums_C = np.add.reduceat(values_T.astype(np.float64), np.cumsum(lengths_C) - lengths_C)
    whole = len(lengths_C) // GROUP * GROUP
    means: npt.NDArray[np.float64] = sums_C[:whole].reshape(-1, GROUP).sum(1) / lengths_C[:whole].reshape(
        -1, GROUP
    ).sum(1)
    return means


def refused_by_toploc(is_refused_C: npt.NDArray[np.bool_]) -> float:
    """Return the share of bundles of which TOPLOC's rule refuses a completion."""
    return float(is_refused_C.reshape(-1, GROUP).any(axis=1).mean())


def compared(name: str, honest: Measured, cheat: Measured, bound: float) -> str:
    """Return a line on what else shows in the same rollouts."""
    nats = {
        "its own claims": information(honest.errors, cheat.errors, ["norm"]),
        "its choices": information(honest.errors, cheat.errors, ["margin", "cooler", "looser"]),
    }
    least = "; ".join(
        f"{what}: {each:.2g} nats a token, so {math.log(EVIDENCE_MAX) / each:,.0f} tokens at least"
        for what, each in nats.items()
    )
    shares = f"a bound on logprobs refuses {refused_by_logprobs(cheat.errors, bound):.0%} of its bundles"
    if cheat.is_refused_C is not None:
        shares += f", TOPLOC {refused_by_toploc(cheat.is_refused_C):.0%}"
    return f"{name}: {least}; {shares}"


def report(bench: Bench, *, is_quick: bool) -> list[Check]:
    """Return the checks of what is kept. Print what else shows."""
    size, (worker, validator) = bench.size, bench.classes
    everything = bench.samples.measured(bench.honest)
    honest = everything
    if is_quick and not bench.is_same_build:
        calibration = read_calibration(config_path("calibration-smollm2.json"))
        moments = calibration.moments_of(worker=worker, validator=validator)
    else:
        known, honest = halves(honest)
        moments = known.errors.moments()
        calibration = Calibration(pairs=(PairMoments(worker=worker, validator=validator, moments=moments),))
    print(f"honest: {honest.errors.summary()}")
    bound = LOGPROB_BOUND * float(_bundle_means(everything.errors).max())
    assert everything.is_refused_C is not None
    refused = refused_by_toploc(everything.is_refused_C)
    print(f"honest bundles refused by TOPLOC's rule: {refused:.0%}; bound on logprobs {bound:.3f} nats")
    policy = CheckPolicy(calibration=calibration)
    # A quick run draws each completion some 170 times a life. A chance correlation with its reward would ban, so only a full run
    # counts the statistics that need no calibration.
    others = {} if is_quick else uncalibrated(honest)
    lives = banned(honest, moments, others, lives=size.lives, bundles=size.bundles)
    checks = [
        at_most("honest bundles of 8 rejected, of 500", rejected(honest, policy, bench.classes, 500), 0),
        at_most(f"honest lives banned, of {size.lives} x {size.bundles:,} bundles", lives, 0),
    ]
    for cheat in bench.cheats:
        measured = bench.samples.measured(bench.piece(cheat))
        print(compared(cheat.name, everything, measured, bound))
        length = float(np.concatenate(measured.errors.lengths).mean())
        what = f"{cheat.name}, tokens until {'a ban' if cheat.edit is None else 'caught'}"
        is_single = bench.is_same_build and not cheat.is_rescored
        group, of_single = (1, ", of single completions") if is_single else (GROUP, "")
        bar = COMPLETIONS_MAX * length if is_single else max(cheat.tokens_max, BUNDLES_MIN * GROUP * length)
        for name, share in [("median", 0.5)] if is_quick else SHARES:
            needed = tokens_until_caught(measured, moments, is_rescored=cheat.is_rescored, group=group, share=share)
            if math.isfinite(bar):
                checks.append(at_most(f"{what}, {name}{of_single}", needed, round(bar)))
            else:
                print(f"{what}, {name}: {needed:,.0f}. {cheat.gain}")
    return checks


def older_cheats(bench: Bench, lr: float) -> list[Cheat]:
    """Return a worker that is STEPS optimizer steps behind, with its own claims and with the right ones.

    Its policy is trained on first use.
    """
    from real_older import LEASES_PER_STEP, STEPS, keep, train_apart

    samples = bench.samples
    path = samples.out / f"{STEPS}-steps-at-{lr:g}.safetensors"
    if not path.exists():
        leases = leases_of(samples.model, STEPS * LEASES_PER_STEP, bench.honest.seed)
        work = [(lease, samples.rollouts(bench.honest, number, lease)) for number, lease in enumerate(leases)]
        keep(train_apart(samples.model, folder_weights(samples.model), work, lr=lr), path)
    name = f"{STEPS} steps older, lr {lr:g}"
    alternative = Alternative(name, change=lambda _: read_weights(path))
    return [Cheat(alternative, 2_000, is_rescored=False), Cheat(alternative, 20_000)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for what is sampled and judged; what is there is not repeated")
    parser.add_argument(
        "--model", type=Path, help="folder of SmolLM2-135M-Instruct; default: scripts/models.py smollm2"
    )
    parser.add_argument(
        "--quick", action="store_true", help="a few dozen completions, with the calibration in configs/"
    )
    parser.add_argument("--json", action="store_true", help="print the checks as JSON and nothing else")
    parser.add_argument(
        "--judge", choices=("transformers", "vllm"), default="transformers", help="the engine that judges"
    )
    parser.add_argument("--sampler", choices=SAMPLERS, default=SAMPLER, help="the engine that samples")
    options = parser.parse_args()
    output = Output(as_json=options.json)
    judge = options.sampler if options.judge == "vllm" else "transformers/fp32"
    with tempfile.TemporaryDirectory() as scratch:
        samples = Samples(options.out or Path(scratch), options.model or built_model(), options.sampler, judge)
        bench = Bench(samples, QUICK if options.quick else FULL)
        if not options.quick:
            asyncio.run(samples.fill([bench.honest]))
            unseen = () if bench.is_same_build else UNSEEN
            bench = replace(bench, further=[*unseen, *(cheat for lr in RATES for cheat in older_cheats(bench, lr))])
        asyncio.run(samples.fill([bench.honest, *map(bench.piece, bench.cheats)]))
        return output.finish(report(bench, is_quick=options.quick))


def built_model() -> Path:
    """Return the folder that scripts/models.py builds."""
    script = Path(__file__).parents[1] / "models.py"
    return Path(
        subprocess.run([sys.executable, script, "smollm2"], check=True, capture_output=True, text=True).stdout.strip()
    )


if __name__ == "__main__":
    raise SystemExit(main())
