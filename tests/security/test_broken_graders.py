"""A broken grader is not a wrong answer: unscored answers count separately, and an evaluation without scores reports an error."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tests.node.table_engine import STOP_TOKEN, VOCAB_SIZE, TableEngine, table_weights

from prime_node.algo.estimates import Mark, sampled_figures
from prime_node.coordinator.state import evaluations
from prime_node.coordinator.state.slot_records import AcceptedGroup
from prime_node.ports.engine import GenerateRequest
from prime_node.ports.environment import HeldOutProblem
from prime_node.trainer.evaluate import Evaluator, HeldOutPrompt, HeldOutSets
from prime_protocol.assignment import Sampling
from prime_protocol.errors import LocalError
from prime_protocol.rollout import Completion

SAMPLING = Sampling(completion_tokens_max=4, stop_token_ids=(STOP_TOKEN,))


class Grader:
    """Problem that implements ports.environment.HeldOutProblem: every answer is right, unless the grader is broken."""

    def __init__(self, fault: str = "") -> None:
        self.fault = fault

    @property
    def prompt(self) -> str:
        return "1"

    def is_correct(self, completion: str, *, finished: bool) -> bool:
        if self.fault == "raises":
            raise RuntimeError("the grader's service is down")
        return True

    def score(self, completion: str, *, finished: bool) -> float:
        return float("nan") if self.fault == "nan" else 1.0


class CoolEngine(TableEngine):
    """Engine that samples at 0.5 where greedy answers are requested."""

    async def generate(self, requests: Sequence[GenerateRequest], sampling: Sampling) -> list[Completion]:
        cool = sampling.model_copy(update={"temperature": max(0.5, sampling.temperature)})
        return await super().generate(requests, cool)


class Texts:
    """Tokenizer that implements ports.environment.Tokenizer."""

    vocab_size = VOCAB_SIZE
    stop_token_id = STOP_TOKEN

    def encode_prompt(self, text: str) -> list[int]:
        return [1]

    encode = encode_prompt

    def decode(self, token_ids: list[int]) -> str:
        return " ".join(map(str, token_ids))


def evaluator(*faults: str) -> Evaluator:
    """Return an evaluator with one question for each fault; the empty one is a grader that works."""
    problems: list[HeldOutProblem] = [Grader(fault) for fault in faults]
    questions = tuple(HeldOutPrompt("toy", (1,), problem) for problem in problems)
    return Evaluator(
        CoolEngine(), Texts(), HeldOutSets(questions, questions), SAMPLING, seed=1, samples=2, pass_at=(2,)
    )


@pytest.mark.parametrize("fault", ["raises", "nan"])
async def test_answers_that_a_grader_fails_on_are_counted_apart_and_lower_no_figure(fault: str) -> None:
    whole = await evaluator("", "", "").evaluate(table_weights(0), 0)
    partly = await evaluator("", fault, "").evaluate(table_weights(0), 0)
    assert whole["eval_failed"] == 0.0
    assert partly["eval_failed"] == 1 + 2  # the greedy answer and both samples
    for name in ("eval_greedy", "eval_sampled", "eval_reward", "eval_pass_at_2"):
        assert partly[name] == whole[name] == 1.0


async def test_where_every_grader_fails_there_is_no_figure_and_no_zero() -> None:
    figures = await evaluator("raises", "nan").evaluate(table_weights(0), 0)
    assert figures == {"eval_failed": 6.0}


async def test_a_stopping_rule_does_not_read_a_broken_grader_as_no_accuracy() -> None:
    assert await evaluator("", "raises").stopping_accuracy(table_weights(0), 0) == 1.0
    with pytest.raises(LocalError, match="the evaluation could not score any answer"):
        await evaluator("raises", "nan").stopping_accuracy(table_weights(0), 0)


def test_workers_evaluations_count_unscored_answers_apart() -> None:
    group = AcceptedGroup("w", 0, "b", 0, (1.0, 0.0, 0.0), unscored=(1, 2))
    mark = evaluations.mark_of(group)
    assert mark == Mark(1, 1, 1.0, 2)
    assert sampled_figures({"toy": [mark]}, pass_at=())["eval_sampled"] == 1.0
