"""The signed batches: their content, which is the same each time, and their digests."""

from __future__ import annotations

from dataclasses import dataclass, field

from prime_node.coordinator.assignments import Assigner
from prime_node.coordinator.decisions import Decisions
from prime_protocol.digest import digest_of
from prime_protocol.envelope import Envelope, PayloadType, seal
from prime_protocol.identity import SigningKey
from prime_protocol.messages import BatchGroup, TrainBatch
from prime_protocol.run_spec import PinnedRun


@dataclass(frozen=True, slots=True)
class BatchDigests:
    """The digests of a batch that was handed out."""

    payload: str
    """Digest that the next batch of the same step names."""
    envelope: str
    """Digest that the manifest of the resulting policy names."""


@dataclass(slots=True)
class BatchSeals:
    """The batches that are fixed, signed on request."""

    run: PinnedRun
    key: SigningKey
    decisions: Decisions
    assigner: Assigner
    known: dict[tuple[int, int], BatchDigests] = field(default_factory=dict)
    """Digests by step and part, so that publishing a policy does not make and sign its batches again."""

    def seal(self, step: int, part: int) -> Envelope:
        """Return the signed batch, and remember its digests until the trainer is durable past the step."""
        envelope = seal(self._make(step, part), PayloadType.BATCH, self.key)
        known, durable = self.known, self.decisions.state.durable_step
        known[step, part] = BatchDigests(payload=digest_of(envelope.payload), envelope=envelope.digest)
        for old in [key for key in known if key[0] < min(durable, step)]:
            del known[old]
        return envelope

    def digests(self, step: int, part: int) -> BatchDigests:
        """Return the digests of a fixed batch. Only after a restart the batch is made again."""
        if (step, part) not in self.known:
            self.seal(step, part)
        return self.known[step, part]

    def _make(self, step: int, part: int) -> TrainBatch:
        """Return the batch to sign. It contains only settled facts, so its bytes are the same each time."""
        state, groups = self.decisions.state, []
        for slot in state.batches[step][part]:
            group = state.steps[slot // state.rules.groups_per_step].accepted[slot]
            problem, prompt = self.assigner.problem(slot)
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
            run=self.run.digest,
            step=step,
            groups=tuple(groups),
            part=part,
            previous=self.digests(step, part - 1).payload if part else None,
        )
