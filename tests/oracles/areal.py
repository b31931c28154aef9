"""AReaL: the capacity of asynchronous rollouts, and which results a batch takes.

inclusionAI/AReaL, areal/infra/staleness_manager.py at 747f9f5b5409c5dc682aa38fc005221862257e72 (`get_capacity`) and
areal/infra/workflow_executor.py at 0f6fba3a207e7b014373b94211df2346111b1172 (`wait_results`). What AReaL calls a rollout is one
prompt with all its completions. `wait_results` shuffles the batch that it returns, and no rule depends on that order.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.oracles.facts import Facts, first


def capacity(
    *, version: int, accepted: int, running: int, batch_size: int, max_head_offpolicyness: int, max_concurrent: int
) -> int:
    """Return how many rollouts may start: bounded by those that run, and by all that the next policies can consume."""
    by_staleness = (max_head_offpolicyness + version + 1) * max(1, batch_size) - (accepted + running)
    return min(max(1, max_concurrent) - running, by_staleness)


@dataclass(frozen=True, slots=True)
class Areal:
    """Settings of the rollout engine."""

    max_head_offpolicyness: int
    max_concurrent_rollouts: int

    def may_begin(self, facts: Facts) -> bool:
        """A rejected rollout counts no longer."""
        running = len(facts.running)
        return (
            capacity(
                version=facts.version,
                accepted=facts.taken + len(facts.groups) - running,
                running=running,
                batch_size=facts.size,
                max_head_offpolicyness=self.max_head_offpolicyness,
                max_concurrent=self.max_concurrent_rollouts,
            )
            > 0
        )

    def stale(self, facts: Facts) -> set[int]:
        """None: the capacity alone bounds the staleness."""
        return set()

    def batch(self, facts: Facts) -> set[int] | None:
        """All results are drained and sorted by the time at which their tasks were created; the first ones are the batch."""
        return first(facts.ready, facts.size)
