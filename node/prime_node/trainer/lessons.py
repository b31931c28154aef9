"""The environments' own answers: batches of the supervised phase, and the prompts under which the policy teaches itself.

Pure functions of seed and step, and of the problem.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import numpy as np

from prime_node.envs.source import prompt_of
from prime_node.ports.environment import Environment, Tokenizer, TurnEnvironment
from prime_node.ports.train_samples import Group, TrainingMode, TrainSample
from prime_node.trainer.evaluate import HeldOutPrompt, TrainingProblem, TurnTrainingProblem

log = logging.getLogger(__name__)


class Lessons:
    """Sampler of supervised problems: the same ones for the same step, on every machine and after every crash."""

    def __init__(
        self,
        environments: Mapping[str, Environment],
        shares: Mapping[str, float],
        tokenizer: Tokenizer,
        *,
        seed: int,
        problems: int,
        batch_size: int,
    ) -> None:
        """Set up the sampler. `shares` are the relative frequencies of the environments."""
        self.environments = environments
        self._names = sorted(environments)
        self._bounds = np.cumsum([shares[name] for name in self._names])
        self.tokenizer = tokenizer
        self._seed = seed
        self._problems = problems
        self._batch_size = batch_size
        self._made: dict[tuple[str, int], TrainSample] = {}

    def batch(self, sft_step: int) -> list[TrainSample]:
        """Return the samples of a supervised step."""
        random = np.random.Generator(np.random.Philox([self._seed, sft_step]))
        picks = np.searchsorted(self._bounds, random.random(self._batch_size) * self._bounds[-1], side="right")
        indices = random.integers(self._problems, size=self._batch_size)
        return [
            self._sample(self._names[pick], index) for pick, index in zip(picks.tolist(), indices.tolist(), strict=True)
        ]

    def hint(self, group: Group, *, template: str) -> tuple[int, ...]:
        """Return a prompt that holds the group's problem and its answer; empty if the problem or its answer is not known.

        Of a group whose rollouts have several turns, the text alone: it goes before the conversation.
        """
        environment = self.environments.get(group.environment)
        if environment is None or group.problem_index is None:
            return ()
        try:
            solution = environment.answer(group.problem_index)
            problem = "" if group.turns else environment.prompt(group.problem_index)
        except Exception:  # third-party code
            log.warning("no answer of problem %d of %s", group.problem_index, group.environment, exc_info=True)
            return ()
        if not solution:
            return ()
        text = template.replace("{problem}", problem).replace("{solution}", solution)
        return tuple(self.tokenizer.encode(text) if group.turns else self.tokenizer.encode_prompt(text))

    def question(self, group: Group) -> HeldOutPrompt | None:
        """Return the problem of a group, to be answered again; None if it is not known."""
        environment = self.environments.get(group.environment)
        if environment is None or group.problem_index is None:
            return None
        answers = isinstance(environment, TurnEnvironment)
        kind = TurnTrainingProblem if answers else TrainingProblem
        problem = kind(environment, group.problem_index)
        return HeldOutPrompt(group.environment, group.prompt_token_ids, problem, answers)

    def _sample(self, name: str, index: int) -> TrainSample:
        sample = self._made.get((name, index))
        if sample is None:
            environment = self.environments[name]
            prompt = prompt_of(environment, index, self.tokenizer)
            answer = (*self.tokenizer.encode(environment.answer(index)), self.tokenizer.stop_token_id)
            sample = TrainSample(prompt, answer, (0.0,) * len(answer), advantage=1.0, mode=TrainingMode.SFT)
            self._made[name, index] = sample
        return sample
