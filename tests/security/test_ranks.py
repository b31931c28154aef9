"""Ranks of one trainer meet where no other user can write: what is in torchrun's store runs as code of the operator."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

from prime_node.cli.launch import launch, torchrun_command

ROOT = Path(__file__).resolve().parents[2]
LOOPBACK = ("0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000")


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
async def test_neither_torchrun_nor_a_rank_listens_beyond_loopback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = torchrun_command(2, restarts_max=0)
    command[command.index("prime_node") :] = ["tests.security.rank_process"]
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    assert await launch(command, [str(tmp_path)], asyncio.Event(), unfinished=9) == 0
    found = [json.loads((tmp_path / f"rank-{rank}").read_text()) for rank in range(2)]
    assert all(found), "gloo listens for the other rank"
    assert [place for places in found for place in places if place not in LOOPBACK] == []
