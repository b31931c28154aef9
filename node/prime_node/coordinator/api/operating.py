"""The endpoint for the operator: ban, unban, drain."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from prime_node.coordinator.decisions import Decisions
from prime_node.coordinator.state import events as ev
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.requests import AdminRequest

log = logging.getLogger(__name__)


@dataclass(slots=True)
class OperatorActions:
    """Orders of the operator."""

    decisions: Decisions

    async def admin(self, signer: str, request: AdminRequest) -> None:
        """Carry out an operator's action. Idempotent."""
        log.info("operator %s: %s %s %s", signer, request.action, request.worker or "", request.reason)
        if request.action == "drain":
            if not self.decisions.state.draining:
                self.decisions.decide(ev.DrainSet())
            return
        worker = self.decisions.state.workers.get(request.worker or "")
        if worker is None:
            raise RemoteError(ErrorCode.UNKNOWN_WORKER, f"no worker has the key {request.worker}")
        if request.action == "ban" and worker.banned is None:
            self.decisions.decide(ev.WorkerBanned(worker.worker, request.reason or "by the operator"))
        if request.action == "unban" and worker.banned is not None:
            self.decisions.decide(ev.WorkerUnbanned(worker.worker))
