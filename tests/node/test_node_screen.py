"""The screen of `join` on a terminal: sentences and figures that fit its width, and a log that does not share a line with it."""

from __future__ import annotations

import io
import logging
import sys
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console
from tests.page_world import HOSTILE

from prime_node.broadcast.follow.follower import DownloadProgress
from prime_node.cli import node_screen
from prime_node.cli.node_screen import NodeScreen, node_lines
from prime_node.observe import setup_logging
from prime_node.worker.control import ON_REQUEST
from prime_node.worker.status import Status
from prime_protocol.requests import WorkerState

STATUS = Status(
    worker="w", state=WorkerState.GENERATING, policy_version=40, head=41, step=41, tokens_per_s=812.4,
    rollouts_generated=1, rollouts_accepted=71_680, rollouts_pending=128, tokens_accepted=453_120,
    refused={"stale": 96, "lease_expired": 40}, peers=4, down_bytes=397_000_000, up_bytes=120_500_000,
)  # fmt: skip
WAITS = "newcomers of your network together hold the limit of one newcomer's leases; it rises with accepted bundles"


def lines(status: Status, download: DownloadProgress | None = None, *, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, force_terminal=False, color_system=None)
    console.print(node_lines(status, download))
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize(
    ("changes", "head"),
    [
        ({}, "Generating  It generates answers for step"),
        ({"paused": ON_REQUEST}, "Paused  It was paused on request"),
        ({"waiting_for": WAITS}, "Waiting  It waits: newcomers of your"),
        (
            {"waiting_for": HOSTILE[2] + "\x1b[2J\n\r", "policy_version": -1, "head": -1},
            "Waiting  It waits: {{7*7}} java",
        ),
    ],
)
def test_each_line_fits_the_terminal(width: int, changes: dict[str, Any], head: str) -> None:
    found = lines(replace(STATUS, **changes), width=width)
    assert 5 <= len(found) <= 4 + -(-260 // width)
    assert max(map(len, found)) <= width
    assert " ".join(found[1:]).replace("  ", " ").startswith(head.replace("  ", " "))
    assert not any(character in line for line in found for character in "\x1b\r")


def test_the_figures_are_those_of_the_worker() -> None:
    _, _, figures, more, hint = lines(replace(STATUS, bundles_spooled=2), width=200)
    expected = "812 tokens/s · 71,680 accepted · 136 rejected · 128 without a verdict · 453,120 tokens credited"
    assert figures == expected
    assert more == "policy 40 of 41 · 2 to upload · received 397.0 MB, sent 120.5 MB · 4 peers"
    assert "Ctrl-C" in hint
    assert len(expected) < 100
    assert lines(replace(STATUS, peers=1), width=80)[3].endswith("1 peer")
    paused = lines(replace(STATUS, paused="until this machine has mains power", head=-1), width=200)
    assert paused[2].startswith("0 tokens/s")
    assert paused[3].startswith("no policy yet")


def test_a_download_is_shown_until_it_is_complete() -> None:
    screen = NodeScreen()
    screen.show(STATUS)
    screen.show_download(DownloadProgress(policy_version=41, bytes_done=10_000_000, bytes_total=40_000_000))
    assert screen.download is not None
    found = lines(STATUS, screen.download, width=80)
    assert found[-1].startswith("downloading policy 41")
    assert found[-1].endswith("10.0 MB of 40.0 MB")
    screen.show_download(DownloadProgress(policy_version=41, bytes_done=40_000_000, bytes_total=40_000_000))
    assert screen.download is None


class Terminal(io.StringIO):
    """A terminal that remembers what is written to it."""

    def isatty(self) -> bool:
        return True


def test_log_lines_appear_above_the_screen_on_lines_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "stderr", terminal)
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    setup_logging("worker")
    try:
        with node_screen.node_screen() as screen:
            assert screen is not None
            screen.show(STATUS)
            logging.getLogger("prime_node.worker.lease_work").info("joined; the engine is loading")
            written = terminal.getvalue()
    finally:
        root.handlers[:], root.level = before, level
    line = next(one for one in written.split("\n") if "joined; the engine" in one)
    assert "tokens/s" not in line
    assert "prime_node" not in line


def test_without_a_terminal_there_is_no_screen(capsys: pytest.CaptureFixture[str]) -> None:
    with node_screen.node_screen() as screen:
        assert screen is None
    assert capsys.readouterr().err == ""
