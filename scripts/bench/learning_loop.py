"""Reinforcement learning in one process, without the wire: the engine, the losses and the train backend of a run.

Step n trains on rollouts of policy max(0, n - k), sampled from its published weights by an engine that workers use.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from prime_node.adapters.models.hf_tokenizer import HfTokenizer
from prime_node.adapters.training.torch_backend import TorchBackend
from prime_node.ports.engine import Engine, GenerateRequest
from prime_node.ports.environment import Environment
from prime_node.ports.train_backend import KeptPolicy, TrainingDiverged
from prime_node.ports.train_samples import Group, TrainSample
from prime_node.trainer.batch import prepare
from prime_node.trainer.evaluate import Evaluator
from prime_node.trainer.recipe import Recipe
from prime_protocol.assignment import Sampling
from prime_protocol.rollout import FinishReason
from prime_protocol.weights import Weights


@dataclass
class LearningLoop:
    """The parts that the runs of a comparison share: each begins with the same weights, and gets the same problems and noise."""

    engine: Engine
    tokenizer: HfTokenizer
    environment: Environment
    evaluator: Evaluator
    sampling: Sampling
    seed: int
    groups: int
    """Groups of a step."""
    rollouts: int
    """Rollouts of a group."""
    first: dict[str, float] | None = None
    """Evaluation of the weights that all runs begin with."""

    async def run(
        self, backend: TorchBackend, recipe: Recipe, *, steps: int, async_level: int, evaluations: int
    ) -> dict[str, Any]:
        """Train for so many steps, and evaluate so many times and once before.

        Returns the evaluations, and of each step its reward, mean |log ratio| (nats) and gradient norm. A run that diverges
        ends there.
        """
        if recipe.needs_reference:
            backend.keep_policy(KeptPolicy.REFERENCE)
        policies: deque[Weights] = deque([backend.snapshot()], maxlen=async_level + 1)
        began = time.perf_counter()
        self.first = self.first or await self.evaluate(policies[-1], 0)
        marks = [self.first]
        found: dict[str, list[float]] = {"reward": [], "log_ratio_abs": [], "grad_norm": []}
        diverged = False
        for step in range(steps):
            prepared = prepare(
                await self._step_groups(step, max(0, step - async_level), policies[0]), recipe, step=step
            )
            samples = _with_reference(backend, prepared.samples) if recipe.needs_reference else prepared.samples
            try:
                stats = backend.train_step(samples, recipe.loss, lr=recipe.schedule.at(step))
            except TrainingDiverged:
                diverged = True
                break
            policies.append(backend.snapshot())
            found["reward"].append(round(prepared.metrics["reward_mean"], 4))
            found["log_ratio_abs"].append(round(stats.log_ratio_abs, 5))
            found["grad_norm"].append(round(stats.grad_norm, 4))
            if (step + 1) * evaluations // steps > step * evaluations // steps:
                marks.append(await self.evaluate(policies[-1], step + 1))
        seconds = round(time.perf_counter() - began, 1)
        return {"evaluations": marks, **found, "diverged": diverged, "seconds": seconds}

    async def evaluate(self, weights: Weights, step: int) -> dict[str, float]:
        """Return the sampled accuracy of a policy on the problems that the evaluator has for its stopping rule."""
        return {"step": step, "sampled": round(await self.evaluator.stopping_accuracy(weights, step), 4)}

    async def _step_groups(self, step: int, policy: int, weights: Weights) -> list[Group]:
        """Sample and score one step's groups."""
        await self.engine.load(weights, policy_version=policy)
        slots = range(step * self.groups, (step + 1) * self.groups)
        prompts = [tuple(self.tokenizer.encode_prompt(self.environment.prompt(slot))) for slot in slots]
        requests = [
            GenerateRequest(prompt, seed=(self.seed << 40) + slot * self.rollouts + number)
            for slot, prompt in zip(slots, prompts, strict=True)
            for number in range(self.rollouts)
        ]
        completions = await self.engine.generate(requests, self.sampling)
        groups = []
        for index, (slot, prompt) in enumerate(zip(slots, prompts, strict=True)):
            mine = tuple(completions[index * self.rollouts : (index + 1) * self.rollouts])
            rewards = tuple(
                self.environment.score(
                    slot, self.tokenizer.decode(list(one.token_ids)), finished=one.finish is FinishReason.STOP
                )
                for one in mine
            )
            groups.append(Group(slot, prompt, mine, rewards, (policy,) * self.rollouts, "here"))
        return groups


def _with_reference(backend: TorchBackend, samples: Sequence[TrainSample]) -> list[TrainSample]:
    logprobs = backend.logprobs(samples, KeptPolicy.REFERENCE)
    return [replace(sample, reference_logprobs=tuple(found)) for sample, found in zip(samples, logprobs, strict=True)]
