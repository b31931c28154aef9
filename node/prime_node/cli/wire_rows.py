"""The part of wire.py for metrics and traces: which files and services receive them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from prime_node.cli.missing_extra import needing_extra
from prime_node.observe import BestEffort, JsonLines, Recorder, Recorders, wanted_traces
from prime_node.traces import use_traces

if TYPE_CHECKING:
    from prime_protocol.run_spec import PinnedRun


def rows_in(
    folder: Path, run: PinnedRun, *, tensorboard: bool, wandb_project: str | None, who: str | None = None
) -> Recorder:
    """Return a recorder to metrics.jsonl, and if configured to TensorBoard and W&B.

    There `who` distinguishes the roles of a run. Raises LocalError.
    """
    rows: list[Recorder] = [BestEffort(JsonLines(folder / "metrics.jsonl"))]
    if tensorboard:
        with needing_extra("tensorboard", "rows for TensorBoard"):
            from prime_node.adapters.tensorboard_rows import TensorboardRows
        rows.append(TensorboardRows(folder / "tensorboard"))
    if wandb_project is not None:
        with needing_extra("wandb", "rows for Weights & Biases"):
            from prime_node.adapters.wandb_rows import WandbRows
        run_id, name = (run.digest[:32], run.spec.name)
        if who is not None:
            run_id, name = f"{run_id}-{who}", f"{name} {who}"
        rows.append(WandbRows(folder, project=wandb_project, run_id=run_id, name=name))
    return Recorders(*rows)


@contextlib.contextmanager
def traced(role: str, run: str) -> Iterator[None]:
    """Send the spans of a block of a role to the collector that PRIME_TRACES names, if it is set. Raises LocalError."""
    wanted = wanted_traces()
    if wanted is None:
        yield
        return
    with needing_extra("traces", "traces"):
        from prime_node.adapters.otlp_traces import OtlpTraces
    traces = OtlpTraces(wanted.url, role=role, run=run, share=wanted.share)
    use_traces(traces)
    try:
        yield
    finally:
        use_traces(None)
        traces.close()
