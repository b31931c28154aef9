"""Rollouts of several turns: the model's prompt and answer at each turn.

An environment that answers (a game, a tool, another agent) makes a rollout of several requests to the engine. Each is
recorded separately, so nothing is rendered or tokenised twice. In such a bundle a completion is one turn's answer. Two
more tensors record which rollout it belongs to and which tokens it was sampled after:

    turns    int32 [N, 3]  (rollout, kept, new) of each completion: its prompt is the first `kept` tokens of its rollout's
                           history, followed by `new` tokens of `context`
    context  int32 [P]     new tokens of all prompts, concatenated; omitted if empty

The history is the prompt and the answer of the previous turn; at the first turn it is the prompt of the lease. So a
turn that continues costs only the environment's text, and one that starts over (stripped thinking, another agent) costs
its prompt. The answer of turn t is sampled with `turn_seed(assigned seed, t)`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

import numpy as np
from blake3 import blake3

from prime_protocol.assignment import Lease
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.noise import SEED_MAX
from prime_protocol.rollout import Completion, Rollouts, recorded
from prime_protocol.run_spec import RunSpec

TokenIds = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Turn:
    """One request to the engine and its answer."""

    prompt_token_ids: TokenIds
    completion: Completion


def turn_seed(seed: int, turn: int) -> int:
    """Return the seed of a rollout's turn, counted from 0: turn 0 has the assigned seed itself."""
    if turn == 0:
        return seed
    digest = blake3(f"prime-node turn {seed} {turn}".encode()).digest(length=8)
    return int.from_bytes(digest, "big") & SEED_MAX


def rollouts_of_turns(lease: Lease, episodes: Sequence[Sequence[Turn]]) -> Rollouts:
    """Return what an honest worker uploads: the turns of each rollout, in the lease's order of groups and seeds."""
    rows: list[tuple[int, int, int]] = []
    context: list[int] = []
    prompts = _prompts_of_lease(lease)
    for number, turns in enumerate(episodes):
        before = next(prompts)
        for turn in turns:
            pairs = zip(before, turn.prompt_token_ids, strict=False)
            kept = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            new = turn.prompt_token_ids[kept:]
            rows.append((number, kept, len(new)))
            context += new
            before = turn.prompt_token_ids + turn.completion.token_ids
    slots = [group.slot for group in lease.groups for _ in group.seeds]
    seeds = [seed for group in lease.groups for seed in group.seeds]
    numbered = [(number, place) for number, turns in enumerate(episodes) for place in range(len(turns))]
    return replace(
        recorded(lease, [turn.completion for turns in episodes for turn in turns]),
        slots_N=np.array([slots[number] for number, _ in numbered], np.int64),
        seeds_N=np.array([turn_seed(seeds[number], place) for number, place in numbered], np.int64),
        turns_N3=np.array(rows, np.int32),
        context_P=np.array(context, np.int32) if context else None,
    )


def episodes_of(rollouts: Rollouts, lease: Lease) -> list[list[Turn]]:
    """Return the turns of each rollout of a lease, with full prompts.

    Raises RemoteError if a turn keeps more tokens than its history has.
    """
    prompts = list(_prompts_of_lease(lease))
    if len(prompts) != rollouts.num_rollouts:
        raise RemoteError(ErrorCode.MALFORMED, f"{rollouts.num_rollouts} rollouts; the lease asks for {len(prompts)}")
    return list(episodes_behind(rollouts, prompts))


def episodes_behind(rollouts: Rollouts, prompts: Sequence[TokenIds]) -> Iterator[list[Turn]]:
    """Return the same for as many rollouts as prompts are given, from the first one on."""
    if rollouts.turns_N3 is None:
        for number, prompt in enumerate(prompts):
            yield [Turn(prompt, rollouts.completion(number))]
        return
    completions, context, place = rollouts.completions(), rollouts.context, 0
    episodes: dict[int, list[Turn]] = {number: [] for number in range(len(prompts))}
    for completion, (number, kept, new) in zip(completions, rollouts.turns_N3.tolist(), strict=True):
        environment_ids = tuple(context[place : place + new])
        place += new
        if number not in episodes:
            continue
        turns = episodes[number]
        before = turns[-1].prompt_token_ids + turns[-1].completion.token_ids if turns else prompts[number]
        if kept > len(before):
            raise RemoteError(ErrorCode.MALFORMED, f"a turn of rollout {number} keeps {kept} of {len(before)} tokens")
        turns.append(Turn(before[:kept] + environment_ids, completion))
    yield from episodes.values()


def joined(turns: Sequence[Turn]) -> Completion:
    """Join all sampled tokens into one completion."""
    if len(turns) == 1:
        return turns[0].completion
    return Completion(
        tuple(token for turn in turns for token in turn.completion.token_ids),
        tuple(logprob for turn in turns for logprob in turn.completion.logprobs),
        turns[-1].completion.finish,
    )


def has_assigned_seeds(rollouts: Rollouts, lease: Lease) -> bool:
    """Return whether slots and seeds are the lease's, in its order, for every turn."""
    slots = [group.slot for group in lease.groups for _ in group.seeds]
    seeds = [seed for group in lease.groups for seed in group.seeds]
    if rollouts.num_rollouts != len(slots):
        return False
    numbers = rollouts.rollout_numbers.tolist()
    places = [0] * len(numbers)
    for index in range(1, len(numbers)):
        places[index] = places[index - 1] + 1 if numbers[index] == numbers[index - 1] else 0
    wanted = [turn_seed(seeds[number], place) for number, place in zip(numbers, places, strict=True)]
    same_slots = rollouts.slots_N.tolist() == [slots[number] for number in numbers]
    return same_slots and bool(rollouts.seeds_N.tolist() == wanted)


def size_fault(rollouts: Rollouts, lease: Lease, spec: RunSpec | None) -> str | None:
    """Return why turns are more, or their prompts longer, than the lease's environments allow, or None.

    Call it before expanding any prompt: each may repeat all of its previous turns, however small the bundle is. Without
    `spec` each rollout has one turn.
    """
    of_rollouts = [group.problem.environment for group in lease.groups for _ in group.seeds]
    if rollouts.turns_N3 is None or rollouts.num_rollouts != len(of_rollouts):
        return None
    if spec is None:
        return "the run has no environment of several turns"
    return turns_fault(rollouts, of_rollouts, spec)


def turns_fault(rollouts: Rollouts, of_rollouts: Sequence[str], spec: RunSpec) -> str | None:
    """Return why turns are more, or their prompts longer, than the environment of each rollout allows, or None."""
    if rollouts.turns_N3 is None:
        return None
    environments = {environment.name: environment for environment in spec.environments}
    numbers_N = rollouts.rollout_numbers
    for name, turns in zip(of_rollouts, np.bincount(numbers_N).tolist(), strict=True):
        if turns > environments[name].turns_max:
            return f"{turns} turns, environment {name} has {environments[name].turns_max}"
    lengths_N = rollouts.turns_N3[:, 1:].sum(axis=1, dtype=np.int64)
    for number, length in zip(numbers_N.tolist(), lengths_N.tolist(), strict=True):
        bound = spec.context_tokens_max(environments[of_rollouts[number]]) - spec.sampling.completion_tokens_max
        if not 1 <= length <= bound:
            return f"a prompt of {length} tokens; environment {of_rollouts[number]} has 1 to {bound}"
    return None


def prompt_fault(rollouts: Rollouts, lease: Lease, spec: RunSpec | None) -> str | None:
    """Return why prompts of turns with valid sizes cannot be the lease's, or None.

    Raises RemoteError if they cannot be read.
    """
    if rollouts.turns_N3 is None or spec is None:
        return None
    environments = {environment.name: environment for environment in spec.environments}
    of_rollouts = [environments[group.problem.environment] for group in lease.groups for _ in group.seeds]
    for environment, prompt, turns in zip(
        of_rollouts, _prompts_of_lease(lease), episodes_of(rollouts, lease), strict=True
    ):
        if environment.turns_max == 1 and turns[0].prompt_token_ids != prompt:
            return "a prompt differs from the lease's"
        if any(max(turn.prompt_token_ids) >= spec.vocab_size for turn in turns):
            return "a token of a prompt is outside the vocabulary"
    return None


def _prompts_of_lease(lease: Lease) -> Iterator[TokenIds]:
    return (group.prompt_token_ids for group in lease.groups for _ in group.seeds)
