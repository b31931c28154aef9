"""`prime-node trace`: a run's pipeline as a picture for Perfetto and Chrome, from the files that the roles wrote."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import typer

from prime_node.cli.run_dir import RunDir
from prime_node.cli.say import say
from prime_node.cli.timeline import CHECKS, Timeline, read_timeline
from prime_node.files import write_durably
from prime_protocol.errors import LocalError


def trace(
    run: Annotated[Path, typer.Argument(help="Folder of the run.")],
    output: Annotated[Path | None, typer.Option(help="Trace file to write [RUN/trace.json].")] = None,
    png: Annotated[Path | None, typer.Option(help="Also draw it into this image file.")] = None,
    steps: Annotated[str | None, typer.Option(help="Only what happened during these steps, for example 40:46.")] = None,
) -> None:
    """Show when trainer, broadcast and workers did what: a trace for ui.perfetto.dev or chrome://tracing."""
    run_dir = RunDir(run)
    run_dir.load_run()
    timeline = read_timeline(run_dir)
    if steps is not None:
        timeline = timeline.between(*_range_of(steps))
    target = output or run / "trace.json"
    try:
        write_durably(target, json.dumps(chrome_trace(timeline)).encode())
        if png is not None:
            from prime_node.cli.plot import save_timeline_png

            save_timeline_png(timeline, png, title=run_dir.path.name)
    except OSError as error:
        raise LocalError(f"{error.filename}: {error.strerror}") from None
    begin_s = timeline.activities[0].begin_s
    lasted_s = max(each.end_s for each in timeline.activities) - begin_s
    say(
        f"{target}: {len(timeline.activities):,} activities of {lasted_s:,.1f} s on {len(timeline.lanes)} lanes; "
        "open it at https://ui.perfetto.dev",
    )


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """Return the Trace Event Format: complete events, one thread per lane; verdicts, which overlap, are asynchronous events."""
    begin_s = timeline.activities[0].begin_s
    threads = {lane: number for number, lane in enumerate(timeline.lanes, start=1)}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "prime-node"}}
    ]
    for lane, thread in threads.items():
        events.append({"ph": "M", "name": "thread_name", "pid": 1, "tid": thread, "args": {"name": lane}})
        events.append({"ph": "M", "name": "thread_sort_index", "pid": 1, "tid": thread, "args": {"sort_index": thread}})
    numbers = count(1)
    for each in timeline.activities:
        at_us, duration_us = round((each.begin_s - begin_s) * 1e6), round((each.end_s - each.begin_s) * 1e6)
        args = {"step": each.step, "policy_version": each.policy_version, **each.details}
        common = {"name": each.title, "cat": each.lane, "pid": 1, "tid": threads[each.lane]}
        if each.lane == CHECKS:
            number = next(numbers)
            events.append({**common, "ph": "b", "id": number, "ts": at_us, "args": args})
            events.append({**common, "ph": "e", "id": number, "ts": at_us + duration_us})
        else:
            events.append({**common, "ph": "X", "ts": at_us, "dur": duration_us, "args": args})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _range_of(steps: str) -> tuple[int, int]:
    first, _, last = steps.partition(":")
    if not first.isdecimal() or not last.isdecimal():
        raise LocalError(f"--steps {steps}: two numbers with a colon, for example 40:46")
    return int(first), int(last)
