"""Partners of the model in games that the settings describe: another try, and a calculator."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.tiny_model_world import write_tiny_model

from prime_node.adapters.models.hf_tokenizer import HfTokenizer
from prime_node.cli.wire_environments import build_environments
from prime_node.envs.partners import calculate, calculator
from prime_node.envs.source import SourceProblem
from prime_node.ports.environment import TurnEnvironment
from prime_protocol.errors import LocalError
from prime_protocol.rollout import Completion, FinishReason
from prime_protocol.run_spec import EnvironmentSpec, Option

WORDS: dict[str, Option] = {"task": "spell_backward", "min_word_len": 3, "max_word_len": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(
        tmp_path_factory.mktemp("model"), hidden_size=32, num_layers=1, num_heads=2, intermediate_size=64
    )


@pytest.mark.parametrize(
    ("expression", "value"), [("12+7", 19), ("2 * (3 + 4)", 14), ("-3 - -4", 1), ("2*-3", -6), ("((5))", 5)]
)
def test_the_calculator_calculates(expression: str, value: int) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize("expression", ["", "1+", "(1", "1)", "2**3", "__import__", "1 2", "(" * 60 + "1", "*1"])
def test_the_calculator_refuses_what_it_does_not_understand(expression: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 (each has its own words)
        calculate(expression)


def test_a_long_line_of_blanks_is_no_call_and_is_seen_at_once() -> None:
    assert calculator(SourceProblem("1 + 1?", "2"), ["calc" + " " * 2**20], lambda problem, answer: 0.0) is None


async def test_a_calculator_is_a_turn_and_the_last_answer_is_scored(model: Path) -> None:
    spec = EnvironmentSpec(
        name="sums", id="reasoning_gym", options={"task": "chain_sum", "partner": "calculator"}, turns_max=2
    )
    world = build_environments([spec], model)["sums"]
    assert isinstance(world, TurnEnvironment)
    tokenizer = HfTokenizer(model)
    prompts: list[str] = []
    answers = iter(["calc 12+7", world.answer(0)])

    async def ask(prompt: tuple[int, ...]) -> Completion:
        prompts.append(tokenizer.decode(list(prompt)))
        tokens = (*tokenizer.encode(next(answers)), tokenizer.stop_token_id)
        return Completion(tokens, (-0.5,) * len(tokens), FinishReason.STOP)

    assert await world.play(0, tuple(tokenizer.encode_prompt(world.prompt(0))), ask) == 1.0
    assert prompts[1].endswith("19")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"turns_max": 2}, "need each other"),
        ({"options": {**WORDS, "partner": "retry"}}, "need each other"),
        ({"turns_max": 2, "options": {**WORDS, "partner": "parrot"}}, "calculator, retry"),
    ],
)
def test_partners_and_turns_are_described_together(model: Path, changes: dict[str, object], why: str) -> None:
    spec = EnvironmentSpec.model_validate({"name": "a", "id": "reasoning_gym", "options": WORDS, **changes})
    with pytest.raises(LocalError, match=why):
        build_environments([spec], model)
