"""State shared by the trainer's loops: its parts, its position, and the operations that both loops use."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from prime_node import __version__
from prime_node.broadcast.publish.publisher import Published, Publisher
from prime_node.memory import return_free_memory
from prime_node.observe import Recorder
from prime_node.ports.clock import Clock
from prime_node.ports.teacher import Teacher
from prime_node.ports.train_backend import KeptPolicy, Loss, PackedBatch, StepStats, TrainBackend, TrainSample
from prime_node.trainer.checkpointing import Checkpoints
from prime_node.trainer.config import TrainerConfig
from prime_node.trainer.evaluate import Evaluator
from prime_node.trainer.lessons import Lessons
from prime_node.trainer.recipe import Recipe
from prime_node.trainer.state import Phase, TrainerState
from prime_node.training_data.feed import Feed, StepBatch
from prime_protocol.manifest import Provenance
from prime_protocol.run_spec import PinnedRun
from prime_protocol.telemetry import HeldOutFigures, Interval

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass
class Trainer:
    """The trainer's parts and state.

    All calls of the backend go through `in_thread`, so the event loop stays free for feed and publisher.
    """

    run: PinnedRun
    config: TrainerConfig
    backend: TrainBackend
    feed: Feed
    publisher: Publisher
    evaluator: Evaluator | None
    """None if the settings ask for no evaluation."""
    lessons: Lessons
    checkpoints: Checkpoints
    metrics: Recorder
    clock: Clock
    teacher: Teacher | None = None
    state: TrainerState = field(init=False)
    copy_seconds: float = field(default=0.0, init=False)
    """Seconds for which the last policy's copy for the publisher delayed the next step."""
    train_seconds: float | None = field(default=None, init=False)
    """Seconds of training in the last step."""
    _thread: ThreadPoolExecutor = field(init=False)
    _saving: asyncio.Task[None] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="train")

    async def in_thread(self, call: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run `call` in the trainer's one thread. Calls never overlap; a cancelled one still ends first."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: call(*args, **kwargs))

    async def resume(self) -> None:
        """Resume from a checkpoint, or begin. The publisher must have started: its head decides from which."""
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
        return await self.feed.take(self.state.step, part, durable_step=durable_step, train_seconds=self.train_seconds)

    async def train(self, samples: Sequence[TrainSample] | PackedBatch, loss: Loss, *, lr: float) -> StepStats:
        """Run one optimizer step and count it if it trained any token."""
        stats = await self.in_thread(self.backend.train_step, samples, loss, lr=lr)
        if stats.num_tokens:
            self.state = self.state.updated(optimizer_steps=self.state.optimizer_steps + 1)
        return stats

    async def renew_reference(self, recipe: Recipe) -> None:
        """Keep the current policy as the reference if this step asks for it."""
        if recipe.renews_reference(self.state.step, self.state.reference_step):
            await self.in_thread(self.backend.keep_policy, KeptPolicy.REFERENCE)
            self.state = self.state.updated(reference_step=self.state.step)

    async def save(self) -> None:
        """Save the state, durably.

        Once per state; saving again does nothing. Raises LocalError, also for an earlier save.
        """
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
        await self.publisher.submit(self.state.step, copy, provenance)

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
        self._thread.shutdown(wait=True)
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
