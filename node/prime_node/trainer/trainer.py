"""State shared by the trainer's loops: its parts, its position, and the operations that both loops use."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from prime_node import __version__
from prime_node.broadcast.publish.encoder import Published
from prime_node.broadcast.publish.publisher import Publisher
from prime_node.memory import return_free_memory
from prime_node.observe import Recorder
from prime_node.trainer.checkpointing import Checkpoints
from prime_node.trainer.committing import Committer
from prime_node.trainer.pinned_recipe import recipe_document, require_pinned
from prime_node.trainer.state import Phase, TrainerState
from prime_node.trainer.step_runner import StepRunner
from prime_node.training_data.feed import StepBatch
from prime_protocol.manifest import Provenance
from prime_protocol.telemetry import HeldOutFigures, Interval

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(kw_only=True)
class Trainer(StepRunner):
    """The trainer's parts and state."""

    publisher: Publisher
    checkpoints: Checkpoints
    metrics: Recorder
    committer: Committer | None = None
    """Commitments for re-execution, if the RunSpec promises any."""
    copy_seconds: float = field(default=0.0, init=False)
    """Seconds for which the last policy's copy for the publisher delayed the next step."""
    commit_seconds: float = field(default=0.0, init=False)
    """Seconds for which the last policy's commitments delayed the next step."""
    train_seconds: float | None = field(default=None, init=False)
    """Seconds of training in the last step."""
    _saving: asyncio.Task[None] | None = field(default=None, init=False)

    async def pin_recipe(self) -> None:
        """Publish the recipe of a run that pins one. Raises LocalError if these settings are another."""
        policy = self.run.spec.replay
        if policy is not None:
            require_pinned(self.config, policy, await self.publisher.read_blob(policy.recipe))
            await self.publisher.put_aside(recipe_document(self.config), what="the recipe")

    async def resume(self) -> None:
        """Resume from a checkpoint, or begin. The publisher must have started: its head decides from which."""
        if self.committer is not None:
            self.committer.begin(self.publisher.head + 1)
        found = await self.in_thread(self.checkpoints.newest, head=self.publisher.head)
        if found is not None:
            self.state, folder = found
            await self.in_thread(self.backend.load, folder)
        else:
            self.state = TrainerState(run=self.run.digest)
            await self.in_thread(self.backend.new_optimizer, self.config.sft.optimizer.settings())

    async def next_batch(self, part: int) -> StepBatch:
        """Return batch number `part` of the current step."""
        durable_step = self.checkpoints.durable_step(self.publisher.head)
        if self.rewards is not None:
            await asyncio.to_thread(self.rewards.forget, durable_step)
        return await self.feed.take(self.state.step, part, durable_step=durable_step, train_seconds=self.train_seconds)

    async def save(self) -> None:
        """Save the state, durably. Once per state; saving again does nothing. Raises LocalError, also for an earlier save."""
        await self._begin_save()
        await self.saved()

    async def save_if_due(self) -> None:
        """Copy the state if a checkpoint is due, and write it while the next steps are computed.

        Raises LocalError, also for an earlier save.
        """
        done = self.state.sft_step if self.state.phase is Phase.SFT else self.state.step
        if done % self.config.checkpoint_every == 0:
            await self._begin_save()
        elif self._saving is not None and self._saving.done():
            await self.saved()

    async def saved(self) -> None:
        """Wait until the save begun by `save_if_due` is durable."""
        if self._saving is not None:
            await self._saving
            self._saving = None

    async def _begin_save(self) -> None:
        await self.saved()  # one at a time: a slow disk delays the steps instead of filling the memory
        folder = self.checkpoints.begin(self.state)
        if folder is not None:
            write = await self.in_thread(self.backend.save, folder)
            finish = partial(self.checkpoints.finish, self.state, write, head=self.publisher.head)
            self._saving = asyncio.create_task(asyncio.to_thread(finish))
            self._saving.add_done_callback(log_failed_save)

    async def publish(self) -> None:
        """Submit the current policy to the publisher; wait for the copy, and while too many are pending."""
        began_s = self.clock.monotonic_s()
        copy = await self.in_thread(self.backend.copy)
        self.copy_seconds = self.clock.monotonic_s() - began_s
        provenance = Provenance(
            step=self.state.step - 1,
            optimizer_steps=self.state.optimizer_steps,
            batch=self.state.batch,
            software=f"prime-node {__version__}",
        )
        committed = None
        if self.committer is not None:
            if self.committer.is_due(self.state.step):
                committed = await self.in_thread(self.committer.commit, self.state, self.backend)
            provenance = provenance.model_copy(
                update={
                    "lr": self.state.lr,
                    "lr_multiplier": self.state.lr_multiplier,
                    "numerics": self.backend.numerics,
                    "training_state": None if committed is None else committed.digest,
                }
            )
        self.commit_seconds = self.clock.monotonic_s() - began_s - self.copy_seconds
        await self.publisher.submit(self.state.step, copy, provenance, committed)

    async def evaluate_if_due(self) -> None:
        """Evaluate the current policy if an evaluation is due, and record its figures."""
        every, step = self.config.evaluate_every, self.state.step
        is_due = every > 0 and (step % every == 0 or step == self.run.spec.max_steps)
        if not is_due and step not in self.config.evaluate_at:
            return
        assert self.evaluator is not None, "an evaluation is due"
        began_s = self.clock.monotonic_s()
        marks = await self.evaluator.evaluate(await self.in_thread(self.backend.snapshot), step)
        self.metrics.record(step=step, **marks, eval_by="trainer", eval_seconds=self.clock.monotonic_s() - began_s)
        figures = {name: _interval(marks, name) for name in ("greedy", "sampled")}
        self.feed.held_out.append(HeldOutFigures(policy_version=step, **figures))
        await self.in_thread(return_free_memory)  # keys and values of all problems
        shown = [f"{marks[f'eval_{name}']:.2f} {name}" for name in ("greedy", "sampled") if f"eval_{name}" in marks]
        log.info("step %d: held-out %s", step, ", ".join(shown) or "nothing: no answer could be scored")

    async def close(self) -> None:
        """Stop everything concurrent with the loop; a call in the trainer's thread ends first. Idempotent."""
        await self.feed.close()
        await self.publisher.close()
        if self.evaluator is not None:
            await self.evaluator.close()
        if self._saving is not None:
            await asyncio.gather(self._saving, return_exceptions=True)
        if self.teacher is not None:
            await self.teacher.close()
        self.end_thread()
        self.metrics.close()


def _interval(marks: Mapping[str, float], name: str) -> Interval | None:
    """Return a figure of an evaluation with its interval; None if no answer could be scored."""
    if f"eval_{name}" not in marks:
        return None
    mean, low, high = (float(marks[f"eval_{name}{suffix}"]) for suffix in ("", "_low", "_high"))
    return Interval(mean=mean, low=low, high=high)


def log_failed_save(saving: asyncio.Task[None]) -> None:
    """Log a failed save at once: the next save raises the error, which may be much later or never."""
    if not saving.cancelled() and (error := saving.exception()) is not None:
        log.error("the checkpoint of the training state could not be written: %s", error)


def record_published(metrics: Recorder) -> Callable[[Published], None]:
    """Return the publisher's callback: it records a row for each announced policy."""

    def record(published: Published) -> None:
        metrics.record(
            policy_version=published.policy_version,
            raw_bytes=published.raw_bytes,
            sent_bytes=published.sent_bytes,
            ratio=published.ratio,
            encodings=dict(published.encodings),
            encode_seconds=published.encode_seconds,
            upload_seconds=published.seconds - published.encode_seconds,
            publish_seconds=published.seconds,
        )

    return record
