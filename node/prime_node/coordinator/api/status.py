"""The coordinator's status: /v1/status for people and programs, /metrics for Prometheus."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

from prime_node.coordinator.agreement import Agreement
from prime_node.coordinator.api.cached_response import CachedResponse
from prime_node.coordinator.api.clock_readings import read_clocks
from prime_node.coordinator.api.nonces import Epochs
from prime_node.coordinator.curation import Curation
from prime_node.coordinator.decisions import Decisions
from prime_node.coordinator.evaluating import Evaluations
from prime_node.coordinator.listed_peers import Peers
from prime_node.coordinator.measure.observer import Observer
from prime_node.coordinator.presence import Presence
from prime_node.coordinator.state import audits, newcomers
from prime_node.coordinator.state.blockers import Blockers
from prime_node.coordinator.state.records import State, WorkerRecord
from prime_node.ports.clock import Clock
from prime_node.ports.metrics import Metrics
from prime_node.ports.web import Request, Response
from prime_protocol.evidence import log_evidence
from prime_protocol.run_spec import PinnedRun

AVAILABLE_SHOWN_MAX = 16
"""Policies in one status for which it shows the time to available."""
WORKERS_SHOWN_MAX = 1_000
"""Workers in one status; active ones come first."""
NAMED_MAX = 8
"""Keys with one ending that are listed."""


@dataclass(slots=True)
class StatusReport:
    """The status of a run, and its gauges."""

    run: PinnedRun
    clock: Clock
    decisions: Decisions
    observer: Observer
    presence: Presence
    peers: Peers
    agreement: Agreement
    evaluations: Evaluations
    curation: Curation
    blockers: Blockers
    metrics: Metrics

    def status_of_run(self) -> dict[str, Any]:
        """Return the run's status. Example: {"step": 3, "head": 3, "waiting_for": ["..."], "workers": [...], ...}."""
        state = self.decisions.state
        workers = sorted(state.workers.values(), key=lambda worker: (not worker.active, worker.joined_at_ms))
        return {
            "run": self.run.digest,
            "name": self.run.spec.name,
            "step": state.current_step,
            "head": state.head,
            "key_ring": self.run.keys.version,
            "calibration": self.run.calibrations.version,
            "max_steps": state.rules.max_steps,
            "async_level": state.rules.async_level,
            "draining": state.draining,
            "complete": state.is_complete,
            "waiting_for": self.blockers.reasons(),
            "rollouts": {"accepted": state.accepted, "refused": dict(state.refused)},
            "bytes_published": state.bytes_published,
            "policies_kept": len(state.published),
            "open_leases": len(state.leases),
            "pending_bundles": len(state.bundles),
            "usable": self.observer.availability.as_rows(AVAILABLE_SHOWN_MAX),
            "peers": len(self.peers),
            "steps": _steps(state),
            "validators": self.agreement.as_row(),
            "problems": {"failing": len(state.failing), "redrawn": state.num_redrawn},
            "evaluations": self.evaluations.as_rows(state),
            "num_workers": state.num_active,
            "workers": [self._worker(worker) for worker in workers[:WORKERS_SHOWN_MAX]],
            "server_time_ms": self.clock.now_ms(),
        }

    def named(self, ending: str) -> dict[str, Any]:
        """Return the keys with this ending, among all that ever joined. Example: {"workers": ["12D3KooW..."]}."""
        found = (key for key in self.decisions.state.workers if key.endswith(ending))
        return {"workers": list(islice(found, NAMED_MAX))}

    def set_gauges(self) -> None:
        """Update the gauges before they are read."""
        state, metrics = self.decisions.state, self.metrics
        metrics.set("prime_head", state.head)
        metrics.set("prime_max_steps", state.rules.max_steps)
        metrics.set("prime_workers", state.num_active)
        metrics.set("prime_workers_banned", sum(worker.banned is not None for worker in state.workers.values()))
        metrics.set("prime_leases_open", len(state.leases))
        metrics.set("prime_bundles_pending", len(state.bundles))
        metrics.set("prime_groups_open", sum(len(step.open) for step in state.steps.values()))
        metrics.set("prime_published_bytes", state.bytes_published)
        metrics.set("prime_events", self.decisions.number)
        metrics.set("prime_problems_redrawn", state.num_redrawn)
        metrics.set("prime_peers", len(self.peers))
        agreement = self.agreement.as_row()
        metrics.set("prime_validator_contradictions", agreement["num_contradictions"])
        metrics.set("prime_validators_differing", len(agreement["differing"]))
        metrics.set("prime_validator_unanswered", sum(one["total"] for one in agreement["unanswered"]))
        self.curation.report()

    def _worker(self, worker: WorkerRecord) -> dict[str, Any]:
        seen = self.presence.get(worker.worker)
        ban = worker.banned
        return {
            "worker": worker.worker,
            "name": worker.name,
            "software": worker.software,
            "engine": worker.engine,
            "hardware": worker.hardware,
            "newcomer": newcomers.is_newcomer(self.decisions.state.rules, worker),
            "rollout_ms": round(worker.rollout_ms, 1),
            "claimed": None if worker.claimed is None else asdict(worker.claimed),
            "active": worker.active,
            "state": seen.state if seen and worker.active else "away",
            "policy_version": seen.policy_version if seen else -1,
            "bundles_spooled": seen.bundles_spooled if seen else 0,
            "silent_s": round(self.clock.monotonic_s() - seen.at_s, 1) if seen else None,
            "accepted": worker.accepted,
            "refused": dict(worker.refused),
            "strikes": worker.strikes,
            "audit_share": round(audits.audit_share(self.decisions.state.rules, worker), 4),
            "audits_passed": worker.audit_score,
            "abandoned": worker.abandoned,
            "tokens_withheld": sum(one.num_tokens for one in worker.escrow),
            "evidence_nats": round(log_evidence(worker.evidence), 2),
            "calibrated": worker.calibrated,
            "open_leases": len(worker.leases),
            "pending_bundles": len(worker.pending),
            "banned": {
                "at_ms": ban.at_ms,
                "step": ban.step,
                "kind": ban.kind,
                "reason": ban.reason,
                "evidence": ban.evidence,
            }
            if ban
            else None,
            "waiting_for": self.presence.hint(worker.worker),
        }


def _steps(state: State) -> list[dict[str, Any]]:
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


class StatusPages:
    """The pages about a run. Slow ones are cached for a while (cached_response.py)."""

    def __init__(self, report: StatusReport, epochs: Epochs, clock: Clock) -> None:
        self._report = report
        self._epochs = epochs
        self._clock = clock
        self._status = CachedResponse(self._described, clock)
        self._metrics = CachedResponse(self._measured, clock)

    async def status(self) -> Response:
        """Return the run's status."""
        return self._status.get()

    async def workers(self, request: Request) -> dict[str, Any]:
        """Return the keys with the ending in the path."""
        return self._report.named(request.params["ending"])

    async def health(self) -> dict[str, Any]:
        """Return that the coordinator answers, and its epoch, which requests name."""
        epoch = self._epochs.present(read_clocks(self._clock))
        return {"ok": True, "run": self._report.run.digest, "epoch": epoch}

    async def metrics(self) -> Response:
        """Return the metrics for Prometheus."""
        return self._metrics.get()

    def _described(self) -> Response:
        return Response(json.dumps(self._report.status_of_run(), separators=(",", ":")).encode())

    def _measured(self) -> Response:
        self._report.set_gauges()
        body, content_type = self._report.metrics.exposition()
        return Response(body, content_type=content_type)
