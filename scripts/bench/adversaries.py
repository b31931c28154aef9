"""Detection of every cheat of lab/prime_lab/adversaries, as a real worker against the real daemon: share, delay, and check.

    python scripts/bench/adversaries.py --out DIR [--audits floor] [--seconds 200]   resumes where it stopped
    python scripts/bench/adversaries.py --out DIR [--audits floor] --report          the table of what there is
    python scripts/bench/adversaries.py --quick [--json]          nine cheats, one seed, no baselines, under two minutes

Each cheat and seed has a run with one honest worker (tests/adversaries/arena.py). The model has the shape of Qwen3 and two
layers; it is trained first and kept in DIR. The run continues until the cheat is banned. The benchmark counts its rollouts that
the trainer got, from the first bundle that differs from an honest worker's, including that bundle.

Full audits: every bundle gets a forward pass. A second run without bans gives the same cheat's bundles to the baselines of
cheat_baselines.py (not with --quick or --no-baselines). Audits at the floor: the cheat is honest until its audits are as rare as
possible, one bundle in four, and begins then. For a cheat that shows in every audited bundle, the number of bundles until the
first rejected one is geometric: 4 on average, 11 or fewer in 95 of 100.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
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
from cheat_baselines import BASELINES, STOP_PROBABILITY, Baselines, Cuts, Numbers
from checks import Check, Output, at_least, at_most
from tests.adversaries.arena import SEEN, Arena
from tests.adversaries.conditions import FLOOR, FLOOR_AUDITS, SOFT, conditions_for
from tests.adversaries.conftest import SHAPE, SMALL
from tests.adversaries.policies import Policies, kept_policies
from tests.adversaries.watching import Judged, Outcome, Part

from prime_lab.adversaries.table import ADVERSARIES
from prime_lab.adversaries.uploads import opened_upload
from prime_protocol.errors import RemoteError

QUICK = (
    "older-1",
    "int8",
    "smaller-rescored",
    "best-of-n",
    "older-proofs",
    "equivocation",
    "shading-0.1-as-vllm",
    "shading-0.05-as-vllm",
    "shading-both-ways",
)
AT_THE_FLOOR = (
    "older-1",
    "older-2",
    "int8",
    "smaller-rescored",
    "escalation",
    "prompt-swap",
    "best-of-n",
    "forged-seed",
    "temperature-0.95",
    "poison",
    "partial-10",
    "partial-1",
    "best-of-n-in-20",
    "shading-0.1-as-vllm",
    "shading-0.05-as-vllm",
)
"""Cheats that change the text, or the logprobs that count where nothing is audited."""
SLOW = ("int8", "temperature-0.95", "temperature-0.98-as-unknown", "best-of-n", "best-of-n-in-20", "ties")
"""Cheats that one audited bundle may not detect."""
NO_CALIBRATION = ("temperature-0.99-as-unknown", "spikes-as-unknown")
BY_DESIGN = ("escalation-3", "int8-as-vllm", "int8-as-unknown", "older-1-as-vllm", *NO_CALIBRATION)
"""Cheats that may pass, as SECURITY.md says."""
ADDING_UP = ("ties-as-vllm", "ties-as-unknown", "unseeded-best-of-n", "temperature-0.98-as-unknown", "best-of-n-in-20")
"""Cheats that no single bundle shows. Their evidence adds up more slowly than that of other cheats."""
ROLLOUTS_MAX = {
    "partial-1": 800,
    "partial-10": 400,
    "ties-as-vllm": 400,
    "ties-as-unknown": 400,
    "unseeded-best-of-n": 600,
    "best-of-n-in-20": 400,
}
"""Rollouts of a cheat before it counts as not caught, ..."""
ROLLOUTS_MAX_OTHERS = 160
AT_THE_FLOOR_TIMES = 4
"""... and the factor for audits at the floor."""
SECONDS_MAX = 90.0
"""Time limit of one run, even on a busy machine."""
STREAM_ROLLOUTS = 32
"""Rollouts of a cheat for the baselines."""
LEASE_ROLLOUTS = 8
NATS = 1e-3
"""Error of a logprob above which it is not an honest worker's, on the same engine and machine."""
RATIO_NATS = math.log(1.01)
"""Error of a claim above which it moves an importance ratio by more than 1 %."""
SHADING = ("shading-", "low-0.05")
"""Cheats that move importance ratios, by how their names begin: found within ..."""
SHADED_ROLLOUTS_MAX = 64
"""... this many dishonest rollouts."""
COOLER_ROLLOUTS_MAX = 64
"""Rollouts of 6 tokens. In this many, one run in 40 has fewer than two changed tokens, and one token proves nothing."""
BUNDLES_95 = math.ceil(math.log(0.05) / math.log(1 - FLOOR.share_min))


@dataclass(frozen=True)
class Wrong:
    """A completion that an honest worker would not have uploaded."""

    slot: int
    changes_text: bool
    """Not its numbers alone."""
    moves_ratios: bool = False
    """By more than 1 %, where the trainer used what is claimed."""


class Bench:
    """Runs of one process: they share the policies and the engines."""

    def __init__(self, policies: Policies, scratch: Path) -> None:
        self._arena = Arena(policies, scratch)
        self._baselines = Baselines(self._arena)

    async def close(self) -> None:
        await self._baselines.close()
        await self._arena.close()

    async def try_cheat(self, name: str, seed: int, *, at_the_floor: bool, streams: bool) -> dict[str, Any]:
        began = time.perf_counter()
        audits, times = (FLOOR, AT_THE_FLOOR_TIMES) if at_the_floor else (None, 1)
        rollouts_max = times * ROLLOUTS_MAX.get(name, ROLLOUTS_MAX_OTHERS)
        outcome = await self._arena.fight(
            name,
            seed=seed,
            rollouts_max=rollouts_max,
            until=(lambda parts, batches: False) if name in SOFT else None,  # the run ends with its last step
            groups_per_step=max(8, rollouts_max // 20),
            seconds_max=SECONDS_MAX,
            audits_first=FLOOR_AUDITS if at_the_floor else 0,
            **conditions_for(name, audits=audits),
        )
        cheat = outcome.parts[0]
        found = {"name": name, "seed": seed, **await self._caught(outcome, cheat), "stream": [], "honest": []}
        found["hurt"] = sum(_is_hurt(outcome, part) for part in outcome.parts[1:])
        found["honest_workers"] = len(outcome.parts) - 1
        found["turned_away"] = dict(cheat.replies)
        found["waits"] = sum("you abandoned" in reason for reason in cheat.waits)
        if streams and not at_the_floor and name not in SOFT:
            await self._add_streams(found, name, seed)
        found["seconds"] = round(time.perf_counter() - began, 1)
        return found

    async def _caught(self, outcome: Outcome, cheat: Part) -> dict[str, Any]:
        """After how many rollouts, in the order in which they were judged, by what, and what the trainer got."""
        assert cheat.adversary is not None
        key, text = cheat.key.key_id, cheat.adversary.changes_text
        groups = [group for batch in outcome.batches for group in batch.groups if group.worker == key]
        trained = {group.slot for group in groups}
        as_claimed = {group.slot for group in groups if group.logprobs is None}
        had = moved = before = since = dishonest = poisoned = accepted = passed = 0
        first, check = None, None
        for judged in (one for one in outcome.judged if one.worker == key and one.verdict is not None):
            assert judged.verdict is not None
            had += judged.lease.num_rollouts
            wrong = await self._wrong(judged)
            if first is None:
                before += judged.lease.num_rollouts if not since and not wrong else 0
                dishonest += len(wrong)
                since += judged.lease.num_rollouts if since or wrong or not text else 0
                accepted += bool(wrong) and judged.verdict.accepted
                passed += bool(wrong) and judged.verdict.accepted and judged.audited
                if judged.verdict.reason is not None and judged.verdict.reason.is_dishonest:
                    first, check = since, str(judged.verdict.reason)
            if judged.verdict.accepted:
                poisoned += sum(one.changes_text and one.slot in trained for one in wrong)
                moved += sum(one.moves_ratios and one.slot in as_claimed for one in wrong)
        ban = outcome.worker(cheat)["banned"]
        if ban is not None and first is None:
            first, check = since, f"ban, {ban['kind']}"
        return {
            "caught": first,
            "check": check,
            "judged": had,
            "honest_before": before,
            "dishonest": dishonest,
            "accepted_before": accepted,
            "passed_audits_before": passed,
            "poisoned": poisoned,
            "moved": moved,
            "banned": None if ban is None else ban["kind"],
        }

    async def _wrong(self, judged: Judged) -> list[Wrong]:
        """Completions that are not an honest worker's."""
        slots = [group.slot for group in judged.lease.groups for _ in group.seeds]
        try:
            _, rollouts = opened_upload(judged.parcel)
        except RemoteError:
            return [Wrong(slot, True) for slot in slots]
        honest, found = await self._arena.honest(judged.lease), []
        for slot, claimed, mine, theirs in zip(
            slots, rollouts.slots_N.tolist(), rollouts.completions(), honest, strict=True
        ):
            if (claimed, mine.token_ids) != (slot, theirs.token_ids):
                found.append(Wrong(slot, True))
            elif (most := float(np.abs(np.subtract(mine.logprobs, theirs.logprobs)).max())) > NATS:
                found.append(Wrong(slot, False, moves_ratios=most > RATIO_NATS))
        return found

    async def _add_streams(self, found: dict[str, Any], name: str, seed: int) -> None:
        """Add the bundles that the baselines judge, from a run in which no worker is banned."""
        outcome = await self._arena.fight(
            name,
            seed=seed,
            rollouts_max=STREAM_ROLLOUTS,
            seconds_max=SECONDS_MAX,
            **conditions_for(name, strikes_max=10**6),
        )
        keys = [part.key.key_id for part in outcome.parts]
        for judged in outcome.judged:
            place = "stream" if judged.worker == keys[0] else "honest"
            found[place].append(asdict(await self._baselines.numbers(judged)))


def _is_hurt(outcome: Outcome, part: Part) -> bool:
    reasons = [receipt.reason for receipt in outcome.receipts_of(part) if receipt.reason is not None]
    return outcome.worker(part)["banned"] is not None or any(reason.is_dishonest for reason in reasons)


async def fill(
    names: Sequence[str], seeds: Sequence[int], out: Path, *, at_the_floor: bool, streams: bool, seconds: float
) -> None:
    """Run every cheat and seed that DIR lacks, and begin none after `seconds`. `streams`: run them for the baselines too."""
    began, runs = time.monotonic(), runs_in(out, at_the_floor=at_the_floor)
    runs.mkdir(parents=True, exist_ok=True)
    missing = [(seed, name) for seed in seeds for name in names if not (runs / f"{name}-{seed}.json").exists()]
    if not missing:
        return
    policies = await kept_policies(
        out / "policies", shape=SHAPE, small_shape=SMALL, taught_steps=60, small_steps=40, rl_steps=SEEN + 8
    )
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(policies, Path(scratch))
        for seed, name in missing:
            if time.monotonic() - began > seconds:
                break
            found = await bench.try_cheat(name, seed, at_the_floor=at_the_floor, streams=streams)
            (runs / f"{name}-{seed}.json").write_text(json.dumps(found))
            line = f"{name} {seed}: caught {found['caught']} by {found['check']}, {found['seconds']} s"
            print(line, file=sys.stderr, flush=True)
        await bench.close()


def runs_in(out: Path, *, at_the_floor: bool) -> Path:
    return out / ("floor" if at_the_floor else "full")


# What it says


def spread(values: Sequence[int | None], *, most: int) -> str:
    """Median and 95th percentile over seeds; one that was not caught counts as longer than any."""
    known = sorted(math.inf if value is None else float(value) for value in values)
    if math.isinf(known[0]):
        return f"- (of {most})"
    if len(known) == 1:
        return f"{known[0]:.0f}"
    median, high = statistics.median(known), known[math.ceil(0.95 * len(known)) - 1]
    missed = sum(map(math.isinf, known))
    shown = [f"{each:.0f}" if math.isfinite(each) else "-" for each in (median, high)]
    return ", ".join(shown) + (f" (missed {missed} of {len(known)}, in {most})" if missed else "")


def numbers_of(run: dict[str, Any], place: str) -> list[Numbers]:
    return [Numbers(**one) for one in run[place]]


def report(runs: Sequence[dict[str, Any]], *, at_the_floor: bool) -> None:
    honest = [one for run in runs for one in numbers_of(run, "honest")]
    cuts = Cuts.of(honest) if honest else None
    columns = ["cheat", "caught after rollouts: median, p95", "by", "dishonest ones among them", "poisoned, trained on"]
    columns += ["ratios moved by over 1 %, trained on"]
    columns += ["cheated bundles accepted before (audited)"] if at_the_floor else BASELINES
    print("| " + " | ".join(columns) + " |")
    print("|---" * len(columns) + "|")
    for name in ADVERSARIES:
        mine = [run for run in runs if run["name"] == name]
        if not mine:
            continue
        poisoned = [run["poisoned"] for run in mine]
        cells = [spread([run["caught"] for run in mine], most=max(run["judged"] for run in mine))]
        cells.append(", ".join(sorted({run["check"] or "-" for run in mine})))
        cells.append(", ".join(str(run["dishonest"]) for run in mine))
        cells.append(f"{statistics.median(poisoned):.0f} (most {max(poisoned)})")
        cells.append(", ".join(str(run["moved"]) for run in mine))
        if at_the_floor:
            cells.append(", ".join(f"{run['accepted_before']} ({run['passed_audits_before']})" for run in mine))
        for who in () if at_the_floor else BASELINES:
            streams = [numbers_of(run, "stream") for run in mine]
            found = [None if cuts is None else cuts.first_refused(stream, who) for stream in streams]
            rollouts = [None if one is None else LEASE_ROLLOUTS * one for one in found]
            cells.append(spread(rollouts, most=STREAM_ROLLOUTS) if any(streams) else "")
        print(f"| {name} | " + " | ".join(cells) + " |")
    if honest:
        published = sum(one.stop_probability < STOP_PROBABILITY for one in honest)
        print(f"\nHonest bundles: {len(honest)}; refused by the baselines as they are set here: none, by construction.")
        print(f"With the published stop probability of {STOP_PROBABILITY}: {published} of {len(honest)}.")
    workers, hurt = (sum(run[each] for run in runs) for each in ("honest_workers", "hurt"))
    print(
        f"\nHonest workers: {workers}, refused or banned: {hurt}. Runs took {sum(run['seconds'] for run in runs):.0f} s."
    )


def checks(runs: Sequence[dict[str, Any]], *, at_the_floor: bool, wanted: int) -> list[Check]:
    hard = [run for run in runs if run["name"] not in (*SOFT, *BY_DESIGN) and "partial" not in run["name"]]
    text = [run for run in hard if ADVERSARIES[run["name"]].changes_text and run["name"] not in ADDING_UP]
    tried, missed = len({run["name"] for run in runs}), sum(run["caught"] is None for run in hard)
    hurt = sum(run["hurt"] for run in runs)
    found = [
        at_least("cheats tried", tried, wanted),
        at_most("runs whose cheat was not caught", missed, 0),
        at_most("honest workers hurt", hurt, 0),
    ]
    shaded = [run for run in runs if run["name"].startswith(SHADING)]
    if shaded:
        worst = max(math.inf if run["caught"] is None else run["dishonest"] for run in shaded)
        name = "dishonest rollouts until shading by 0.05 nats or more is caught, the most"
        bar = (AT_THE_FLOOR_TIMES if at_the_floor else 1) * SHADED_ROLLOUTS_MAX
        found.append(at_most(name, worst, bar))
    cooler = [run["caught"] or math.inf for run in runs if run["name"] == "temperature-0.98-as-unknown"]
    if cooler and not at_the_floor:
        late = statistics.fmean(each > COOLER_ROLLOUTS_MAX for each in cooler)
        name = f"share of runs at temperature 0.98, unknown class, that took more than {COOLER_ROLLOUTS_MAX} rollouts"
        found.append(at_most(name, late, 0.1))
    if at_the_floor:
        took = [run["caught"] or math.inf for run in text if run["name"] not in SLOW]
        if not took:
            return found
        beyond = statistics.fmean(each > LEASE_ROLLOUTS * BUNDLES_95 for each in took)
        name = f"share of runs whose cheat took more than {LEASE_ROLLOUTS * BUNDLES_95} rollouts, derived 0.05"
        return [*found, at_most(name, beyond, 0.15)]
    moved = sum(run["moved"] for run in runs)
    found.append(at_most("trained rollouts whose claims moved a ratio by over 1 %", moved, 0))
    worst = max((math.inf if run["caught"] is None else run["caught"] for run in text), default=0)
    name = "rollouts until a cheat that changes the text is caught, the most of any seed"
    found.append(at_most(name, worst, 50))
    older = [math.inf if run["caught"] is None else run["caught"] for run in runs if run["name"] == "older-1"]
    if older:
        found.append(at_most("rollouts until one policy step is caught, the most", max(older), 50))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder of the runs; one that is there is not repeated")
    parser.add_argument("--audits", choices=("full", "floor"), default="full", help="of the cheat's bundles")
    parser.add_argument("--seeds", type=int, nargs="+", default=(1, 2, 3))
    parser.add_argument("--names", nargs="+", choices=ADVERSARIES, help="these cheats only")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no run after this long")
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument("--no-baselines", action="store_true", help="leave out the second run of each cheat")
    parser.add_argument("--quick", action="store_true", help="nine cheats, one seed, no baselines")
    parser.add_argument("--json", action="store_true", help="print the checks alone, as JSON")
    options = parser.parse_args()
    if options.out is None and not options.quick:
        parser.error("give --out DIR, or --quick")
    output = Output(as_json=options.json)
    at_the_floor = options.audits == "floor"
    names = options.names or (QUICK if options.quick else AT_THE_FLOOR if at_the_floor else tuple(ADVERSARIES))
    seeds = (1,) if options.quick else options.seeds
    with tempfile.TemporaryDirectory() as scratch:
        out = options.out or Path(scratch)
        if not options.report:
            streams = not (options.quick or options.no_baselines)
            asyncio.run(fill(names, seeds, out, at_the_floor=at_the_floor, streams=streams, seconds=options.seconds))
        runs = [json.loads(path.read_text()) for path in sorted(runs_in(out, at_the_floor=at_the_floor).glob("*.json"))]
    if not runs:
        sys.exit(f"no runs in {out}")
    found = checks(
        runs, at_the_floor=at_the_floor, wanted=len(QUICK) if options.quick else 25 if not at_the_floor else 12
    )
    report(runs, at_the_floor=at_the_floor)
    print()
    return output.finish(found)


if __name__ == "__main__":
    raise SystemExit(main())
