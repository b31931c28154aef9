"""The supervised phase: training on the environments' own answers, until the model samples enough right answers.

It stops early on purpose. It teaches only the format. The rest is left to the reinforcement learning, and a model that
is sure of its answers would have nothing left to explore.
"""

from __future__ import annotations

import asyncio
import logging

from prime_node.algo.losses import find_loss
from prime_node.algo.schedule import ParameterSchedule
from prime_node.ports.train_backend import StepStats
from prime_node.trainer.state import Phase
from prime_node.trainer.step_runner import StepRunner
from prime_node.trainer.trainer import Trainer

log = logging.getLogger(__name__)


async def teach(trainer: Trainer, stop: asyncio.Event) -> None:
    """Run supervised steps until the accuracy's target, `steps_max`, or `stop`. Ends the phase unless stopped."""
    while not await _is_taught(trainer):
        if stop.is_set():
            await trainer.save()
            return
        stats = await teach_step(trainer)
        trainer.metrics.record(sft_step=trainer.state.sft_step, loss=stats.loss, grad_norm=stats.grad_norm)
        await trainer.save_if_due()
    await end_phase(trainer)


async def teach_step(trainer: StepRunner) -> StepStats:
    """Run one supervised step."""
    optimizer, step = trainer.config.sft.optimizer, trainer.state.sft_step
    schedule = ParameterSchedule(optimizer.lr, optimizer.warmup_steps, 1, final_share=1.0)
    stats = await trainer.train(trainer.lessons.batch(step), find_loss("sft"), lr=schedule.at(step))
    trainer.state = trainer.state.updated(sft_step=step + 1)
    return stats


async def end_phase(trainer: StepRunner) -> None:
    """Begin the reinforcement learning: a new optimizer, and the critic's first weights."""
    await trainer.in_thread(trainer.backend.new_optimizer, trainer.config.optimizer.settings())
    if trainer.config.critic is not None and trainer.config.critic.initial_weights is None:
        await trainer.in_thread(trainer.backend.begin_critic)
    trainer.state = trainer.state.updated(phase=Phase.RL)


async def _is_taught(trainer: Trainer) -> bool:
    config, step = trainer.config.sft, trainer.state.sft_step
    if config.steps_max == 0:
        return True
    if step and step % config.check_every == 0:
        weights = await trainer.in_thread(trainer.backend.snapshot)
        assert trainer.evaluator is not None, "the supervised phase has a stopping rule"
        accuracy = await trainer.evaluator.stopping_accuracy(weights, step)
        trainer.metrics.record(sft_step=step, sft_accuracy=accuracy)
        if accuracy >= config.accuracy_target:
            log.info("supervised phase: sampled accuracy %.2f after %d steps", accuracy, step)
            return True
    if step >= config.steps_max:
        log.warning("supervised phase: stopped at %d steps below its target of %.2f", step, config.accuracy_target)
        return True
    return False
