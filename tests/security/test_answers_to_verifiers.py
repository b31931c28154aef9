"""Hostile answers to environments of the verifiers library: each costs seconds of the processor's time, and its own episode."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.node.renderer_world import deepseek_call, deepseek_model

from prime_node.adapters.environments.child import EnvironmentFailed
from prime_node.adapters.environments.process import ProcessTurnEnvironment
from prime_node.adapters.models.hf_tokenizer import HfTokenizer
from prime_node.cli.wire_environments import end_environments, start_environments
from prime_node.envs.settings import EnvironmentSettings
from prime_protocol.rollout import Completion
from prime_protocol.run_spec import EnvironmentSpec

pytest.importorskip("verifiers")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
CALLS_MAX = 64  # that of verifiers_harness.py, whose import takes seconds
TASKSETS = Path(__file__).parents[1] / "node" / "tasksets"


async def played(world: ProcessTurnEnvironment, answer: Completion, model: Path) -> list[str]:
    """Play problem 0 with a model that gives this answer and then has no turn left. Return its prompts."""
    prompts: list[str] = []

    async def ask(prompt: tuple[int, ...]) -> Completion | None:
        prompts.append(HfTokenizer(model).decode(list(prompt)))
        return answer if len(prompts) == 1 else None

    assert await world.play(0, (1,), ask) == 0.0
    return prompts


async def test_an_answer_that_would_be_parsed_for_hours_costs_seconds_and_its_own_episode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, the library parsed it without a limit, on the loop that all episodes of the process share."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(TASKSETS)]))
    options: dict[str, str | int | float | bool] = {"taskset": "prime_words", "tools": True, "renderer": "deepseek-v3"}
    spec = EnvironmentSpec(name="words", id="verifiers", options=options, turns_max=4)
    made = start_environments([spec], deepseek_model(tmp_path), hidden=[], settings=EnvironmentSettings())
    try:
        world = made["words"]
        assert isinstance(world, ProcessTurnEnvironment)
        process = world.process.pid
        with pytest.raises(EnvironmentFailed, match="more than 2 s of the processor's time"):
            await played(world, deepseek_call(tmp_path, "\n" * 20_000 + "x"), tmp_path)
        many = deepseek_call(tmp_path, '{"word": "abc"}\n```', name="speller_backward", times=CALLS_MAX + 3)
        _, answered = await played(world, many, tmp_path)
        assert (answered.count("cba"), answered.count("error: an answer may have")) == (CALLS_MAX, 3)
        nested = deepseek_call(tmp_path, "[" * 5_000 + "\n```", name="speller_backward")
        assert await played(world, nested, tmp_path), "before, it ended the episode with an error"
        assert world.process.pid == process
    finally:
        end_environments(made)
