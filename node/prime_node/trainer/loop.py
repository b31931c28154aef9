"""The trainer's loop.

Concurrency: `reinforce` waits for the feed (the coordinator's next batch) and, in mode opd, for the teacher's server.
If more than async_level policies are unpublished, it waits for the publisher, whose failure ends the other waits. While
the backend's thread works, the feed fetches step n + 1, filters and packs it, and the publisher announces policy n.
Setting `stop` ends a wait for a batch or for the teacher. A step that has begun to train is finished, saved and
published. If the coordinator is unreachable then, `leave_seconds` bounds the wait for it: the next start announces the
rest.

Order within a step: train, save, publish. After a kill between any two, the newest checkpoint that is not ahead of the
announced policies is found again. The steps after it are computed again from the same batches, and the publisher
compares each with what it has already announced.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from functools import partial
from typing import Any

from prime_node.patience import cancel_all, unless
from prime_node.traces import of_step, spanned
from prime_node.trainer.recipe import Recipe
from prime_node.trainer.rows import trainer_row
from prime_node.trainer.sft import teach
from prime_node.trainer.state import Phase
from prime_node.trainer.step import run_step
from prime_node.trainer.teaching import check_teacher
from prime_node.trainer.trainer import Trainer
from prime_node.training_data.feed import StepBatch

log = logging.getLogger(__name__)

SAY_S = 30.0
"""Seconds after which a wait for a batch is logged, with its duration."""


async def run_trainer(trainer: Trainer, stop: asyncio.Event) -> bool:
    """Train until the run's last policy is published (True) or until `stop` is set (False)."""
    try:
        spec = trainer.run.spec
        recipe = trainer.recipe()
        if not await _unless_left(trainer, stop, trainer.publisher.start()):
            return False
        if not await _unless_left(trainer, stop, trainer.pin_recipe()):
            return False
        await trainer.resume()
        if trainer.state.phase is Phase.SFT:
            await teach(trainer, stop)
        if trainer.state.phase is Phase.RL:
            await reinforce(trainer, recipe, stop)
            await _unless_left(trainer, stop, trainer.publisher.flush())
            if trainer.state.step == spec.max_steps:
                await _unless_left(trainer, stop, trainer.feed.report())
    finally:
        await trainer.close()
    return trainer.publisher.head == trainer.run.spec.max_steps


async def reinforce(trainer: Trainer, recipe: Recipe, stop: asyncio.Event) -> None:
    """Run the steps of reinforcement learning: step n makes policy n + 1."""
    now_s = trainer.clock.monotonic_s
    trainer.prepare_ahead(recipe)
    trainer.date_critic(recipe)
    await trainer.renew_reference(recipe)
    await trainer.save()
    await _unless_left(trainer, stop, trainer.publish())
    await trainer.evaluate_if_due()
    if trainer.teacher is not None:
        checking = check_teacher(trainer.teacher, trainer.run.spec, clock=trainer.clock, topk=recipe.topk)
        await unless(stop.wait(), checking)
    while trainer.state.step < trainer.run.spec.max_steps and not stop.is_set():
        step, done, began_s = trainer.state.step, _optimizer_steps(trainer), now_s()
        with spanned("train step", of_step(step), is_root=True, step=step):
            trained = await run_step(trainer, recipe, partial(_next_batch, trainer, stop), stop)
        if trained is None:
            if _optimizer_steps(trainer) > done:  # the weights are those of half a step: not to be saved
                return
            break
        trained_s = now_s()
        trainer.train_seconds = trained_s - began_s - trained.idle_seconds
        await trainer.save_if_due()
        saved_s = now_s()
        await _unless_left(trainer, stop, trainer.publish())
        ended_s = now_s()
        row = trainer_row(
            trained,
            trainer.state,
            train_seconds=trainer.train_seconds,
            save_seconds=saved_s - trained_s,
            copy_seconds=trainer.copy_seconds,
            commit_seconds=trainer.commit_seconds,
            submit_seconds=ended_s - saved_s,
            step_seconds=ended_s - began_s,
            device_flops_max=trainer.config.device_flops_max,
        )
        trainer.metrics.record(step=step, **row)
        await trainer.evaluate_if_due()
    await trainer.save()


def _optimizer_steps(trainer: Trainer) -> int:
    return trainer.state.optimizer_steps + trainer.state.critic_steps


async def _next_batch(trainer: Trainer, stop: asyncio.Event, part: int) -> StepBatch | None:
    """Return the step's next batch, or None if `stop` comes first.

    Raises the publisher's failure: without a publisher no batch would ever come.
    """
    with spanned("wait for batch", of_step(trainer.state.step), part=part):
        return await _batch_or_stop(trainer, stop, part)


async def _batch_or_stop(trainer: Trainer, stop: asyncio.Event, part: int) -> StepBatch | None:
    taking = asyncio.create_task(trainer.next_batch(part))
    stopping = asyncio.create_task(stop.wait())
    failing = asyncio.create_task(trainer.publisher.failed())
    tasks = (taking, stopping, failing)
    try:
        waited_s = 0.0
        while not (await asyncio.wait(tasks, timeout=SAY_S, return_when=asyncio.FIRST_COMPLETED))[0]:
            waited_s += SAY_S
            log.info(
                "step %d: waiting for rollouts for %.0f s: %s", trainer.state.step, waited_s, trainer.feed.waits_for
            )
        if failing.done():
            failing.result()
        return taking.result() if taking.done() else None
    finally:
        await cancel_all(*tasks)


async def _unless_left(trainer: Trainer, stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Run `work`, which waits for the coordinator. Return whether it was done.

    Once `stop` is set, wait at most `leave_seconds`.
    """
    working, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait((working,), timeout=trainer.config.leave_seconds)
        if not working.done():
            log.warning(
                "stopping while the coordinator is unreachable; the next start announces the remaining policies"
            )
            return False
        working.result()
        return True
    finally:
        await cancel_all(working, stopping)
