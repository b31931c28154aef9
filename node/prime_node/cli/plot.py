"""Pictures: the learning curve, as a PNG and in the terminal, and the timeline.

The timeline has one row per lane, coloured by policy. Checks queue and overlap, so they are pale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prime_node.cli.timeline import BROADCAST, CHECKS, PUBLISHER, TRAINER, Activity, Timeline
from prime_node.observe import rows_with
from prime_protocol.visible import printable


@dataclass(frozen=True, slots=True)
class Curve:
    """Content of the plot by step. Rewards are means over a step's rollouts; evaluations are on held-out problems."""

    steps: Sequence[int]
    rewards: Sequence[float]
    evaluation_steps: Sequence[int]
    greedy: Sequence[float]
    sampled: Sequence[float]
    ban_step: int | None = None
    """Step at which a worker was banned."""


def curve_of(rows: Sequence[dict[str, Any]], *, ban_step: int | None = None) -> Curve:
    """Build the curve from the trainer's metrics. A step that was repeated after a crash counts once."""
    trained = {row["step"]: row["reward_mean"] for row in rows_with(rows, "step", "reward_mean")}
    evaluated = {row["step"]: row for row in rows_with(rows, "step", "eval_greedy", "eval_sampled")}
    return Curve(
        steps=sorted(trained),
        rewards=[trained[step] for step in sorted(trained)],
        evaluation_steps=sorted(evaluated),
        greedy=[evaluated[step]["eval_greedy"] for step in sorted(evaluated)],
        sampled=[evaluated[step]["eval_sampled"] for step in sorted(evaluated)],
        ban_step=ban_step,
    )


def save_curves_png(curve: Curve, path: Path, *, title: str) -> None:
    """Write the curve as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(curve.steps, curve.rewards, color="#b0b7c3", linewidth=0.8, label="reward of the step's rollouts")
    axes.plot(
        curve.evaluation_steps, curve.greedy, color="#1b6ca8", marker="o", markersize=3.5, label="held-out, greedy"
    )
    axes.plot(
        curve.evaluation_steps, curve.sampled, color="#d9822b", marker="o", markersize=3.5, label="held-out, sampled"
    )
    if curve.ban_step is not None:
        axes.axvline(curve.ban_step, color="#b3261e", linewidth=1, linestyle=":", label="cheater banned")
    axes.set(xlabel="step", ylabel="exact answers / reward", ylim=(0, 1))
    axes.set_title(printable(title, 200), parse_math=False)  # a run's name may be "$\\frac"
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(path)


def terminal_plot(curve: Curve) -> str:
    """Return the curve as text for a terminal."""
    import plotext

    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plotsize(76, 15)
    plotext.plot(curve.steps, curve.rewards, label="reward of the step")
    if curve.evaluation_steps:
        plotext.scatter(curve.evaluation_steps, curve.sampled, label="held-out, sampled", marker="o")
    plotext.ylim(0, 1)
    plotext.xlabel("step")
    return str(plotext.uncolorize(plotext.build()))


COLOURS = ("#1b6ca8", "#d9822b", "#3d8b52", "#8e5aa8", "#b0503f", "#6b7a8f")
"""Colours of consecutive policies. A step has the colour of the policy that it starts from."""
LANES_MAX = 64
"""Lanes of a picture. A run has a worker for each key that a stranger makes, and 2,000 lanes took minutes and 1 GB."""
PALE = {"wait": "#e6e8ec", "save": "#c9cdd4", "submit": "#c9cdd4", "swap": "#2b2f36"}


def save_timeline_png(timeline: Timeline, path: Path, *, title: str) -> None:
    """Write the timeline as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lanes = drawn_lanes(timeline)
    if len(lanes) < len(timeline.lanes):
        title = f"{title}: {len(lanes)} of {len(timeline.lanes):,} lanes"
    timeline = Timeline(lanes, tuple(each for each in timeline.activities if each.lane in lanes))
    shown = [each for each in timeline.activities if each.lane == TRAINER] or timeline.activities
    begin_s, end_s = min(each.begin_s for each in shown), max(each.end_s for each in shown)
    figure = Figure(figsize=(10, 0.5 * len(lanes) + 1.3), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for each in timeline.activities:
        row, width_s = lanes.index(each.lane), each.end_s - each.begin_s
        axes.barh(row, width_s, left=each.begin_s - begin_s, height=0.7, color=_colour(each), **_look(each.lane))
        label = str(each.step if each.lane == TRAINER and each.name == "train" else each.policy_version)
        if label != "-1" and each.name not in PALE and each.lane != CHECKS and width_s > (end_s - begin_s) / 40:
            middle = (max(each.begin_s, begin_s) + min(each.end_s, end_s)) / 2 - begin_s
            axes.text(middle, row, label, ha="center", va="center", color="white", fontsize=7)
    axes.set(
        xlim=(0, end_s - begin_s), xlabel="seconds; the number is the policy at work, in the trainer's lane the step"
    )
    axes.set_yticks(range(len(lanes)), lanes, parse_math=False)  # a worker's name may be "$\\x$"
    axes.invert_yaxis()
    axes.set_title(title, parse_math=False)
    figure.savefig(path)


def drawn_lanes(timeline: Timeline) -> tuple[str, ...]:
    """Return the lanes, without those of the workers with the least to draw if there are too many."""
    if len(timeline.lanes) <= LANES_MAX:
        return timeline.lanes
    seconds = dict.fromkeys(timeline.lanes, 0.0)
    for each in timeline.activities:
        seconds[each.lane] += each.end_s - each.begin_s
    *fixed, checks = (TRAINER, PUBLISHER, BROADCAST, CHECKS)
    workers = sorted(set(timeline.lanes) - {*fixed, checks}, key=lambda lane: (-seconds[lane], lane))
    kept = {*fixed, checks, *workers[: LANES_MAX - len(fixed) - 1]}
    return tuple(lane for lane in timeline.lanes if lane in kept)


def _look(lane: str) -> dict[str, Any]:
    return {"edgecolor": "white", "lw": 0.4, "alpha": 0.35 if lane == CHECKS else 1.0}


def _colour(activity: Activity) -> str:
    number = activity.step if activity.lane == TRAINER else activity.policy_version
    return PALE.get(activity.name) or COLOURS[number % len(COLOURS)]
