"""Rollouts of several turns: their encoding, their seeds, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.protocol.conftest import Sample

from prime_protocol.errors import RemoteError
from prime_protocol.rollout import Completion, FinishReason, Rollouts, pack_body, parse_body
from prime_protocol.run_spec import EnvironmentSpec, RunSpec
from prime_protocol.turns import Turn, episodes_of, rollouts_of_turns, turn_seed
from prime_protocol.verdict import RejectReason
from prime_protocol.verify import check_assignment

STOP = 257
Episodes = list[list[Turn]]


def answer(*tokens: int) -> Completion:
    return Completion((*tokens, STOP), (-0.5,) * (len(tokens) + 1), FinishReason.STOP)


def game(sample: Sample) -> Episodes:
    """Return as many turns for each rollout as its number, and one more; the last starts over."""
    prompts = [group.prompt_token_ids for group in sample.lease.groups for _ in group.seeds]
    episodes = []
    for number, prompt in enumerate(prompts):
        turns = [Turn(prompt, answer(number))]
        for place in range(number):
            before = turns[-1].prompt_token_ids + turns[-1].completion.token_ids
            turns.append(Turn((*before, 7, place) if place % 3 < 2 else (9, 9), answer(place)))
        episodes.append(turns)
    return episodes


def spec_of(sample: Sample, **changes: object) -> RunSpec:
    environments = tuple(one.model_copy(update={"turns_max": 8, **changes}) for one in sample.run.spec.environments)
    return RunSpec.model_validate(sample.run.spec.model_copy(update={"environments": environments}).model_dump())


def bundled(sample: Sample, episodes: Episodes) -> Rollouts:
    """Return the rollouts after encoding and parsing."""
    body, size = pack_body(rollouts_of_turns(sample.lease, episodes))
    header = sample.header.model_copy(update={"decompressed_bytes": size})
    return parse_body(header, body, sample.run.spec.limits)


def test_turns_survive_the_wire(sample: Sample) -> None:
    rollouts = bundled(sample, game(sample))
    assert rollouts.num_rollouts == sample.lease.num_rollouts
    found = episodes_of(rollouts, sample.lease)
    wanted = game(sample)
    assert [[turn.prompt_token_ids for turn in turns] for turns in found] == [
        [turn.prompt_token_ids for turn in turns] for turns in wanted
    ]
    assert [[turn.completion.token_ids for turn in turns] for turns in found] == [
        [turn.completion.token_ids for turn in turns] for turns in wanted
    ]
    assert check_assignment(sample.header, rollouts, sample.lease, vocab_size=264, turns=spec_of(sample)).accepted


def test_a_turn_that_continues_costs_the_tokens_in_between(sample: Sample) -> None:
    prompt = sample.lease.groups[0].prompt_token_ids
    long = tuple(range(1, 200))
    episode = [Turn(prompt, answer(*long)), Turn((*prompt, *long, STOP, 5, 6), answer(1))]
    others = [[Turn(group.prompt_token_ids, answer(1))] for group in sample.lease.groups for _ in group.seeds]
    rollouts = rollouts_of_turns(sample.lease, [episode, *others[1:]])
    assert rollouts.context == [5, 6]


@given(st.integers(0, 2**63 - 1), st.integers(1, 50))
def test_each_turn_has_randomness_of_its_own(seed: int, turn: int) -> None:
    seeds = [turn_seed(seed, place) for place in range(turn + 1)]
    assert seeds[0] == seed
    assert len(set(seeds)) == turn + 1
    assert all(0 <= each < 2**63 for each in seeds)


def test_the_seeds_of_turns_are_these() -> None:
    assert [turn_seed(7, place) for place in range(3)] == [7, 2363793413644308110, 3656069919564741627]


def seed_of_a_turn(rollouts: Rollouts) -> Rollouts:
    seeds = rollouts.seeds_N.copy()
    seeds[2] += 1
    return replace(rollouts, seeds_N=seeds)


def slot_of_a_turn(rollouts: Rollouts) -> Rollouts:
    slots = rollouts.slots_N.copy()
    slots[2] += 1
    return replace(rollouts, slots_N=slots)


@pytest.mark.parametrize("tamper", [seed_of_a_turn, slot_of_a_turn])
def test_turns_with_other_seeds_or_slots_are_refused(sample: Sample, tamper: Callable[[Rollouts], Rollouts]) -> None:
    rollouts = tamper(rollouts_of_turns(sample.lease, game(sample)))
    verdict = check_assignment(sample.header, rollouts, sample.lease, vocab_size=264, turns=spec_of(sample))
    assert verdict.reason is RejectReason.WRONG_ASSIGNMENT


@pytest.mark.parametrize(("changes", "why"), [({"turns_max": 1}, "has 1"), ({"turns_max": 2}, "environment .* has 2")])
def test_more_turns_than_the_environment_has_are_refused(sample: Sample, changes: dict[str, int], why: str) -> None:
    rollouts = rollouts_of_turns(sample.lease, game(sample))
    spec = spec_of(sample, **changes)
    verdict = check_assignment(sample.header, rollouts, sample.lease, vocab_size=264, turns=spec)
    assert verdict.reason is RejectReason.WRONG_CONTEXT
    assert check_assignment(sample.header, rollouts, sample.lease, vocab_size=264).reason is RejectReason.WRONG_CONTEXT


def test_another_prompt_in_an_environment_of_one_turn_is_refused(sample: Sample) -> None:
    episodes = [[Turn((1, 2), answer(1))] for group in sample.lease.groups for _ in group.seeds]
    rollouts = rollouts_of_turns(sample.lease, episodes)
    spec = spec_of(sample, turns_max=1)
    verdict = check_assignment(sample.header, rollouts, sample.lease, vocab_size=264, turns=spec)
    assert verdict.reason is RejectReason.WRONG_CONTEXT


@pytest.mark.parametrize(("tokens", "why"), [((264,), "vocabulary"), ((), "1 to")])
def test_prompts_of_no_token_or_outside_of_the_vocabulary_are_refused(
    sample: Sample, tokens: tuple[int, ...], why: str
) -> None:
    episodes = game(sample)
    episodes[-1][-1] = Turn(tokens, answer(1))
    rollouts = rollouts_of_turns(sample.lease, episodes)
    verdict = check_assignment(sample.header, rollouts, sample.lease, vocab_size=264, turns=spec_of(sample))
    assert verdict.reason is RejectReason.WRONG_CONTEXT
    assert why in verdict.detail


def rows(rollouts: Rollouts, place: int, column: int, value: int) -> Rollouts:
    assert rollouts.turns_N3 is not None
    changed = rollouts.turns_N3.copy()
    changed[place, column] = value
    return replace(rollouts, turns_N3=changed)


@pytest.mark.parametrize(
    "tamper",
    [
        lambda rollouts: rows(rollouts, 0, 0, 1),
        lambda rollouts: rows(rollouts, -1, 0, 9),
        lambda rollouts: rows(rollouts, 3, 0, 0),
        lambda rollouts: rows(rollouts, 0, 1, -1),
        lambda rollouts: rows(rollouts, -1, 2, 50),
        lambda rollouts: replace(rollouts, turns_N3=None),
        lambda rollouts: replace(rollouts, context_P=None),
        lambda rollouts: replace(rollouts, context_P=-rollouts.context_P - 1),
        lambda rollouts: replace(rollouts, turns_N3=rollouts.turns_N3[:-1]),
        lambda rollouts: replace(rollouts, turns_N3=np.ascontiguousarray(rollouts.turns_N3[:, :2])),
    ],
)
def test_turns_that_do_not_fit_together_are_malformed(sample: Sample, tamper: Callable[[Rollouts], Rollouts]) -> None:
    body, size = pack_body(tamper(rollouts_of_turns(sample.lease, game(sample))))
    header = sample.header.model_copy(update={"decompressed_bytes": size})
    with pytest.raises(RemoteError):
        parse_body(header, body, sample.run.spec.limits)


def test_a_turn_cannot_keep_more_than_was_said(sample: Sample) -> None:
    rollouts = rows(rollouts_of_turns(sample.lease, game(sample)), 1, 1, 100)
    with pytest.raises(RemoteError, match="keeps 100 "):
        check_assignment(sample.header, rollouts, sample.lease, vocab_size=264, turns=spec_of(sample))


def test_too_many_or_too_long_turns_are_refused_before_any_prompt_is_spelled_out(sample: Sample) -> None:
    unreadable = rows(rollouts_of_turns(sample.lease, game(sample)), 1, 1, 2**31 - 1)  # to spell it out is an error
    for spec, why in ((spec_of(sample, turns_max=2), "has 2"), (spec_of(sample), "a prompt of 214748")):
        verdict = check_assignment(sample.header, unreadable, sample.lease, vocab_size=264, turns=spec)
        assert verdict.reason is RejectReason.WRONG_CONTEXT
        assert why in verdict.detail


def test_too_many_turns_are_refused_before_the_seed_of_each_is_computed(sample: Sample) -> None:
    rollouts = seed_of_a_turn(rollouts_of_turns(sample.lease, game(sample)))
    verdict = check_assignment(
        sample.header, rollouts, sample.lease, vocab_size=264, turns=spec_of(sample, turns_max=2)
    )
    assert verdict.reason is RejectReason.WRONG_CONTEXT


def test_an_environment_must_have_room_for_a_prompt_and_a_completion(sample: Sample) -> None:
    with pytest.raises(ValueError, match="must fit"):
        spec_of(sample, context_tokens_max=10)


def test_what_is_new_in_an_environments_description_is_left_out_where_it_is_not_used() -> None:
    assert EnvironmentSpec(name="a", id="b").model_dump().keys() == {"name", "id", "weight", "seed", "options"}
