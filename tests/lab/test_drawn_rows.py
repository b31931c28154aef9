"""Rows of the broadcast that are drawn from a seed, and the BitTorrent client that they are compared with in simulation."""

from __future__ import annotations

import random
from types import ModuleType

import pytest
from tests.source_tree import ROOT

from prime_lab.bittorrent import BLOCKS, EVERYONE_UNCHOKED, BitTorrentPicker
from prime_lab.homes import Home, NatKind, can_connect
from prime_lab.network import Simulation
from prime_lab.simulated_swarm import SimulatedSwarm


@pytest.fixture
def draws(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "bench"))
    from shaped import draws

    return draws


def test_a_seed_gives_its_row_each_time_within_the_stated_ranges(draws: ModuleType) -> None:
    rows = [draws.draw(seed) for seed in range(200)]
    assert rows == [draws.draw(seed) for seed in range(200)]
    assert len({row.links for row in rows}) == 200
    for row in rows:
        assert draws.PEERS[0] <= row.num_receivers <= draws.PEERS[1]
        assert draws.SIZE_MB[0] <= row.size_mb <= draws.SIZE_MB[1]
        assert row.num_receivers * row.size_mb <= 1.01 * draws.TOTAL_MB
        assert row.num_receivers * row.size_mb / row.bound_s <= 1.01 * draws.CARRIED_MB_S
        assert all(0 <= link.loss <= draws.LOSS_MAX and link.delay_ms > 0 for link in row.links)
    assert {link.nat for row in rows for link in row.links} == set(NatKind)


def test_what_no_hole_punching_connects() -> None:
    apart = {(one, other) for one in NatKind for other in NatKind if not can_connect(one, other)}
    behind = set(NatKind) - {NatKind.PUBLIC}
    assert apart == {(one, other) for one in behind for other in behind if NatKind.SYMMETRIC in (one, other)}


def test_a_bittorrent_client_passes_on_whole_pieces_alone_and_ends_with_duplicates() -> None:
    picker = BitTorrentPicker([1] * (2 * BLOCKS), rng=random.Random(1))
    picker.add("half", has=(1 << BLOCKS) - 2)
    assert picker.pick("half", 0.0) is None
    picker.has("half", 1)
    first = picker.pick("half", 0.0)
    assert first is not None
    assert first < BLOCKS
    assert picker.arrived("half", first, 1.0) == ()
    others = [picker.pick("half", 1.0) for _ in range(2)]
    picker.add("seed", has=(1 << 2 * BLOCKS) - 1)
    while picker.unasked:
        block = picker.pick("seed", 1.0)
        assert block is not None
        picker.arrived("seed", block, 2.0)
    assert set(others) == {block for block in range(2 * BLOCKS) if picker.missing >> block & 1}
    again = picker.pick("seed", 2.0)
    assert again is not None
    assert again in others
    assert picker.arrived("seed", again, 3.0) == ("half",)


def test_a_simulated_bittorrent_swarm_takes_what_its_links_take() -> None:
    homes = [Home(100, 100, delay_ms=0.2)] * 6
    world = SimulatedSwarm(
        homes, Home(200, 200, 0.2), 6_000_000, 2**15, origin_is_peer=True, stride_s=0.01,
        choker=EVERYONE_UNCHOKED, origin_choker=EVERYONE_UNCHOKED, is_bittorrent=True,
    )  # fmt: skip
    found = Simulation(world).run()
    assert found.unfinished == 0
    assert 1.0 <= found.last_ratio < 2.0
