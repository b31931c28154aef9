"""What is caught, how soon and by what: every cheat of sim/adversaries as a real worker against the real daemon.

    python scripts/bench/adversaries.py --out DIR --seeds 1 2 3 [--seconds 50]   goes on where it stopped
    python scripts/bench/adversaries.py --out DIR --report                       the table of what there is
    python scripts/bench/adversaries.py --quick [--json]                         six cheats, one seed, under a minute

For each cheat and seed two runs with one honest worker beside it (tests/adversaries/arena.py; a Qwen3-shaped model of two layers,
trained on the spot). In the first everything is as a run has it: the cheat is banned, and what the trainer got of it is counted.
In the second nobody is banned, so that the baselines get as many bundles to judge: TOPLOC alone with its published thresholds,
a comparison of logprobs alone, and INTELLECT-2's published checks (TOPLOC, termination, token sampling, fixed problems, form).
Thresholds that are not published are 1.5 times what the honest bundles of all runs reach, which is as tight as it may be.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
from tests.adversaries.arena import SEEN, Arena, Judged, Outcome, Part
from tests.adversaries.conftest import SHAPE, SMALL
from tests.adversaries.policies import make_policies

from prime_node.adapters.engines.transformers_engine import TransformersEngine
from prime_node.ports.engine import ScoreRequest
from prime_node.sim.adversaries.table import ADVERSARIES
from prime_node.sim.adversaries.uploads import opened
from prime_protocol.errors import PeerError
from prime_protocol.proof import compare_proofs
from prime_protocol.run_spec import CheckPolicy
from prime_protocol.verdict import RejectReason

QUICK = ("older-1", "int8", "smaller-rescored", "best-of-n", "older-proofs", "equivocation")
SOFT = ("equivocation", "time-shift", "hoarding", "picking")
"""Nothing that they upload is false; the scheduler limits what they can do."""
ROLLOUTS_MAX = 160
"""Of a cheat, before it is taken for not caught."""
SECONDS_MAX = 25.0
"""Of one run, on however busy a machine."""
STREAM_ROLLOUTS = 32
"""Of a cheat, for the baselines."""
LEASE_ROLLOUTS = 8
TOPLOC_EXPONENTS, TOPLOC_MEAN, TOPLOC_MEDIAN = 38, 10.0, 8.0
"""Published for bf16: more exponents that differ, or larger mantissa errors, are refused (arXiv 2501.16007)."""
STOP_PROBABILITY = 0.1
"""Published: a stop token of a smaller probability is refused."""
UNLIKELY = 0.01
"""Probability below which a token counts for the token sampling check, whose cut-off is not published."""
SLACK = 1.5


@dataclass(frozen=True)
class Check:
    name: str
    value: float
    bar: str
    ok: bool


@dataclass(frozen=True)
class Numbers:
    """What a bundle shows to the baselines."""

    logprob_error: float = 0.0
    toploc: bool = False
    """A proof is beyond TOPLOC's thresholds."""
    unlikely: float = 0.0
    """Share of tokens that the policy gives a small probability."""
    stop_probability: float = 1.0
    """Of the least likely stop token."""
    form: bool = False
    """Refused for its form: what cannot be parsed, other problems than assigned, a wrong end."""


FORM = {RejectReason.MALFORMED, RejectReason.WRONG_ASSIGNMENT, RejectReason.BAD_TERMINATION}


class Baselines:
    """A forward pass of the claimed policy over bundles that were judged."""

    def __init__(self, arena: Arena) -> None:
        self._policies = arena.policies
        self._engine = TransformersEngine(arena.policies.folder, threads=1)
        self._loaded = -1

    async def numbers(self, judged: Judged) -> Numbers:
        reason = None if judged.verdict is None else judged.verdict.reason
        form = reason in FORM
        try:
            _, rollouts = opened(judged.parcel)
        except PeerError:
            return Numbers(form=True)
        if judged.lease.policy_version != self._loaded:
            self._loaded = judged.lease.policy_version
            await self._engine.load(self._policies.chain[SEEN + self._loaded], policy_version=self._loaded)
        prompts = [group.prompt_token_ids for group in judged.lease.groups for _ in group.seeds]
        requests = [
            ScoreRequest(prompt, completion.token_ids, 0, hidden=True)
            for prompt, completion in zip(prompts, rollouts.completions(), strict=True)
        ]
        prefill = await self._engine.prefill(requests, judged.lease.sampling)
        toploc = True
        if rollouts.proofs_CB is not None and prefill.hidden_TD is not None:
            errors = compare_proofs(rollouts.proofs_CB, prefill.hidden_TD, rollouts.lengths_N.tolist())
            toploc = bool(
                (errors.exponent_mismatches_C > TOPLOC_EXPONENTS).any()
                or (errors.mantissa_error_mean_C > TOPLOC_MEAN).any()
                or (errors.mantissa_error_median_C > TOPLOC_MEDIAN).any()
            )
        ends_T = np.isin(rollouts.token_ids_T, judged.lease.sampling.stop_token_ids)
        return Numbers(
            logprob_error=float(np.abs(rollouts.logprobs_T - prefill.logprobs_T).mean()),
            toploc=toploc,
            unlikely=float((prefill.logprobs_T < np.log(UNLIKELY)).mean()),
            stop_probability=float(np.exp(prefill.logprobs_T[ends_T]).min()) if ends_T.any() else 1.0,
            form=form,
        )


async def try_cheat(arena: Arena, baselines: Baselines, name: str, seed: int) -> dict[str, Any]:
    soft = {"lease_seconds": 0.5, "max_steps": 4} if name in SOFT else {}
    outcome = await arena.fight(
        name, seed=seed, rollouts_max=None if soft else ROLLOUTS_MAX, seconds_max=SECONDS_MAX, **soft
    )
    cheat = outcome.parts[0]
    found: dict[str, Any] = {"name": name, "seed": seed, **_caught(outcome, cheat), "stream": [], "honest": []}
    found["poisoned"] = await _poisoned(outcome, cheat, arena)
    found["hurt"] = sum(_is_hurt(outcome, part) for part in outcome.parts[1:])
    found["honest_workers"] = len(outcome.parts) - 1
    found["turned_away"] = dict(cheat.replies)
    found["waits"] = sum("brought nothing" in reason for reason in cheat.waits)
    if not soft:
        free = CheckPolicy(proofs=True, strikes_max=10**6)
        outcome = await arena.fight(name, seed=seed, rollouts_max=STREAM_ROLLOUTS, seconds_max=SECONDS_MAX, checks=free)
        keys = [part.key.key_id for part in outcome.parts]
        for judged in outcome.judged:
            place = "stream" if judged.worker == keys[0] else "honest"
            found[place].append(asdict(await baselines.numbers(judged)))
    return found


def _caught(outcome: Outcome, cheat: Part) -> dict[str, Any]:
    """After how many rollouts, in the order in which they were judged, and by what."""
    had, first, check = 0, None, None
    for judged in outcome.judged:
        if judged.worker == cheat.key.key_id and judged.verdict is not None:
            had += judged.lease.num_rollouts
            if first is None and judged.verdict.reason is not None and judged.verdict.reason.is_dishonest:
                first, check = had, str(judged.verdict.reason)
    ban = outcome.worker(cheat)["banned"]
    if ban is not None and first is None:
        first, check = had, f"ban, {ban['kind']}"
    return {"caught": first, "check": check, "judged": had, "banned": None if ban is None else ban["kind"]}


async def _poisoned(outcome: Outcome, cheat: Part, arena: Arena) -> int:
    """Completions of the cheat that the trainer got and that an honest worker would not have given."""
    leases = {judged.lease.lease_id: judged for judged in outcome.judged if judged.worker == cheat.key.key_id}
    trained = {group.slot for batch in outcome.batches for group in batch.groups if group.worker == cheat.key.key_id}
    num = 0
    for judged in leases.values():
        slots = [group.slot for group in judged.lease.groups for _ in group.seeds]
        if judged.verdict is None or not judged.verdict.accepted or not trained.intersection(slots):
            continue
        honest = await arena.honest(judged.lease)
        _, rollouts = opened(judged.parcel)
        for slot, mine, theirs in zip(slots, rollouts.completions(), honest, strict=True):
            num += slot in trained and mine.token_ids != theirs.token_ids
    return num


def _is_hurt(outcome: Outcome, part: Part) -> bool:
    reasons = [receipt.reason for receipt in outcome.receipts_of(part) if receipt.reason is not None]
    return outcome.worker(part)["banned"] is not None or any(reason.is_dishonest for reason in reasons)


async def fill(names: Sequence[str], seeds: Sequence[int], out: Path, *, seconds: float) -> None:
    """Every cheat and seed that DIR does not have yet; none is begun after so many seconds."""
    began = time.monotonic()
    missing = [(seed, name) for seed in seeds for name in names if not (out / f"{name}-{seed}.json").exists()]
    with tempfile.TemporaryDirectory() as scratch:
        policies = await make_policies(
            Path(scratch), shape=SHAPE, small_shape=SMALL, taught_steps=60, small_steps=40, rl_steps=SEEN + 8
        )
        arena = Arena(policies, Path(scratch))
        baselines = Baselines(arena)
        for seed, name in missing:
            if time.monotonic() - began > seconds:
                break
            found = await try_cheat(arena, baselines, name, seed)
            (out / f"{name}-{seed}.json").write_text(json.dumps(found))
            print(f"{name} {seed}: caught {found['caught']} by {found['check']}", file=sys.stderr, flush=True)
        await arena.close()


# What it says


@dataclass(frozen=True)
class Cuts:
    """The baselines' thresholds that are not published, from honest bundles."""

    logprob_error: float
    unlikely: float
    stop_probability: float

    @classmethod
    def of(cls, honest: Sequence[Numbers]) -> Cuts:
        return cls(
            SLACK * max(one.logprob_error for one in honest),
            SLACK * max(one.unlikely for one in honest),
            min(one.stop_probability for one in honest) / SLACK,
        )

    def verdicts(self, one: Numbers) -> dict[str, bool]:
        """Who refuses a bundle."""
        sampling = one.unlikely > self.unlikely or one.stop_probability < self.stop_probability
        return {
            "logprobs alone": one.logprob_error > self.logprob_error,
            "TOPLOC alone": one.toploc and not one.form,
            "INTELLECT-2": one.form or one.toploc or sampling,
        }


BASELINES = ("logprobs alone", "TOPLOC alone", "INTELLECT-2")


def after(stream: Sequence[Numbers], cuts: Cuts, who: str) -> int | None:
    """Rollouts until the first refused bundle."""
    for place, one in enumerate(stream):
        if cuts.verdicts(one)[who]:
            return LEASE_ROLLOUTS * (place + 1)
    return None


def spread(values: Sequence[int | None], *, most: int) -> str:
    """Median and 95th percentile over seeds."""
    known = sorted(value for value in values if value is not None)
    if not known:
        return f"- (of {most})"
    if len(values) == 1:
        return str(known[0])
    missed = len(values) - len(known)
    last = known[min(len(known) - 1, int(0.95 * len(known)))]
    return f"{statistics.median(known):.0f}, {last}" + (f", missed {missed} of {len(values)}" if missed else "")


def numbers_of(runs: Sequence[dict[str, Any]], place: str) -> list[Numbers]:
    return [Numbers(**one) for run in runs for one in run[place]]


def report(runs: Sequence[dict[str, Any]]) -> None:
    honest = numbers_of(runs, "honest")
    cuts = Cuts.of(honest)
    print(
        "| cheat | caught after rollouts: median, p95 | by | poisoned, trained on | logprobs alone | TOPLOC alone | INTELLECT-2 |"
    )
    print("|---|---|---|---|---|---|---|")
    for name in ADVERSARIES:
        mine = [run for run in runs if run["name"] == name]
        if not mine:
            continue
        checks = sorted({run["check"] or "-" for run in mine})
        poisoned = [run["poisoned"] for run in mine]
        cells = [spread([run["caught"] for run in mine], most=max(run["judged"] for run in mine)), ", ".join(checks)]
        cells.append(f"{statistics.median(poisoned):.0f} ({max(poisoned)})")
        for who in BASELINES:
            streams = [[Numbers(**one) for one in run["stream"]] for run in mine]
            cells.append(
                spread([after(one, cuts, who) for one in streams], most=STREAM_ROLLOUTS) if any(streams) else ""
            )
        print(f"| {name} | " + " | ".join(cells) + " |")
    published = sum(one.stop_probability < STOP_PROBABILITY for one in honest)
    print(f"\nHonest bundles: {len(honest)}; refused by the baselines as they are set here: none, by construction.")
    print(f"With the published stop probability of {STOP_PROBABILITY}: {published} of {len(honest)}.")
    print(
        f"Honest workers: {sum(run['honest_workers'] for run in runs)}, refused or banned: {sum(run['hurt'] for run in runs)}."
    )


def checks(runs: Sequence[dict[str, Any]], *, wanted: int) -> list[Check]:
    by_design = ("escalation-3", "int8-as-vllm", "int8-as-unknown")
    hard = [run for run in runs if run["name"] not in (*SOFT, *by_design)]
    text = [run for run in hard if ADVERSARIES[run["name"]].changes_text]
    worst = max((run["caught"] or ROLLOUTS_MAX + 1 for run in text if "partial" not in run["name"]), default=0)
    tried = len({run["name"] for run in runs})
    missed = sum(run["caught"] is None for run in hard)
    found = [
        Check("cheats tried", float(tried), f">= {wanted}", tried >= wanted),
        Check("rollouts until a cheat that changes the text is caught, the most of any seed", worst, "<= 50", worst <= 50),
        Check("runs whose cheat was not caught", missed, "0", missed == 0),
        Check("honest workers hurt", sum(run["hurt"] for run in runs), "0", not any(run["hurt"] for run in runs)),
    ]  # fmt: skip
    older = [run["caught"] for run in runs if run["name"] == "older-1"]
    if older:
        found.append(
            Check(
                "rollouts until one policy step is caught, the most",
                max(o or 10**6 for o in older),
                "<= 50",
                all(o and o <= 50 for o in older),
            )
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder of the runs; one that is there is not repeated")
    parser.add_argument("--seeds", type=int, nargs="+", default=(1, 2, 3))
    parser.add_argument("--names", nargs="+", choices=ADVERSARIES, default=list(ADVERSARIES))
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no run after this long")
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument("--quick", action="store_true", help="six cheats, one seed")
    parser.add_argument("--json", action="store_true", help="print the checks alone, as JSON")
    options = parser.parse_args()
    if options.out is None and not options.quick:
        parser.error("give --out DIR, or --quick")
    with tempfile.TemporaryDirectory() as scratch:
        out = options.out or Path(scratch)
        out.mkdir(parents=True, exist_ok=True)
        if not options.report:
            names, seeds = (QUICK, (1,)) if options.quick else (options.names, options.seeds)
            asyncio.run(fill(names, seeds, out, seconds=options.seconds))
        runs = [json.loads(path.read_text()) for path in sorted(out.glob("*.json"))]
    if not runs:
        sys.exit(f"no runs in {out}")
    if options.json:
        print(
            json.dumps(
                {"checks": [asdict(check) for check in checks(runs, wanted=len(QUICK) if options.quick else 25)]}
            )
        )
        return
    report(runs)
    print()
    for check in checks(runs, wanted=len(QUICK) if options.quick else 25):
        print(f"{'ok  ' if check.ok else 'MISS'} {check.name}: {check.value:.3g} (bar {check.bar})")


if __name__ == "__main__":
    main()
