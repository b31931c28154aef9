"""The progress of `prime-node replay` for people: a status line on a terminal, else a line now and then."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from prime_node.cli.say import say
from prime_node.ports.clock import Clock

if TYPE_CHECKING:
    from prime_node.replay.progress import ReplayProgress

LINE_S, LOOK_S = 30.0, 0.5
"""Seconds between two lines, and between two looks."""


async def show_progress(progress: ReplayProgress, console: Console, clock: Clock) -> None:
    """Show where a re-execution is, until cancelled."""
    status = console.status("") if console.is_terminal else None
    said_s = clock.monotonic_s()
    with status or contextlib.nullcontext():
        while True:
            await clock.sleep(LOOK_S)
            text, now_s = progress.text, clock.monotonic_s()
            if status is not None:
                status.update(Text(text))
            elif text and now_s >= said_s + LINE_S:
                say(f"now  {text}", console=console)
                said_s = now_s
