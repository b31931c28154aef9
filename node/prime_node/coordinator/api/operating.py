"""The endpoint for the operator: ban, unban, drain, pause, resume, limit, snapshot."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from prime_node.coordinator.decisions import Decisions
from prime_node.coordinator.state import events as ev
from prime_node.coordinator.state.persons import PersonBanned, PersonUnbanned
from prime_node.coordinator.state.records import JoiningLimits
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.requests import AdminRequest

log = logging.getLogger(__name__)


@dataclass(slots=True)
class OperatorActions:
    """Orders of the operator."""

    decisions: Decisions
    save_snapshot: Callable[[], Awaitable[None]]

    async def admin(self, signer: str, request: AdminRequest) -> None:
        """Carry out an operator's action. Idempotent."""
        log.info("operator %s: %s %s %s", signer, request.action, request.worker or "", request.reason)
        state, decide = self.decisions.state, self.decisions.decide
        match request.action:
            case "drain" if not state.draining:
                decide(ev.DrainSet())
            case "pause" if not state.paused_at_ms or state.pause_reason != request.reason:
                decide(ev.RunPaused(request.reason))
            case "resume" if state.paused_at_ms:
                decide(ev.RunResumed())
            case "limit":
                assert request.joining is not None
                limits = JoiningLimits(**request.joining.model_dump())
                if limits != state.joining:
                    decide(ev.JoiningLimited(limits))
            case "snapshot":
                await self.save_snapshot()
            case "ban" | "unban":
                self._judge(request)

    def _judge(self, request: AdminRequest) -> None:
        state, key = self.decisions.state, request.worker or ""
        worker = state.workers.get(key)
        reason = request.reason or "by the operator"
        if key in state.persons or key in state.banned_persons:
            if request.action == "ban" and key not in state.banned_persons:
                self.decisions.decide(PersonBanned(key, reason))
            if request.action == "unban":
                self.decisions.decide(PersonUnbanned(key))
            return
        if worker is None:
            raise RemoteError(ErrorCode.UNKNOWN_WORKER, f"no worker and no person has the key {key}")
        if request.action == "ban" and worker.banned is None:
            self.decisions.decide(ev.WorkerBanned(worker.worker, reason))
        if request.action == "unban" and worker.banned is not None:
            self.decisions.decide(ev.WorkerUnbanned(worker.worker))
