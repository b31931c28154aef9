"""GDPO: several rewards of a rollout, by hand, from a reward function's dict, and in a run."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.node.batch_coordinator import BatchCoordinator, make_run
from tests.node.trainer_world import CONFIG, EchoEnvironment, make_trainer

from prime_node.adapters.environments.frames import as_parts
from prime_node.adapters.environments.own_code import OwnReward
from prime_node.adapters.models.hf_tokenizer import HfTokenizer
from prime_node.algo.advantages import AdvantageInputs, RolloutView, find_advantage
from prime_node.envs.source import SourceProblem
from prime_node.ports.train_samples import Group
from prime_node.trainer.batch import prepare
from prime_node.trainer.lessons import Lessons
from prime_node.trainer.loop import run_trainer
from prime_node.trainer.pinned_recipe import require_repeatable
from prime_node.trainer.recipe import Recipe
from prime_protocol.errors import LocalError
from prime_protocol.rollout import Completion, FinishReason

GDPO = {"advantage": {"type": "gdpo", "gdpo_reward_keys": "reward, format"}}


def values(rewards: tuple[float, ...], formats: tuple[float | None, ...], **settings: Any) -> Any:
    rollouts = [
        RolloutView(reward, reward_parts={} if more is None else {"format": more, "other": 9.0})
        for reward, more in zip(rewards, formats, strict=True)
    ]
    return find_advantage("gdpo", kwargs=settings)(AdvantageInputs(tuple(rollouts)))


def test_each_reward_is_normalized_in_its_group_by_hand() -> None:
    """The deviation of two rollouts with 1 and 0 is 0.7071, so they get 0.7071 and -0.7071, whatever the reward's scale."""
    both = {"gdpo_reward_keys": "reward, format", "eps": 0.0}
    half = math.sqrt(0.5)
    assert values((1.0, 0.0), (0.0, 0.1), **both) == pytest.approx((0.0, 0.0))
    assert values((1.0, 0.0), (0.0, 0.1), **both, gdpo_reward_weights="1,0.5") == pytest.approx((half / 2, -half / 2))
    assert values((1.0, 1.0), (0.0, 0.1), **both) == pytest.approx((-half, half)), "a flat reward adds nothing"
    assert values((1.0, 0.0), (None, 0.1), **both) == pytest.approx((0.0, 0.0)), "what is not there is 0"
    assert values((1.0, 0.0), (0.0, 0.1), eps=0.5) == pytest.approx((0.5 / (half + 0.5), -0.5 / (half + 0.5)))
    assert values((1.0,), (1.0,), **both) == (0.0,)
    assert values((), ()) == ()
    gdpo = find_advantage("gdpo", kwargs={"gdpo_reward_keys": "reward,format"})
    assert (gdpo.reward_parts, gdpo.is_whitened) == ({"format"}, True)
    assert find_advantage("group_mean").reward_parts == find_advantage("gdpo").reward_parts == set()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gdpo_reward_keys": " , "}, "names no reward"),
        ({"gdpo_reward_weights": "1,2"}, "expected 1 numbers with commas"),
        ({"gdpo_reward_weights": "much"}, "expected 1 numbers with commas"),
        ({"gdpo_reward_weights": "inf"}, "expected 1 numbers with commas"),
        ({"gdpo_rewards": "a"}, "unexpected keyword argument 'gdpo_rewards'"),
    ],
)
def test_a_bad_setting_of_gdpo_is_refused_before_the_run(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(LocalError, match=message):
        find_advantage("gdpo", kwargs=settings)


class NamesLength(EchoEnvironment):
    """A further reward of each answer; answers to problems of odd numbers cannot be graded again."""

    def parts(self, index: int, completion: str, *, finished: bool) -> Mapping[str, float]:
        if index % 2:
            raise ValueError("no such problem")
        return {"format": len(completion) / 8 + finished}


async def test_a_run_compares_the_rewards_that_its_trainer_grades_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = type(CONFIG).model_validate(CONFIG.model_dump() | GDPO)
    coordinator = BatchCoordinator(make_run(max_steps=2, async_level=2))
    trainer = make_trainer(tmp_path, coordinator, config=config)
    worlds = {"echo": NamesLength()}
    tokenizer = HfTokenizer(tmp_path / "model")
    trainer.lessons = Lessons(worlds, {"echo": 1.0}, tokenizer, seed=3, problems=20, batch_size=4)
    with caplog.at_level(logging.WARNING):
        assert await run_trainer(trainer, asyncio.Event())
    assert len(set(coordinator.roots)) > 1
    assert any("no further rewards of an answer" in line for line in caplog.messages)
    assert not any("they count as 0" in line for line in caplog.messages)


async def test_what_no_answer_has_and_what_cannot_be_graded_again_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = type(CONFIG).model_validate(CONFIG.model_dump() | GDPO)
    trainer = make_trainer(tmp_path, BatchCoordinator(make_run(max_steps=1)), config=config)
    assert await run_trainer(trainer, asyncio.Event())
    assert "step 0: no answer has the rewards format: they count as 0" in caplog.messages
    with pytest.raises(LocalError, match=r"run\.replay: advantage gdpo grades answers again"):
        require_repeatable(config)


def test_an_entry_that_is_no_reward_takes_no_other_one_with_it() -> None:
    """Before, an infinite entry failed all of an answer's, and a number of another library than Python's was left out."""
    found = {"reward": 1.0, "format": np.float32(0.5), "loss": math.inf, "none": None, "huge": 10**400, "text": "1"}
    reward = OwnReward("own:score", lambda completion, answer, info: found)
    assert as_parts(reward.parts("", SourceProblem("", "", {}))) == {"format": 0.5}


def test_the_groups_further_rewards_reach_the_advantage() -> None:
    """Equal rewards, and 1 and 0 for the format: 0.7071 and -0.7071 for two tokens each, whose sample deviation is 0.8165."""
    completion = Completion((1, 2), (-0.1, -0.2), FinishReason.STOP)
    parts: tuple[Mapping[str, float], ...] = ({"format": 1.0}, {"format": 0.0})
    group = Group(0, (9,), (completion,) * 2, (0.5, 0.5), (0, 0), "worker", reward_parts=parts)
    config = type(CONFIG).model_validate(GDPO | {"filters": []})
    recipe = Recipe.of(config, max_steps=1, completion_tokens_max=4, vocab_size=8)
    samples = prepare([group], recipe, step=0).samples
    assert [sample.advantage for sample in samples] == pytest.approx([0.75**0.5, -(0.75**0.5)], rel=1e-6)
