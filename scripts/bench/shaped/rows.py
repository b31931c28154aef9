"""The rows of the table: which links, which file, which faults; and what this project asks of itself in each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from prime_lab.homes import NatKind

from .network import Link
from .race import Faults, Row

UNEQUAL_MBIT = (10, 10, 15, 20, 25, 30, 40, 50, 60, 80, 100, 100)


def links(
    origin_up: float, ups: Sequence[float], down: float, *, nat: NatKind = NatKind.PUBLIC, delay_ms: float = 0.0
) -> tuple[Link, ...]:
    return (Link(origin_up, origin_up, delay_ms=delay_ms), *(Link(up, down, nat, delay_ms) for up in ups))


SIX = links(200, [100] * 6, 100)
TWELVE = links(100, [50] * 12, 50)

ROWS: dict[str, tuple[Row, float]] = {
    row.name: (row, bar)
    for row, bar in (
        (Row("6 equal, 64 MB", 64, SIX), 1.15),
        (Row("6 equal, 256 MB", 256, SIX), 1.15),
        (Row("6 slow up, 64 MB", 64, links(100, [20] * 6, 100)), 1.15),
        (Row("12 equal, 64 MB", 64, TWELVE), 1.25),
        (Row("12 equal, 256 MB", 256, TWELVE), 1.25),
        (Row("12 fast, 64 MB", 64, links(200, [100] * 12, 100)), 1.25),
        (Row("12 unequal, 64 MB", 64, links(100, UNEQUAL_MBIT, 100)), 1.4),
        (Row("12 unequal, 256 MB", 256, links(100, UNEQUAL_MBIT, 100)), 1.4),
        (Row("6 behind NAT, 64 MB", 64, links(200, [100] * 6, 100, nat=NatKind.HOME)), 1.35),
    )
}
"""By name, with the bar for time to the last over the bound."""

DELTA = Row("12 delta, 2 MB, 40 ms", 2, links(100, [20] * 12, 100, delay_ms=10))
"""A small file, where round trips and not bytes decide. 40 ms from host to host and back."""

DELTA_BAR = 4.0
"""Over a bound of half a second, in which three things weigh. (1) A manifest, an index and the first piece are five round trips:
0.2 s. (2) A piece of 64 KiB leaves an uplink of 20 Mbit/s for eleven others in 0.3 s, before they can pass it on. (3) Processor:
12 receivers take 0.1 s each, origin and delay.py 0.5 s; on two cores that alone is 0.8 s, and it is why rounds differ."""

CROSSING = tuple(
    replace(DELTA, name=f"12 delta, {name}, 40 ms", size_mb=size_mb)
    for name, size_mb in (("64 KB", 0.064), ("1 MB", 1.0))
)
"""Small deltas that go down the tree and, in another run, in a swarm."""

_FAULTY = Row("no fault", 32, SIX)
FAULT_ROWS: dict[str, Row] = {
    row.name: row
    for row in (
        _FAULTY,
        replace(_FAULTY, name="killed receiver", faults=Faults(killed={2: 1.0})),
        replace(_FAULTY, name="late joiner", faults=Faults(late={6: 1.5})),
        replace(_FAULTY, name="origin dies after one copy", faults=Faults(origin_dies_at_copies=1.6)),
        replace(_FAULTY, name="poisoned peer", faults=Faults(poisoned=frozenset({1}))),
        replace(_FAULTY, name="peer at 1 % speed", links=(*SIX[:6], Link(1, 100))),
        replace(
            _FAULTY, name="partition heals", faults=Faults(partition=(frozenset({4, 5, 6}), 0.7, 4.0)), timeout_s=60
        ),
    )
}

QUICK = Row("4 equal, 8 MB", 8, links(100, [50] * 4, 50))
QUICK_BAR = 2.0
"""A file of 1.3 seconds: set-up and the last piece weigh much."""
