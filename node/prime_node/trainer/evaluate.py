"""Held-out evaluation: greedy and sampled accuracy, pass@k and mean reward, on problems that are never trained on.

There are two disjoint sets: the evaluation's, and the stopping rule's of the supervised phase. A figure to which a
stopping rule was fitted is no measurement. Seeds are the evaluation's own and the same each time, so two policies get
the same problems and the same noise.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prime_node.algo.estimates import Mark, sampled_figures, spread
from prime_node.envs.episodes import BatchingQueue, Bounds, EpisodeRecorder, again_alone
from prime_node.ports.engine import Engine, GenerateRequest
from prime_node.ports.environment import (
    Ask,
    Environment,
    HeldOutProblem,
    Tokenizer,
    TurnEnvironment,
    TurnProblem,
    graded_together,
)
from prime_protocol.assignment import Sampling
from prime_protocol.errors import LocalError
from prime_protocol.rollout import Completion, FinishReason
from prime_protocol.weights import Weights

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HeldOutPrompt:
    """A held-out problem with its prompt."""

    environment: str
    prompt_token_ids: tuple[int, ...]
    problem: HeldOutProblem
    answers: bool = False
    """Whether its environment is multi-turn: `problem` is a TurnProblem."""


@dataclass(frozen=True, slots=True)
class TrainingProblem:
    """Implementation of ports.environment.HeldOutProblem by a training problem, for greedy completions."""

    environment: Environment
    index: int

    @property
    def prompt(self) -> str:
        """Return the prompt's text."""
        return self.environment.prompt(self.index)

    def is_correct(self, completion: str, *, finished: bool) -> bool:
        """Return whether the completion gets the full reward."""
        return self.score(completion, finished=finished) == 1.0

    def score(self, completion: str, *, finished: bool) -> float:
        """Return the reward of a completion."""
        return self.environment.score(self.index, completion, finished=finished)


@dataclass(frozen=True, slots=True)
class TurnTrainingProblem(TrainingProblem):
    """The same for a problem whose environment answers."""

    async def play(self, prompt_token_ids: tuple[int, ...], ask: Ask) -> float:
        """Play one rollout and return its reward."""
        assert isinstance(self.environment, TurnEnvironment)
        return await self.environment.play(self.index, prompt_token_ids, ask)


@dataclass(frozen=True, slots=True)
class HeldOutSets:
    """The two sets of held-out problems."""

    evaluation: tuple[HeldOutPrompt, ...]
    stopping: tuple[HeldOutPrompt, ...]


def held_out(
    environments: Mapping[str, Environment], tokenizer: Tokenizer, *, evaluation: int, stopping: int
) -> HeldOutSets:
    """Return the two sets, with `evaluation` and `stopping` problems of each environment."""
    sets: tuple[list[HeldOutPrompt], list[HeldOutPrompt]] = ([], [])
    for name, environment in environments.items():
        for number, problem in enumerate(environment.held_out(evaluation + stopping)):
            prompt = tuple(tokenizer.encode_prompt(problem.prompt))
            question = HeldOutPrompt(name, prompt, problem, isinstance(problem, TurnProblem))
            sets[number >= evaluation].append(question)
    return HeldOutSets(tuple(sets[0]), tuple(sets[1]))


class Evaluator:
    """Evaluator on an engine of the trainer's own: its figures are trusted."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        questions: HeldOutSets,
        sampling: Sampling,
        *,
        seed: int,
        samples: int = 1,
        pass_at: Sequence[int] = (),
        bounds: Mapping[str, Bounds] | None = None,
    ) -> None:
        """Set up an evaluation.

        `sampling` is the run's; the greedy half uses temperature 0. `samples` is the number of completions of each
        problem, `pass_at` the k of pass@k, and `bounds` those of multi-turn environments.
        """
        self._engine = engine
        self._tokenizer = tokenizer
        self._questions = questions
        self._sampling, self._greedy = sampling, sampling.model_copy(update={"temperature": 0.0})
        self._seed = seed
        self._samples = samples
        self._pass_at = tuple(pass_at)
        self._bounds = bounds or {}

    async def evaluate(self, weights: Weights, policy_version: int) -> dict[str, float]:
        """Evaluate a policy and return its figures.

        `eval_greedy` and `eval_sampled` are shares of exact answers. `eval_reward` is the mean reward of the sampled
        ones, and `eval_pass_at_4` the chance that one of four is right. `_low` and `_high` bound each with 95 %
        confidence. A name after a slash is one environment's, if there are several.

        `eval_failed` counts answers on which the environment failed. They are in no other figure; a figure without any
        answer is missing.
        """
        await self._engine.load(weights, policy_version=policy_version)
        questions = self._questions.evaluation
        greedy = await self._ask(questions, self._greedy, samples=1)
        sampled = await self._ask(questions, self._sampling, samples=self._samples)
        greedy_by, sampled_by = _by_environment(questions, greedy), _by_environment(questions, sampled)
        shares = {name: [mark.share for mark in marks] for name, marks in greedy_by.items()}
        failed = sum(mark.num_failed for mark in (*greedy, *sampled))
        if failed:
            log.warning("policy %d: environments failed on %d answers of the evaluation", policy_version, failed)
        figures = spread("eval_greedy", shares) | sampled_figures(sampled_by, pass_at=self._pass_at)
        return figures | {"eval_failed": float(failed)}

    async def greedy_rewards(
        self, questions: Sequence[HeldOutPrompt], weights: Weights, policy_version: int
    ) -> list[float | None]:
        """Return the reward of one greedy completion of each problem; None if its environment fails."""
        await self._engine.load(weights, policy_version=policy_version)
        marks = await self._ask(questions, self._greedy, samples=1)
        return [mark.reward_mean if mark.num_completions else None for mark in marks]

    async def stopping_accuracy(self, weights: Weights, sft_step: int) -> float:
        """Return the sampled accuracy on the stopping rule's problems. Raises LocalError if none of them can be marked."""
        questions = self._questions.stopping
        await self._engine.load(weights, policy_version=sft_step)
        marks = await self._ask(questions, self._sampling, samples=1)
        if questions and not any(mark.num_completions for mark in marks):
            raise LocalError(
                "the evaluation could not score any answer: the environments failed on all of them. See the first failures "
                "in the log and fix the environment"
            )
        return _mean([mark.share for mark in marks if mark.num_completions])

    async def close(self) -> None:
        """Free the engine. Idempotent."""
        await self._engine.close()

    async def _ask(self, questions: Sequence[HeldOutPrompt], sampling: Sampling, *, samples: int) -> list[Mark]:
        """Return one mark for each problem, over `samples` completions."""
        seeds = [
            [self._seed * 2**32 + sample * 2**20 + number for sample in range(samples)]
            for number in range(len(questions))
        ]
        answers = [place for place, question in enumerate(questions) if question.answers]
        asked = [place for place, question in enumerate(questions) if not question.answers]
        requests = [
            GenerateRequest(questions[place].prompt_token_ids, seed) for place in asked for seed in seeds[place]
        ]
        completions = iter(await self._engine.generate(requests, sampling) if requests else ())
        with graded_together():
            marks = {
                place: self._mark(questions[place], [next(completions) for _ in range(samples)]) for place in asked
            }
        batcher, alone = BatchingQueue(lambda batch: self._engine.generate(batch, sampling)), asyncio.Lock()
        episodes = [self._episode(questions[place], seed, batcher, alone) for place in answers for seed in seeds[place]]
        rewards = iter(await batcher.serving(asyncio.gather(*episodes)) if episodes else ())
        for place in answers:
            its = [next(rewards) for _ in range(samples)]
            marks[place] = _marked([None if reward is None else (reward == 1.0, reward) for reward in its])
        return [marks[place] for place in range(len(questions))]

    async def _episode(
        self, question: HeldOutPrompt, seed: int, batcher: BatchingQueue, alone: asyncio.Lock
    ) -> float | None:
        """Return the reward of one multi-turn rollout; None if the environment fails."""
        problem, bounds = question.problem, self._bounds[question.environment]
        assert isinstance(problem, TurnProblem)
        try:
            return await again_alone(
                lambda: problem.play(question.prompt_token_ids, EpisodeRecorder(seed, bounds, batcher.ask)), alone
            )
        except Exception:  # third-party code; the engine's faults are raised by the batching queue
            log.warning("environment %s: an evaluation's episode failed", question.environment, exc_info=True)
            return None

    def _mark(self, question: HeldOutPrompt, completions: Sequence[Completion]) -> Mark:
        """Mark a problem's completions.

        Those on which the environment fails count as neither right nor wrong, and the run continues.
        """
        problem = question.problem
        values: list[tuple[bool, float] | None] = []
        for completion in completions:
            text, finished = self._tokenizer.decode(list(completion.token_ids)), completion.finish is FinishReason.STOP
            try:
                right, reward = problem.is_correct(text, finished=finished), problem.score(text, finished=finished)
                if not math.isfinite(reward):
                    raise ValueError(f"its reward is {reward}")
            except Exception:  # third-party code
                log.warning(
                    "environment %s: cannot score an answer to its problem", question.environment, exc_info=True
                )
                values.append(None)
            else:
                values.append((right, reward))
        return _marked(values)


def _marked(values: Sequence[tuple[bool, float] | None]) -> Mark:
    """Return the mark of (right, reward) pairs; a pair is None if the environment failed."""
    known = [value for value in values if value is not None]
    right, rewards = sum(right for right, _ in known), [reward for _, reward in known]
    return Mark(right, len(known), _mean(rewards), len(values) - len(known))


def _by_environment(questions: Sequence[HeldOutPrompt], marks: Sequence[Mark]) -> dict[str, list[Mark]]:
    """Group the marks of problems with at least one marked answer."""
    found: dict[str, list[Mark]] = {}
    for question, mark in zip(questions, marks, strict=True):
        if mark.num_completions:
            found.setdefault(question.environment, []).append(mark)
    return found


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
