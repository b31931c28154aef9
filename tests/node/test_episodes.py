"""Episodes: bounds, seeds, and replay from a recording."""

from __future__ import annotations

import asyncio
import statistics

import pytest

from prime_node.envs.episodes import Bounds, CutShort, EpisodeRecorder, WrongContext, replayed, scored
from prime_node.ports.engine import GenerateRequest
from prime_node.ports.environment import Ask
from prime_protocol.rollout import Completion, FinishReason
from prime_protocol.turns import Turn, turn_seed


def answer(*tokens: int) -> Completion:
    return Completion(tokens, (-0.5,) * len(tokens), FinishReason.STOP)


async def test_every_turn_has_its_seed_and_the_bounds_end_an_episode() -> None:
    asked: list[GenerateRequest] = []

    async def engine(request: GenerateRequest) -> Completion:
        asked.append(request)
        return answer(1)

    recorder = EpisodeRecorder(7, Bounds(turns_max=3, prompt_tokens_max=4), engine)
    assert await recorder((1, 2, 3, 4, 5)) is None, "too long"
    assert [await recorder((number,)) for number in range(4)] == [answer(1)] * 3 + [None]
    assert [request.seed for request in asked] == [turn_seed(7, number) for number in range(3)]
    assert [turn.prompt_token_ids for turn in recorder.turns] == [(0,), (1,), (2,)]


async def asks_twice(ask: Ask) -> float:
    """Two agents at once; the reward depends on their joint output."""
    answers = await asyncio.gather(ask((1,)), ask((2,)))
    return float(sum(one.token_ids[0] for one in answers if one is not None))


BOUNDS = Bounds(turns_max=4, prompt_tokens_max=4)


async def test_agents_that_ask_at_once_are_distinguished_by_their_prompts() -> None:
    turns = [Turn((2,), answer(20)), Turn((1,), answer(1))]
    assert await replayed(asks_twice, turns, BOUNDS, exact=True) == 21.0
    with pytest.raises(WrongContext, match="1 recorded turns"):
        await replayed(asks_twice, [*turns, turns[0]], BOUNDS, exact=True)
    with pytest.raises(CutShort, match="not recorded"):
        await replayed(asks_twice, turns[:1], BOUNDS, exact=True)


async def test_an_agent_that_runs_ahead_of_another_is_cut_short_and_not_dishonest() -> None:
    async def agent(ask: Ask, *prompts: int) -> None:
        for prompt in prompts:
            if await ask((prompt,)) is None:
                raise ValueError("nobody answers")

    async def play(ask: Ask) -> float:
        async with asyncio.TaskGroup() as agents:
            agents.create_task(agent(ask, 1, 2))
            agents.create_task(agent(ask, 3, 4))
        return 1.0

    with pytest.raises(CutShort):  # 2 was asked for when the worker's environment failed, 4 not yet
        await replayed(play, [Turn((1,), answer(1)), Turn((3,), answer(1))], BOUNDS, exact=True)


async def test_answers_count_in_order_if_the_environment_is_not_deterministic() -> None:
    turns = [Turn((7,), answer(5)), Turn((8,), answer(6))]
    assert await replayed(asks_twice, turns, BOUNDS, exact=False) == 11.0


async def test_a_judge_that_is_not_sure_is_asked_several_times() -> None:
    opinions = iter([0.0, 1.0, 0.9])

    async def play(ask: Ask) -> float:
        await ask((1,))
        return next(opinions)

    assert statistics.median(await scored(play, [Turn((1,), answer(1))], BOUNDS, exact=True, scorings=3)) == 0.9
