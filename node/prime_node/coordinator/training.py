"""What the trainer asks for: the batch of a step."""

from __future__ import annotations

from prime_node.coordinator import events as ev
from prime_node.coordinator.core import Core
from prime_node.coordinator.records import Topic
from prime_node.coordinator.scheduler import forgettable_step, waits_for
from prime_protocol.envelope import Envelope, PayloadType, seal
from prime_protocol.errors import ErrorCode, PeerError
from prime_protocol.messages import BatchGroup, BatchRequest, NotYet, TrainBatch

RETRY_S = 0.2
"""How soon the trainer may ask again after it waited in vain."""


async def batch(core: Core, signer: str, request: BatchRequest) -> Envelope | NotYet:
    """All groups of one step in slot order, once the last one is accepted. The same step gives the same batch for ever."""
    state = core.state
    if request.step >= state.rules.max_steps:
        raise PeerError(ErrorCode.NOT_FOUND, f"the run ends with step {state.rules.max_steps - 1}")
    if request.step < state.first_step:
        raise PeerError(
            ErrorCode.NOT_FOUND, f"step {request.step} is forgotten: the trainer was durable at {state.first_step}"
        )
    durable = forgettable_step(state, min(request.durable_step, request.step))
    if durable > state.first_step:
        core.decide(ev.TrainerDurable(durable))
    is_ready = await core.news.until(
        Topic.BATCH,
        lambda: state.is_ready(request.step),
        is_worth_waiting=lambda ready: not ready,
        wait_s=request.wait_s,
    )
    if not is_ready:
        return NotYet(reason="; ".join(waits_for(state))[:500], retry_after_s=RETRY_S)
    if not state.steps[request.step].fixed:
        core.decide(ev.BatchFixed(request.step))
    return seal(make_batch(core, request.step), PayloadType.BATCH, core.key)


def make_batch(core: Core, step: int) -> TrainBatch:
    """The signed list; the same bytes each time, because it holds nothing but what was settled."""
    groups = []
    for slot, group in sorted(core.state.steps[step].accepted.items()):
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
            )
        )
    return TrainBatch.model_construct(run=core.run.digest, step=step, groups=tuple(groups))
