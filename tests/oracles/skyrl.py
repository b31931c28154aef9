"""SkyRL: the capacity of fully asynchronous generation, and its queue of groups.

NovaSky-AI/SkyRL, skyrl/train/fully_async_trainer.py at 06a734eacb1531367cb7bb0560a9c04985b1aa58
(`_compute_capacity_unlocked`, and the training loop, which takes groups from a queue). Its global step counts from 1 and is the
step being worked on.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.oracles.facts import Facts, first


def capacity(
    *, global_step: int, accepted: int, running: int, mini_batch_size: int, max_staleness_steps: int, workers: int
) -> int:
    """Return how many groups may be submitted."""
    consumed = (max_staleness_steps + global_step) * mini_batch_size
    return min(workers - running, consumed - (accepted + running))


@dataclass(frozen=True, slots=True)
class SkyRl:
    """Settings of `trainer.fully_async`."""

    max_staleness_steps: int
    num_parallel_generation_workers: int

    def may_begin(self, facts: Facts) -> bool:
        """Failed groups count no longer."""
        running = len(facts.running)
        return (
            capacity(
                global_step=facts.version + 1,
                accepted=facts.taken + len(facts.groups) - running,
                running=running,
                mini_batch_size=facts.size,
                max_staleness_steps=self.max_staleness_steps,
                workers=self.num_parallel_generation_workers,
            )
            > 0
        )

    def stale(self, facts: Facts) -> set[int]:
        """None: a group that is staler than the setting is trained with a warning."""
        return set()

    def batch(self, facts: Facts) -> set[int] | None:
        """The queue gives groups in the order in which they were completed."""
        return first(facts.arrived, facts.size)
