"""The parts of the trainer that compute a step, and its state. A re-execution uses them too."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from prime_node.memory import return_free_memory
from prime_node.ports.clock import Clock
from prime_node.ports.teacher import Teacher
from prime_node.ports.train_backend import KeptPolicy, Loss, PackedBatch, StepStats, TrainBackend
from prime_node.ports.train_samples import Group, TrainingMode, TrainSample
from prime_node.trainer.batch import ready_batch
from prime_node.trainer.config import TrainerConfig
from prime_node.trainer.evaluate import Evaluator
from prime_node.trainer.further_rewards import FurtherRewards, KeptRewards, RewardsKey
from prime_node.trainer.lessons import Lessons
from prime_node.trainer.recipe import Recipe
from prime_node.trainer.state import TrainerState
from prime_node.training_data.feed import Feed
from prime_protocol.run_spec import PinnedRun

T = TypeVar("T")


@dataclass(kw_only=True)
class StepRunner:
    """What computes steps. All calls of the backend go through `in_thread`, so the event loop stays free."""

    run: PinnedRun
    config: TrainerConfig
    backend: TrainBackend
    feed: Feed
    lessons: Lessons
    clock: Clock
    teacher: Teacher | None = None
    evaluator: Evaluator | None = None
    """None if the settings ask for nothing that the trainer samples itself."""
    rewards: KeptRewards | None = None
    """Rewards that the trainer found itself in the steps since its checkpoint; None keeps none."""
    state: TrainerState = field(init=False)
    _thread: ThreadPoolExecutor = field(init=False)

    def __post_init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="train")

    def recipe(self) -> Recipe:
        """Look up the algorithms of the settings. Raises LocalError."""
        spec = self.run.spec
        return Recipe.of(
            self.config,
            max_steps=spec.max_steps,
            completion_tokens_max=spec.sampling.completion_tokens_max,
            vocab_size=spec.vocab_size,
        )

    def prepare_ahead(self, recipe: Recipe) -> None:
        """Let the feed prepare each batch as soon as it arrives."""
        now_s, minis = self.clock.monotonic_s, self.run.spec.schedule.require_batches
        lessons = self.lessons
        further = FurtherRewards(lessons.environments, lessons.tokenizer, self.run.spec, self.rewards)
        hints = partial(self.lessons.hint, template=recipe.hint_template)
        self.feed.work_ahead(
            lambda batch: ready_batch(
                further.graded(batch, recipe), recipe, self.backend, minis=minis, now_s=now_s, hint_of=hints
            )
        )

    async def in_thread(self, call: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run `call` in the trainer's one thread. Calls never overlap; a cancelled one still ends first."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: call(*args, **kwargs))

    async def with_greedy_rewards(self, groups: Sequence[Group], recipe: Recipe, key: RewardsKey) -> list[Group]:
        """Return the groups; those of mode rl with the reward of the current policy's greedy completion of their problem.

        If the step was computed before, these are the rewards of the first time. Raises LocalError.
        """
        rewards = None if self.rewards is None else await asyncio.to_thread(self.rewards.read, key)
        if rewards is None:
            rewards = await self._greedy_rewards(groups, recipe)
            if self.rewards is not None:
                await asyncio.to_thread(self.rewards.keep, key, rewards)
        return [replace(group, greedy_reward=reward) for group, reward in zip(groups, rewards, strict=True)]

    async def _greedy_rewards(self, groups: Sequence[Group], recipe: Recipe) -> list[float | None]:
        assert self.evaluator is not None, "TrainerConfig.evaluates asks for one"
        asked = {
            place: question
            for place, group in enumerate(groups)
            if recipe.mode_of(group.environment) is TrainingMode.RL and (question := self.lessons.question(group))
        }
        weights = await self.in_thread(self.backend.snapshot)
        rewards = await self.evaluator.greedy_rewards([*asked.values()], weights, self.state.step)
        await self.in_thread(return_free_memory)  # keys and values of all problems
        known = dict(zip(asked, rewards, strict=True))
        return [known.get(place) for place in range(len(groups))]

    async def train(self, samples: Sequence[TrainSample] | PackedBatch, loss: Loss, *, lr: float) -> StepStats:
        """Run one optimizer step and count it if it trained any token."""
        stats = await self.in_thread(self.backend.train_step, samples, loss, lr=lr)
        if stats.num_tokens:
            self.state = self.state.updated(optimizer_steps=self.state.optimizer_steps + 1)
        return stats

    async def train_critic(self, samples: Sequence[TrainSample], *, lr: float) -> dict[str, float]:
        """Run one optimizer step of the critic, count it if it trained any token, and return its metrics."""
        stats = await self.in_thread(self.backend.train_critic, samples, lr=lr)
        if any(sample.num_trained for sample in samples):
            self.state = self.state.updated(critic_steps=self.state.critic_steps + 1)
        return {"critic_loss": stats.loss, "critic_grad_norm": stats.grad_norm, "critic_lr": lr, **stats.metrics}

    def date_critic(self, recipe: Recipe) -> None:
        """Note the step at which a critic begins, from which its warm-up counts. A run without one forgets it."""
        if recipe.critic is None:
            self.state = self.state.updated(critic_since=None, critic_steps=0)
        elif self.state.critic_since is None:  # also in checkpoints of releases that did not note it
            self.state = self.state.updated(critic_since=0 if self.state.critic_steps else self.state.step)

    async def renew_reference(self, recipe: Recipe) -> None:
        """Keep the current policy as the reference if this step asks for it."""
        if recipe.renews_reference(self.state.step, self.state.reference_step):
            await self.in_thread(self.backend.keep_policy, KeptPolicy.REFERENCE)
            self.state = self.state.updated(reference_step=self.state.step)

    def end_thread(self) -> None:
        """End the trainer's thread; a call in it ends first. Idempotent."""
        self._thread.shutdown(wait=True)
