"""Turns that continue the previous one are judged by one forward pass, with the same numbers as separately."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.node.tiny_engine_world import tiny_engine

from prime_node.adapters.engines.strings import strung
from prime_node.adapters.engines.transformers_engine import TransformersEngine
from prime_node.ports.engine import ScoreRequest
from prime_protocol.assignment import Sampling

SAMPLING = Sampling(temperature=0.8, completion_tokens_max=16, stop_token_ids=(5,))


def rollout(rng: np.random.Generator, turns: int, *, seed: int) -> list[ScoreRequest]:
    """Make turns in which each prompt is the previous one, its answer, and some words of the environment."""
    context, made = tuple(rng.integers(0, 264, rng.integers(1, 9)).tolist()), []
    for turn in range(turns):
        answer = tuple(rng.integers(0, 264, rng.integers(1, 12)).tolist())
        made.append(ScoreRequest(context, answer, seed + turn, hidden=True))
        context = (*context, *answer, *rng.integers(0, 264, turn % 3).tolist())
    return made


def requests() -> list[ScoreRequest]:
    rng = np.random.default_rng(0)
    made = [one for seed in range(0, 60, 10) for one in rollout(rng, 1 + seed // 10, seed=seed)]
    anew = replace(made[-1], prompt_token_ids=(7, 7, *made[-1].prompt_token_ids[2:]))  # thinking was stripped
    return [*made, anew, *rollout(rng, 3, seed=90)]


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[TransformersEngine]:
    async with tiny_engine(tmp_path) as made:
        yield made


@pytest.mark.parametrize("seeded", [True, False])
async def test_all_turns_of_a_rollout_together_are_judged_as_turn_by_turn(
    engine: TransformersEngine, seeded: bool
) -> None:
    asked = requests() if seeded else [replace(request, seed=None) for request in requests()]
    together = (await engine.prefill(asked, SAMPLING)).arrays()
    one_by_one = [(await engine.prefill([request], SAMPLING)).arrays() for request in asked]
    for name, values in together.items():
        wanted = np.concatenate([each[name] for each in one_by_one])
        if name == "hidden_TD":  # bf16, as bits: a last bit of fp32 may turn one of its own
            assert (np.abs(values.astype(np.int64) - wanted.astype(np.int64)) <= 1).mean() > 0.99
        else:
            np.testing.assert_allclose(values, wanted, atol=2e-5)
    assert len(together["logprobs_T"]) == sum(len(request.completion_token_ids) for request in asked)


def test_what_turns_repeat_is_forwarded_once() -> None:
    asked = requests()
    strings = strung(asked)
    assert len(strings) == 6 + 1 + 1
    last = asked[20]
    assert strings[5].prompt_token_ids == asked[15].prompt_token_ids
    assert (*strings[5].prompt_token_ids, *strings[5].token_ids) == last.prompt_token_ids + last.completion_token_ids
    for string, turns in zip(strings, [[0], [1, 2], [3, 4, 5]], strict=False):
        chosen = [string.token_ids[place] for place, _, _ in string.chosen]
        assert chosen == [token for turn in turns for token in asked[turn].completion_token_ids]
        assert [at for _, _, at in string.chosen if at == 0] == [0] * len(turns)
        assert {seed for _, seed, _ in string.chosen} == {asked[turn].seed for turn in turns}


def test_a_prompt_that_does_not_continue_a_string_starts_a_new_one() -> None:
    one = ScoreRequest((1, 2), (3, 4), 7)
    assert len(strung([one, one])) == 2
    assert len(strung([one, ScoreRequest((1, 2, 3), (4,), 7)])) == 2, "it ends in the middle of the answer"
    assert len(strung([one, ScoreRequest((1, 2, 3, 4), (5,), 8)])) == 1
