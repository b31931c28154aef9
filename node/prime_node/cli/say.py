"""What commands print. Nothing else in this package writes words to a terminal, so none from outside arrives there as it came."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prime_protocol.visible import printable

if TYPE_CHECKING:
    from rich.console import Console

LINE_CHARS_MAX = 16_384
"""Of one line; an invitation takes 4,096."""


def say(*lines: str, console: Console | None = None) -> None:
    """Each on a line of its own, on standard output or where `console` writes; neither markup nor a line break inside counts."""
    for line in lines:
        shown = printable(line, LINE_CHARS_MAX)
        if console is None:
            print(shown, flush=True)
        else:
            console.print(shown, markup=False, emoji=False, highlight=False, soft_wrap=True)
