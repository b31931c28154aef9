"""Closeness of a run to a scheduler without cost, in each mode, on one trace of generation times.

    python scripts/bench/overlap.py [--quick] [--json]
    python scripts/bench/overlap.py --levers           what each lever gives, alone and left out (overlap_levers.py), and no more

The coordinator's own state machine and scheduler on a virtual clock (lab/prime_lab/world.py), with simulated workers:
512 groups a step as in verl's experiment with 128 GPUs (documents of its fully asynchronous policy: 64 generate, 64
train, 512 prompts, 4 batches a step, staleness 0.5). Group times are lognormal with sigma 1.1, capped at 8 times their mean,
130 s of work a step and worker. Each request, upload, check, swap and pause takes its time (sim.world.Costs; a pause is 1 s
here, five times the product's). Workers fetch leases ahead as the product does by default: while leases are short.

Baseline, in the same run: the same generation, training and broadcast times replayed by a scheduler without cost
(coordinator/measure/zero_overhead.py). Closeness is its time over ours.

`mode` rows train for 113 s, as verl reports. `sync` is verl's colocated baseline by its own published phases: all 128 GPUs
generate, then all train for 178 s, the recomputed logprobs included. A full run repeats these rows on seven traces.

In the `k` rows G is the time that one batch takes on-policy on 64 workers, T is G, and b is the broadcast. `real trainer`
trains the demo's model on this machine, and the clock advances by the time that each batch took. `groups of` rows compare the
default of `leases_ahead` with 0 and 1, in mode d, for groups of 10 to 325 round trips of 50 ms; all other times shrink with
the groups.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import geometric_mean
from typing import Any

from checks import Check, Output, at_least, at_most
from overlap_levers import lever_checks
from overlap_traces import GROUPS, MEAN_S, TRAIN_S, WARM, WORKERS, make_trace

from prime_lab.scenario import Costs, Scenario
from prime_lab.world import SimulatedRun
from prime_protocol.schedule import Schedule

SYNC_WORKERS, SYNC_TRAIN_S = 128, 356.30 - 177.85
SEED_SPEEDUP = 2.35
AHEAD_MEANS_S = (0.5, 2.0, MEAN_S)
MODES = {
    "a verl_on_policy": {"preset": "verl_on_policy"},
    "b verl_stream": {"preset": "verl_stream"},
    "c verl_stale": {"preset": "verl_stale"},
    "d verl_partial": {"preset": "verl_partial"},
    "in flight, KV kept": {"preset": "verl_partial", "swap": "keep_kv"},
    "in flight, recomputed": {"preset": "verl_partial", "swap": "keep_and_recompute"},
}


@dataclass(frozen=True, slots=True)
class Row:
    """Result of one run."""

    name: str
    step_s: float
    """Mean of the steps after the first ones."""
    replayed_step_s: float
    closeness: float
    """Closeness over the whole run, from the first policy's arrival to the last one's publication."""
    trainer_idle: float
    rollouter_idle: float
    lag_mean: float
    lag_max: int
    dropped: int
    in_order: bool
    async_level: int
    num_events: int
    wall_s: float


def run(name: str, scenario: Scenario) -> Row:
    began_s = time.perf_counter()
    world = SimulatedRun(scenario)
    world.run()
    usable_s = world.published_s[0] + scenario.broadcast_seconds
    measured = [at_s - usable_s for at_s in world.published_s[1:]]
    replayed = world.replayed_s()
    lags = [lag for step in world.steps for lag, count in step.lags.items() for _ in range(count)]
    present = sum(step.present_ms for step in world.steps)
    return Row(
        name=name,
        step_s=_step(measured),
        replayed_step_s=_step(replayed),
        closeness=replayed[-1] / measured[-1],
        trainer_idle=sum(world.idle_seconds[WARM:]) / (measured[-1] - measured[WARM - 1]),
        rollouter_idle=1.0 - sum(step.busy_ms for step in world.steps) / present,
        lag_mean=sum(lags) / len(lags),
        lag_max=max(lags),
        dropped=sum(step.dropped.total() for step in world.steps),
        in_order=world.state.rules.admission.is_in_order,
        async_level=world.state.rules.async_level,
        num_events=world.num_events,
        wall_s=time.perf_counter() - began_s,
    )


def _step(times: Sequence[float]) -> float:
    return (times[-1] - times[WARM - 1]) / (len(times) - WARM)


def make_scenario(
    schedule: dict[str, Any],
    trace: Sequence[float],
    num_steps: int,
    *,
    k: int = 0,
    train_s: float = TRAIN_S,
    workers: int = WORKERS,
    broadcast_s: float = 0.0,
    leases_ahead: int | None = None,
    costs: Costs | None = None,
) -> Scenario:
    chosen = Schedule.model_validate(schedule)
    return Scenario(
        chosen,
        async_level=k,
        groups_per_step=GROUPS,
        num_steps=num_steps,
        num_workers=workers,
        group_seconds=trace.__getitem__,
        train_seconds=lambda step, slots: train_s / chosen.batches_per_step,
        broadcast_seconds=broadcast_s,
        costs=costs or Costs(retry=1.0),
        leases_ahead=leases_ahead,
    )


def mode_rows(num_steps: int, seed: int) -> list[Row]:
    make = functools.partial(make_scenario, trace=make_trace(GROUPS * num_steps, MEAN_S, seed), num_steps=num_steps)
    rows = [run("sync", make({}, train_s=SYNC_TRAIN_S, workers=SYNC_WORKERS))]
    return rows + [run(f"mode {name}", make(settings)) for name, settings in MODES.items()]


def ahead_row(mean_s: float, num_steps: int, seed: int, leases_ahead: int | None) -> Row:
    """A row of groups of `mean_s` seconds in the mean, with all times but the round trip in proportion."""
    share, usual = mean_s / MEAN_S, Costs()
    costs = Costs(upload=share * usual.upload, check=share * usual.check, swap=share * usual.swap, retry=share)
    trace = make_trace(GROUPS * num_steps, mean_s, seed)
    name = f"groups of {mean_s:g} s, {'default' if leases_ahead is None else leases_ahead} ahead"
    settings, train_s = MODES["d verl_partial"], share * TRAIN_S
    return run(name, make_scenario(settings, trace, num_steps, train_s=train_s, leases_ahead=leases_ahead, costs=costs))


def rows_of(num_steps: int, seed: int) -> list[Row]:
    trace = make_trace(GROUPS * num_steps, MEAN_S, seed)
    make = functools.partial(make_scenario, trace=trace, num_steps=num_steps)
    rows = mode_rows(num_steps, seed)
    batch_s = next(row.step_s for row in rows if row.name.startswith("mode a")) - TRAIN_S
    for k in range(4):
        for share in (0.0, 0.5, 1.0, 2.0):
            scenario = make({}, k=k, train_s=batch_s, broadcast_s=share * batch_s)
            rows.append(run(f"k {k}, b {share:g} G", scenario))
    return rows


def real_trainer_row(num_steps: int, seed: int) -> Row:
    """A small scale: 16 groups of 4 completions a step in two batches, really trained; generation takes 0.9 of that."""
    from overlap_trainer import RealTrainer

    trainer = RealTrainer()
    train_s = 2 * min(trainer.train(tuple(range(8))) for _ in range(4))
    trace = make_trace(16 * num_steps, 0.9 * train_s * 8 / 16, seed)
    small = train_s / 500
    scenario = Scenario(
        Schedule.model_validate({"preset": "verl_partial", "trigger_parameter_sync_step": 2}),
        async_level=1,
        groups_per_step=16,
        num_steps=num_steps,
        num_workers=8,
        group_seconds=trace.__getitem__,
        train_seconds=lambda step, slots: trainer.train(slots),
        broadcast_seconds=0.2 * train_s,
        costs=Costs(request=small, upload=small, check=small, swap=small, retry=small, wait=1.0),
    )
    return run("real trainer, mode d", scenario)


def checks_of(rows: Sequence[Row]) -> list[Check]:
    by_name = {row.name: row for row in rows}
    checks = [at_least(f"{row.name}: closeness", row.closeness, 0.97) for row in rows]
    for row in rows:
        if row.in_order:
            checks.append(at_most(f"{row.name}: lag above k", max(0, row.lag_max - row.async_level), 0))
            checks.append(at_most(f"{row.name}: groups dropped", row.dropped, 0))
    hidden = [(1, 0.0), (2, 0.0), (2, 0.5), (2, 1.0), (3, 0.0), (3, 0.5), (3, 1.0), (3, 2.0)]
    for k, share in hidden:  # b up to (k - 1) G, T = G: the trainer is the bottleneck
        row = by_name[f"k {k}, b {share:g} G"]
        checks.append(at_most(f"{row.name}: trainer idle", row.trainer_idle, 0.05))
    for share in (0.5, 1.0):
        with_b, without = by_name[f"k 2, b {share:g} G"], by_name["k 2, b 0 G"]
        over = with_b.step_s / without.step_s
        checks.append(at_most(f"k 2 hides b of {share:g} G: step over that without b", over, 1.05))
    return checks


def speedup(rows: Sequence[Row]) -> float:
    by_name = {row.name: row for row in rows}
    return by_name["sync"].step_s / by_name["mode d verl_partial"].step_s


def seed_checks(traces: Sequence[Sequence[Row]]) -> list[Check]:
    """Check the worst of all traces."""
    closeness = min(row.closeness for rows in traces for row in rows)
    return [
        at_least(f"worst of {len(traces)} traces: mode d over sync", min(map(speedup, traces)), SEED_SPEEDUP),
        at_least(f"worst of {len(traces)} traces: closeness of all modes", closeness, 0.97),
    ]


def bound_checks(num_steps: int, seeds: Sequence[int], sync_s: float) -> list[Check]:
    """Compare the product's defaults, batches in order and k = 2, with the bound of any scheduler on these traces.

    No step takes less than its training, nor less than all groups' seconds divided by the workers: the trace's mean, by
    construction. Steps are long-run means, so filling the pipeline and the last stragglers do not count.
    """
    bound_s = max(MEAN_S * GROUPS / WORKERS, TRAIN_S)
    steps_s = []
    for seed in seeds:
        trace = make_trace(GROUPS * num_steps, MEAN_S, seed)
        steps_s.append(run("defaults, k 2", make_scenario({}, trace, num_steps, k=2)).step_s)
    worst = max(steps_s)
    shown = f"{min(steps_s):.1f} to {worst:.1f} s a step, {sync_s / worst:.2f}x of sync"
    shown += f"; bound {bound_s:.1f} s, {sync_s / bound_s:.2f}x"
    print(f"defaults, k 2, {num_steps} steps: {shown}")
    return [
        at_least(
            f"worst of {len(steps_s)} traces: defaults, k 2: bound of a step over its time", bound_s / worst, 0.97
        ),
        at_least(f"worst of {len(steps_s)} traces: defaults, k 2, over sync", sync_s / worst, SEED_SPEEDUP),
    ]


def ahead_checks(num_steps: int, seeds: Sequence[int]) -> list[Check]:
    """Compare the default of `leases_ahead` with 0 and 1: geometric means over the traces."""
    print("geometric mean of the closeness in mode d   0 ahead   1 ahead   default")
    checks = []
    for mean_s in AHEAD_MEANS_S:
        found = [
            geometric_mean(ahead_row(mean_s, num_steps, seed, ahead).closeness for seed in seeds)
            for ahead in (0, 1, None)
        ]
        print(f"groups of {mean_s:5g} s" + " " * 27 + "".join(f"{value:10.3f}" for value in found))
        share = found[2] / max(found[:2])
        checks.append(at_least(f"groups of {mean_s:g} s: default over the better of 0 and 1 ahead", share, 0.985))
    return checks


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer steps: below a minute")
    parser.add_argument("--levers", action="store_true", help="measure the levers alone: minutes")
    parser.add_argument("--json", action="store_true", help="print the checks alone, as JSON")
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    output, num_steps = Output(as_json=options.json), 9 if options.quick else 16
    if options.levers:
        trace = make_trace(GROUPS * num_steps, MEAN_S, options.seed)
        sync = run("sync", make_scenario({}, trace, num_steps, train_s=SYNC_TRAIN_S, workers=SYNC_WORKERS))
        seeds = range(options.seed, options.seed + (1 if options.quick else 3))
        return output.finish(lever_checks(9 if options.quick else 24, seeds, sync.step_s, is_quick=options.quick))
    rows = rows_of(num_steps, options.seed)
    seeds = range(options.seed, options.seed + (1 if options.quick else 7))
    traces = [rows[: 1 + len(MODES)], *(mode_rows(num_steps, seed) for seed in seeds[1:])]
    rows.append(real_trainer_row(12 if options.quick else 40, options.seed))
    sync_s = rows[0].step_s
    print("row                      step s  over sync  closeness  idle: trainer  workers   lag mean, max   dropped")
    for row in rows:
        over = f"{sync_s / row.step_s:8.2f}x" if row.name.startswith(("sync", "mode")) else " " * 9
        print(
            f"{row.name:24}{row.step_s:7.2f}  {over}  {row.closeness:9.3f}  {row.trainer_idle:13.1%}  "
            f"{row.rollouter_idle:7.1%}   {row.lag_mean:8.2f}, {row.lag_max:3}   {row.dropped:7}"
        )
    for seed, found in zip(seeds, traces, strict=True):
        least = min(row.closeness for row in found)
        print(f"trace {seed:2}: mode d over sync {speedup(found):.3f}x, least closeness of the modes {least:.3f}")
    ahead = ahead_checks(num_steps, seeds if len(seeds) > 1 else (7, 8))
    bound = bound_checks(40, seeds, sync_s)
    levers = lever_checks(num_steps, seeds[:1] if options.quick else seeds[:3], sync_s, is_quick=options.quick)
    return output.finish([*checks_of(rows), *seed_checks(traces), *bound, *ahead, *levers])


if __name__ == "__main__":
    raise SystemExit(main())
