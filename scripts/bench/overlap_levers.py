"""What each lever against idle engines and an idle trainer gives: alone, and left out of all of them, on the same traces.

k                    batches in order with async_level 2, instead of 0
spans                completions continue over a swap (`keep_kv`), instead of `drain`
length-aware leases  no lease is fetched ahead of a long one, as the product does by default, instead of one
longest first        the groups of a step with the longest history of their prompts are leased first
cancelling           work that is certain to be dropped is stopped, instead of finished

The order by history is not in the product; the simulation alone has it. It knows the half of a group's log length that is its
prompt's, and `longest first, known` knows the whole. Each worker is an engine of one place, so that what it generated is
counted: what no batch trained on was discarded. Swaps in flight do not count. In order, no group becomes too old, so there is
nothing to cancel; the rows `dropping` take the lowest ready slots, and drop what is more than 2 policies old.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from checks import Check, at_least, at_most
from overlap_traces import GROUPS, MEAN_S, TRAIN_S, WARM, WORKERS, make_prompted_trace

from prime_lab.scenario import Costs, Scenario
from prime_lab.world import SimulatedRun
from prime_protocol.schedule import Schedule

BOUND_S = max(MEAN_S * GROUPS / WORKERS, TRAIN_S)
"""No engine idle: a step's groups divided by the workers; or no trainer idle."""


@dataclass(frozen=True, slots=True)
class Levers:
    """Levers that are on."""

    k: bool = False
    spans: bool = False
    length_aware: bool = False
    longest_first: bool = False
    cancelling: bool = False
    is_known: bool = False
    """Whether the order knows the length itself, rather than the prompt's share."""
    drops: bool = False
    """Whether batches take the lowest ready slots, and drop old groups."""

    def schedule(self) -> Schedule:
        """Return the schedule."""
        settings: dict[str, object] = {"swap": "keep_kv" if self.spans else "drain"}
        if self.drops:
            settings |= {"staleness_threshold": 2.0 * self.k, "selection": "lowest_slot_first"}
            settings |= {"stale": "drop_and_refill", "max_off_policy_steps": 2}
        return Schedule.model_validate(settings)


ALL = Levers(k=True, spans=True, length_aware=True, longest_first=True, cancelling=True)
NAMES = {
    "k": "k",
    "spans": "spans",
    "length_aware": "length-aware leases",
    "longest_first": "longest first",
    "cancelling": "cancelling",
}


@dataclass(frozen=True, slots=True)
class LeverRow:
    """Means over the traces."""

    step_s: float
    discarded: float
    """Share of what was generated that no batch trained on."""

    @property
    def closeness(self) -> float:
        """Return the bound of a step over its time."""
        return BOUND_S / self.step_s


def rows_of_levers(*, is_quick: bool) -> Iterator[tuple[str, Levers]]:
    """Yield each row's name and its levers; `is_quick`: only those that are checked."""
    yield "all", ALL
    for name, shown in NAMES.items():
        yield f"all but {shown}", replace(ALL, **{name: False})
    yield "the product's defaults", Levers(k=True, length_aware=True, cancelling=True)
    if is_quick:
        return
    yield "none", Levers()
    for name, shown in NAMES.items():
        yield f"{shown} alone", replace(Levers(), **{name: True})
    yield "longest first, known, alone", Levers(longest_first=True, is_known=True)
    yield "all, dropping", replace(ALL, drops=True)
    yield "all but cancelling, dropping", replace(ALL, drops=True, cancelling=False)


def measured(levers: Levers, num_steps: int, seed: int) -> LeverRow:
    """Simulate one run."""
    trace, prompts = make_prompted_trace(GROUPS * num_steps, MEAN_S, seed)
    if levers.longest_first:
        known = trace if levers.is_known else prompts
        trace = [trace[slot] for slot in sorted(range(len(trace)), key=lambda slot: (slot // GROUPS, -known[slot]))]
    schedule = levers.schedule()
    world = SimulatedRun(
        Scenario(
            schedule,
            async_level=2 * levers.k,
            groups_per_step=GROUPS,
            num_steps=num_steps,
            num_workers=WORKERS,
            group_seconds=trace.__getitem__,
            train_seconds=lambda step, slots: TRAIN_S,
            costs=Costs(retry=1.0),
            leases_ahead=0 if levers.length_aware else 1,
            slots=1,
            completion_seconds=lambda slot, number: trace[slot] if number == 0 else 0.0,
            cancels=levers.cancelling,
        )
    )
    world.run()
    published = world.published_s
    used_s = sum(engine.used_s(0.0, world.time.now_s) - engine.stalled_s for engine in world.engines)
    return LeverRow((published[-1] - published[WARM]) / (num_steps - WARM), max(0.0, 1.0 - sum(trace) / used_s))


def lever_checks(num_steps: int, seeds: Sequence[int], sync_s: float, *, is_quick: bool) -> list[Check]:
    """Print the table, and check that the defaults lack nothing that a lever would give."""
    rows: dict[str, LeverRow] = {}
    print(f"levers, {num_steps} steps, {len(seeds)} traces            step s  over sync  of the bound  discarded")
    for name, levers in rows_of_levers(is_quick=is_quick):
        found = [measured(levers, num_steps, seed) for seed in seeds]
        row = rows[name] = LeverRow(fmean(one.step_s for one in found), fmean(one.discarded for one in found))
        print(f"{name:36}{row.step_s:8.1f}  {sync_s / row.step_s:8.2f}x  {row.closeness:12.3f}  {row.discarded:11.1%}")
    defaults = rows["the product's defaults"]
    checks = [
        at_least("levers: the bound of a step over its time with the defaults", defaults.closeness, 0.97),
        at_least("levers: the same with all levers", rows["all"].closeness, 0.97),
        at_most(
            "levers: time of a step with the defaults over that with all", _over(rows, "the product's defaults"), 1.03
        ),
        at_most("levers: share discarded with the defaults", defaults.discarded, 0.001),
        at_least("levers: time of a step with all but k over that with all", _over(rows, "all but k"), 2.0),
    ]
    for name in ("spans", "longest first", "cancelling"):
        what = f"levers: time of a step with all but {name} over that with all"
        checks.append(at_most(what, _over(rows, f"all but {name}"), 1.03))
    return checks


def _over(rows: dict[str, LeverRow], name: str) -> float:
    return rows[name].step_s / rows["all"].step_s
