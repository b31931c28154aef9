"""The endpoint for the trainer: the batch of a step."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from prime_node.coordinator.api.bundles import BundleStorage
from prime_node.coordinator.api.statements import BatchSeals
from prime_node.coordinator.decisions import Decisions
from prime_node.coordinator.measure.observer import Observer
from prime_node.coordinator.state import events as ev
from prime_node.coordinator.state.batches import (
    CHOICE_RULES,
    choose_batch,
    forgettable_step,
    next_step,
    stale_slots,
    stored_of,
)
from prime_node.coordinator.state.blockers import Blockers
from prime_node.coordinator.state.effects import Topic
from prime_node.coordinator.waiting import Notifications
from prime_node.traces import of_step, spanned
from prime_protocol import limits
from prime_protocol.envelope import Envelope
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.replies import NotYet
from prime_protocol.requests import BatchRequest
from prime_protocol.visible import printable

log = logging.getLogger(__name__)

RETRY_S = 0.2
"""Pause before the trainer may ask again after it waited without result."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The slots of a batch, and the event in whose state they were chosen."""

    slots: tuple[int, ...]
    after: int


@dataclass(slots=True)
class TrainerBatches:
    """The batches that the trainer asks for."""

    decisions: Decisions
    notifications: Notifications
    observer: Observer
    seals: BatchSeals
    blockers: Blockers
    bundles: BundleStorage

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
        chosen = await self.notifications.until(
            Topic.BATCH,
            lambda: self._choose(request),
            is_worth_waiting=lambda choice: choice is None,
            wait_s=request.wait_s,
        )
        if chosen is None or (chosen.slots and not await self._fix(request, chosen)):
            return NotYet(
                reason=printable("; ".join(self.blockers.reasons()), limits.TEXT_CHARS_MAX), retry_after_s=RETRY_S
            )
        return self.seals.seal(request.step, request.part)

    async def _fix(self, request: BatchRequest, chosen: Choice) -> bool:
        """Fix a batch whose bytes are intact. Otherwise drop the groups of damaged bundles, and return False.

        Groups that are accepted while the bytes are read change nothing. The trainer's next request finds what another
        request changed meanwhile.
        """
        state, part = self.decisions.state, request.part
        stored = {slot: stored_of(state, slot) for slot in chosen.slots}
        damaged = await self.bundles.damaged({digest for digests in stored.values() for digest in digests})
        for digest in sorted(damaged):
            log.error("bundle %s is damaged or lost on this disk; its groups are leased again. Check the disk", digest)
        if lost := tuple(slot for slot in chosen.slots if damaged & stored_of(state, slot)):
            self.decisions.decide(ev.GroupsLost(lost))
        elif (
            request.step == next_step(state)
            and part == len(state.batches.get(request.step, ()))
            and all(stored_of(state, slot) == digests for slot, digests in stored.items())
        ):
            with spanned("batch", of_step(request.step), step=request.step, part=part, num_groups=len(chosen.slots)):
                self.decisions.decide(ev.BatchFixed(request.step, chosen.slots, chosen.after, CHOICE_RULES))
        return part < len(state.batches.get(request.step, ()))

    def _choose(self, request: BatchRequest) -> Choice | None:
        """Return the batch, without slots if it is fixed already; None if it has to wait."""
        state = self.decisions.state
        if request.part < len(state.batches.get(request.step, ())):
            return Choice((), self.decisions.number)
        if request.step != next_step(state):
            return None
        if old := stale_slots(state, request.step):
            self.decisions.decide(ev.GroupsDropped(old, CHOICE_RULES))
            log.info("step %d: %d groups became too old; their slots are leased again", request.step, len(old))
        if request.part != len(state.batches.get(request.step, ())) or (slots := choose_batch(state)) is None:
            return None
        return Choice(slots, self.decisions.number)
