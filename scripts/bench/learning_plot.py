"""The curves of learning.py as a PNG."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


def plot(runs: Sequence[dict[str, Any]], path: Path, *, losses: Sequence[str]) -> None:
    """One panel for each task and level; a line a loss, the mean over seeds, and their range as a band."""
    tasks = sorted({run["task"] for run in runs})
    levels = sorted({run["async_level"] for run in runs})
    figure = Figure(figsize=(4 * len(levels), 3 * len(tasks)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(tasks), len(levels), squeeze=False, sharex=True, sharey="row")
    for (row, task), (column, level) in itertools.product(enumerate(tasks), enumerate(levels)):
        panel = axes[row][column]
        here = [run for run in runs if (run["task"], run["async_level"]) == (task, level)]
        panel.set_title(f"{task}, k = {level}, {len({run['seed'] for run in here})} seeds", fontsize=9)
        for loss in losses:
            mine = [run for run in here if run["loss"] == loss]
            if mine:
                marks = [run["evaluations"] for run in mine]
                shortest = min(map(len, marks))
                steps = [mark["step"] for mark in marks[0][:shortest]]
                values = [[each[place]["sampled"] for each in marks] for place in range(shortest)]
                style = "--" if loss == "grpo" else "-"
                (line,) = panel.plot(steps, [*map(statistics.fmean, values)], style, label=loss)
                panel.fill_between(steps, [*map(min, values)], [*map(max, values)], alpha=0.08, color=line.get_color())
        panel.set_xlabel("step", fontsize=8)
        panel.set_ylabel("sampled accuracy, held out", fontsize=8)
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=len(losses), fontsize=8)
    figure.savefig(path, dpi=90)


def bands(runs: Sequence[dict[str, Any]], path: Path, *, by: str, names: Sequence[str]) -> None:
    """One panel: for each value of `by` the mean over seeds, and the range as a band."""
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    panel = figure.subplots()
    for style, name in zip(itertools.cycle(("-", "--", ":")), names, strict=False):  # equal curves hide each other
        marks = [run["evaluations"] for run in runs if run[by] == name]
        if marks:
            shortest = min(map(len, marks))
            steps = [mark["step"] for mark in marks[0][:shortest]]
            values = [[each[place]["sampled"] for each in marks] for place in range(shortest)]
            means = [statistics.fmean(each) for each in values]
            (line,) = panel.plot(steps, means, style, label=f"{name} ({len(marks)} seeds)")
            panel.fill_between(steps, [*map(min, values)], [*map(max, values)], alpha=0.2, color=line.get_color())
    panel.set_xlabel("step")
    panel.set_ylabel("sampled accuracy, held out")
    panel.set_ylim(0, 1)
    panel.legend(fontsize=8)
    figure.savefig(path, dpi=110)
