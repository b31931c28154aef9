"""A run as rows of JSON values, from its state and its history alone: of a coordinator that runs, or of one that has stopped."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

from prime_node.coordinator.measure.history import RunHistory
from prime_node.coordinator.state import audits, newcomers
from prime_node.coordinator.state.records import State, WorkerRecord
from prime_protocol.evidence import log_evidence
from prime_protocol.run_spec import PinnedRun


def run_row(run: PinnedRun, state: State, history: RunHistory) -> dict[str, Any]:
    """Return the run's row, without its workers. Example: {"step": 3, "head": 3, "steps": [...], "learning": {...}, ...}."""
    return {
        "run": run.digest,
        "name": run.spec.name,
        "step": state.current_step,
        "head": state.head,
        "key_ring": run.keys.version,
        "calibration": run.calibrations.version,
        "max_steps": state.rules.max_steps,
        "async_level": state.rules.async_level,
        "draining": state.draining,
        "paused": bool(state.paused_at_ms),
        "pause_reason": state.pause_reason,
        "joining": asdict(state.joining),
        "complete": state.is_complete,
        "rollouts": {"accepted": state.accepted, "refused": dict(state.refused)},
        "bytes_published": state.bytes_published,
        "policies_kept": len(state.published),
        "open_leases": len(state.leases),
        "pending_bundles": len(state.bundles),
        "steps": step_rows(state),
        "problems": {"failing": len(state.failing), "redrawn": state.num_redrawn},
        "num_workers": state.num_active,
        "learning": learning_row(history),
    }


def learning_row(history: RunHistory) -> dict[str, Any]:
    """Return the newest step's mean reward, and the newest held-out figures. Example: {"step": 3, "reward": 0.4}."""
    newest = {name: values[-1] for name, values in history.columns(history.last_step - 1).items() if values}
    row: dict[str, Any] = {name: newest[name] for name in ("step", "at", "reward") if name in newest}
    if history.evaluations:
        row["held_out"] = history.evaluations[-1]
    return row


def workers_by_activity(state: State) -> list[WorkerRecord]:
    """Return all workers that ever joined: active ones first, then in the order of their joins."""
    return sorted(state.workers.values(), key=lambda worker: (not worker.active, worker.joined_at_ms))


def worker_row(state: State, worker: WorkerRecord) -> dict[str, Any]:
    """Return a worker's row. Example: {"worker": "12D3KooW...", "accepted": 640, "banned": None, ...}."""
    ban = worker.banned
    return {
        "worker": worker.worker,
        "name": worker.name,
        "person": worker.person,
        "software": worker.software,
        "engine": worker.engine,
        "hardware": worker.hardware,
        "newcomer": newcomers.is_newcomer(state.rules, worker),
        "rollout_ms": round(worker.rollout_ms, 1),
        "claimed": None if worker.claimed is None else asdict(worker.claimed),
        "active": worker.active,
        "accepted": worker.accepted,
        "refused": dict(worker.refused),
        "strikes": worker.strikes,
        "audit_share": round(audits.audit_share(state.rules, worker), 4),
        "audits_passed": worker.audit_score,
        "abandoned": worker.abandoned,
        "tokens_withheld": sum(one.num_tokens for one in worker.escrow),
        "evidence_nats": round(log_evidence(worker.evidence), 2),
        "calibrated": worker.calibrated,
        "open_leases": len(worker.leases),
        "pending_bundles": len(worker.pending),
        "banned": None
        if ban is None
        else {"at_ms": ban.at_ms, "step": ban.step, "kind": ban.kind, "reason": ban.reason, "evidence": ban.evidence},
    }


def step_rows(state: State) -> list[dict[str, Any]]:
    """Return the groups of each step in progress, counted by state. Example: [{"step": 3, "open": 4, "leased": 2, ...}]."""
    leased: Counter[int] = Counter()
    pending: Counter[int] = Counter()
    for lease in state.leases.values():
        leased[lease.step] += 0 if state.is_evaluation(lease.slots) else len(lease.slots)
    for bundle in state.bundles.values():
        pending[bundle.lease.step] += 0 if state.is_evaluation(bundle.lease.slots) else len(bundle.lease.slots)
    return [
        {
            "step": number,
            "open": len(step.open),
            "leased": leased[number],
            "pending": pending[number],
            "accepted": len(step.accepted),
            "trained": len(step.taken),
            "fixed": step.fixed,
        }
        for number, step in state.steps.items()
    ]
