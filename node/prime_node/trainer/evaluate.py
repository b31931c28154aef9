"""Held-out evaluation: greedy and sampled accuracy, and mean reward, on problems that no training has seen.

Two disjoint sets: the evaluation's, and the one that the supervised phase's stopping rule looks at. A figure that a stopping
rule has been fitted to is no measurement. Seeds are the evaluation's own and the same each time, so two policies meet the
same problems and the same noise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prime_node.ports.engine import Engine, GenerateRequest
from prime_node.ports.environment import Environment, HeldOutProblem, Tokenizer
from prime_protocol.assignment import Sampling
from prime_protocol.rollout import FinishReason
from prime_protocol.weights import Weights


@dataclass(frozen=True, slots=True)
class Question:
    """A held-out problem, ready to be asked."""

    environment: str
    prompt_token_ids: tuple[int, ...]
    problem: HeldOutProblem


@dataclass(frozen=True, slots=True)
class HeldOut:
    """The two sets of questions."""

    evaluation: tuple[Question, ...]
    stopping: tuple[Question, ...]


@dataclass(frozen=True, slots=True)
class _Marks:
    """What the completions of some questions are worth, in their order."""

    correct: tuple[bool, ...]
    rewards: tuple[float, ...]


def held_out(
    environments: Mapping[str, Environment], tokenizer: Tokenizer, *, evaluation: int, stopping: int
) -> HeldOut:
    """So many problems of each environment."""
    sets: tuple[list[Question], list[Question]] = ([], [])
    for name, environment in environments.items():
        for number, problem in enumerate(environment.held_out(evaluation + stopping)):
            question = Question(name, tuple(tokenizer.encode_prompt(problem.prompt)), problem)
            sets[number >= evaluation].append(question)
    return HeldOut(tuple(sets[0]), tuple(sets[1]))


class Evaluator:
    """Asks an engine of the trainer's own."""

    def __init__(
        self, engine: Engine, tokenizer: Tokenizer, questions: HeldOut, sampling: Sampling, *, seed: int
    ) -> None:
        """`sampling` is the run's; the greedy half sets its temperature to 0."""
        self._engine = engine
        self._tokenizer = tokenizer
        self._questions = questions
        self._sampling = sampling
        self._seed = seed

    async def evaluate(self, weights: Weights, policy_version: int) -> dict[str, float]:
        """`eval_greedy` and `eval_sampled` are shares of exact answers; `eval_reward` is the mean of the sampled ones."""
        await self._engine.load(weights, policy_version=policy_version)
        questions = self._questions.evaluation
        greedy = await self._ask(questions, self._sampling.model_copy(update={"temperature": 0.0}))
        sampled = await self._ask(questions, self._sampling)
        marks = {
            "eval_greedy": _mean(greedy.correct),
            "eval_sampled": _mean(sampled.correct),
            "eval_reward": _mean(sampled.rewards),
        }
        names = sorted({question.environment for question in questions})
        for name in names if len(names) > 1 else ():
            here = [place for place, question in enumerate(questions) if question.environment == name]
            marks[f"eval_greedy/{name}"] = _mean([greedy.correct[place] for place in here])
            marks[f"eval_sampled/{name}"] = _mean([sampled.correct[place] for place in here])
        return marks

    async def stopping_accuracy(self, weights: Weights, sft_step: int) -> float:
        """Sampled accuracy on the stopping rule's own questions."""
        await self._engine.load(weights, policy_version=sft_step)
        return _mean((await self._ask(self._questions.stopping, self._sampling)).correct)

    async def close(self) -> None:
        """Free the engine. Idempotent."""
        await self._engine.close()

    async def _ask(self, questions: Sequence[Question], sampling: Sampling) -> _Marks:
        requests = [
            GenerateRequest(question.prompt_token_ids, self._seed * 2**32 + number)
            for number, question in enumerate(questions)
        ]
        correct, rewards = [], []
        for question, completion in zip(questions, await self._engine.generate(requests, sampling), strict=True):
            text = self._tokenizer.decode(list(completion.token_ids))
            finished = completion.finish is FinishReason.STOP
            correct.append(question.problem.is_correct(text, finished=finished))
            rewards.append(question.problem.score(text, finished=finished))
        return _Marks(tuple(correct), tuple(rewards))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
