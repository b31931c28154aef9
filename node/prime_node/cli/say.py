"""Output of the commands. Only this module writes text to a terminal, so text from outside is always escaped."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prime_protocol.visible import printable

if TYPE_CHECKING:
    from rich.console import Console

LINE_CHARS_MAX = 16_384
"""Length limit of one line; an invitation takes 4,096 characters."""


def say(*lines: str, console: Console | None = None) -> None:
    """Print each argument on its own line, on standard output or to `console`. Markup and line breaks inside have no effect."""
    for line in lines:
        shown = printable(line, LINE_CHARS_MAX)
        if console is None:
            print(shown, flush=True)
        else:
            console.print(shown, markup=False, emoji=False, highlight=False, soft_wrap=True)
