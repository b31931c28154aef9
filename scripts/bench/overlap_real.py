"""Effect of k with real parts: whole runs by `prime-node up`, on-policy and off-policy, with time, idle shares and learning
curves.

    python scripts/bench/overlap_real.py --resume DIR [--quick] [--json] [--levels 0,1,2] [--seeds 1,2,3] [--steps 200]
        [--engine transformers | vllm] [--workers 3] [--download-mbit 2 | --link-mbit 4] [--seconds 240] [--png FILE]

Each level and seed is a separate run in DIR: the demo's task and model, and real coordinator, trainer, validator and workers as
processes. One call works for at most `--seconds`, and the next call resumes, so that a long measurement can be made in pieces.
Complete runs are reported. Levels take turns, seed by seed, so that a busy hour affects all of them alike.

Two options make the broadcast long. `--link-mbit` puts each worker into its own network namespace, behind a link that the kernel
limits to this rate in both directions, and the trusted roles into another one. It needs root and iproute2, and DIR must not be in
/tmp, which is private to each host. `--download-mbit` leaves all on loopback, and each worker limits itself.

Baseline, in the same measurement: k = 0. Step times are of the trainer's own clock, the first tenth left out; closeness is the
coordinator's (docs/scheduler.md). On one machine workers and trainer share the cores: work that overlaps in time does not overlap
in arithmetic, so the gain is smaller than with one machine each.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from checks import Check, Output, at_most
from shaped.network import Link, Network

from prime_node.observe import read_json_lines

DATACENTRE_MBIT = 1_000.0


def settings_of(level: int, seed: int, options: argparse.Namespace) -> list[str]:
    found = [
        f"run.async_level={level}",
        f"run.max_steps={options.steps}",
        f"trainer.seed={seed}",
        f"trainer.evaluate_every={max(1, options.steps // 8)}",
        *([f"up.num_workers={options.workers}"] if options.link_mbit is None else []),
        "up.unsafe_cheaters={}",
        "up.port=0",
    ]
    if options.quick:
        found += ["trainer.sft.steps_max=40", "trainer.evaluation_problems=64"]
    if options.download_mbit is not None:
        found.append(f"worker.swarm.download_mbit_per_s={options.download_mbit}")
    return found


def work_on(folder: Path, settings: Sequence[str], *, engine: str, seconds: float) -> bool:
    """Start or resume a run. Return True if it ended."""
    command = [sys.executable, "-m", "prime_node", "up", str(folder), "--engine", engine]
    if not (folder / "run.json").exists():
        for assignment in settings:
            command += ["--set", assignment]
    with (folder.parent / f"{folder.name}.log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            return process.wait(timeout=seconds) == 0
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            process.wait()
            return False


def work_on_shaped(
    folder: Path, settings: Sequence[str], *, engine: str, seconds: float, links: Sequence[Link]
) -> bool:
    """Do the same, with the trusted roles on host 0 and one worker, which joins by the link, on each other host."""
    until_s = time.monotonic() + seconds
    prime_node = [sys.executable, "-m", "prime_node"]
    with Network([Link(DATACENTRE_MBIT, DATACENTRE_MBIT), *links]) as network:
        origin, *homes = network.hosts
        words = ["up.num_workers=0", f"up.host={origin.address}", *settings]
        new = [word for setting in words for word in ("--set", setting)]
        link_file = folder / "join-link"
        link_file.unlink(missing_ok=True)
        up = network.start(
            origin, [*prime_node, "up", str(folder), *([] if (folder / "run.json").exists() else new)], folder.parent
        )
        while not link_file.exists() and up.poll() is None and time.monotonic() < until_s:
            time.sleep(0.05)
        for host in homes if link_file.exists() else ():
            link = link_file.read_text().strip()
            place = folder / f"home-{host.index}"
            network.start(host, [*prime_node, "join", link, "--folder", str(place), "--engine", engine], place)
        while up.poll() is None and time.monotonic() < until_s:
            time.sleep(0.2)
        for process in (*(process for home in homes for process in home.processes), up):
            process.stop(grace_s=30.0)
        return up.exit_code == 0


def is_done(folder: Path) -> bool:
    return (folder / "summary.json").exists()


def measure(folder: Path, level: int, seed: int) -> dict[str, Any]:
    """Return the figures of a run that ended."""
    trained = {
        row["step"]: row for row in read_json_lines(folder / "trainer" / "metrics.jsonl") if "step_seconds" in row
    }
    by_step = {row["step"]: row for row in read_json_lines(folder / "coordinator" / "metrics.jsonl")}
    marks = {row["step"]: row for row in read_json_lines(folder / "trainer" / "metrics.jsonl") if "eval_sampled" in row}
    steps = [trained[step] for step in sorted(trained)][len(trained) // 10 :]
    others = [by_step[step] for step in sorted(by_step)][len(by_step) // 10 :]

    def mean(rows: Sequence[dict[str, Any]], name: str) -> float | None:
        found = [row[name] for row in rows if name in row]
        return statistics.fmean(found) if found else None

    return {
        "k": level,
        "seed": seed,
        "steps": len(trained),
        "step_s": mean(steps, "step_seconds"),
        "step_s_spread": statistics.pstdev(row["step_seconds"] for row in steps),
        "train_s": mean(steps, "train_seconds"),
        "trainer_idle": sum(row["idle_seconds"] for row in steps) / sum(row["step_seconds"] for row in steps),
        "rollouter_idle": mean(others, "rollouter/idle_ratio"),
        "broadcast_s": mean(others, "broadcast_seconds"),
        "closeness": mean(others, "closeness"),
        "lag_mean": mean(steps, "lag_mean"),
        "lag_max": max(row["lag_max"] for row in steps),
        "evaluations": [
            {"step": step, "sampled": row["eval_sampled"], "greedy": row["eval_greedy"]}
            for step, row in sorted(marks.items())
        ],
        "name": f"k = {level}",
    }


def checks_of(runs: Sequence[dict[str, Any]]) -> list[Check]:
    """Check that the lag is within k, and that learning is the same within noise, where there are three seeds of each."""
    checks = []
    for run in runs:
        over = max(0, run["lag_max"] - run["k"])
        checks.append(at_most(f"k {run['k']}, seed {run['seed']}: lag above k", over, 0))
    levels = sorted({run["k"] for run in runs})
    ends = {level: [run["evaluations"][-1]["sampled"] for run in runs if run["k"] == level] for level in levels}
    if levels[:1] == [0] and all(len(found) >= 3 for found in ends.values()):
        for level in levels[1:]:
            difference = abs(statistics.fmean(ends[level]) - statistics.fmean(ends[0]))
            noise = max(max(found) - min(found) for found in (ends[0], ends[level]))
            name = f"k {level}: accuracy at the end, beside k 0, in units of the seeds' range"
            checks.append(at_most(name, difference / max(noise, 1e-9), 1.0))
    return checks


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--resume", type=Path, required=True, metavar="DIR", help="where the runs are; made if it is not there"
    )
    parser.add_argument("--quick", action="store_true", help="a short warm-up and few held-out words")
    parser.add_argument("--json", action="store_true", help="print the checks alone, as JSON")
    parser.add_argument("--levels", default="0,1,2")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--engine", default="transformers")
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--download-mbit", type=float, default=None)
    parser.add_argument("--link-mbit", type=float, default=None)
    parser.add_argument("--seconds", type=float, default=240.0, help="for this call")
    parser.add_argument("--png", type=Path, default=None, help="the learning curves with bands")
    options = parser.parse_args()
    output = Output(as_json=options.json)
    options.resume = options.resume.resolve()
    options.resume.mkdir(parents=True, exist_ok=True)
    runs, left = [], []
    until_s = time.monotonic() + options.seconds
    for seed in map(int, options.seeds.split(",")):
        for level in map(int, options.levels.split(",")):
            folder = options.resume / f"k{level}-seed{seed}"
            seconds = until_s - time.monotonic()
            if not is_done(folder) and seconds > 10:
                settings = settings_of(level, seed, options)
                if options.link_mbit is None:
                    work_on(folder, settings, engine=options.engine, seconds=seconds)
                else:
                    links = [Link(options.link_mbit, options.link_mbit)] * options.workers
                    work_on_shaped(folder, settings, engine=options.engine, seconds=seconds, links=links)
            if is_done(folder):
                runs.append(measure(folder, level, seed))
            else:
                left.append(folder.name)
    checks = checks_of(runs)
    if options.png is not None and runs:
        from learning_plot import bands

        bands(runs, options.png, by="name", names=sorted({run["name"] for run in runs}))
    show(runs)
    code = output.finish(checks)
    if left:
        print(f"not ended yet: {', '.join(left)}; the same command resumes", file=sys.stderr)
    return 1 if left else code


COLUMNS = {
    "k": "k",
    "seed": "seed",
    "steps": "steps",
    "step_s": "step s",
    "step_s_spread": "sd",
    "train_s": "train s",
    "trainer_idle": "trainer idle",
    "rollouter_idle": "workers idle",
    "broadcast_s": "broadcast s",
    "closeness": "closeness",
    "lag_mean": "lag mean",
    "lag_max": "lag max",
}


def show(runs: Sequence[dict[str, Any]]) -> None:
    print("  ".join([*COLUMNS.values(), "sampled: first, last"]))
    for run in sorted(runs, key=lambda run: (run["k"], run["seed"])):
        cells = []
        for name, title in COLUMNS.items():
            value = run[name]
            text = "-" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)
            cells.append(text.rjust(len(title)))
        marks = [mark["sampled"] for mark in run["evaluations"]] or [float("nan")]
        print("  ".join([*cells, f"{marks[0]:.2f}, {marks[-1]:.2f}"]))


if __name__ == "__main__":
    raise SystemExit(main())
