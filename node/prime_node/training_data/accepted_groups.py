"""Checks of an accepted group that the trainer repeats, and the part of its bundle that they concern. Pure.

Intake does not parse a body: a validator alone says that it fits the lease. So one wrong validator could end the run,
because a batch is fixed and the trainer meets the same data at each start. A group that fails here is left out.

The checks are those of prime_protocol.verify that need no seeds and no forward pass. Their cost is linear in the
group's bytes, and each prompt is bounded before any is expanded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from prime_protocol.limits import REWARD_MAX
from prime_protocol.replies import BatchGroup
from prime_protocol.rollout import Rollouts
from prime_protocol.run_spec import RunSpec
from prime_protocol.turns import Turn, turns_fault
from prime_protocol.verify import spans_ascend, termination_fault


def part_of(rollouts: Rollouts, members: range) -> Rollouts:
    """Return some of a bundle's rollouts, numbered from 0, without their proofs. `members` must be in the bundle."""
    first, last = np.searchsorted(rollouts.rollout_numbers, (members.start, members.stop)).tolist()
    completions = slice(first, last)
    ends_N = np.concatenate(([0], rollouts.lengths_N.cumsum(dtype=np.int64)))
    tokens = slice(int(ends_N[first]), int(ends_N[last]))
    spans = slice(*np.searchsorted(rollouts.spans_S3[:, 0], (first, last)).tolist())
    part = Rollouts(
        token_ids_T=rollouts.token_ids_T[tokens],
        logprobs_T=rollouts.logprobs_T[tokens],
        lengths_N=rollouts.lengths_N[completions],
        finish_N=rollouts.finish_N[completions],
        slots_N=rollouts.slots_N[completions],
        seeds_N=rollouts.seeds_N[completions],
        spans_S3=rollouts.spans_S3[spans] - np.array((first, 0, 0), np.int32),
    )
    if rollouts.turns_N3 is None:
        return part
    starts_N = np.concatenate(([0], rollouts.turns_N3[:, 2].cumsum(dtype=np.int64)))
    context = None if rollouts.context_P is None else rollouts.context_P[int(starts_N[first]) : int(starts_N[last])]
    rows = rollouts.turns_N3[completions] - np.array((members.start, 0, 0), np.int32)
    return replace(part, turns_N3=rows, context_P=context)


def content_fault(entry: BatchGroup, part: Rollouts, spec: RunSpec) -> str | None:
    """Return why a group's rollouts or rewards are not what the run asks for, or None. `part` is `part_of` its bundle."""
    if entry.problem.environment not in {environment.name for environment in spec.environments}:
        return f"the run has no environment {entry.problem.environment}"
    if (part.slots_N != entry.slot).any():
        return "its completions are of another slot"
    if not all(abs(reward) <= REWARD_MAX for reward in entry.rewards):  # false for NaN
        return f"a reward is above {REWARD_MAX:g} in magnitude"
    spans = spec.schedule.swap.spans_policies
    if not spans_ascend(part, oldest=entry.policy_version, newest=spec.max_steps if spans else entry.policy_version):
        return "its tokens are of other policies than the leased one"
    fault = turns_fault(part, [entry.problem.environment] * len(entry.rewards), spec)
    if fault is not None:
        return fault
    context_max = 0 if part.context_P is None else int(part.context_P.max(initial=0))
    if max(int(part.token_ids_T.max(initial=0)), context_max) >= spec.vocab_size:
        return f"a token id is not below {spec.vocab_size}"
    return termination_fault(part, spec.sampling)


def prompts_fault(entry: BatchGroup, episodes: Sequence[Sequence[Turn]], spec: RunSpec) -> str | None:
    """Return why the prompts of turns are not the group's, or None."""
    turns_max = {environment.name: environment.turns_max for environment in spec.environments}
    if turns_max[entry.problem.environment] > 1:
        return None
    is_own = all(turns[0].prompt_token_ids == entry.prompt_token_ids for turns in episodes)
    return None if is_own else "a prompt differs from the lease's"
