"""Combine the coordinator's status and the roles' own files into one `RunProgress`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prime_node.cli.run_dir import RunDir
from prime_node.cli.screen import Row, RunProgress, recent, size
from prime_node.cli.supervisor import ChildState
from prime_node.observe import rows_with
from prime_node.worker.status import read_status
from prime_protocol.errors import LocalError
from prime_protocol.run_spec import PinnedRun


def progress_of(
    run_dir: RunDir,
    run: PinnedRun,
    rows: list[dict[str, Any]],
    status: Mapping[str, Any],
    processes: Mapping[str, ChildState],
    *,
    elapsed_s: float,
) -> RunProgress:
    """Return the progress of a run.

    `rows` are the trainer's metrics. `status` is the coordinator's; it is empty until the coordinator first answers.
    """
    trained = rows_with(rows, "reward_mean")
    workers = {worker["worker"]: worker for worker in status.get("workers", ())}
    return RunProgress(
        phase=_phase(status, rows, run),
        step=int(status.get("step", 0)),
        max_steps=run.spec.max_steps,
        elapsed_s=elapsed_s,
        rewards=[row["reward_mean"] for row in trained],
        lag_mean=recent(trained, "lag_mean"),
        evaluation=_evaluation(rows),
        broadcast=_broadcast(rows, status),
        rows=[
            _row(name, state, workers.get(_key_id(run_dir.path / name)), trained) for name, state in processes.items()
        ],
        waiting_for=next(iter(status.get("waiting_for", ())), ""),
        refused=status.get("rollouts", {}).get("refused", {}),
    )


def _key_id(folder: Path) -> str:
    """Return the key id of the worker in this folder, from its status file.

    Names prove nothing: any worker may use "worker-1" as its name.
    """
    try:
        return read_status(folder / "status.json").worker
    except LocalError:
        return ""


def _phase(status: Mapping[str, Any], rows: list[dict[str, Any]], run: PinnedRun) -> str:
    if not status:
        return "starting"
    head = int(status.get("head", -1))
    if head < 0:
        taught = rows_with(rows, "sft_step")
        return f"teaching the format (supervised step {taught[-1]['sft_step']})" if taught else "starting"
    return "finishing" if head >= run.spec.max_steps else "learning"


def _evaluation(rows: list[dict[str, Any]]) -> str:
    evaluated = rows_with(rows, "eval_greedy", "eval_sampled", "step")
    if not evaluated:
        return ""
    last = evaluated[-1]
    return f"{last['eval_greedy']:.2f} greedy, {last['eval_sampled']:.2f} sampled at step {last['step']}"


def _broadcast(rows: list[dict[str, Any]], status: Mapping[str, Any]) -> str:
    """Describe the download size of the newest policy for a worker that keeps up, its raw size, and the time to available."""
    published = rows_with(rows, "raw_bytes", "sent_bytes", "ratio")
    if not published:
        return ""
    last = published[-1]
    text = f"{size(last['sent_bytes'])} of {size(last['raw_bytes'])} raw, {last['ratio']:.1f}x"
    usable = status.get("usable", [])
    if usable:
        text += f", usable after {usable[-1]['median_s']:.1f} s (nine of ten workers {usable[-1]['most_s']:.1f} s)"
    return text


def _row(name: str, state: ChildState, worker: Mapping[str, Any] | None, trained: Sequence[Mapping[str, Any]]) -> Row:
    if worker is None:
        idle = recent(trained, "trainer/idle_ratio") if name == "trainer" else None
        return Row(name, state, "" if idle is None else f"idle {idle:.0%}")
    refused: Mapping[str, int] = worker.get("refused", {})
    ban = worker.get("banned")
    note = f"banned at step {ban['step']}: {ban['reason']}" if ban else ""
    return Row(
        name,
        state,
        str(worker.get("state", "")),
        policy=str(version) if (version := worker.get("policy_version", -1)) >= 0 else "-",
        accepted=int(worker.get("accepted", 0)),
        refused=sum(refused.values()),
        note=note,
    )
