"""Whole runs of configs/smollm2.toml: whether they learn, who is banned, whether honest work is rejected.

    python scripts/bench/public_model.py --out DIR [--seed 7 8 9] [--json]    a quarter of an hour a seed on two cores with bf16
    python scripts/bench/public_model.py --quick [--json]                     two small steps with one honest worker

Each seed is one `prime-node up` with the shipped file, and another seed of its problems: three vLLM workers in bf16,
of which the third begins to cheat, a validator and a trainer share this machine. A finished run in DIR is not repeated, so a run
that was started by hand counts, too. Times begin with the folder's run.json. A checked bundle of an honest worker is rejected if
its outcome in the coordinator's timeline is not "accepted"; an expired lease has no check, and is printed.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checks import Check, Output, at_least, at_most

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs" / "smollm2.toml"
SEED_LINE = "seed = 7\n"
CHEATER = "worker-3"
BEFORE_MAX, AFTER_MIN, MINUTES_MAX = 0.05, 0.35, 40.0
QUICK = (
    "run.max_steps=2",
    "run.groups_per_step=4",
    "up.num_workers=1",
    "up.unsafe_cheaters={}",
    "trainer.evaluate_every=0",
)


@dataclass(frozen=True)
class Mark:
    """An evaluation on held-out problems."""

    step: int
    minutes: float
    """From the start of the run to the end of the evaluation."""
    sampled: float
    greedy: float


@dataclass(frozen=True)
class Found:
    """What a finished run's folder says."""

    marks: list[Mark]
    honest_rejected: int
    """Bundles of honest workers that a check rejected."""
    honest_expired: int
    """Leases of honest workers that expired or were returned."""
    banned: list[str]
    minutes: float
    summary: dict[str, Any]


def start(folder: Path, seed: int, settings: Sequence[str] = ()) -> None:
    """Run `prime-node up` with the shipped file and another seed of its problems, until the run has finished."""
    build = [sys.executable, str(ROOT / "scripts" / "models.py"), "smollm2"]
    subprocess.run(build, check=True, stdout=subprocess.DEVNULL)
    text = CONFIG.read_text()
    assert text.count(SEED_LINE) == 1, f"{CONFIG} does not have one line {SEED_LINE.strip()!r}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    config = folder.parent / f"{folder.name}.toml"
    config.write_text(text.replace(SEED_LINE, f"seed = {seed}\n"))
    (folder.parent / "calibration-smollm2.json").write_bytes((CONFIG.parent / "calibration-smollm2.json").read_bytes())
    given = [part for setting in settings for part in ("--set", setting)]
    subprocess.run([sys.executable, "-m", "prime_node", "up", str(folder), "--config", str(config), *given], check=True)


def read(folder: Path) -> Found:
    """Read a finished run."""
    began = (folder / "run.json").stat().st_mtime
    rows = list(_lines(folder / "trainer" / "metrics.jsonl"))
    marks = [
        Mark(row["step"], (row["time"] - began) / 60, row["eval_sampled"], row["eval_greedy"])
        for row in rows
        if "eval_sampled" in row
    ]
    honest = [row for row in _lines(folder / "coordinator" / "timeline.jsonl") if row.get("name") != CHEATER]
    summary = json.loads((folder / "summary.json").read_text())
    return Found(
        marks,
        sum(row["kind"] == "check" and row["outcome"] != "accepted" for row in honest),
        sum(row["kind"] == "lease" and row["outcome"] != "redeemed" for row in honest),
        [ban["worker"] for ban in summary["bans"]],
        (rows[-1]["time"] - began) / 60,
        summary,
    )


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    yield from map(json.loads, path.read_text().splitlines())


def checks_of(seed: int, found: Found) -> list[Check]:
    name = f"problems of seed {seed}"
    reached = next((mark.minutes for mark in found.marks if mark.sampled >= AFTER_MIN), math.inf)
    return [
        at_most(f"{name}: sampled accuracy before training", found.marks[0].sampled, BEFORE_MAX),
        at_least(f"{name}: sampled accuracy at the end", found.marks[-1].sampled, AFTER_MIN),
        at_most(f"{name}: minutes to a sampled accuracy of {AFTER_MIN:g}", reached, MINUTES_MAX),
        at_least(f"{name}: cheaters banned", float(CHEATER in found.banned), 1.0),
        *honest_checks(name, found),
    ]


def honest_checks(name: str, found: Found) -> list[Check]:
    return [
        at_most(f"{name}: honest workers banned", float(len(set(found.banned) - {CHEATER})), 0.0),
        at_most(f"{name}: honest bundles rejected by a check", float(found.honest_rejected), 0.0),
        at_least(f"{name}: the chain of policies verifies", float(found.summary["verification"]["ok"]), 1.0),
    ]


def report(seed: int, found: Found) -> None:
    marks = ", ".join(
        f"{one.sampled:.2f} ({one.greedy:.2f}) at step {one.step}, {one.minutes:.1f} min" for one in found.marks
    )
    print(f"seed {seed}: sampled (greedy) {marks}; finished in {found.minutes:.1f} min")
    print(f"  rollouts {found.summary['rollouts']}, {found.summary['bytes_published']:,} bytes published")
    print(
        f"  bans {found.summary['bans']}; leases of honest workers that expired or were returned: {found.honest_expired}"
    )


def quick() -> list[Check]:
    """Check a small run with one honest worker: what it cannot show is learning and bans."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        start(folder, 7, QUICK)
        found = read(folder)
    accepted = found.summary["rollouts"]["accepted"]
    return [at_least("quick run: rollouts accepted", accepted, 64.0), *honest_checks("quick run", found)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder of the runs; a finished one is not repeated")
    parser.add_argument("--seed", type=int, nargs="+", default=[7, 8, 9], help="seeds of the problems")
    parser.add_argument("--quick", action="store_true", help="two small steps with one honest worker")
    parser.add_argument("--json", action="store_true", help="print the checks alone, as JSON")
    options = parser.parse_args()
    output = Output(as_json=options.json)
    if options.quick:
        return output.finish(quick())
    if options.out is None:
        parser.error("give --out DIR, or --quick")
    checks: list[Check] = []
    for seed in options.seed:
        folder = options.out / f"seed{seed}"
        if not (folder / "summary.json").exists():
            start(folder, seed)
        found = read(folder)
        report(seed, found)
        checks += checks_of(seed, found)
    return output.finish(checks)


if __name__ == "__main__":
    raise SystemExit(main())
