"""The page of all recorded figures, RESULTS.md, from the JSON files in results/.

    python scripts/bench/results.py write                                        write RESULTS.md
    python scripts/bench/results.py record [--variant V] [--notes TEXT] -- python scripts/bench/X.py [options]

`record` runs the benchmark with --json, writes results/X-V-DATE.json and then the page. The page shows the newest value of
each bar of a benchmark and variant, so a run of some rows replaces these rows alone. A variant separates runs whose bars
have the same names and mean different things (another engine, another audit rate).
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import platform
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
RESULTS, PAGE = FOLDER / "results", FOLDER / "RESULTS.md"
NEVER_RECORDED: dict[str, str] = {
    "adapters": "a quick run on 2026-11-23: a delta of integers has 0.16 times the bytes of one of bf16 factors",
    "overload": "a busy machine, 10 s at twice the capacity of 2,547 heartbeats/s (2026-11-27): work's p99 2.1 times that at "
    "half, all uploads done, none lost; heartbeats' p99 4.1 times (bar 3, missed), before they waited for seconds",
}
"""Benchmarks that print checks and have no file in results/, with the reason."""

HEAD = """# Results

`scripts/bench/results.py` writes this page from `scripts/bench/results/*.json`; `results.py record` adds a run. For each bar
it shows the newest recorded value; missed bars come first. Figures are as good as their machine was
quiet: read the notes. What was tried on the way to these figures is in the git history of this file. Pictures:
[which loss learns](../../docs/learning.png), [an attack on learning](../../docs/under-attack.png),
[staleness with real parts](../../docs/overlap-real.png), [the swarm at 10,000 homes](../../docs/swarm-scale.png).
"""


@dataclass(frozen=True)
class Run:
    """One recorded run of a benchmark."""

    bench: str
    variant: str
    """Empty for most."""
    command: str
    date: str
    """ISO 8601, UTC."""
    commit: str
    """Empty: unknown."""
    machine: str
    notes: str
    """The machine's load, and what the figures do not show."""
    checks: tuple[dict[str, Any], ...]
    rows: tuple[dict[str, Any], ...] = ()
    """What the checks are computed from, by column, for a benchmark that prints it."""

    @property
    def title(self) -> str:
        return f"{self.bench}, {self.variant}" if self.variant else self.bench


def read(folder: Path = RESULTS) -> list[Run]:
    """Return the recorded runs, oldest first."""
    runs = []
    for path in sorted(folder.glob("*.json"), key=lambda path: (len(path.stem), path.stem)):
        found = json.loads(path.read_text(encoding="utf-8"))
        runs.append(Run(**{**found, "checks": tuple(found["checks"]), "rows": tuple(found.get("rows", ()))}))
    return sorted(runs, key=lambda run: run.date)


def newest(runs: list[Run]) -> dict[tuple[str, str], dict[str, tuple[Run, dict[str, Any]]]]:
    """Return the newest run and value of each bar, by (benchmark, variant) and the bar's name."""
    found: dict[tuple[str, str], dict[str, tuple[Run, dict[str, Any]]]] = {}
    for run in runs:
        bars = found.setdefault((run.bench, run.variant), {})
        for check in run.checks:
            bars[check["name"]] = (run, check)
    return dict(sorted(found.items()))


def shown(value: float | None) -> str:
    """Return the value as the page prints it."""
    if value is None:
        return "never"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


def page(runs: list[Run]) -> str:
    """Return the text of RESULTS.md."""
    bars = newest(runs)
    used = [run for run in runs if any(run is one for group in bars.values() for one, _ in group.values())]
    number = {id(run): index for index, run in enumerate(sorted(used, key=lambda run: run.title), start=1)}
    rows = [(key, name, run, check) for key, group in bars.items() for name, (run, check) in group.items()]
    rows.sort(key=lambda row: bool(row[-1]["ok"]))  # missed ones first
    missed = sum(not check["ok"] for *_, check in rows)
    lines = [HEAD, f"{len(rows)} bars, {missed} missed.\n"]
    if NEVER_RECORDED:
        lines += ["Never recorded:\n", *(f"- `{bench}.py`: {why}" for bench, why in sorted(NEVER_RECORDED.items())), ""]
    lines += ["## Bars\n", "| benchmark | check | value | bar | | run |", "|---|---|---|---|---|---|"]
    for _, name, run, check in rows:
        result = "ok" if check["ok"] else "**missed**"
        cells = (run.title, name, shown(check["value"]), check["bar"], result, f"{number[id(run)]}, {run.date}")
        lines.append("| " + " | ".join(cells) + " |")
    lines += [
        "",
        "## Runs\n",
        "| | benchmark | date | commit | command | machine | notes |",
        "|---|---|---|---|---|---|---|",
    ]
    for run in sorted(used, key=lambda run: number[id(run)]):
        row = (str(number[id(run)]), run.title, run.date, run.commit, f"`{run.command}`", run.machine, run.notes)
        lines.append("| " + " | ".join(row) + " |")
    for run in used:
        if run.rows:
            columns = list(dict.fromkeys(column for row in run.rows for column in row))
            lines += ["", f"## {run.title}: rows of run {number[id(run)]}", "", "| " + " | ".join(columns) + " |"]
            lines.append("|" + "---|" * len(columns))
            lines += ["| " + " | ".join(cell(row.get(column, "")) for column in columns) + " |" for row in run.rows]
    return "\n".join(lines) + "\n"


def cell(value: float | str | None) -> str:
    """Return a cell of a row as the page prints it."""
    return value if isinstance(value, str) else shown(value)


def machine() -> str:
    """Return this machine's processors and memory, in words."""
    model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = len(os.sched_getaffinity(0))
    return f"{cores} cores, {model[1].strip() if model else platform.processor()}, {gib:.0f} GiB"


def record(command: list[str], *, variant: str, notes: str) -> Path:
    """Run a benchmark and keep what it prints. Raise SystemExit if that is not JSON alone."""
    bench = next((Path(word).stem for word in command if word.endswith(".py")), None)
    if bench is None:
        raise SystemExit("no scripts/bench/X.py, and not scripts/gpu_check.py, in the command")
    load = os.getloadavg()[0]
    result = subprocess.run([*command, *([] if "--json" in command else ["--json"])], stdout=subprocess.PIPE, text=True)
    try:
        printed = json.loads(result.stdout)
        checks = printed["checks"]
    except (ValueError, KeyError, TypeError) as e:
        raise SystemExit(
            f"{bench} ended with {result.returncode} and printed no checks: {result.stdout[:200]!r}"
        ) from e
    git = ["git", "-C", str(FOLDER)]
    commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True).stdout.strip()
    date = dt.datetime.now(dt.UTC).date().isoformat()
    found = {
        "bench": bench,
        "variant": variant,
        "command": " ".join(["python", *command[1:]]),
        "date": date,
        "commit": commit + (" with changes" if commit and changed else ""),
        "machine": machine(),
        "notes": "; ".join(filter(None, [f"load {load:.1f} before the run", notes])),
        "checks": checks,
        **({"rows": printed["rows"]} if "rows" in printed else {}),
    }
    name = "-".join(filter(None, [bench, variant, date])).replace(" ", "-")
    path, count = RESULTS / f"{name}.json", 1
    while path.exists():  # a day's later run has later figures
        count += 1
        path = RESULTS / f"{name}-{count}.json"
    path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("write", "record"))
    parser.add_argument("--variant", default="", help="tells runs apart whose bars have the same names")
    parser.add_argument("--notes", default="", help="what the figures do not show, in a sentence")
    own, command = sys.argv[1:], []
    if "--" in own:
        own, command = own[: own.index("--")], own[own.index("--") + 1 :]
    options = parser.parse_args(own)
    if options.what == "record":
        print(record(command, variant=options.variant, notes=options.notes))
    PAGE.write_text(page(read()), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
