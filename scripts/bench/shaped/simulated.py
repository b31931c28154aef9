"""Rows in the simulator (lab/prime_lab/network.py): the product, and a BitTorrent client's policy on the same links."""

from __future__ import annotations

from prime_lab.bittorrent import BLOCK_BYTES, EVERYONE_UNCHOKED
from prime_lab.homes import Home
from prime_lab.network import Simulation
from prime_lab.simulated_swarm import Result, SimulatedSwarm
from prime_node.broadcast.swarm.choker import ChokerRules
from prime_node.trainer.config import TrainerConfig
from prime_protocol.codec import anchor_chunk_elements
from prime_protocol.pieces import PIECE_BYTES_MAX, PIECE_BYTES_MIN, PIECES_WISHED

from .race import Row

ORIGIN_CHOKER = ChokerRules(slots=TrainerConfig().swarm.upload_slots)
HEADERS = 0.068
"""1,514 bytes on the wire for 1,448 of data, and an acknowledgement of 66 for each two packets."""
DELAY_MS_MIN = 0.1
START_ROUND_TRIPS = 3.0
"""Round trips of the product before the first piece: the manifest, a connection to a peer, and the index over it."""


def piece_bytes(file_bytes: int) -> int:
    """Return the size of most pieces of an anchor of incompressible bf16, as its encoder and pieces.py cut it."""
    chunk_bytes = 2 * anchor_chunk_elements(file_bytes // 2)
    wished = max(PIECE_BYTES_MIN, min(PIECE_BYTES_MAX, file_bytes // PIECES_WISHED))
    return chunk_bytes * -(-wished // chunk_bytes)


def world_of(row: Row, *, is_bittorrent: bool = False, seed: int = 0) -> SimulatedSwarm:
    """Return the simulation of a row without its faults. Hole punching works wherever it can, as in shaped/network.py."""
    origin, *others = (
        Home(link.up_mbit, link.down_mbit, max(DELAY_MS_MIN, link.delay_ms), link.nat, loss=link.loss)
        for link in row.links
    )
    file_bytes = int(row.size_mb * 1e6)
    return SimulatedSwarm(
        others,
        origin,
        file_bytes,
        BLOCK_BYTES if is_bittorrent else piece_bytes(file_bytes),
        seed=seed,
        origin_is_peer=True,
        punched_share=1.0,
        start_round_trips=1.0 if is_bittorrent else START_ROUND_TRIPS,
        announce_s=0.01 if is_bittorrent else 0.05,
        stride_s=min(0.01, max(0.004, row.bound_s / 1_000)),
        overhead=HEADERS,
        time_s_max=20 * row.bound_s,
        choker=EVERYONE_UNCHOKED if is_bittorrent else ChokerRules(),
        origin_choker=EVERYONE_UNCHOKED if is_bittorrent else ORIGIN_CHOKER,
        is_bittorrent=is_bittorrent,
    )


def simulate_row(row: Row, *, is_bittorrent: bool = False, seed: int = 0) -> Result:
    return Simulation(world_of(row, is_bittorrent=is_bittorrent, seed=seed)).run()
