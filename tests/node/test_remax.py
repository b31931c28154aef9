"""ReMax: the reward of a greedy completion as baseline, by hand, and sampled by the trainer."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.node.batch_coordinator import BatchCoordinator, make_run
from tests.node.trainer_world import CONFIG, EchoEnvironment, make_trainer, rows

from prime_node.adapters.engines.transformers_engine import TransformersEngine
from prime_node.adapters.models.hf_tokenizer import HfTokenizer
from prime_node.algo.advantages import (
    AdvantageInputs,
    LengthCost,
    OverlongPenalty,
    RolloutView,
    TokenNeed,
    find_advantage,
)
from prime_node.envs.episodes import Bounds
from prime_node.ports.engine import GenerateRequest
from prime_node.ports.environment import Ask
from prime_node.ports.train_samples import Group
from prime_node.trainer.evaluate import Evaluator, HeldOutSets
from prime_node.trainer.further_rewards import RewardsKey
from prime_node.trainer.lessons import Lessons
from prime_node.trainer.loop import run_trainer
from prime_node.trainer.pinned_recipe import require_repeatable
from prime_node.trainer.state import TrainerState
from prime_protocol.errors import LocalError
from prime_protocol.rollout import Completion, FinishReason

REMAX = {"advantage": {"type": "remax"}}


def tokens(rewards: tuple[float, ...], greedy: float | None, costs: Any) -> Any:
    group = AdvantageInputs(tuple(map(RolloutView, rewards)), greedy)
    return find_advantage("remax").of_tokens(group, costs)


def test_the_baseline_is_the_greedy_reward_by_hand() -> None:
    """Rewards 1 and 0.25, the greedy one 0.5; the first rollout's tokens cost 0.1, 0 and 0.3."""
    nothing = [[0.0] * 3, [0.0]]
    assert tokens((1.0, 0.25), 0.5, nothing) == [[0.5] * 3, [-0.25]]
    assert tokens((1.0, 0.25), 0.5, [[0.1, 0.0, 0.3], [0.0]]) == [pytest.approx([0.1, 0.2, 0.2]), [-0.25]]
    assert tokens((1.0, 0.25), None, nothing) == [[0.375] * 3, [-0.375]], "the group's mean, if there is none"
    assert tokens((1.0, 1.0), 0.0, nothing) == [[1.0] * 3, [1.0]], "equal rewards teach too"
    assert tokens((1.0,), 1.0, [[]]) == [[]]
    assert tokens((), None, []) == []
    remax = find_advantage("remax")
    assert (remax.needs, remax.is_whitened) == ({TokenNeed.GREEDY_REWARD}, False)


def test_what_would_change_one_side_of_the_comparison_is_refused() -> None:
    for shaping in ({"length_cost": LengthCost.TOKENS}, {"overlong": OverlongPenalty(2, 1.0, 8)}):
        with pytest.raises(LocalError, match="length_penalty and overlong_buffer change the rewards"):
            find_advantage("remax", **shaping)
    config = CONFIG.model_copy(update={"evaluate_every": 0, "sft": CONFIG.sft.model_copy(update={"steps_max": 0})})
    assert not config.evaluates
    config = type(config).model_validate(config.model_dump() | REMAX)
    assert config.evaluates
    with pytest.raises(LocalError, match=r"run\.replay: advantage remax samples greedy completions"):
        require_repeatable(config)


class CountsCharacters(EchoEnvironment):
    """The reward is a number of the answer's text; problem 2 cannot be scored."""

    def score(self, index: int, completion: str, *, finished: bool) -> float:
        if index == 2:
            raise ValueError("no such problem")
        return sum(map(ord, completion)) % 97 / 97


class AnswersOnce(CountsCharacters):
    """The same with two turns, of which the second counts."""

    async def play(self, index: int, prompt_token_ids: tuple[int, ...], ask: Ask) -> float:
        first = await ask(prompt_token_ids)
        assert first is not None
        second = await ask((*prompt_token_ids, *first.token_ids[:1]))
        assert second is not None
        return sum(second.token_ids) % 97 / 97


async def test_the_trainer_scores_greedy_completions_of_its_current_policy(tmp_path: Path) -> None:
    coordinator = BatchCoordinator(make_run(max_steps=2))
    config = type(CONFIG).model_validate(CONFIG.model_dump() | REMAX | {"environment_modes": {"copies": "sft"}})
    trainer = make_trainer(tmp_path, coordinator, config=config)
    trainer.state = TrainerState(run=coordinator.run.digest)
    tokenizer, sampling = HfTokenizer(tmp_path / "model"), coordinator.run.spec.sampling
    engine = TransformersEngine(tmp_path / "model", threads=1)
    worlds = {"echo": CountsCharacters(), "talk": AnswersOnce(), "copies": CountsCharacters()}
    trainer.lessons = Lessons(worlds, dict.fromkeys(worlds, 1.0), tokenizer, seed=1, problems=3, batch_size=1)
    trainer.evaluator = Evaluator(
        engine, tokenizer, HeldOutSets((), ()), sampling, seed=1, bounds={"talk": Bounds(2, 64)}
    )
    prompt = tuple(tokenizer.encode_prompt("c"))
    stopped = Completion((98,), (-1.0,), FinishReason.STOP)
    group = Group(0, prompt, (stopped,), (1.0,), (0,), "worker", environment="echo", problem_index=1)
    given = [
        group,
        replace(group, environment="talk"),
        replace(group, problem_index=2),
        replace(group, problem_index=None),
        replace(group, environment="copies"),
    ]
    key = RewardsKey(0, 0, "a" * 64, "greedy-0", tuple(one.slot for one in given))
    found = [one.greedy_reward for one in await trainer.with_greedy_rewards(given, trainer.recipe(), key)]
    greedy = sampling.model_copy(update={"temperature": 0.0})

    async def answer(asked: tuple[int, ...]) -> Completion:
        (completion,) = await engine.generate([GenerateRequest(asked, 5)], greedy)
        return completion

    first = await answer(prompt)
    second = await answer((*prompt, *first.token_ids[:1]))
    expected = worlds["echo"].score(1, tokenizer.decode(list(first.token_ids)), finished=True)
    assert expected > 0.0
    assert found == [expected, sum(second.token_ids) % 97 / 97, None, None, None]
    await trainer.close()


async def test_a_run_trains_with_a_greedy_baseline(tmp_path: Path) -> None:
    config = type(CONFIG).model_validate(CONFIG.model_dump() | REMAX)
    coordinator = BatchCoordinator(make_run(max_steps=2, async_level=2))
    assert await run_trainer(make_trainer(tmp_path, coordinator, config=config), asyncio.Event())
    means = [float(str(row["greedy_reward_mean"])) for row in rows(tmp_path, "greedy_reward_mean")]
    assert len(means) == 2
    assert all(0.0 <= mean <= 1.0 for mean in means)
    assert len(set(coordinator.roots)) > 1
