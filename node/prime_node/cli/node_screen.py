"""Screen of `prime-node join` on a terminal: what the worker does, in a few lines that stay below the log.

Rendering only: the worker passes its status every few seconds, and the follower the progress of a download.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from prime_node.cli.screen import size
from prime_protocol.visible import number_of, printable

if TYPE_CHECKING:
    from prime_node.broadcast.follow.follower import DownloadProgress
    from prime_node.worker.status import Status

_COLOURS = {"Generating": "green", "Paused": "yellow", "Waiting": "yellow", "Finishing": "yellow", "No answer": "red"}
SENTENCE_CHARS_MAX = 240
"""A reason of the coordinator may be long; three lines of 80 characters show this much."""
HINT = "Ctrl-C leaves; in another terminal: prime-node pause, open"
RULE = "─" * 40
"""Shorter than any terminal: a longer one would leave parts of itself where a terminal becomes narrower."""
REFRESHES_PER_S = 2.0


@dataclass
class NodeScreen:
    """The lines of one worker. It shows nothing before the first status."""

    status: Status | None = None
    download: DownloadProgress | None = None

    def show(self, status: Status) -> None:
        """Show a status."""
        self.status = status

    def show_download(self, progress: DownloadProgress) -> None:
        """Show a download until it is complete."""
        self.download = progress if progress.bytes_done < progress.bytes_total else None

    def __rich__(self) -> RenderableType:
        """Return the lines."""
        return Text() if self.status is None else node_lines(self.status, self.download)


def node_lines(status: Status, download: DownloadProgress | None = None) -> RenderableType:
    """Render a worker: what it does, its figures, and a download in progress. Only the sentence may take several lines."""
    from prime_node.worker.status import doing, speed_now

    word, sentence = doing(status)
    head = Text(word, style=f"bold {_COLOURS.get(word, '')}".strip())
    head.append(f"  {printable(sentence, SENTENCE_CHARS_MAX)}", style="not bold default")
    rejected = sum(status.refused.values())
    figures = [f"{speed_now(status):,.0f} tokens/s", f"{status.rollouts_accepted:,} accepted"]
    figures += [f"{rejected:,} rejected"] if rejected else []
    figures += [f"{status.rollouts_pending:,} without a verdict"] if status.rollouts_pending else []
    figures += [f"{status.tokens_accepted:,} tokens credited"]
    held = "none" if status.policy_version < 0 else str(status.policy_version)
    more = ["no policy yet" if status.head < 0 else f"policy {held} of {status.head}"]
    more += [f"{status.bundles_spooled} to upload"] if status.bundles_spooled else []
    more += [f"received {size(status.down_bytes)}, sent {size(status.up_bytes)}"]
    more += [number_of(status.peers, "peer")]
    lines: list[RenderableType] = [
        _line((RULE, "dim")),
        head,
        _line((" · ".join(figures), "")),
        _line((" · ".join(more), "dim")),
    ]
    lines.append(_line((HINT, "dim")) if download is None else _bar(download))
    return Group(*lines)


def _bar(download: DownloadProgress) -> RenderableType:
    table = Table.grid(padding=(0, 1))
    bar = ProgressBar(total=download.bytes_total, completed=download.bytes_done, width=24)
    text = f"{size(download.bytes_done)} of {size(download.bytes_total)}"
    table.add_row(f"downloading policy {download.policy_version}", bar, text)
    return table


def _line(*parts: tuple[str, str]) -> Text:
    line = Text(no_wrap=True, overflow="ellipsis")
    for text, style in parts:
        line.append(printable(text), style=style)
    return line


@contextlib.contextmanager
def node_screen() -> Iterator[NodeScreen | None]:
    """Show the lines below the log while the context is open; yield None without a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    screen = NodeScreen()
    with Live(screen, console=console, refresh_per_second=REFRESHES_PER_S, transient=True):
        yield screen
