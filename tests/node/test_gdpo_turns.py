"""Further rewards of rollouts with several turns: played again with their recorded answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.node.batch_coordinator import make_run

from prime_node.adapters.environments.process import ProcessEnvironment, ProcessTurnEnvironment
from prime_node.adapters.models.hf_tokenizer import HfTokenizer
from prime_node.cli.wire_environments import end_environments, start_environments
from prime_node.cli.wire_new import pin_datasets
from prime_node.coordinator.new_run import RunConfig
from prime_node.envs.episodes import Bounds, EpisodeRecorder
from prime_node.envs.settings import EnvironmentSettings
from prime_node.ports.engine import GenerateRequest
from prime_node.ports.train_samples import Group
from prime_node.trainer.batch import prepare
from prime_node.trainer.config import TrainerConfig
from prime_node.trainer.further_rewards import FurtherRewards
from prime_node.trainer.recipe import Recipe
from prime_node.training_data.feed import StepBatch
from prime_protocol.rollout import Completion, FinishReason
from prime_protocol.run_spec import EnvironmentSpec, Option
from prime_protocol.turns import joined

CODE = """
class Polite:
    def problem(self, number):
        return {"question": f"Say {number}", "answer": str(number)}

    def score(self, completion, answer, info):
        return {"reward": float(answer in completion), "polite": float("please" in completion), "length": len(completion)}

    def reply(self, completions, answer, info):
        return None if answer in completions[-1] else "No."
"""


RETRY: dict[str, Option] = {"task": "spell_backward", "min_word_len": 3, "max_word_len": 4, "partner": "retry"}


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[dict[str, ProcessEnvironment]]:
    folder = tmp_path_factory.mktemp("code")
    (folder / "polite.py").write_text(CODE)
    settings = EnvironmentSettings(code_folder=folder)
    asked = (
        EnvironmentSpec(name="talk", id="python", options={"environment": "polite:Polite"}, turns_max=3),
        EnvironmentSpec(name="again", id="reasoning_gym", options=RETRY, turns_max=3),
    )
    specs = pin_datasets(RunConfig(environments=asked), settings).environments
    made = start_environments(specs, model, hidden=[], settings=settings)
    yield made
    end_environments(made)


async def group_of(world: ProcessEnvironment, name: str, tokenizer: HfTokenizer, says: list[list[str]]) -> Group:
    """Play one rollout for each list of answers, and return all of them as the feed delivers them."""
    assert isinstance(world, ProcessTurnEnvironment)
    prompt = tuple(tokenizer.encode_prompt(world.prompt(0)))
    rewards, episodes = [], []
    for texts in says:
        left = iter(texts)

        async def say(request: GenerateRequest, left: Iterator[str] = left) -> Completion:
            ids = (*tokenizer.encode(next(left)), tokenizer.stop_token_id)
            return Completion(ids, (-0.5,) * len(ids), FinishReason.STOP)

        recorder = EpisodeRecorder(7, Bounds(3, 900), say)
        rewards.append(await world.play(0, prompt, recorder))
        episodes.append(tuple(recorder.turns))
    completions = tuple(joined(turns) for turns in episodes)
    versions = (0,) * len(says)
    return Group(0, prompt, completions, tuple(rewards), versions, "w", name, turns=tuple(episodes), problem_index=0)


async def test_the_last_answer_of_a_conversation_is_graded_again(
    worlds: dict[str, ProcessEnvironment], model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer, talk = HfTokenizer(model), worlds["talk"]
    answer = talk.answer(0)
    says = [["no", f"please {answer}"], [answer], ["please", "please", "no"]]
    group = await group_of(talk, "talk", tokenizer, says)
    assert group.rewards == (1.0, 1.0, 0.0)
    assert [len(turns) for turns in group.turns] == [2, 1, 3]
    environments = tuple(EnvironmentSpec(name=name, id="echo", turns_max=3) for name in worlds)
    spec = make_run().spec.model_copy(update={"environments": environments})
    further = FurtherRewards(worlds, tokenizer, spec, None)
    found = await asyncio.to_thread(further.of, group)
    length = len(f"please {answer}")
    assert found == (
        {"polite": 1.0, "length": length},
        {"polite": 0.0, "length": len(answer)},
        {"polite": 0.0, "length": 2},
    )

    other = replace(group, turns=((replace(group.turns[0][0], prompt_token_ids=(5,)),), *group.turns[1:]))
    with caplog.at_level(logging.WARNING):
        assert (await asyncio.to_thread(further.of, other))[0] == {}
        assert "environment talk: no further rewards of an answer" in caplog.text
        caplog.clear()
        plain = await group_of(worlds["again"], "again", tokenizer, [[worlds["again"].answer(0)]])
        assert await asyncio.to_thread(further.of, plain) == ({},)
        assert "only a reward function of the run's own that returns a dict names further rewards" in caplog.text


async def test_conversations_are_trained_on_with_their_own_further_rewards(
    worlds: dict[str, ProcessEnvironment], model: Path
) -> None:
    """Equal rewards; the polite rollout is better, whatever the rollouts' numbers of tokens."""
    tokenizer = HfTokenizer(model)
    answer = worlds["talk"].answer(0)
    group = await group_of(worlds["talk"], "talk", tokenizer, [["no", f"please {answer}"], [f"thanks {answer}"]])
    run = make_run()
    environments = tuple(EnvironmentSpec(name=name, id="echo", turns_max=3) for name in worlds)
    spec = run.spec.model_copy(update={"environments": environments})
    settings = {"advantage": {"type": "gdpo", "gdpo_reward_keys": "reward,polite"}, "filters": []}
    recipe = Recipe.of(TrainerConfig.model_validate(settings), max_steps=1, completion_tokens_max=64, vocab_size=264)
    further = FurtherRewards(worlds, tokenizer, spec, None)
    batch = await asyncio.to_thread(further.graded, StepBatch(0, 0, "a" * 64, (group,)), recipe)
    samples = prepare(batch.groups, recipe, step=0).samples
    signs = [sample.advantage > 0.0 for sample in samples]
    assert signs == [True] * (len(samples) - 1) + [False]
