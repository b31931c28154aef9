"""verl: the fully asynchronous policy, and the replay buffer of the V1 trainers.

volcengine/verl, verl/experimental/fully_async_policy/fully_async_rollouter.py at 7332cb6caf7cb28fdd70a517d7e9c92c8198c605
(`set_max_required_samples`, `_should_pause_generation`); verl-project/verl, verl/trainer/ppo/v1/replay_buffer.py at
080a43f8c48b4445dc6364179602067306883f1e (`_stale_terminal_keys`, `_has_enough_samples`, `sample`) and
verl/trainer/ppo/v1/trainer_separate_async.py at 0abc9fb3822d259a8333b3f0a5b8f77cf74ec27e (`on_train_begin`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tests.oracles.facts import Facts, first


def max_required_samples(*, required: int, staleness_threshold: float, sync_step: int) -> int:
    """Return the number of samples at which the rollouter pauses."""
    return int(required * (staleness_threshold + 1) * sync_step)


@dataclass(frozen=True, slots=True)
class FullyAsync:
    """Settings of `async_training`. A step is `sync_step` batches."""

    staleness_threshold: float
    sync_step: int

    def may_begin(self, facts: Facts) -> bool:
        """A sync of parameters sets the count to what is in progress and in the queue; each new sample adds one."""
        most = max_required_samples(
            required=facts.size, staleness_threshold=self.staleness_threshold, sync_step=self.sync_step
        )
        return facts.left_over + facts.begun_since < most

    def stale(self, facts: Facts) -> set[int]:
        """None."""
        return set()

    def batch(self, facts: Facts) -> set[int] | None:
        """The message queue gives samples in the order in which they were completed."""
        return first(facts.arrived, facts.size)


def span(*, global_steps: int, prompt_step: int) -> int:
    """Return the number of policies that a prompt spans, its own and the one that trains on it included."""
    return global_steps - prompt_step + 1


@dataclass(frozen=True, slots=True)
class V1:
    """Settings of `trainer.v1`."""

    num_warmup_batches: int
    max_off_policy_threshold: int
    max_off_policy_strategy: Literal["drop", "wait"]

    def may_begin(self, facts: Facts) -> bool:
        """The warm-up batches come first, and one batch with each step; a prompt that is dropped is replaced."""
        submitted = facts.taken + len(facts.groups)
        return submitted < (self.num_warmup_batches + 1 + facts.version) * facts.size

    def stale(self, facts: Facts) -> set[int]:
        """Finished prompts beyond the threshold, under `drop` only."""
        if self.max_off_policy_strategy != "drop":
            return set()
        return {
            group.number for group in facts.ready if self._span(facts, group.version) > self.max_off_policy_threshold
        }

    def batch(self, facts: Facts) -> set[int] | None:
        """The oldest policies first. Of one policy, any order is as good: the keys come from a set. This takes it as arrival.

        Under `wait`, it waits for each prompt in progress that has reached the threshold.
        """
        overdue = (self._span(facts, group.version) >= self.max_off_policy_threshold for group in facts.running)
        if self.max_off_policy_strategy == "wait" and any(overdue):
            return None
        return first(sorted(facts.arrived, key=lambda group: group.version), facts.size)

    def _span(self, facts: Facts, version: int) -> int:
        return span(global_steps=facts.step, prompt_step=version)
