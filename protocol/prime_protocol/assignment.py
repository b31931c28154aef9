"""What a worker is asked to do: a lease over groups of completions, with the randomness of each one fixed in advance."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from prime_protocol import limits
from prime_protocol.digest import Digest
from prime_protocol.envelope import WireModel
from prime_protocol.identity import KeyId
from prime_protocol.noise import SEED_MAX
from prime_protocol.visible import VISIBLE

Seed = Annotated[int, Field(ge=0, le=SEED_MAX)]
Name = Annotated[str, Field(min_length=1, max_length=limits.NAME_CHARS_MAX, pattern=VISIBLE)]
Text = Annotated[str, Field(max_length=limits.TEXT_CHARS_MAX, pattern=VISIBLE)]
"""For a person."""
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
TokenIds = Annotated[tuple[TokenId, ...], Field(max_length=limits.TOKENS_MAX)]
Step = Annotated[int, Field(ge=0, le=limits.STEP_MAX)]
"""A training step or a policy version."""
Count = Annotated[int, Field(ge=0, le=limits.COUNT_MAX)]
"""A number of things, bytes or milliseconds."""


class Sampling(WireModel):
    """How completions are sampled, the same for the whole run. Example: Sampling(temperature=1.0, completion_tokens_max=8)."""

    temperature: float = Field(default=1.0, ge=0.0, le=10.0)
    """Divides the logits before sampling and before the recorded logprobs are taken. 0 is greedy."""
    completion_tokens_max: int = Field(ge=1, le=limits.TOKENS_MAX)
    """A completion ends here if no stop token came, the stop token included."""
    stop_token_ids: tuple[TokenId, ...] = Field(max_length=64)
    """A completion ends with the first of these; it is part of the completion."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0, exclude_if=lambda top_p: top_p == 1.0)
    """Tokens may be chosen where those more probable have less mass than this together. 1 lets all."""
    top_k: int = Field(default=0, ge=0, le=2**24, exclude_if=lambda top_k: not top_k)
    """Tokens may be chosen where fewer than this many are more probable. 0 lets all."""
    min_p: float = Field(default=0.0, ge=0.0, le=1.0, exclude_if=lambda min_p: not min_p)
    """Tokens may be chosen that have at least this share of the most probable one's probability. 0 lets all."""

    @property
    def filters(self) -> tuple[float, int, float] | None:
        """(top_p, top_k, min_p), or None where every token may be chosen. Greedy choice is never filtered."""
        found = (self.top_p, self.top_k, self.min_p)
        return None if self.temperature == 0.0 or found == (1.0, 0, 0.0) else found


HELD_OUT_START = 2**48
"""Problem indices from here on are held-out ones: HELD_OUT_START + n is the environment's evaluation problem n."""


class Problem(WireModel):
    """One problem of one environment. Example: Problem(environment="spell_backward", index=17)."""

    environment: Name
    """Name of an environment of the RunSpec."""
    index: Count
    """Number of the problem; the environment and the index together are the problem, for ever."""


class GroupAssignment(WireModel):
    """One prompt and the seeds of its G completions."""

    slot: Count
    """The group's number in the run, counted from 0. Its step is slot // groups_per_step; beyond the last step it is a place of
    an evaluation."""
    problem: Problem
    prompt_token_ids: TokenIds = Field(min_length=1)
    """The prompt as the coordinator renders it. The worker feeds exactly this."""
    seeds: tuple[Seed, ...] = Field(min_length=1, max_length=limits.LEASE_ROLLOUTS_MAX)
    """One seed for each completion. Length G."""


class Lease(WireModel):
    """The coordinator's signed, time-limited promise of some groups to one worker."""

    run: Digest
    lease_id: Digest
    worker: KeyId
    step: Step
    """The step of these slots, slot // groups_per_step: the one that trains them, where batches are in order."""
    policy_version: Step
    """The policy to sample from: the one that the worker said it holds."""
    policy_digest: Digest
    """Digest of that policy's manifest."""
    groups: tuple[GroupAssignment, ...] = Field(min_length=1, max_length=limits.LEASE_ROLLOUTS_MAX)
    sampling: Sampling
    issued_at_ms: Count
    """Unix time by the coordinator's clock."""
    expires_at_ms: Count
    """After this the groups go to somebody else."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if len({group.slot for group in self.groups}) != len(self.groups):
            raise ValueError("a lease names a slot once")
        if self.num_rollouts > limits.LEASE_ROLLOUTS_MAX:
            raise ValueError(f"a lease asks for at most {limits.LEASE_ROLLOUTS_MAX} rollouts")
        if self.expires_at_ms < self.issued_at_ms:
            raise ValueError("a lease ends after it begins")
        return self

    @property
    def is_evaluation(self) -> bool:
        """True if it asks for held-out problems. A lease never mixes them with others."""
        return self.groups[0].problem.index >= HELD_OUT_START

    @property
    def num_rollouts(self) -> int:
        return sum(len(group.seeds) for group in self.groups)
