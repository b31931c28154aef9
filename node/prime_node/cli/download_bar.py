"""Progress bar of a download, for `prime-node fetch` and `evaluate`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from rich.console import Console

if TYPE_CHECKING:
    from prime_node.broadcast.follow.follower import DownloadProgress


@contextlib.contextmanager
def download_bar() -> Iterator[Callable[[DownloadProgress], None]]:
    """Show a progress bar for downloads that take long enough; show nothing without a terminal."""
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda progress: None
        return
    with Bar(
        TextColumn("policy {task.fields[version]}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(),
        console=console, transient=True,
    ) as bar:  # fmt: skip
        task = bar.add_task("policy", total=None, version="-", visible=False)

        def show(progress: DownloadProgress) -> None:
            bar.update(
                task,
                completed=progress.bytes_done,
                total=progress.bytes_total,
                version=progress.policy_version,
                visible=progress.bytes_done < progress.bytes_total,
            )

        yield show
