"""The timeline as a picture: one row per lane, coloured by policy. Checks queue and overlap, so they are pale."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prime_node.cli.timeline import CHECKS, TRAINER, Activity, Timeline

COLOURS = ("#1b6ca8", "#d9822b", "#3d8b52", "#8e5aa8", "#b0503f", "#6b7a8f")
"""Colours of consecutive policies. A step has the colour of the policy that it starts from."""
PALE = {"wait": "#e6e8ec", "save": "#c9cdd4", "submit": "#c9cdd4", "swap": "#2b2f36"}


def save_timeline_png(timeline: Timeline, path: Path, *, title: str) -> None:
    """Write the timeline as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lanes = timeline.lanes
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


def _look(lane: str) -> dict[str, Any]:
    return {"edgecolor": "white", "lw": 0.4, "alpha": 0.35 if lane == CHECKS else 1.0}


def _colour(activity: Activity) -> str:
    number = activity.step if activity.lane == TRAINER else activity.policy_version
    return PALE.get(activity.name) or COLOURS[number % len(COLOURS)]
