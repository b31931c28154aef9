"""One step of training: its batches in turn, each split into mini-batches of one optimizer step.

Concurrency: a step waits for the feed before each batch, and for the teacher if there is one; `stop` ends both waits. A
partly trained step exists in the backend only: if stopped between two batches of a step, the trainer resumes from the
checkpoint before it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

from prime_node.algo.advantages import TokenNeed
from prime_node.patience import unless
from prime_node.ports.train_backend import KeptPolicy, PackedBatch, TrainBackend
from prime_node.ports.train_samples import TrainingMode, TrainSample
from prime_node.trainer.batch import MiniBatch, ReadyBatch
from prime_node.trainer.further_rewards import RewardsKey
from prime_node.trainer.other_policies import (
    credited,
    for_critic,
    with_proximal,
    with_reference,
    with_selected,
    with_weight_mean,
)
from prime_node.trainer.recipe import ProximalPolicy, Recipe
from prime_node.trainer.step_runner import StepRunner
from prime_node.trainer.teaching import self_taught, taught
from prime_node.training_data.feed import StepBatch

_ADDED_UP = ("num_", "filtered_", "flagged_", "lag/")


@dataclass
class Trained:
    """Result of a step."""

    batch: str
    """Digest of its last batch, which covers those before it."""
    lr_multiplier: float
    lr: float = 0.0
    """Learning rate of its last optimizer step."""
    kl_coef: float | None = None
    """Coefficient of the divergence in the reward for the next step."""
    idle_seconds: float = 0.0
    ahead_seconds: float = 0.0
    """Seconds for advantages, filters and packing, in parallel to an earlier step."""
    groups_left_out: int = 0
    """Groups of its batches whose data cannot be used."""
    rows: list[tuple[float, dict[str, float]]] = field(default_factory=list)
    """Metrics of each mini-batch, with their weight in a mean."""

    @property
    def metrics(self) -> dict[str, float]:
        """Return the step's metrics: counts are summed, maxima kept, everything else is averaged."""
        if len(self.rows) == 1:
            return self.rows[0][1]
        merged: dict[str, float] = {}
        for name in dict.fromkeys(name for _, row in self.rows for name in row):
            found = [(weight, row[name]) for weight, row in self.rows if name in row]
            if name.startswith(_ADDED_UP) or name.endswith(("_seconds", "_flops", "_num")):
                merged[name] = sum(value for _, value in found)
            elif "_max" in name or "/max_" in name:
                merged[name] = max(value for _, value in found)
            else:
                total = sum(weight for weight, _ in found)
                merged[name] = sum(weight * value for weight, value in found) / max(total, 1e-9)
        return merged


async def train_step(
    trainer: StepRunner, recipe: Recipe, next_batch: Callable[[int], Awaitable[StepBatch | None]], stop: asyncio.Event
) -> Trained | None:
    """Train on all batches of the current step; return None if `stop` comes before the last one."""
    schedule, step = trainer.run.spec.schedule, trainer.state.step
    trained = Trained("", trainer.state.lr_multiplier, kl_coef=trainer.state.kl_coef)
    keeps = recipe.proximal is ProximalPolicy.CYCLE and schedule.batches_per_step * schedule.require_batches > 1
    for part in range(schedule.batches_per_step):
        began_s = trainer.clock.monotonic_s()
        batch = await next_batch(part)
        if batch is None:
            return None
        trained.idle_seconds += trainer.clock.monotonic_s() - began_s
        trained.batch = batch.digest
        ready: ReadyBatch = batch.made
        trained.ahead_seconds += ready.seconds
        trained.groups_left_out += batch.num_left_out
        for number, mini in enumerate(ready.minis):
            if keeps and part == 0 and number == 0:
                await trainer.in_thread(trainer.backend.keep_policy, KeptPolicy.PROXIMAL)
            slots = tuple(group.slot for group in mini.groups)
            greedy = RewardsKey(step, part, batch.digest, f"greedy-{number}", slots)
            if not await _optimizer_step(trainer, recipe, mini, trained, stop, keeps=keeps, greedy=greedy):
                return None
    return trained


async def _optimizer_step(
    trainer: StepRunner,
    recipe: Recipe,
    mini: MiniBatch,
    trained: Trained,
    stop: asyncio.Event,
    *,
    keeps: bool,
    greedy: RewardsKey,
) -> bool:
    """Make one optimizer step, and add its figures to `trained`. Return False if `stop` comes first.

    `keeps`: whether the proximal policy is kept. `greedy`: name of the rewards of greedy completions.
    """
    step, prepared, credit_numbers = trainer.state.step, mini.prepared, {}
    if prepared is None:
        if TokenNeed.GREEDY_REWARD in recipe.advantage.needs:
            groups = await unless(stop.wait(), trainer.with_greedy_rewards(mini.groups, recipe, greedy))
            if groups is None:
                return False
            mini = replace(mini, groups=groups)
        done = await trainer.in_thread(
            credited, mini, recipe, trainer.backend, step=step, kl_coef=trained.kl_coef, keeps=keeps
        )
        prepared, credit_numbers, trained.kl_coef = done.prepared, dict(done.numbers), done.kl_coef
    samples: Sequence[TrainSample] | PackedBatch | None = mini.packed
    if samples is None:
        asking = taught(
            prepared.samples,
            trainer.teacher,
            clock=trainer.clock,
            topk=recipe.topk,
            vocab_size=recipe.vocab_size,
        )
        known = await unless(stop.wait(), asking)
        if known is None:
            return False
        seed = trainer.state.optimizer_steps
        samples = await trainer.in_thread(completed, known, recipe, trainer.backend, keeps=keeps, seed=seed)
    critic_numbers: dict[str, float] = {}
    if recipe.critic is not None:
        assert not isinstance(samples, PackedBatch), "advantages that need values are not packed ahead"
        age = step - (trainer.state.critic_since or 0)
        critic_numbers = await trainer.train_critic(for_critic(samples), lr=recipe.critic.rates.at(age))
        if age < recipe.critic.warmup_steps:
            samples = []
    lr = trained.lr = recipe.schedule.at(step) * trained.lr_multiplier
    stats = await trainer.train(samples, recipe.loss, lr=lr)
    if stats.num_tokens:
        trained.lr_multiplier = recipe.next_multiplier(trained.lr_multiplier, stats.log_ratio_abs)
    numbers = {
        **prepared.metrics,
        **credit_numbers,
        **critic_numbers,
        "loss": stats.loss,
        "grad_norm": stats.grad_norm,
        "lr": lr,
        "num_tokens": stats.num_tokens,
        "log_ratio_abs": stats.log_ratio_abs,
        **stats.metrics,
        **stats.work,
    }
    trained.rows.append((float(len(mini.groups)), numbers))
    return True


def completed(
    samples: Sequence[TrainSample], recipe: Recipe, backend: TrainBackend, *, keeps: bool, seed: int
) -> Sequence[TrainSample]:
    """Add to samples what the loss needs of other policies and of the whole optimizer step. For the trainer's thread.

    `keeps`: whether the proximal policy is kept, rather than the current one. `seed` decides which tokens the loss chooses.
    """
    if any(sample.mode is TrainingMode.OPSD for sample in samples):
        samples = self_taught(samples, recipe, backend)
    samples = with_proximal(samples, recipe, backend, keeps=keeps)
    if recipe.needs_reference:
        samples = with_reference(samples, backend)
    if recipe.chooses_tokens:
        samples = with_selected(samples, recipe, backend, seed=seed)
    if recipe.loss.normalizes_weights:
        samples = with_weight_mean(samples, recipe, backend)
    return samples


async def run_step(
    trainer: StepRunner, recipe: Recipe, next_batch: Callable[[int], Awaitable[StepBatch | None]], stop: asyncio.Event
) -> Trained | None:
    """Train the current step and move on to the next: its state, and its reference policy. None as `train_step` says."""
    trained = await train_step(trainer, recipe, next_batch, stop)
    if trained is None:
        return None
    numbers, state = trained.metrics, trainer.state
    trainer.state = state.updated(
        step=state.step + 1,
        batch=trained.batch,
        lr=trained.lr,
        lr_multiplier=trained.lr_multiplier,
        kl_coef=trained.kl_coef,
        stale_groups=state.stale_groups + round(numbers["num_stale_groups"]),
        stale_rollouts=state.stale_rollouts + round(numbers["num_stale_rollouts"]),
    )
    await trainer.renew_reference(recipe)  # before the state is saved or committed to
    return trained
