"""Leases: groups of completions that a worker is asked for, with each completion's randomness fixed in advance."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, field_validator, model_validator

from prime_protocol import limits
from prime_protocol.digest import Digest
from prime_protocol.envelope import WireModel
from prime_protocol.identity import KeyId
from prime_protocol.noise import SEED_MAX
from prime_protocol.visible import VISIBLE

Seed = Annotated[int, Field(ge=0, le=SEED_MAX)]
Name = Annotated[str, Field(min_length=1, max_length=limits.NAME_CHARS_MAX, pattern=VISIBLE)]
Text = Annotated[str, Field(max_length=limits.TEXT_CHARS_MAX, pattern=VISIBLE)]
"""Text for a person to read."""
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
TokenIds = Annotated[tuple[TokenId, ...], Field(max_length=limits.TOKENS_MAX)]
Step = Annotated[int, Field(ge=0, le=limits.STEP_MAX)]
"""Training step or policy version."""
Count = Annotated[int, Field(ge=0, le=limits.COUNT_MAX)]
"""Number of things, bytes or milliseconds."""


class Sampling(WireModel):
    """Sampling parameters of the whole run. Example: Sampling(temperature=1.0, completion_tokens_max=8)."""

    temperature: float = Field(default=1.0, ge=0.0, le=10.0)
    """Divisor of the logits before sampling and before the recorded logprobs: 0, which is greedy, or at least TEMPERATURE_MIN."""
    completion_tokens_max: int = Field(ge=1, le=limits.TOKENS_MAX)
    """Length at which a completion ends without a stop token; a stop token counts."""
    stop_token_ids: tuple[TokenId, ...] = Field(max_length=64)
    """Tokens that end a completion; the stop token is part of the completion."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0, exclude_if=lambda top_p: top_p == 1.0)
    """Nucleus limit: a token is allowed if the more probable ones together have less mass than this. 1 allows all."""
    top_k: int = Field(default=0, ge=0, le=2**24, exclude_if=lambda top_k: not top_k)
    """Rank limit: a token is allowed if fewer than this many are more probable. 0 allows all."""
    min_p: float = Field(default=0.0, ge=0.0, le=1.0, exclude_if=lambda min_p: not min_p)
    """Relative limit: a token is allowed with at least this share of the most probable one's probability. 0 allows all."""

    @field_validator("temperature")
    @classmethod
    def _divides(cls, temperature: float) -> float:
        if 0.0 < temperature < limits.TEMPERATURE_MIN:
            raise ValueError(f"it must be 0 or at least {limits.TEMPERATURE_MIN:g}")
        return temperature

    @property
    def filters(self) -> tuple[float, int, float] | None:
        """Filters (top_p, top_k, min_p), or None if every token is allowed. Greedy choice is never filtered."""
        found = (self.top_p, self.top_k, self.min_p)
        return None if self.temperature == 0.0 or found == (1.0, 0, 0.0) else found


HELD_OUT_START = 2**48
"""First held-out problem index: HELD_OUT_START + n is the environment's evaluation problem n."""


class Problem(WireModel):
    """One problem of one environment. Example: Problem(environment="spell_backward", index=17)."""

    environment: Name
    """Name of an environment of the RunSpec."""
    index: Count
    """Number of the problem; environment and index identify it permanently."""


class GroupAssignment(WireModel):
    """One prompt and the seeds of its G completions."""

    slot: Count
    """Number of the group in the run, counted from 0. Its step is slot // groups_per_step; beyond the last step it is a
    place of an evaluation."""
    problem: Problem
    prompt_token_ids: TokenIds = Field(min_length=1)
    """Prompt as the coordinator renders it. The worker feeds exactly this."""
    seeds: tuple[Seed, ...] = Field(min_length=1, max_length=limits.LEASE_ROLLOUTS_MAX)
    """One seed for each completion. Length G."""


class Lease(WireModel):
    """Coordinator's signed, time-limited grant of some groups to one worker."""

    run: Digest
    lease_id: Digest
    worker: KeyId
    step: Step
    """Step of these slots, slot // groups_per_step. With batches in order, it trains them."""
    policy_version: Step
    """Policy to sample from: the policy that the worker reported."""
    policy_digest: Digest
    """Digest of that policy's manifest."""
    groups: tuple[GroupAssignment, ...] = Field(min_length=1, max_length=limits.LEASE_ROLLOUTS_MAX)
    sampling: Sampling
    issued_at_ms: Count
    """Unix time by the coordinator's clock."""
    expires_at_ms: Count
    """Time after which the groups go to another worker."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if len({group.slot for group in self.groups}) != len(self.groups):
            raise ValueError("a lease must name each slot once")
        if self.num_rollouts > limits.LEASE_ROLLOUTS_MAX:
            raise ValueError(f"a lease asks for at most {limits.LEASE_ROLLOUTS_MAX} rollouts")
        if self.expires_at_ms < self.issued_at_ms:
            raise ValueError("a lease must end after it begins")
        return self

    @property
    def is_evaluation(self) -> bool:
        """Whether the lease asks for held-out problems. A lease never mixes them with others."""
        return self.groups[0].problem.index >= HELD_OUT_START

    @property
    def num_rollouts(self) -> int:
        """Number of completions that the lease asks for."""
        return sum(len(group.seeds) for group in self.groups)
