"""Batches of the supervised phase: problems with the environments' own answers. A pure function of seed and step."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from prime_node.envs.prompts import prompt_of
from prime_node.ports.environment import Environment, Tokenizer
from prime_node.ports.train_backend import TrainingMode, TrainSample


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
        self._environments = environments
        self._names = sorted(environments)
        self._bounds = np.cumsum([shares[name] for name in self._names])
        self._tokenizer = tokenizer
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

    def _sample(self, name: str, index: int) -> TrainSample:
        sample = self._made.get((name, index))
        if sample is None:
            environment = self._environments[name]
            prompt = prompt_of(environment, index, self._tokenizer)
            answer = (*self._tokenizer.encode(environment.answer(index)), self._tokenizer.stop_token_id)
            sample = TrainSample(prompt, answer, (0.0,) * len(answer), advantage=1.0, mode=TrainingMode.SFT)
            self._made[name, index] = sample
        return sample
