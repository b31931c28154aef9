"""Home links of the contributors of a simulated run."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

BYTES_PER_MBIT = 1e6 / 8


class NatKind(StrEnum):
    """What is between a machine and the internet."""

    PUBLIC = "public"
    """An open address."""
    HOME = "home"
    """A router that keeps ports: hole punching works."""
    SYMMETRIC = "symmetric"
    """A router that gives each connection a random port: hole punching fails."""
    CARRIER = "carrier"
    """A home's router that is itself behind its provider's. Both keep ports."""


def can_connect(one: NatKind, other: NatKind) -> bool:
    """Return whether two machines can connect directly, if hole punching works wherever it can."""
    return NatKind.PUBLIC in (one, other) or NatKind.SYMMETRIC not in (one, other)


@dataclass(frozen=True, slots=True)
class Home:
    """One machine's link. Example: Home(up_mbit=20, down_mbit=100, delay_ms=20, nat=NatKind.HOME)."""

    up_mbit: float
    down_mbit: float
    delay_ms: float = 10.0
    """One-way delay to the core of the internet: a round trip takes twice the sum of both ends'."""
    nat: NatKind = NatKind.PUBLIC
    joins_s: float = 0.0
    leaves_s: float = float("inf")
    loss: float = 0.0
    """Share of the packets that are lost, in each direction."""
    is_liar: bool = False
    """Whether it announces every piece and sends wrong bytes."""

    @property
    def is_nat(self) -> bool:
        """Whether it is behind NAT: two such machines connect only by hole punching."""
        return self.nat is not NatKind.PUBLIC


PLANS: tuple[tuple[float, float, float], ...] = (
    (0.10, 5, 25),
    (0.20, 10, 50),
    (0.25, 20, 100),
    (0.20, 40, 250),
    (0.10, 50, 500),
    (0.05, 100, 100),
    (0.10, 500, 1_000),
)
"""Share of homes, Mbit/s up, Mbit/s down: DSL, three cables, VDSL, small fibre, fibre. An assumption, based on offers
in Europe and North America. None is below 25 Mbit/s down, since that home alone would then set the bound."""


def draw_homes(
    count: int, rng: random.Random, *, nat_share: float = 0.7, churn: float = 0.0, churn_s: float = 0.0
) -> list[Home]:
    """Draw `count` homes by PLANS.

    The share `churn` of them leaves at a random moment of the first `churn_s` seconds, and for each of these another
    one joins at a random moment of the same time.
    """
    homes = [_draw(rng, nat_share) for _ in range(count)]
    leavers = rng.sample(range(count), round(churn * count))
    for index in leavers:
        home = homes[index]
        homes[index] = replace(home, leaves_s=rng.uniform(0.0, churn_s))
        homes.append(replace(_draw(rng, nat_share), joins_s=rng.uniform(0.0, churn_s)))
    return homes


def _draw(rng: random.Random, nat_share: float) -> Home:
    _, up, down = rng.choices(PLANS, [share for share, _, _ in PLANS])[0]
    delay_ms = min(150.0, rng.lognormvariate(3.0, 0.6))  # median 20 ms, so 80 ms from home to home and back
    return Home(up, down, delay_ms, NatKind.HOME if rng.random() < nat_share else NatKind.PUBLIC)


def fluid_bound_s(num_bytes: float, origin_mbit: float, homes: Sequence[Home]) -> float:
    """Return the least time in which all homes can hold the file (Kumar & Ross 2006).

    It is limited by the origin's uplink, the slowest downlink, or all uplinks together.
    """
    uplinks = origin_mbit + sum(home.up_mbit for home in homes)
    rate_mbit = min(origin_mbit, min(home.down_mbit for home in homes), uplinks / len(homes))
    return num_bytes / (rate_mbit * BYTES_PER_MBIT)
