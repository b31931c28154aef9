"""What a worker is asked to do: a lease over groups of completions, with the randomness of each one fixed in advance."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from prime_protocol import limits
from prime_protocol.digest import Digest
from prime_protocol.envelope import WireModel
from prime_protocol.identity import KeyId
from prime_protocol.noise import SEED_MAX

Seed = Annotated[int, Field(ge=0, le=SEED_MAX)]
Name = Annotated[str, Field(min_length=1, max_length=limits.NAME_CHARS_MAX)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]


class Sampling(WireModel):
    """How completions are sampled, the same for the whole run. Example: Sampling(temperature=1.0, completion_tokens_max=8)."""

    temperature: float = Field(default=1.0, ge=0.0, le=10.0)
    """Divides the logits before sampling and before the recorded logprobs are taken. 0 is greedy."""
    completion_tokens_max: int = Field(ge=1, le=1_048_576)
    """A completion ends here if no stop token came, the stop token included."""
    stop_token_ids: tuple[TokenId, ...] = Field(max_length=64)
    """A completion ends with the first of these; it is part of the completion."""


class Problem(WireModel):
    """One problem of one environment. Example: Problem(environment="spell_backward", index=17)."""

    environment: Name
    """Name of an environment of the RunSpec."""
    index: int = Field(ge=0, le=2**53)
    """Number of the problem; the environment and the index together are the problem, for ever."""


class GroupAssignment(WireModel):
    """One prompt and the seeds of its G completions."""

    slot: int = Field(ge=0, le=2**53)
    """The group's number in the run, counted from 0. Its step is slot // groups_per_step."""
    problem: Problem
    prompt_token_ids: tuple[TokenId, ...] = Field(min_length=1)
    """The prompt as the coordinator renders it. The worker feeds exactly this."""
    seeds: tuple[Seed, ...] = Field(min_length=1, max_length=limits.LEASE_ROLLOUTS_MAX)
    """One seed for each completion. Length G."""


class Lease(WireModel):
    """The coordinator's signed, time-limited promise of some groups to one worker."""

    run: Digest
    lease_id: Digest
    worker: KeyId
    step: int = Field(ge=0)
    """The step that these rollouts will be trained at."""
    policy_version: int = Field(ge=0)
    """The policy to sample from: the one that the worker said it holds."""
    policy_digest: Digest
    """Digest of that policy's manifest."""
    groups: tuple[GroupAssignment, ...] = Field(min_length=1)
    sampling: Sampling
    issued_at_ms: int = Field(ge=0)
    """Unix time by the coordinator's clock."""
    expires_at_ms: int = Field(ge=0)
    """After this the groups go to somebody else."""

    @property
    def num_rollouts(self) -> int:
        return sum(len(group.seeds) for group in self.groups)
