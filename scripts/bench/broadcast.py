"""Distribution of one file over shaped links: this project, naive HTTP, libtorrent and SHARDCAST, on the same bytes in one run.

    python scripts/bench/broadcast.py [--quick] [--json] [--row NAME ...] [--system NAME ...] [--faults] [--rounds 3]
    python scripts/bench/broadcast.py --draw SEED ... [--sim] [--minutes 45]

Hosts are network namespaces (shaped/network.py), and every program is a separate process. It needs root, iproute2, and nft for
the row behind NAT. `ratio` is the time until the last receiver holds verified bytes over the fluid lower bound max(F/u_s, F/min
d_i, N*F/(u_s + sum u_i)); headers alone cost 1.05. The baselines are installed on demand into --folder. All processes share this
machine's cores, so a row that needs more megabytes per second than they can carry measures the processor: see its columns.

`--draw` runs rows drawn from seeds (shaped/draws.py), this project and libtorrent by turns, once each, and simulates both on the
same links; no row begins after `--minutes`. If either keeps the processors busier than BUSY_MAX, both run again on links half as
fast. With `--sim` it only simulates: seconds a row. The JSON has a row for each seed, times as multiples of its bound.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from checks import Check, Output, at_most
from shaped import rows
from shaped.draws import BUSY_MAX, SLOWER_TIMES_MAX, draw, seconds_max, slower
from shaped.excess import PARTS
from shaped.race import Outcome, Row, System, run
from shaped.simulated import simulate_row
from shaped.systems import baselines, ours

OURS = "prime-node"
MEAN_BAR, WORST_BAR, SIMULATOR_BAR = 0.9, 1.05, 1.1
"""Bars of drawn rows: our time over libtorrent's, geometric mean and worst; the simulator's error as a factor, worst."""
COLUMNS = (
    "row",
    "system",
    "ratio",
    "spread",
    "bound s",
    "origin sent x",
    "received x",
    "CPU s origin",
    "receiver",
    "MB",
    *PARTS,
)


def race(row: Row, chosen: Sequence[str], folder: Path, rounds: int) -> dict[str, list[Outcome]]:
    """The systems by turns, so that a busy minute does not hit one of them alone."""
    systems: dict[str, System] = {OURS: ours(), **baselines(folder, row)}
    found: dict[str, list[Outcome]] = {name: [] for name in systems if name in chosen}
    for _ in range(rounds):
        for name, outcomes in found.items():
            outcomes.append(run(systems[name], row, folder))
            print(json.dumps(outcomes[-1].as_json()), file=sys.stderr, flush=True)
    return found


def middle(outcomes: Sequence[Outcome], of: Callable[[Outcome], float]) -> float:
    return statistics.median(of(outcome) for outcome in outcomes)


def line(row: Row, name: str, outcomes: Sequence[Outcome]) -> tuple[str, ...]:
    ratios = [outcome.ratio for outcome in outcomes]
    return (
        row.name,
        name,
        f"{statistics.median(ratios):.2f}",
        f"{min(ratios):.2f}-{max(ratios):.2f}",
        f"{row.bound_s:.2f}",
        f"{middle(outcomes, lambda one: one.origin_copies):.2f}",
        f"{middle(outcomes, lambda one: one.received_copies):.2f}",
        f"{middle(outcomes, lambda one: one.cpu_origin_s):.2f}",
        f"{middle(outcomes, lambda one: one.cpu_receiver_s):.2f}",
        f"{middle(outcomes, lambda one: one.rss_receiver_mb):.0f}",
        *(f"{middle(outcomes, lambda one, part=part: one.excess.get(part, math.nan)):.2f}" for part in PARTS),  # type: ignore[misc]
    )


def checks_of(row: Row, bar: float, found: dict[str, list[Outcome]]) -> list[Check]:
    """Ours against the bar, and against each baseline that ran."""
    ratio = middle(found[OURS], lambda one: one.ratio)
    made = [at_most(f"{row.name}: time to the last over the bound", ratio, bar)]
    for name, outcomes in found.items():
        if name != OURS:
            share = ratio / middle(outcomes, lambda one: one.ratio)
            made.append(at_most(f"{row.name}: of the time of {name}", share, 1.0))
    return made


def fault_checks(found: dict[str, Outcome]) -> list[Check]:
    """Return checks that all receivers that stayed completed with the right bytes. The cost has no bar."""
    return [
        at_most(f"{name}: receivers that stayed and did not complete, or hold a wrong byte", len(outcome.failed), 0)
        for name, outcome in found.items()
    ]


def raced_on_links(row: Row, folder: Path) -> tuple[Row, dict[str, Outcome]]:
    """Run a drawn row once with each system, and again on slower links while the processors are too busy.

    Returns the last of these rows and its outcomes.
    """
    for times in range(SLOWER_TIMES_MAX + 1):
        found = race(replace(row, timeout_s=seconds_max(row)), [OURS, "libtorrent"], folder, 1)
        outcomes = {name: outcome for name, (outcome,) in found.items()}
        if times == SLOWER_TIMES_MAX or all(outcome.busy_share <= BUSY_MAX for outcome in outcomes.values()):
            break
        row = slower(row)
    return row, outcomes


def drawn(seeds: Sequence[int], folder: Path, *, minutes: float) -> list[dict[str, float | str]]:
    """Run and simulate the rows of seeds; with `minutes` 0, only simulate them. Values are times over the bound."""
    began_s, table = time.monotonic(), list[dict[str, float | str]]()
    for seed in seeds:
        row, found = draw(seed), dict[str, Outcome]()
        if minutes and time.monotonic() - began_s < 60 * minutes:
            row, found = raced_on_links(row, folder)
        line: dict[str, float | str] = {"row": row.name, "bound s": round(row.bound_s, 1)}  # of the links it ran on
        line["simulated"] = round(simulate_row(row).last_ratio, 3)
        line["libtorrent simulated"] = round(simulate_row(row, is_bittorrent=True).last_ratio, 3)
        line |= {name: round(outcome.ratio, 3) for name, outcome in found.items()}
        if found:
            line |= {f"{name}: CPU s a receiver": round(one.cpu_receiver_s, 2) for name, one in found.items()}
            line["links made"] = found[OURS].linked_share or 0.0
            line |= {f"{name}: processors busy": round(one.busy_share, 2) for name, one in found.items()}
        print(json.dumps(line), file=sys.stderr, flush=True)
        table.append(line)
    return table


def drawn_checks(table: Sequence[dict[str, float | str]], *, is_simulated: bool) -> list[Check]:
    """Return checks over all drawn rows. A row that had no time left misses them."""

    def worst(values: Sequence[float]) -> float:
        return max(values) if len(values) == len(table) else math.inf

    ours, theirs = ("simulated", "libtorrent simulated") if is_simulated else (OURS, "libtorrent")
    shares = [float(line[ours]) / float(line[theirs]) for line in table if ours in line]
    mean = math.exp(statistics.fmean(map(math.log, shares))) if len(shares) == len(table) else math.inf
    where = "drawn rows, simulated" if is_simulated else "drawn rows"
    checks = [
        at_most(f"{where}: our time over libtorrent's, geometric mean", round(mean, 3), MEAN_BAR),
        at_most(f"{where}: our time over libtorrent's, worst", round(worst(shares), 3), WORST_BAR),
    ]
    if not is_simulated:
        errors = [float(line[OURS]) / float(line["simulated"]) for line in table if OURS in line]
        error = worst([max(share, 1 / share) if share else math.inf for share in errors])
        checks.append(at_most(f"{where}: the simulator's error, worst factor", round(error, 3), SIMULATOR_BAR))
    return checks


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one small row, once, under a minute")
    parser.add_argument("--json", action="store_true", help="print the checks alone, as JSON")
    parser.add_argument("--row", action="append", help="only this row, by name; may be repeated")
    parser.add_argument("--system", action="append", help="only this system beside ours; may be repeated")
    parser.add_argument("--faults", action="store_true", help="the faults instead of the rows")
    parser.add_argument(
        "--crossing", action="store_true", help="small deltas down the tree and in a swarm, nothing else"
    )
    parser.add_argument("--draw", type=int, action="append", metavar="SEED", help="a drawn row; may be repeated")
    parser.add_argument("--sim", action="store_true", help="with --draw: only simulate")
    parser.add_argument("--minutes", type=float, default=45.0, help="with --draw: no row begins after this time")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--folder", type=Path, default=Path("/var/tmp/prime-node-bench"), help="for files and baselines"
    )
    options = parser.parse_args()
    if options.folder.resolve().is_relative_to("/tmp"):
        parser.error("--folder must not be in /tmp: every host has a /tmp of its own")
    output = Output(as_json=options.json)
    options.folder.mkdir(parents=True, exist_ok=True)
    chosen = [OURS, *(options.system or ("naive HTTP", "libtorrent", "shardcast"))]
    checks: list[Check] = []
    if options.draw:
        lines = drawn(options.draw, options.folder, minutes=0.0 if options.sim else options.minutes)
        print("\n".join("  ".join(f"{name} {value}" for name, value in line.items()) for line in lines))
        checks = drawn_checks(lines, is_simulated=True)
        checks += [] if options.sim else drawn_checks(lines, is_simulated=False)
        return output.finish(checks, lines)
    table: list[tuple[str, ...]] = [COLUMNS]
    if options.crossing:
        for row in rows.CROSSING:
            for name, is_tree in (("tree", True), ("swarm", False)):
                system = replace(ours(), options={"is_tree": is_tree})
                table.append(line(row, name, [run(system, row, options.folder) for _ in range(options.rounds)]))
    elif options.faults:
        outcomes = {
            name: run(ours(), row, options.folder)
            for name, row in rows.FAULT_ROWS.items()
            if not options.row or name in options.row
        }
        table += [line(outcome.row, OURS, [outcome]) for outcome in outcomes.values()]
        checks += fault_checks(outcomes)
    else:
        wanted = {**rows.ROWS, rows.DELTA.name: (rows.DELTA, rows.DELTA_BAR)}
        if options.quick:
            wanted = {rows.QUICK.name: (rows.QUICK, rows.QUICK_BAR)}
        for row, bar in wanted.values():
            if not options.row or row.name in options.row:
                found = race(replace(row, timeout_s=60.0) if options.quick else row, chosen, options.folder,
                             1 if options.quick else options.rounds)  # fmt: skip
                table += [line(row, name, outcomes) for name, outcomes in found.items()]
                checks += checks_of(row, bar, found)
    print("| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS))
    for cells in table[1:]:
        print("| " + " | ".join(cells) + " |")
    return output.finish(checks)


if __name__ == "__main__":
    raise SystemExit(main())
