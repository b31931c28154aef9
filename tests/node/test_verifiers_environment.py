"""Environments of the verifiers ecosystem: played through the loopback endpoint, replayed by the validator, away from keys."""

from __future__ import annotations

import itertools
import json
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.tiny_model_world import write_tiny_model

from prime_node.adapters.environments.process import ProcessTurnEnvironment
from prime_node.adapters.models.hf_tokenizer import HfTokenizer
from prime_node.algo.trajectories import interleave
from prime_node.cli.wire_environments import end_environments, start_environments
from prime_node.envs.episodes import Bounds, EpisodeRecorder, WrongContext, replayed
from prime_node.envs.settings import EnvironmentSettings
from prime_node.ports.engine import GenerateRequest
from prime_node.ports.environment import Ask, TurnEnvironment
from prime_protocol.errors import LocalError
from prime_protocol.rollout import Completion, FinishReason
from prime_protocol.run_spec import EnvironmentSpec
from prime_protocol.turns import Turn

pytest.importorskip("verifiers")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

BOUNDS = Bounds(turns_max=4, prompt_tokens_max=4_000)
Say = Callable[[str], str]
Worlds = dict[str, ProcessTurnEnvironment]


@pytest.fixture(autouse=True, scope="module")
def tasksets() -> Iterator[None]:
    """Install the taskset of these tests."""
    folder = str(Path(__file__).parent / "tasksets")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([os.environ.get("PYTHONPATH", ""), folder]))
        yield


def model_of(folder: Path) -> Path:
    return write_tiny_model(folder, hidden_size=16, num_layers=1, num_heads=1, intermediate_size=16)


def words(name: str = "words", **options: str | int | bool) -> EnvironmentSpec:
    return EnvironmentSpec(name=name, id="verifiers", options={"taskset": "prime_words", **options}, turns_max=4)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_of(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory, model: Path, tasksets: None) -> Iterator[Worlds]:
    """Start two environments in one process, whose imports take seconds: one looks for a secret and a port."""
    key = tmp_path_factory.mktemp("run") / "keys" / "worker.key"
    key.parent.mkdir()
    key.write_text("secret")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        made = start_environments(
            [words(snoop=str(key), dial=listener.getsockname()[1]), words("handoff", env="prime_handoff")],
            model,
            hidden=[key.parent],
            settings=EnvironmentSettings(),
        )
    yield {name: world for name, world in made.items() if isinstance(world, ProcessTurnEnvironment)}
    end_environments(made)


async def recorded(
    world: TurnEnvironment, model: Path, say: Say, special: dict[str, int] | None = None
) -> tuple[float, list[Turn]]:
    """Play problem 0 with a model that answers a prompt's text as given."""
    tokenizer = HfTokenizer(model)

    async def sample(request: GenerateRequest) -> Completion:
        text = say(tokenizer.decode(list(request.prompt_token_ids)))
        ids: list[int] = []
        for part in split(text, special or {}):
            ids += [part] if isinstance(part, int) else tokenizer.encode(part)
        ids.append(tokenizer.stop_token_id)
        return Completion(tuple(ids), (-0.5,) * len(ids), FinishReason.STOP)

    recorder = EpisodeRecorder(7, BOUNDS, sample)
    reward = await world.play(0, (1,), recorder)
    return reward, recorder.turns


def split(text: str, special: dict[str, int]) -> list[str | int]:
    for name, number in special.items():
        if name in text:
            before, _, after = text.partition(name)
            return [*split(before, special), number, *split(after, special)]
    return [text] if text else []


async def test_a_taskset_is_played_and_scored_again_and_sees_no_key_and_no_port(worlds: Worlds, model: Path) -> None:
    world = worlds["words"]
    word = world.answer(0)[::-1]
    assert world.prompt(0) == f"FileNotFoundError, ConnectionRefusedError: reverse {word}"

    reward, turns = await recorded(world, model, lambda prompt: word[::-1] if word in prompt else "?")
    assert (reward, len(turns)) == (1.0, 1)
    assert word in HfTokenizer(model).decode(list(turns[0].prompt_token_ids))
    assert (await recorded(world, model, lambda prompt: "wrong"))[0] == 0.0

    async def play(ask: object) -> float:
        return await world.play(0, (1,), ask)  # type: ignore[arg-type]

    assert await replayed(play, turns, BOUNDS, exact=True) == 1.0

    found: dict[str, float] = {}

    async def name_parts(ask: object) -> float:
        found.update(await world.play_parts(0, (1,), ask))  # type: ignore[arg-type]
        return 0.0

    await replayed(name_parts, turns, BOUNDS, exact=True)
    assert found["exact"] == 1.0
    assert found["letters"] == len(word)
    assert "reward" not in found
    other = Turn((*turns[0].prompt_token_ids[:-1], 5), turns[0].completion)
    with pytest.raises(WrongContext):
        await replayed(play, [other], BOUNDS, exact=True)


@pytest.fixture(scope="module")
def tools(qwen3: Path, tasksets: None) -> Iterator[ProcessTurnEnvironment]:
    """Start an environment with a tool."""
    made = start_environments([words(tools=True, renderer="auto")], qwen3, hidden=[], settings=EnvironmentSettings())
    world = made["words"]
    assert isinstance(world, ProcessTurnEnvironment)
    yield world
    end_environments(made)


async def with_a_call(
    world: ProcessTurnEnvironment, model: Path, arguments: Callable[[str], str]
) -> tuple[float, list[Turn]]:
    """Play problem 0 with a model that calls the tool with these arguments, of the word, and then gives the right answer."""
    word = world.answer(0)[::-1]
    vocabulary = json.loads((model / "tokenizer.json").read_bytes())["model"]["vocab"]
    tokens = {name: vocabulary[name] for name in ("<tool_call>", "</tool_call>")}

    turns = itertools.count()

    def say(prompt: str) -> str:
        if next(turns):
            return word[::-1]
        name = "speller_backward" if "speller_backward" in prompt else "backward"
        return f'<tool_call>\n{{"name": "{name}", "arguments": {{"word": {arguments(word)}}}}}\n</tool_call>'

    return await recorded(world, model, say, tokens)


async def test_a_tool_is_called_and_its_result_is_the_next_prompt(tools: ProcessTurnEnvironment, qwen3: Path) -> None:
    word = tools.answer(0)[::-1]
    reward, turns = await with_a_call(tools, qwen3, json.dumps)
    assert (reward, len(turns)) == (1.0, 2)
    first = turns[0].prompt_token_ids + turns[0].completion.token_ids
    assert turns[1].prompt_token_ids[: len(first)] == first, "bridged: what was sampled stays as it was"
    assert word[::-1] in HfTokenizer(qwen3).decode(list(turns[1].prompt_token_ids[len(first) :]))


async def test_arguments_that_no_tool_can_get_are_answered_and_never_sent(
    tools: ProcessTurnEnvironment, qwen3: Path
) -> None:
    for arguments in ('"\\ud800"', "[" * 500 + "]" * 500):
        reward, turns = await with_a_call(tools, qwen3, lambda _, one=arguments: one)
        assert (reward, len(turns)) == (1.0, 2)
        assert "error: the arguments are not valid" in HfTokenizer(qwen3).decode(list(turns[1].prompt_token_ids))


async def test_a_handoff_to_another_agent_is_a_sample_of_its_own(worlds: Worlds, model: Path) -> None:
    world = worlds["handoff"]
    word = world.answer(0)[::-1]

    def say(prompt: str) -> str:
        if "the speller says" in prompt:
            return prompt.rpartition("the speller says ")[2][: len(word)]
        return word[::-1] if f"spell {word} backward" in prompt else word

    reward, turns = await recorded(world, model, say)
    assert (reward, len(turns)) == (1.0, 3)
    samples = interleave(turns)
    assert [sample.turns for sample in samples] == [(0, 2), (1,)], "the planner's two answers are one sample"
    assert [sum(sample.loss_mask) for sample in samples] == [2 * (len(word) + 1), len(word) + 1], "each answer once"

    async def play(ask: Ask) -> float:
        return await world.play(0, (1,), ask)

    assert await replayed(play, turns, BOUNDS, exact=True) == 1.0


def test_a_taskset_that_is_not_installed_says_so(model: Path) -> None:
    with pytest.raises(LocalError, match="no_such_tasks"):
        start_environments([words(taskset="no_such_tasks")], model, hidden=[], settings=EnvironmentSettings())
