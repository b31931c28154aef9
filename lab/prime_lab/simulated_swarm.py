"""What a simulation of a swarm is given, and what it finds. network.py simulates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from prime_lab.homes import Home
from prime_node.broadcast.swarm.choker import ChokerRules
from prime_node.broadcast.swarm.picker import PickerRules
from prime_node.broadcast.swarm.topology import TopologyRules


@dataclass(frozen=True, slots=True)
class SimulatedSwarm:
    """Parameters of the simulation."""

    homes: Sequence[Home]
    origin: Home
    file_bytes: int
    piece_bytes: int
    seed: int = 0
    origin_is_peer: bool = False
    """Whether the origin is the trainer's seeder, a peer that has everything. Otherwise it is a coordinator or a
    bucket, which is asked only for pieces that no peer has."""
    peer_list_max: int = 64
    """Peers that the coordinator names to each."""
    punched_share: float = 0.7
    """Share of pairs behind NAT that connect, of those that hole punching can connect (Trautwein et al., "Decentralized Hole
    Punching", 2022)."""
    announce_s: float = 0.05
    """Seconds for which announcements to a neighbour are gathered."""
    start_round_trips: float = 1.0
    """Round trips to the origin before the first request for a piece."""
    tick_s: float = 0.1
    """Seconds between a downloading peer's checks for idle sources."""
    overhead: float = 0.0
    """Header bytes on the wire for each byte of the file."""
    stride_s: float = 0.02
    time_s_max: float = 3_600.0
    picker: PickerRules = field(default_factory=PickerRules)
    choker: ChokerRules = field(default_factory=ChokerRules)
    origin_choker: ChokerRules = field(default_factory=ChokerRules)
    topology: TopologyRules = field(default_factory=TopologyRules)
    is_bittorrent: bool = False
    """Whether peers pick as a BitTorrent client does (bittorrent.py), instead of the product's picker."""


@dataclass(frozen=True, slots=True)
class Result:
    """Results of a simulation. Times are in seconds since a peer joined, by peer, for those that stayed."""

    done_s: tuple[float, ...]
    unfinished: int
    """Peers that stayed and did not finish in time."""
    bound_s: float
    origin_copies: float
    """Bytes that the origin sent, as a multiple of the file."""
    wasted_share: float
    """Share of sent bytes that were not needed."""
    simulated_s: float

    @property
    def last_ratio(self) -> float:
        """Return the last peer's time, relative to the bound; infinite if a peer did not finish."""
        return math.inf if self.unfinished else max(self.done_s) / self.bound_s

    def ratio(self, percentile: float) -> float:
        """Return the time until this percentage of the peers was done, relative to the bound."""
        times = sorted(self.done_s) + [math.inf] * self.unfinished
        return times[max(0, math.ceil(percentile / 100 * len(times)) - 1)] / self.bound_s
