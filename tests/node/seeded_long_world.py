"""A long simulated run without faults, in which the size of all that a coordinator holds in memory and on its disk is sampled.

python -m tests.node.seeded_long_world 100000      a run of so many steps; names what grew in its second half
"""

from __future__ import annotations

import gc
import resource
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.node.seeded_node_world import setting_of
from tests.node.seeded_parts_world import hashes_as_signatures, replaced
from tests.node.seeded_world import Cluster

from prime_lab.virtual_loop import run_virtually
from prime_node.coordinator import daemon
from prime_node.coordinator.assignments import DIGESTS_REMEMBERED

PACE = 0.02
SAMPLES = 8
SNAPSHOT_EVENTS = 200
OWN = ("prime_node", "prime_protocol")
CONTAINERS = (dict, list, set, frozenset, deque, tuple, Counter)
GROWTH_MAX = 1.2
"""Size in the last quarter of a run as a share of that in the second one."""
SMALL = 64
"""Elements that may be added without a question: what is rare is not yet full in a short run."""
ADDED_PER_STEP = {"receipts": 3.0, "ledger": 3.0, "published": 1.1}
"""What a run adds to the disk permanently, by design: two groups a step, some of them refused first, and a manifest."""
BOUNDS = {
    ".history._steps": 2_000,
    ".history._steps[]": 2_000 * 20,
    ".gate.nonces._slices[].seen": 100_000,
    "_assigner._digests": DIGESTS_REMEMBERED,
    "._journal._uncopied[]": 3 * 2 * SNAPSHOT_EVENTS,
    "events on the disk": 3 * SNAPSHOT_EVENTS,
}
"""Sizes up to which something may grow, by the end of its path: rows of the page's history, nonces of eight minutes, digests of
the newest leases, fields of the events that no snapshot covers, events since the last snapshots."""
JOURNAL_GIB_MAX = 0.01
"""Bound of the archived journal. It is small, so that a long run reaches it: its list of chapters is then flat."""


def bound_of(path: str) -> int:
    """Return the stated bound of a container; 0 if it may not grow."""
    return next((bound for end, bound in BOUNDS.items() if path.endswith(end)), 0)


def sizes_of(root: object) -> Counter[str]:
    """Return the number of elements in each container that is reachable from an object, by the attributes that lead to it."""
    sizes, seen = Counter[str](), set[int]()
    waiting: list[tuple[str, object]] = [("", root)]
    while waiting:
        path, each = waiting.pop()
        if id(each) in seen or isinstance(each, (str, bytes, int, float, type(None))):
            continue
        seen.add(id(each))
        if isinstance(each, CONTAINERS):
            sizes[path] += len(each)
            inner = [*each, *each.values()] if isinstance(each, dict) else list(each)
            waiting += [(f"{path}[]", one) for one in inner]
        elif type(each).__module__.startswith(OWN):
            waiting += [(f"{path}.{name}", value) for name, value in attributes_of(each)]
    return sizes


def resident_mib() -> int:
    """Return the memory of this process, in which the simulated disk is too."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() >> 20


def attributes_of(each: object) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of an object, those in slots too."""
    yield from vars(each).items() if hasattr(each, "__dict__") else ()
    for kind in type(each).__mro__:
        names = getattr(kind, "__slots__", ())
        for name in [names] if isinstance(names, str) else names:
            if hasattr(each, name):
                yield name, getattr(each, name)


@dataclass
class LongRun:
    """The samples of one run, at equal distances."""

    steps: int
    memory: list[Counter[str]] = field(default_factory=list)
    disk: list[Counter[str]] = field(default_factory=list)

    def grown(self) -> list[str]:
        """Return what is larger in the last quarter of the run than in the second one."""
        found = []
        first, last = self.memory[SAMPLES // 4 : SAMPLES // 2], self.memory[3 * SAMPLES // 4 :]
        for path in sorted(set().union(*last)):
            before, after = (max(sample[path] for sample in part) for part in (first, last))
            if after > max(GROWTH_MAX * before + SMALL, bound_of(path)):
                found.append(f"{path}: {before} -> {after} elements")
        steps = self.steps * (SAMPLES - 1 - SAMPLES // 2) / SAMPLES
        for name in self.disk[-1]:
            added = self.disk[-1][name] - self.disk[SAMPLES // 2][name]
            bound = max(ADDED_PER_STEP.get(name, 0.0) * steps + SMALL, bound_of(f"{name} on the disk"))
            if added > bound:
                found.append(f"{name} on the disk: {added} more in {steps:.0f} steps")
        return found


def run_long(steps: int, say: Callable[[str], None] = lambda text: None) -> LongRun:
    """Run so many steps, and sample. `say` gets a line for each sample."""
    found, opened = LongRun(steps), []
    open_coordinator = vars(daemon)["open_coordinator"]

    async def noted(*arguments: Any) -> Any:
        opened.append(await open_coordinator(*arguments))
        return opened[-1]

    async def sample(policy_version: int) -> None:
        if policy_version and policy_version % (steps // SAMPLES) == 0:
            gc.collect()
            found.memory.append(sizes_of(opened[-1]))
            found.disk.append(await cluster.disk.rows())
            elements, rows = sum(found.memory[-1].values()), sum(found.disk[-1].values())
            say(
                f"step {policy_version}: {elements} elements, {rows} rows and files, {resident_mib()} MiB with the disk"
            )

    setting = setting_of(
        steps,
        pace=PACE,
        snapshot_events=SNAPSHOT_EVENTS,
        tick_seconds=1.0,
        checkpoints_kept=20,
        journal_gib_max=JOURNAL_GIB_MAX,
    )
    cluster = Cluster(1, (), lambda text: None, setting, sample)

    with hashes_as_signatures(), replaced(daemon, open_coordinator=noted):
        run_virtually(cluster.run(calm_s=100.0 * steps))
    return found


if __name__ == "__main__":
    begun_s = time.monotonic()
    run = run_long(int(sys.argv[1]), lambda text: print(text, flush=True))
    for name, rows in sorted(run.disk[-1].items()):
        print(f"{name}: {rows} on the disk")
    print(f"{sum(run.memory[0].values())} -> {sum(run.memory[-1].values())} elements in memory")
    grown = run.grown()
    print(*grown or ["nothing grew"], sep="\n")
    print(f"{run.steps} steps in {time.monotonic() - begun_s:.0f} s")
    sys.exit(bool(grown))
