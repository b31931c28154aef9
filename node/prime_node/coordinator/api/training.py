"""The endpoint for the trainer: the batch of a step."""

from __future__ import annotations

import logging

from prime_node.coordinator.core import BatchDigests, Core
from prime_node.coordinator.state import events as ev
from prime_node.coordinator.state.batching import choose_batch, next_step, stale_slots
from prime_node.coordinator.state.effects import Topic
from prime_node.coordinator.state.retained import forgettable_step
from prime_node.coordinator.watchdog import waiting
from prime_protocol import limits
from prime_protocol.digest import digest_of
from prime_protocol.envelope import Envelope, PayloadType, seal
from prime_protocol.errors import ErrorCode, PeerError
from prime_protocol.messages import BatchGroup, BatchRequest, NotYet, TrainBatch
from prime_protocol.visible import printable

log = logging.getLogger(__name__)

RETRY_S = 0.2
"""Pause before the trainer may ask again after it waited without result."""


async def batch(core: Core, signer: str, request: BatchRequest) -> Envelope | NotYet:
    """Return a batch of a step, its groups in slot order, once it is complete. The same request always gives the same batch."""
    state = core.state
    if request.step >= state.rules.max_steps:
        raise PeerError(ErrorCode.NOT_FOUND, f"the run ends with step {state.rules.max_steps - 1}")
    if request.part >= state.rules.batches_per_step:
        raise PeerError(ErrorCode.NOT_FOUND, f"a step has {state.rules.batches_per_step} batches")
    if request.step < state.durable_step:
        raise PeerError(
            ErrorCode.NOT_FOUND, f"step {request.step} is forgotten: the trainer was durable at {state.durable_step}"
        )
    if request.train_ms is not None:
        core.observer.trained(request.step, request.train_ms / 1_000)
    durable = forgettable_step(state, min(request.durable_step, request.step))
    if durable > state.durable_step:
        core.decide(ev.TrainerDurable(durable))
    is_fixed = await core.news.until(
        Topic.BATCH,
        lambda: _fix(core, request),
        is_worth_waiting=lambda fixed: not fixed,
        wait_s=request.wait_s,
    )
    if not is_fixed:
        return NotYet(reason=printable("; ".join(waiting(core)), limits.TEXT_CHARS_MAX), retry_after_s=RETRY_S)
    return seal_batch(core, request.step, request.part)


def _fix(core: Core, request: BatchRequest) -> bool:
    """Return whether the batch is fixed, now or before."""
    state = core.state
    if request.part < len(state.batches.get(request.step, ())):
        return True
    if request.step != next_step(state):
        return False
    if old := stale_slots(state, request.step):
        core.decide(ev.GroupsDropped(old))
        log.info("step %d: %d groups had become too old; their slots are leased again", request.step, len(old))
    chosen = choose_batch(state)
    if chosen is None or request.part != len(state.batches.get(request.step, ())):
        return False
    core.decide(ev.BatchFixed(request.step, chosen))
    return True


def seal_batch(core: Core, step: int, part: int) -> Envelope:
    """Return the signed batch, and remember its digests until the trainer is durable past the step."""
    envelope = seal(make_batch(core, step, part), PayloadType.BATCH, core.key)
    known, durable = core.batch_digests, core.state.durable_step
    known[step, part] = BatchDigests(payload=digest_of(envelope.payload), envelope=envelope.digest)
    for old in [key for key in known if key[0] < min(durable, step)]:
        del known[old]
    return envelope


def batch_digests(core: Core, step: int, part: int) -> BatchDigests:
    """Return the digests of a fixed batch. Only after a restart the batch is made again."""
    if (step, part) not in core.batch_digests:
        seal_batch(core, step, part)
    return core.batch_digests[step, part]


def make_batch(core: Core, step: int, part: int) -> TrainBatch:
    """Return the batch to sign. It contains only settled facts, so its bytes are the same each time."""
    state, groups = core.state, []
    for slot in state.batches[step][part]:
        group = state.steps[slot // state.rules.groups_per_step].accepted[slot]
        problem, prompt = core.assigner.problem(slot)
        groups.append(
            BatchGroup.model_construct(
                slot=slot,
                problem=problem,
                prompt_token_ids=prompt,
                worker=group.worker,
                policy_version=group.policy_version,
                bundle=group.bundle,
                first=group.first,
                rewards=group.rewards,
                unscored=group.unscored,
                logprobs=group.logprobs or None,
            )
        )
    return TrainBatch.model_construct(
        run=core.run.digest,
        step=step,
        groups=tuple(groups),
        part=part,
        previous=batch_digests(core, step, part - 1).payload if part else None,
    )
