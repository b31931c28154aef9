"""Display of `prime-node up` while it runs: a live table on a terminal, one line every few seconds elsewhere.

Rendering only: all data comes from `RunProgress`, which up.py fills from the coordinator's status and the trainer's metrics.
The progress bar of a download is that of `prime-node fetch` and `evaluate`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from prime_node.observe import rows_with
from prime_protocol.visible import printable

if TYPE_CHECKING:
    from prime_node.broadcast.follow.follower import DownloadProgress


_BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class Row:
    """One process in the table."""

    name: str
    process: str
    """State of the process: running, restarting, done, ..."""
    doing: str
    policy: str = ""
    accepted: int = 0
    refused: int = 0
    note: str = ""


@dataclass(frozen=True, slots=True)
class RunProgress:
    """Progress of the run at one moment."""

    phase: str
    """Phase: starting, teaching the format, learning, finishing."""
    step: int
    max_steps: int
    elapsed_s: float
    rewards: Sequence[float] = ()
    """Mean reward of each trained step."""
    lag_mean: float | None = None
    evaluation: str = ""
    broadcast: str = ""
    """Newest policy: bytes sent, raw bytes, ratio."""
    rows: Sequence[Row] = ()
    waiting_for: str = ""
    refused: Mapping[str, int] = field(default_factory=dict)


def render(progress: RunProgress) -> RenderableType:
    """Return the live table."""
    head = Table.grid(padding=(0, 2))
    head.add_row(
        Text(printable(progress.phase), style="bold"),
        Text(f"step {progress.step}/{progress.max_steps}"),
        ProgressBar(total=progress.max_steps, completed=progress.step, width=30),
        Text(f"{progress.elapsed_s:.0f} s"),
    )
    numbers = Text(f"reward {sparkline(progress.rewards, width=40)} {_latest(progress.rewards)}")
    if progress.evaluation:
        numbers.append(printable(f"   held-out: {progress.evaluation}"), style="cyan")
    broadcast = printable(progress.broadcast or "-")
    detail = Text(f"lag {_or_dash(progress.lag_mean)}   broadcast {broadcast}", style="dim")
    if progress.waiting_for:
        detail.append(printable(f"   waiting for: {progress.waiting_for}"))
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("who", "process", "doing", "policy", "accepted", "rejected", ""):
        table.add_column(column, justify="right" if column in ("policy", "accepted", "rejected") else "left")
    for row in progress.rows:
        style = "red" if row.note.startswith("banned") else ""
        cells = (row.name, row.process, row.doing, row.policy, str(row.accepted), str(row.refused), row.note)
        table.add_row(*(Text(printable(cell)) for cell in cells), style=style)
    return Group(head, numbers, detail, table)


def one_line(progress: RunProgress) -> str:
    """Return the progress as one line, for a log or a pipe."""
    parts = [
        f"{progress.elapsed_s:6.0f} s  {progress.phase}",
        f"step {progress.step}/{progress.max_steps}",
        f"reward {_latest(progress.rewards)}",
        f"lag {_or_dash(progress.lag_mean)}",
    ]
    if progress.broadcast:
        parts.append(f"sent {progress.broadcast}")
    if progress.evaluation:
        parts.append(f"held-out {progress.evaluation}")
    if progress.refused:
        parts.append("rejected " + ", ".join(f"{count} {reason}" for reason, count in progress.refused.items()))
    parts.extend(f"{row.name} {row.note}" for row in progress.rows if row.note)
    return printable("  ".join(parts))


def sparkline(values: Sequence[float], *, width: int) -> str:
    """Return values in [0, 1] as bars, averaged to `width` columns."""
    if not values:
        return ""
    columns = min(width, len(values))
    means = []
    for column in range(columns):
        part = values[column * len(values) // columns : (column + 1) * len(values) // columns]
        means.append(sum(part) / len(part))
    return "".join(_BARS[min(len(_BARS) - 1, max(0, int(mean * len(_BARS))))] for mean in means)


def size(num_bytes: float) -> str:
    """Format a size. Example: 1536 -> '1.5 kB'."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1_000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1_000
    return f"{num_bytes:.1f} TB"


def recent(rows: Sequence[Mapping[str, Any]], name: str, *, count: int = 20) -> float | None:
    """Return the mean of a metric's last `count` values."""
    values = [row[name] for row in rows_with(rows, name)][-count:]
    return sum(values) / len(values) if values else None


def _latest(values: Sequence[float], *, count: int = 10) -> str:
    return f"{sum(values[-count:]) / len(values[-count:]):.2f}" if values else "-"


def _or_dash(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


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
