"""Peers behind real NATs, in network namespaces; the same processes as scripts/bench/nat.py."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("libp2p", reason="libp2p could not be built on this machine")

BENCH = Path(__file__).resolve().parents[2] / "scripts" / "bench"


@pytest.fixture
def nat(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    if why := importlib.import_module("homes").missing():
        pytest.skip(f"a network of namespaces {why}")
    monkeypatch.delitem(sys.modules, "nat", raising=False)
    return importlib.import_module("nat")


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_two_homes_punch_a_hole_and_talk_directly(nat: ModuleType) -> None:
    row = await nat.pair((nat.HOME, nat.HOME))
    assert (row["caller_finds"], row["called_finds"]) == ("relayed", "relayed")
    assert (row["link"], row["punched"], row["echo"]) == ("direct", [1, 1], True)


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_a_home_without_hole_punching_still_fetches_from_reachable_peers(nat: ModuleType) -> None:
    row = await nat.pair((nat.SYMMETRIC, nat.HOME), wait_s=2.0)
    assert (row["link"], row["punched"][0]) == ("relayed", 0)
    assert row["echo_of_hub"], "outbound it reaches every open peer"
