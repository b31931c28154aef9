"""Rows drawn from a seed: links that the design was not tuned to. Pure.

Links are plans of home access (prime_lab/homes.py). Everything else is drawn too: number of peers, size, round trips, losses,
and the share behind NAT of each kind. At home each peer has its own processor; here all share this machine's. So the file has
less than TOTAL_MB at all receivers together, links are slowed until all downloads need CARRIED_MB_S at the bound, and a row that
keeps the processors busier than BUSY_MAX nevertheless is run again on slower links.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace

from prime_lab.homes import PLANS, NatKind

from .network import Link
from .race import Row

PEERS = 6, 40
SIZE_MB = 2.0, 256.0
ROUND_TRIP_MS = 5.0, 120.0
"""Between two homes of a typical delay."""
ORIGIN_MBIT = 50.0, 100.0, 200.0
LOSS_MAX = 0.01
TOTAL_MB = 600.0
CARRIED_MB_S = 12.0
BUSY_MAX = 0.7
"""Share of the processors' time up to which a row measures the links."""
SLOWER = 2.0
SLOWER_TIMES_MAX = 3
"""How much slower the links of a busy row become, and how often."""
NAT_KINDS = {NatKind.HOME: 0.7, NatKind.CARRIER: 0.15, NatKind.SYMMETRIC: 0.15}
"""Share of the homes behind NAT, by kind. An assumption: two thirds of pairs can then connect, as "Decentralized Hole Punching"
(Trautwein et al. 2022) measured."""


def draw(seed: int) -> Row:
    """Return the row of a seed: the same one each time."""
    rng = random.Random(f"broadcast row {seed}")
    num = round(_log_uniform(rng, *PEERS))
    size_mb = round(_log_uniform(rng, SIZE_MB[0], min(SIZE_MB[1], TOTAL_MB / num)), 1)
    round_trip_ms = rng.uniform(*ROUND_TRIP_MS)
    nat_share, lossy_share = rng.uniform(0.0, 0.8), rng.choice((0.0, 0.0, 0.2, 0.5))
    plans = rng.choices(PLANS, [share for share, _, _ in PLANS], k=num)
    origin = Link(origin_mbit := rng.choice(ORIGIN_MBIT), origin_mbit, delay_ms=round(round_trip_ms / 4, 1))
    homes = [
        Link(
            up,
            down,
            nat=_nat(rng, nat_share),
            delay_ms=round(round_trip_ms / 4 * rng.uniform(0.5, 1.5), 1),
            loss=round(_log_uniform(rng, LOSS_MAX / 100, LOSS_MAX), 5) if rng.random() < lossy_share else 0.0,
        )
        for _, up, down in plans
    ]
    name = f"seed {seed}: {num} homes, {size_mb:g} MB, {round_trip_ms:.0f} ms"
    row = Row(name, size_mb, (origin, *homes))
    faster = num * size_mb / row.bound_s / CARRIED_MB_S
    return slower(row, faster) if faster > 1 else row


def _nat(rng: random.Random, share: float) -> NatKind:
    if rng.random() >= share:
        return NatKind.PUBLIC
    return rng.choices(list(NAT_KINDS), list(NAT_KINDS.values()))[0]


def _log_uniform(rng: random.Random, low: float, high: float) -> float:
    return math.exp(rng.uniform(math.log(low), math.log(high)))


def slower(row: Row, times: float = SLOWER) -> Row:
    """Return the row with links that are so many times slower. Round trips and losses stay."""
    links = tuple(
        replace(link, up_mbit=round(link.up_mbit / times, 2), down_mbit=round(link.down_mbit / times, 2))
        for link in row.links
    )
    return replace(row, links=links)


def seconds_max(row: Row) -> float:
    """Return the time after which a run of a drawn row is given up: four times its bound, and a minute for a busy machine."""
    return 4 * row.bound_s + 60
