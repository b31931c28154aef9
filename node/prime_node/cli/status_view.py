"""Rendering of `prime-node status`. Pure; all untrusted text goes through `printable`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from prime_node.broadcast.audit.audit_report import date_of
from prime_node.cli.screen import size
from prime_protocol.visible import number_of, printable

if TYPE_CHECKING:
    from prime_node.cli.run_status import RunStatus, StepLine, WorkerLine
    from prime_node.worker.status import Status

WORKERS_SHOWN_MAX = 50
"""Number of a run's workers that are shown; `--json` has them all."""
STEPS_SHOWN_MAX = 70
"""The same for steps: a coordinator lists those that are not over, the async level and a few more."""
TRAINED_SHOWN_MAX = 3
"""The same for steps of which every group is trained."""
LINES_SHOWN_MAX = 20
"""The same for waits, for what validators disagree on, and for reasons of rejections."""
SILENT_S_MIN = 30.0
"""Minimum silence before a worker is labelled silent."""
STOPPED_MS = 60_000
"""Age of a status file above which its worker counts as stopped or asleep."""


def of_run(run: RunStatus) -> RenderableType:
    """Render a run. Example: `demo   step 42 of 400   policy 42   k = 2   learning`, then its waits, steps and workers."""
    running = (
        "not running here" if run.stopped else "draining" if run.draining else "paused" if run.paused else "running"
    )
    state = "complete" if run.complete else running
    head = Table.grid(padding=(0, 3))
    head.add_row(
        Text(printable(run.name), style="bold"),
        f"step {run.step} of {run.max_steps}",
        f"policy {run.head}" if run.head >= 0 else "no policy yet",
        f"k = {run.async_level}",
        state,
    )
    facts = Table.grid(padding=(0, 2))
    facts.add_row("rollouts", _counted(run.rollouts.accepted, run.rollouts.refused))
    if run.stopped and run.learning.at and isfinite(run.learning.at):
        facts.add_row("last step", f"ended {date_of(int(run.learning.at))}")
    if learned := _learned(run):
        facts.add_row("reward", learned)
    published = size(run.bytes_published) + ("" if run.stopped else f", {number_of(run.peers, 'peer')}")
    if run.usable:
        last = run.usable[-1]
        published += (
            f"; policy {last.policy_version} usable after {last.median_s:.1f} s, "
            f"{last.most_s:.1f} s for nine of ten (of {last.workers} that reported it)"
        )
    facts.add_row("published", published)
    if run.problems.redrawn:
        facts.add_row(
            "problems", f"{run.problems.redrawn} replaced: their environment failed for every worker that tried them"
        )
    for line in run.validators.lines()[:LINES_SHOWN_MAX]:
        facts.add_row("validators", Text(printable(line), style="red"))
    for wait in run.waiting_for[:LINES_SHOWN_MAX]:
        facts.add_row("waits for", Text(printable(wait), style="yellow"))
    part = Text("1 worker takes part" if run.num_workers == 1 else f"{run.num_workers:,} workers take part")
    if run.stopped:
        part = Text(f"workers that took part: {len(run.workers):,}")
        if not run.complete:
            facts.add_row("to resume", "prime-node up FOLDER, or prime-node coordinator FOLDER and the other roles")
    return Group(head, facts, Text(), _steps(run), Text(), part, _workers(run))


def _learned(run: RunStatus) -> str:
    """Return the newest reward and held-out figures. Example: `0.42 in step 35; held out, policy 32: 0.41 greedy`."""
    found = [] if run.learning.reward is None else [f"{run.learning.reward:.2f} in step {run.learning.step}"]
    if (held_out := run.learning.held_out) is not None:
        ways = (("greedy", held_out.greedy), ("sampled", held_out.sampled))
        figures = ", ".join(f"{value:.2f} {way}" for way, value in ways if value is not None)
        found += [f"held out, policy {held_out.policy}: {figures}"] if figures else []
    return "; ".join(found)


def of_workers(found: Sequence[tuple[Path, Status]], now_ms: int) -> RenderableType:
    """Render the workers of this machine, each with its folder."""
    lines: list[RenderableType] = []
    for folder, status in found:
        age_ms = now_ms - status.at_ms
        if status.ended:
            now = f"ended: {status.ended}"
        elif age_ms > STOPPED_MS:
            now = f"not running, or suspended: last update {_ago(age_ms / 1_000)} ago"
        else:
            now = status.line()
        facts = Table.grid(padding=(0, 2))
        facts.add_row("now", Text(printable(now)))
        facts.add_row("rollouts", _counted(status.rollouts_accepted, status.refused))
        facts.add_row(
            "accepted", f"{status.tokens_accepted:,} tokens; {status.rollouts_pending:,} rollouts have no verdict yet"
        )
        if status.contributors:
            facts.add_row("standing", _standing(status))
        if status.bundles_spooled:
            facts.add_row("uploads", f"bundles that wait to be uploaded: {status.bundles_spooled}")
        if status.swarm:
            facts.add_row("peers", Text(printable(status.swarm)))
        if status.notice and status.notice != status.waiting_for:
            facts.add_row("notice", Text(printable(status.notice), style="yellow"))
        lines += [
            Text(printable(str(folder)), style="bold"),
            Text(f"worker {printable(status.worker)}", style="dim"),
            facts,
            Text(),
        ]
    return Group(*lines[:-1])


def _standing(status: Status) -> str:
    """Return a contributor's place. Example: `place 3 of 41 by tokens, 12.5 % of all`."""
    if status.rank is None:
        place = f"no credited tokens yet; {number_of(status.contributors, 'contributor')}"
    else:
        place = f"place {status.rank:,} of {status.contributors:,} by tokens, {100 * status.share:.1f} % of all"
    return place + (f"; all machines of person {printable(status.person[-8:])}" if status.person else "")


def _telling(run: RunStatus) -> list[StepLine]:
    """Return the steps with work left, and the last few of those that are trained: a coordinator lists more of these."""
    trained = [step for step in run.steps if step.trained and not (step.open or step.leased or step.pending)]
    dropped = {step.step for step in trained[:-TRAINED_SHOWN_MAX] if step.trained == step.accepted}
    return [step for step in run.steps if step.step not in dropped]


def _steps(run: RunStatus) -> Table:
    """Render where each step's groups are, and the time until half, and nine of ten, of the workers could use its policy."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("groups of step", "open", "leased", "unjudged", "accepted", "trained", "policy usable after"):
        table.add_column(column, justify="right")
    usable = {one.policy_version: f"{one.median_s:.1f} to {one.most_s:.1f} s" for one in run.usable}
    for step in _telling(run)[:STEPS_SHOWN_MAX]:
        groups = (step.step, step.open, step.leased, step.pending, step.accepted, step.trained)
        table.add_row(*map(str, groups), usable.get(step.step, "-"))
    return table


def _workers(run: RunStatus) -> RenderableType:
    """Render one line per worker, and notes on some of them below the table."""
    shown = run.workers[:WORKERS_SHOWN_MAX]
    table = Table(box=None, pad_edge=False, header_style="dim")
    numbers = ("policy", "leases", "accepted", "rejected", "audited")
    for column in ("worker", "key", "doing", *numbers):
        table.add_column(column, justify="right" if column in numbers else "left", no_wrap=True)
    notes = []
    for worker in shown:
        cells = (
            worker.name, worker.worker[-8:], worker.state if worker.active else "away",
            str(worker.policy_version) if worker.policy_version >= 0 else "-", str(worker.open_leases),
            f"{worker.accepted:,}", f"{sum(worker.refused.values()):,}", f"{worker.audit_share:.0%}",
        )  # fmt: skip
        style = "red" if worker.banned else "" if worker.active else "dim"
        table.add_row(*(Text(printable(cell)) for cell in cells), style=style)
        if note := _note(worker):
            notes.append(Text(printable(f"{worker.name} ({worker.worker[-8:]}) {note}"), style=style))
    if len(run.workers) > len(shown):
        notes.append(Text(f"and {len(run.workers) - len(shown):,} more workers: --json lists all", style="dim"))
    return Group(table, *notes)


def _note(worker: WorkerLine) -> str:
    """Return what an operator needs to notice about a worker; empty if there is nothing."""
    if worker.banned is not None:
        return f"was banned at step {worker.banned.step}: {worker.banned.reason}"
    notes = []
    if worker.active and (worker.silent_s or 0.0) > SILENT_S_MIN:
        notes.append(f"has been silent for {_ago(worker.silent_s or 0.0)}")
    if worker.strikes:
        notes.append("has 1 strike" if worker.strikes == 1 else f"has {worker.strikes} strikes")
    if worker.newcomer:
        notes.append("is a newcomer")
    if worker.active and worker.waiting_for:
        notes.append(f"waits for: {worker.waiting_for}")
    return "; ".join(notes)


def _counted(accepted: int, refused: Mapping[str, int]) -> Text:
    text = f"{accepted:,} accepted, {sum(refused.values()):,} rejected"
    if refused:
        shown = sorted(refused.items())[:LINES_SHOWN_MAX]
        text += " (" + ", ".join(f"{printable(reason)} {count:,}" for reason, count in shown) + ")"
    return Text(text)


def _ago(seconds: float) -> str:
    """Format a duration: 90 -> '90 s'; 7200 -> '120 min'."""
    return (
        f"{seconds:.0f} s"
        if seconds < 120
        else f"{seconds / 60:.0f} min"
        if seconds < 7_200
        else f"{seconds / 3_600:.0f} h"
    )
