"""prime-rl: the barrier of its asynchronous level, and the orchestrator as it is today.

PrimeIntellect-ai/prime-rl, docs/async.md until 2025 (policy max(0, n - async_level) or newer generates batch n). Since 2026:
src/prime_rl/orchestrator/dispatcher.py (`fill_inflight`, `on_version_pending`), orchestrator.py (`update_dispatch_gate`,
`finalize_train_batch`, TARGET_LAG) and train_sink.py (`_drop_stale`), read at 004274ec964f016ec9b17b5ae990a4b535314ff1 and newer
copies. Its steps count from 1: step N trains policy N - 1. Here step n, from 0, trains policy n.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.oracles.facts import Facts, first

TARGET_LAG = 1


def is_gate_open(*, shipped: int, policy_version: int) -> bool:
    """Return whether the dispatcher may start, and the orchestrator may ship: not too far ahead of the inference's policy."""
    return shipped - policy_version <= TARGET_LAG


def min_fresh_version(*, shipped: int, max_off_policy_steps: int) -> int:
    """Return the oldest policy at dispatch that the batch being collected may hold."""
    return shipped - max_off_policy_steps


def is_cancelled(*, dispatched: int, pending: int, max_off_policy_steps: int) -> bool:
    """Return whether a group in flight is cancelled when policy `pending` arrives: each policy since its dispatch counts one."""
    return pending - dispatched > max_off_policy_steps


@dataclass(frozen=True, slots=True)
class Barrier:
    """Batches in order, at most `async_level` policies behind."""

    async_level: int

    def may_begin(self, facts: Facts) -> bool:
        """The newest policy may generate the batch of the next group."""
        batch = (facts.taken + len(facts.groups)) // facts.size
        return facts.version >= max(0, batch - self.async_level)

    def stale(self, facts: Facts) -> set[int]:
        """None."""
        return set()

    def batch(self, facts: Facts) -> set[int] | None:
        """All groups of the batch."""
        return first([group for group in facts.ready if group.number // facts.size == facts.step], facts.size)


@dataclass(frozen=True, slots=True)
class Orchestrator:
    """Permits for groups in flight, a gate on shipped batches, and a sweep of old groups."""

    max_inflight: int
    max_off_policy_steps: int

    def may_begin(self, facts: Facts) -> bool:
        """A permit is free, and the gate is open."""
        is_open = is_gate_open(shipped=facts.step, policy_version=facts.version)
        return is_open and len(facts.running) < self.max_inflight

    def stale(self, facts: Facts) -> set[int]:
        """Queued groups that were dispatched too long ago."""
        oldest = min_fresh_version(shipped=facts.step, max_off_policy_steps=self.max_off_policy_steps)
        return {group.number for group in facts.ready if group.version < oldest}

    def cancelled(self, facts: Facts) -> set[int]:
        """Groups in flight that are cancelled as the newest policy arrives, and older ones than it that would be swept anyway."""
        lag_max = self.max_off_policy_steps
        oldest = min(facts.version, min_fresh_version(shipped=facts.step, max_off_policy_steps=lag_max))
        swept = {group.number for group in facts.running if group.version < oldest}
        at_once = {
            group.number
            for group in facts.running
            if is_cancelled(dispatched=group.version, pending=facts.version, max_off_policy_steps=lag_max)
        }
        assert at_once <= swept
        return swept

    def batch(self, facts: Facts) -> set[int] | None:
        """The first groups of the queue; a batch that is complete behind a closed gate is held."""
        if not is_gate_open(shipped=facts.step, policy_version=facts.version):
            return None
        return first(facts.arrived, facts.size)
