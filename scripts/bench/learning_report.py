"""Results of the runs of learning.py: tables, checks, and the curves in one file."""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from checks import Check, at_least, at_most

Run = dict[str, Any]
"""One of learning.py's JSON files."""


def read(out: Path) -> list[Run]:
    if out.is_file():
        return [json.loads(line) for line in out.read_text().splitlines()]
    return [json.loads(path.read_text()) for path in sorted(out.glob("*-k*-seed*.json"))]


def by_tenth(values: Sequence[float]) -> list[float]:
    """Means of ten parts, or of fewer where there are fewer values."""
    parts = min(10, len(values))
    bounds = [len(values) * part // parts for part in range(parts + 1)] if parts else []
    return [round(statistics.fmean(values[begin:end]), 4) for begin, end in itertools.pairwise(bounds)]


def keep(runs: Sequence[Run], path: Path) -> None:
    """One line a run, its steps in tenths. Times are left out: they are of a machine that was busy with other things."""
    steps = ("reward", "log_ratio_abs", "grad_norm")
    lines = [
        {
            **{name: value for name, value in run.items() if name != "seconds"},
            **{name: by_tenth(run[name]) for name in steps},
        }
        for run in runs
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def final(run: Run) -> float:
    """Sampled held-out accuracy after the last step; 0 where it diverged."""
    return 0.0 if run["diverged"] else float(run["evaluations"][-1]["sampled"])


def lost(run: Run) -> float:
    """Return the accuracy that it lost between its best evaluation and the end."""
    return max(float(mark["sampled"]) for mark in run["evaluations"]) - final(run)


def cell(runs: Sequence[Run]) -> str:
    """Median and range of the final accuracy, the worst loss from a peak, the mean reward of the last tenth, seeds."""
    if not runs:
        return "-"
    values = [final(run) for run in runs]
    tail = [statistics.fmean(run["reward"][-max(1, len(run["reward"]) // 10) :] or [0.0]) for run in runs]
    return (
        f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f}), -{max(map(lost, runs)):.2f},"
        f" {statistics.fmean(tail):.2f}, n={len(runs)}"
    )


def report(runs: Sequence[Run], *, losses: Iterable[str], levels: Sequence[int]) -> None:
    for task, steps in sorted({(run["task"], run["steps"]) for run in runs}):
        mine = [run for run in runs if (run["task"], run["steps"]) == (task, steps)]
        begins = sorted({float(run["evaluations"][0]["sampled"]) for run in mine})
        print(f"\n{task}, {steps} steps, lr {mine[0]['lr']:g}; sampled held-out accuracy before: {begins}")
        print(
            "Each cell: final accuracy, median (range); worst loss from a peak; mean reward of the last tenth; seeds.\n"
        )
        print("| loss | " + " | ".join(f"k = {level}" for level in levels) + " |")
        print("|---" * (1 + len(levels)) + "|")
        for loss in losses:
            cells = [
                cell([run for run in mine if run["loss"] == loss and run["async_level"] == level]) for level in levels
            ]
            if any(each != "-" for each in cells):
                print(f"| {loss} | " + " | ".join(cells) + " |")


def compare(runs: Sequence[Run], *, losses: Iterable[str], levels: Sequence[int], base: str) -> None:
    """Final accuracy less that of the loss `base` on the same task, seed and level: mean and range over the pairs."""
    known = {
        (run["task"], run["seed"], run["steps"], run["async_level"]): final(run) for run in runs if run["loss"] == base
    }
    print(f"\nFinal accuracy less {base}'s from the same start, all tasks: mean (range), pairs.\n")
    print("| loss | " + " | ".join(f"k = {level}" for level in levels) + " |")
    print("|---" * (1 + len(levels)) + "|")
    for loss in (name for name in losses if name != base):
        cells = []
        for level in levels:
            mine = [run for run in runs if (run["loss"], run["async_level"]) == (loss, level)]
            places = [(run["task"], run["seed"], run["steps"], level) for run in mine]
            apart = [final(run) - known[place] for run, place in zip(mine, places, strict=True) if place in known]
            cell = (
                f"{statistics.fmean(apart):+.3f} ({min(apart):+.3f} to {max(apart):+.3f}), n={len(apart)}"
                if apart
                else "-"
            )
            cells.append(cell)
        if any(each != "-" for each in cells):
            print(f"| {loss} | " + " | ".join(cells) + " |")


def checks(runs: Sequence[Run], *, wanted: int, quick: bool) -> list[Check]:
    """Check what the runs show. A few steps (`quick`) show that all runs end, not what a loss gains."""
    found = [
        at_least("runs of the grid that was asked for", len(runs), wanted),
        at_most("runs that diverged", sum(bool(run["diverged"]) for run in runs), 0),
    ]
    if quick:
        return found
    for level in sorted({run["async_level"] for run in runs}):
        pairs = [
            (final(run), final(other))
            for run, other in itertools.product(runs, runs)
            if run["loss"] == "grpo_is"
            and other["loss"] == "grpo"
            and run["async_level"] == other["async_level"] == level
            and all(run[key] == other[key] for key in ("task", "seed", "steps"))
        ]
        if pairs:
            gain = statistics.fmean(corrected - plain for corrected, plain in pairs)
            name = f"accuracy that importance correction adds at k = {level}"
            if level:
                found.append(Check(name, gain, "> 0", gain > 0.0))
            else:  # the sampler is the trainer's own policy: there is nothing to correct
                found.append(Check(name, gain, "-0.03 to 0.03", abs(gain) <= 0.03))
    improved = [
        final(run) - float(run["evaluations"][0]["sampled"]) for run in runs if run["loss"] not in ("grpo", "gspo")
    ]
    if improved:
        worst = min(improved)
        found.append(Check("least accuracy gained by a run, grpo and gspo left out", worst, "> 0", worst > 0.0))
    return found
