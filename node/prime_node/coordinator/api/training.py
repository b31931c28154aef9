"""The endpoint for the trainer: the batch of a step."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from prime_node.coordinator.api.statements import BatchSeals
from prime_node.coordinator.decisions import Decisions
from prime_node.coordinator.measure.observer import Observer
from prime_node.coordinator.state import events as ev
from prime_node.coordinator.state.batches import choose_batch, forgettable_step, next_step, stale_slots
from prime_node.coordinator.state.blockers import Blockers
from prime_node.coordinator.state.effects import Topic
from prime_node.coordinator.waiting import Notifications
from prime_protocol import limits
from prime_protocol.envelope import Envelope
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.replies import NotYet
from prime_protocol.requests import BatchRequest
from prime_protocol.visible import printable

log = logging.getLogger(__name__)

RETRY_S = 0.2
"""Pause before the trainer may ask again after it waited without result."""


@dataclass(slots=True)
class TrainerBatches:
    """The batches that the trainer asks for."""

    decisions: Decisions
    notifications: Notifications
    observer: Observer
    seals: BatchSeals
    blockers: Blockers

    async def batch(self, signer: str, request: BatchRequest) -> Envelope | NotYet:
        """Return a batch of a step, its groups in slot order, once it is complete. The same request gives the same batch."""
        state = self.decisions.state
        if request.step >= state.rules.max_steps:
            raise RemoteError(ErrorCode.NOT_FOUND, f"the run ends with step {state.rules.max_steps - 1}")
        if request.part >= state.rules.batches_per_step:
            raise RemoteError(ErrorCode.NOT_FOUND, f"a step has {state.rules.batches_per_step} batches")
        if request.step < state.durable_step:
            raise RemoteError(
                ErrorCode.NOT_FOUND,
                f"step {request.step} was deleted: the trainer reported step {state.durable_step} as durable",
            )
        if request.train_ms is not None:
            self.observer.trained(request.step, request.train_ms / 1_000)
        if request.held_out is not None:
            self.observer.evaluated(request.held_out)
        durable = forgettable_step(state, min(request.durable_step, request.step))
        if durable > state.durable_step:
            self.decisions.decide(ev.TrainerDurable(durable))
        is_fixed = await self.notifications.until(
            Topic.BATCH,
            lambda: self._fix(request),
            is_worth_waiting=lambda fixed: not fixed,
            wait_s=request.wait_s,
        )
        if not is_fixed:
            return NotYet(
                reason=printable("; ".join(self.blockers.reasons()), limits.TEXT_CHARS_MAX), retry_after_s=RETRY_S
            )
        return self.seals.seal(request.step, request.part)

    def _fix(self, request: BatchRequest) -> bool:
        """Return whether the batch is fixed, now or before."""
        state = self.decisions.state
        if request.part < len(state.batches.get(request.step, ())):
            return True
        if request.step != next_step(state):
            return False
        if old := stale_slots(state, request.step):
            self.decisions.decide(ev.GroupsDropped(old))
            log.info("step %d: %d groups became too old; their slots are leased again", request.step, len(old))
        chosen = choose_batch(state)
        if chosen is None or request.part != len(state.batches.get(request.step, ())):
            return False
        self.decisions.decide(ev.BatchFixed(request.step, chosen))
        return True
