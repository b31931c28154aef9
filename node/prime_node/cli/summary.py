"""The summary at the end of `prime-node up`: learning, rejections, bans, and whether the whole chain verifies."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from prime_node.cli import wire
from prime_node.cli.plot import curve_of, save_curves_png, terminal_plot
from prime_node.cli.run_dir import RunDir
from prime_node.cli.say import say
from prime_node.cli.screen import size
from prime_node.files import write_durably
from prime_node.observe import read_json_lines, rows_with
from prime_protocol.errors import PrimeError
from prime_protocol.run_spec import PinnedRun
from prime_protocol.visible import printable

DOES_NOT_FOLLOW = 1
"""Exit code of a re-execution of which a step does not follow."""


async def summarise(
    run_dir: RunDir, run: PinnedRun, status: Mapping[str, Any], console: Console, *, replay_steps: int = 0
) -> int:
    """Print and write the summary. Return 0, or 1 if the chain does not verify or a step does not follow.

    `replay_steps`: steps to re-execute, in a run that promises it.
    """
    from prime_node.broadcast.audit.audit import audit

    rows = read_json_lines(run_dir.trainer_metrics)
    bans = [
        {"worker": worker["name"], **worker["banned"]}
        for worker in status.get("workers", ())
        if worker.get("banned") is not None
    ]
    report = await audit(wire.folder_source(run_dir.public), run.digest, chain=True)
    replay = await _replay(run_dir, run, replay_steps) if run.spec.replay is not None and replay_steps else None
    summary = {
        "run": run.digest,
        "policies": run.spec.max_steps,
        "evaluation": _evaluations(rows),
        "rollouts": status.get("rollouts", {}),
        "bans": bans,
        "bytes_published": status.get("bytes_published", 0),
        "broadcast": _broadcast(rows),
        "trainer_idle_share": _idle_share(rows),
        "verification": {
            "ok": report.passed,
            "checks": [f"{check.title}: {check.detail}" for check in report.checks if check.passed],
            "reason": None if report.failure is None else f"{report.failure.title}: {report.failure.detail}",
        },
        "replay": replay,
    }
    curve = curve_of(rows, ban_step=bans[0]["step"] if bans else None)
    _show(summary, console)
    if curve.steps:
        console.print(terminal_plot(curve), markup=False, highlight=False)
        save_curves_png(curve, run_dir.path / "curve.png", title=f"{run.spec.name}, k = {run.spec.async_level}")
        say(f"curve: {run_dir.path / 'curve.png'}", console=console)
    write_durably(run_dir.path / "summary.json", json.dumps(summary, indent=1, default=float).encode())
    return 0 if report.passed and (replay is None or replay["exit_code"] != DOES_NOT_FOLLOW) else 1


async def _replay(run_dir: RunDir, run: PinnedRun, count: int) -> dict[str, Any]:
    """Re-execute some steps, drawn at random."""
    from prime_node.cli.options import Options
    from prime_node.cli.replay_target import ReplayOptions, replay_target
    from prime_node.envs.settings import EnvironmentSettings
    from prime_node.trainer.config import TrainerConfig
    from prime_node.trainer.pinned_recipe import import_paths

    settings = Options.of_run(str(run_dir.path), None, [])
    trainer = settings.load(TrainerConfig)
    if (nproc := trainer.ranks.nproc or 1) > 1:
        command = f"prime-node replay {run_dir.path} --sample {count} --nproc {nproc}"
        return {"exit_code": 3, "text": f"not yet: the trainer computed on {nproc} ranks, and so does `{command}`"}
    options = ReplayOptions(run=run.digest, sample=count, code=frozenset(import_paths(trainer)))
    try:
        report = await replay_target(str(run_dir.path), options, settings.load(EnvironmentSettings))
    except PrimeError as error:
        return {"exit_code": 3, "text": f"no step could be re-executed: {error}"}
    wrong = [f"step {one.step}: {one.detail}" for one in report.steps if one.detail]
    text = f"{len(report.steps)} for {count} drawn at random: {report.outcome}"
    text = "; ".join([text, *wrong[:1]])
    return {"exit_code": report.as_fields()["exit_code"], "steps": [one.step for one in report.steps], "text": text}


def _evaluations(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the first and last evaluation on held-out problems."""
    evaluated = rows_with(rows, "step", "eval_greedy")
    if not evaluated:
        return {}
    figures = ("eval_greedy", "eval_sampled", "eval_reward")
    names = ("step", *figures, *(f"{name}_{bound}" for name in figures for bound in ("low", "high")))
    return {
        place: {name: row[name] for name in names if rows_with([row], name)}
        for place, row in (("before", evaluated[0]), ("after", evaluated[-1]))
    }


def _broadcast(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the bytes that a worker that kept up downloaded over the whole run, and the raw bytes of all policies."""
    published = rows_with(rows, "raw_bytes", "sent_bytes")
    if not published:
        return {}
    raw, sent = (sum(row[name] for row in published) for name in ("raw_bytes", "sent_bytes"))
    return {"raw_bytes": raw, "sent_bytes": sent, "ratio": raw / sent}


def _idle_share(rows: list[dict[str, Any]]) -> float | None:
    """Return the share of the reinforcement learning time that the trainer spent waiting for a batch."""
    steps = rows_with(rows, "idle_seconds", "step_seconds")
    idle, total = (sum(row[name] for row in steps) for name in ("idle_seconds", "step_seconds"))
    return idle / total if total else None


def _show(summary: Mapping[str, Any], console: Console) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)

    def row(label: str, value: str) -> None:
        table.add_row(Text(printable(label)), Text(printable(value)))  # untrusted names must not act as markup

    evaluation = summary["evaluation"]
    if evaluation:
        for label, name in (
            ("exact, greedy", "eval_greedy"),
            ("exact, sampled", "eval_sampled"),
            ("reward", "eval_reward"),
        ):
            if name in evaluation["before"] and name in evaluation["after"]:
                before, after = evaluation["before"][name], evaluation["after"][name]
                low, high = (evaluation["after"].get(f"{name}_{bound}") for bound in ("low", "high"))
                sure = f" (95 %: {low:.2f} to {high:.2f})" if low is not None and high is not None else ""
                row(f"held-out {label}", f"{before:.2f} -> {after:.2f}{sure}")
    rollouts = summary["rollouts"]
    row("rollouts accepted", f"{rollouts.get('accepted', 0):,}")
    for reason, count in sorted(rollouts.get("refused", {}).items()):
        row(f"  rejected: {reason}", f"{count:,}")
    for ban in summary["bans"]:
        row("banned", f"{ban['worker']} at step {ban['step']}: {ban['reason']}")
    row("published", f"{size(summary['bytes_published'])} of checkpoints")
    if sent := summary["broadcast"]:
        ratio = f"{size(sent['sent_bytes'])} of {size(sent['raw_bytes'])} raw to each worker, {sent['ratio']:.1f}x"
        row("broadcast", ratio)
    if summary["trainer_idle_share"] is not None:
        row("trainer idle", f"{summary['trainer_idle_share']:.1%}")
    verification = summary["verification"]
    for check in verification["checks"]:
        row("verified", check)
    if (replay := summary["replay"]) is not None:
        row("steps re-executed", replay["text"])
    row("whole chain", "verified" if verification["ok"] else f"DOES NOT HOLD: {verification['reason']}")
    console.print()
    console.print(table)
