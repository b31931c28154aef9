"""What a re-execution shows while a step takes minutes: which part, and how far."""

from __future__ import annotations

import asyncio
import io
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from tests.node.replay_world import replayable_run, replayed, trained
from tests.time_world import VirtualClock

from prime_node.cli.replay import LINE_S, show_progress
from prime_node.replay.material import ReplayProgress


@dataclass
class SeenProgress(ReplayProgress):
    """Progress that keeps all that it showed."""

    seen: list[str] = field(default_factory=list)

    def note(self, part: str, done: int, total: int) -> None:
        super().note(part, done, total)
        self.seen.append(self.text)


async def test_each_part_of_a_step_is_shown_with_how_far_it_is(tmp_path: Path) -> None:
    published = await trained(tmp_path / "run", replayable_run(max_steps=2))
    progress = SeenProgress()
    report = await replayed(published, tmp_path, range(2), genesis=True, progress=progress)
    assert report.exit_code == 0
    for part in ("supervised steps 1 of", "bundles", "comparison with the published policy", "passes"):
        assert any(part in text for text in progress.seen), (part, progress.seen)
    assert any(text.startswith("policy 0: ") for text in progress.seen)
    assert any(text.startswith("step 1 of 0 to 1: ") for text in progress.seen)
    assert progress.text == "step 1 of 0 to 1", "every part has ended"


async def shown(progress: ReplayProgress, console: Console) -> None:
    """Show progress for a little more than two lines' time."""
    clock = VirtualClock()
    showing = asyncio.ensure_future(show_progress(progress, console, clock))
    await clock.sleep(2 * LINE_S + 2.0)
    showing.cancel()
    await asyncio.gather(showing, return_exceptions=True)


async def test_a_log_gets_a_line_now_and_then_and_a_terminal_a_status_line() -> None:
    progress = ReplayProgress("step 41 of 40 to 49")
    progress.note("passes", 12, 64)
    log, screen = io.StringIO(), io.StringIO()
    await shown(progress, Console(file=log))
    assert log.getvalue().splitlines() == ["now  step 41 of 40 to 49: passes 12 of 64"] * 2
    await shown(progress, Console(file=screen, force_terminal=True))
    assert "step 41 of 40 to 49: passes 12 of 64" in screen.getvalue()
    assert "now" not in screen.getvalue()
