"""The coordinator's status: /v1/status for people and programs, /metrics for Prometheus."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from itertools import chain, islice
from typing import Any

from prime_node.coordinator.agreement import Agreement
from prime_node.coordinator.api.admission import joining_rules
from prime_node.coordinator.api.cached_response import CachedResponse
from prime_node.coordinator.api.clock_readings import read_clocks
from prime_node.coordinator.api.nonces import Epochs
from prime_node.coordinator.config import CoordinatorConfig
from prime_node.coordinator.curation import Curation
from prime_node.coordinator.decisions import Decisions
from prime_node.coordinator.evaluating import Evaluations
from prime_node.coordinator.listed_peers import Peers
from prime_node.coordinator.measure.history import RunHistory
from prime_node.coordinator.measure.observer import Observer
from prime_node.coordinator.measure.standings import Standings
from prime_node.coordinator.measure.state_rows import run_row, worker_row, workers_by_activity
from prime_node.coordinator.presence import Presence
from prime_node.coordinator.state.blockers import Blockers
from prime_node.coordinator.state.records import WorkerRecord
from prime_node.ports.clock import Clock
from prime_node.ports.metrics import Metrics
from prime_node.ports.web import Request, Response
from prime_protocol.replies import Standing
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
    config: CoordinatorConfig
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
    history: RunHistory
    standings: Standings

    def status_of_run(self) -> dict[str, Any]:
        """Return the run's status. Example: {"step": 3, "head": 3, "waiting_for": ["..."], "workers": [...], ...}."""
        state = self.decisions.state
        return {
            **run_row(self.run, state, self.history),
            "joining_rules": asdict(joining_rules(state, self.config)),
            "waiting_for": self.blockers.reasons(),
            "usable": self.observer.availability.as_rows(AVAILABLE_SHOWN_MAX),
            "peers": len(self.peers),
            "validators": self.agreement.as_row(),
            "evaluations": self.evaluations.as_rows(state),
            "workers": [self._worker(worker) for worker in workers_by_activity(state)[:WORKERS_SHOWN_MAX]],
            "server_time_ms": self.clock.now_ms(),
        }

    def named(self, ending: str) -> dict[str, Any]:
        """Return the keys of workers and persons with this ending. Example: {"workers": ["12D3KooW..."]}."""
        state = self.decisions.state
        found = (key for key in chain(state.workers, state.persons) if key.endswith(ending))
        return {"workers": list(islice(found, NAMED_MAX))}

    def set_gauges(self) -> None:
        """Update the gauges before they are read."""
        state, metrics = self.decisions.state, self.metrics
        metrics.set("prime_head", state.head)
        metrics.set("prime_max_steps", state.rules.max_steps)
        metrics.set("prime_paused", bool(state.paused_at_ms))
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
        return {
            **worker_row(self.decisions.state, worker),
            "state": seen.state if seen and worker.active else "away",
            "policy_version": seen.policy_version if seen else -1,
            "bundles_spooled": seen.bundles_spooled if seen else 0,
            "silent_s": round(self.clock.monotonic_s() - seen.at_s, 1) if seen else None,
            "waiting_for": self.presence.hint(worker.worker),
        }


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

    async def standing(self, request: Request) -> Standing:
        """Return the standing of the key in the path, of a worker or of a person. Raise RemoteError(NOT_FOUND)."""
        return self._report.standings.standing_of(request.params["key"])

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
