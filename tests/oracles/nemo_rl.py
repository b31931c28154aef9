"""NeMo-RL: the samplers of the single controller.

NVIDIA-NeMo/RL, nemo_rl/algorithms/async_utils/staleness_sampler.py at 018355f1a0f223267ef452bc0a3ae237041b415d. The buffer keeps
groups in the order in which they were reserved, ready or not. One call selects a whole batch here (`min_prompt_groups` =
`max_prompt_groups`); upstream a step may also be put together from several smaller calls.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.oracles.facts import Facts, Group, first


def admits(*, batch_index: int, trainer_version: int, window: int) -> bool:
    """Return whether a dispatch batch passes the gate: at most `window` batches ahead of the trainer."""
    return batch_index <= trainer_version + window


def in_window(groups: list[Group], *, trainer_version: int, window: int) -> list[Group]:
    """Return the groups whose start weight is in the window of the trainer's version."""
    oldest = max(0, trainer_version - window)
    return [group for group in groups if oldest <= group.version <= trainer_version]


@dataclass(frozen=True, slots=True)
class InOrder:
    """Each dispatch batch is for one step, and the step waits for it."""

    max_lookahead_versions: int

    def may_begin(self, facts: Facts) -> bool:
        """The dispatch batch of the next group passes the gate."""
        index = (facts.taken + len(facts.groups)) // facts.size
        return admits(batch_index=index, trainer_version=facts.version, window=self.max_lookahead_versions)

    def stale(self, facts: Facts) -> set[int]:
        """None can be: a step takes all groups of its dispatch batch."""
        return set()

    def batch(self, facts: Facts) -> set[int] | None:
        """The groups whose target is this step."""
        return first([group for group in facts.ready if group.number // facts.size == facts.step], facts.size)


@dataclass(frozen=True, slots=True)
class ReadyFirst:
    """Gated; takes what is ready, of any policy."""

    max_staleness_versions: int

    def may_begin(self, facts: Facts) -> bool:
        """As InOrder."""
        return InOrder(self.max_staleness_versions).may_begin(facts)

    def stale(self, facts: Facts) -> set[int]:
        """None: each admitted group stays selectable."""
        return set()

    def batch(self, facts: Facts) -> set[int] | None:
        """The first ready groups of the buffer."""
        return first([group for group in facts.ready if group.version <= facts.step], facts.size)


@dataclass(frozen=True, slots=True)
class WeightFifo:
    """Gated; drains one policy after another."""

    max_staleness_versions: int

    def may_begin(self, facts: Facts) -> bool:
        """As InOrder."""
        return InOrder(self.max_staleness_versions).may_begin(facts)

    def stale(self, facts: Facts) -> set[int]:
        """Ready groups whose policy is before the window."""
        kept = in_window(facts.ready, trainer_version=facts.step, window=self.max_staleness_versions)
        return {group.number for group in facts.ready} - {group.number for group in kept}

    def batch(self, facts: Facts) -> set[int] | None:
        """The ready groups of the oldest policy in the window; it waits while others of that policy are in progress.

        If that policy has too few groups for a batch, this one call would wait forever. A step that is put together from calls
        for what is ready continues with the next policy, and so does this.
        """
        chosen: list[Group] = []
        live = in_window(list(facts.groups.values()), trainer_version=facts.step, window=self.max_staleness_versions)
        for version in sorted({group.version for group in live}):
            mine = [group for group in facts.ready if group.version == version]
            chosen += mine[: facts.size - len(chosen)]
            if len(chosen) == facts.size:
                return {group.number for group in chosen}
            if any(group.version == version for group in facts.running):
                return None
        return None


@dataclass(frozen=True, slots=True)
class Windowed:
    """Not gated; ready groups that leave the window are evicted."""

    max_staleness_versions: int
    sample_freshest_first: bool

    def may_begin(self, facts: Facts) -> bool:
        """The sampler never refuses. The capacity of the buffer does, and docs/scheduler.md names how it differs."""
        return True

    def stale(self, facts: Facts) -> set[int]:
        """As WeightFifo."""
        return WeightFifo(self.max_staleness_versions).stale(facts)

    def cancelled(self, facts: Facts) -> set[int]:
        """Groups in progress that have left the window (`should_abort_inflight`); no other sampler aborts any."""
        kept = in_window(facts.running, trainer_version=facts.step, window=self.max_staleness_versions)
        return {group.number for group in facts.running} - {group.number for group in kept}

    def batch(self, facts: Facts) -> set[int] | None:
        """The first ready groups of the buffer, or those of the newest policies."""
        ready = in_window(facts.ready, trainer_version=facts.step, window=self.max_staleness_versions)
        if self.sample_freshest_first:
            ready = sorted(ready, key=lambda group: facts.step - group.version)
        return first(ready, facts.size)
