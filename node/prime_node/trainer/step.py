"""One step of training: its batches in turn, each split into mini-batches of one optimizer step.

Concurrency: a step waits for the feed before each batch, and for the teacher if there is one; `stop` ends both waits. A
partly trained step exists in the backend only: if stopped between two batches of a step, the trainer resumes from the
checkpoint before it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from prime_node.patience import unless
from prime_node.ports.train_backend import KeptPolicy, PackedBatch, TrainSample
from prime_node.trainer.batch import ReadyBatch
from prime_node.trainer.recipe import ProximalPolicy, Recipe
from prime_node.trainer.teaching import taught
from prime_node.trainer.trainer import Trainer
from prime_node.training_data.feed import StepBatch

_ADDED_UP = ("num_", "filtered_", "flagged_", "lag/")


@dataclass
class Trained:
    """Result of a step."""

    batch: str
    """Digest of its last batch, which covers those before it."""
    lr_multiplier: float
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
    trainer: Trainer, recipe: Recipe, next_batch: Callable[[int], Awaitable[StepBatch | None]], stop: asyncio.Event
) -> Trained | None:
    """Train on all batches of the current step; return None if `stop` comes before the last one."""
    schedule, step = trainer.run.spec.schedule, trainer.state.step
    trained = Trained("", trainer.state.lr_multiplier)
    for part in range(schedule.batches_per_step):
        began_s = trainer.clock.monotonic_s()
        batch = await next_batch(part)
        if batch is None:
            return None
        trained.idle_seconds += trainer.clock.monotonic_s() - began_s
        trained.batch = batch.digest
        is_first = part == 0
        ready: ReadyBatch = batch.made
        trained.ahead_seconds += ready.seconds
        trained.groups_left_out += batch.num_left_out
        for mini in ready.minis:
            samples: Sequence[TrainSample] | PackedBatch | None = mini.packed
            if samples is None:
                known = await unless(stop.wait(), taught(mini.prepared.samples, trainer.teacher, clock=trainer.clock))
                if known is None:
                    return None
                samples = await _with_proximal(trainer, recipe, known, is_first=is_first)
                if recipe.needs_reference:
                    samples = await _with_logprobs(trainer, samples, KeptPolicy.REFERENCE, "reference_logprobs")
            is_first = False
            lr = recipe.schedule.at(step) * trained.lr_multiplier
            stats = await trainer.train(samples, recipe.loss, lr=lr)
            if stats.num_tokens:
                trained.lr_multiplier = recipe.next_multiplier(trained.lr_multiplier, stats.log_ratio_abs)
            numbers = {
                **mini.prepared.metrics,
                "loss": stats.loss,
                "grad_norm": stats.grad_norm,
                "lr": lr,
                "num_tokens": stats.num_tokens,
                "log_ratio_abs": stats.log_ratio_abs,
                **stats.metrics,
                **stats.work,
            }
            trained.rows.append((float(mini.num_groups), numbers))
    return trained


async def _with_proximal(
    trainer: Trainer, recipe: Recipe, samples: Sequence[TrainSample], *, is_first: bool
) -> Sequence[TrainSample]:
    """Add the proximal policy's logprobs, unless it is the policy at the start of the optimizer step."""
    if recipe.proximal is ProximalPolicy.ROLLOUT:
        return [replace(sample, prox_logprobs=sample.inference_logprobs) for sample in samples]
    schedule = trainer.run.spec.schedule
    if recipe.proximal is ProximalPolicy.CURRENT or schedule.batches_per_step * schedule.require_batches == 1:
        return samples
    if is_first:
        await trainer.in_thread(trainer.backend.keep_policy, KeptPolicy.PROXIMAL)
    return await _with_logprobs(trainer, samples, KeptPolicy.PROXIMAL, "prox_logprobs")


async def _with_logprobs(
    trainer: Trainer, samples: Sequence[TrainSample], which: KeptPolicy, field_name: str
) -> Sequence[TrainSample]:
    logprobs = await trainer.in_thread(trainer.backend.kept_logprobs, samples, which)
    fields: list[dict[str, Any]] = [{field_name: tuple(found)} for found in logprobs]
    return [replace(sample, **its) for sample, its in zip(samples, fields, strict=True)]
