"""The parameters of a simulated run: costs in seconds, schedule, workers and how long their work takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from prime_node.coordinator.state.rules import SchedulerRules, schedule_rules
from prime_protocol.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Costs:
    """Overheads of the work, in seconds."""

    request: float = 0.05
    """Time from a request to its answer, without waiting."""
    upload: float = 0.5
    check: float = 0.5
    """Validator's time for a bundle."""
    validators: int = 4
    swap: float = 1.0
    """Time to load a policy that has arrived."""
    recompute_share: float = 0.02
    """Share of a completion's time so far: recomputing its keys and values after a swap during generation."""
    retry: float = 0.2
    """Pause before a request is repeated, if waiting for the answer would not help."""
    wait: float = 10.0
    """Time for which the coordinator holds a request open."""
    heartbeat: float = 5.0
    """Time between two heartbeats of a worker, whose answers name cancelled leases."""
    encode: float = 0.0
    """Time from the end of a step until its policy is published; one policy at a time."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """Parameters of a run.

    Example: Scenario(Schedule(), async_level=2, groups_per_step=512, num_steps=12, num_workers=64, ...).
    """

    schedule: Schedule
    async_level: int
    groups_per_step: int
    num_steps: int
    num_workers: int
    group_seconds: Callable[[int], float]
    """Function that returns the seconds for a slot's group, the same for every worker."""
    train_seconds: Callable[[int, tuple[int, ...]], float]
    """Function that returns the seconds for training a batch, from its step and slots."""
    broadcast_seconds: float = 0.0
    """Time from a policy's publication until a worker holds it; policies neither overtake each other nor queue."""
    costs: Costs = field(default_factory=Costs)
    groups_per_lease: int = 1
    leases_ahead: int | None = None
    """As the worker's setting of this name. An engine with `slots` fetches none ahead if it is unset."""
    slots: int = 0
    """Completions that a worker's engine generates side by side, from several leases; 0: one lease at a time."""
    completion_seconds: Callable[[int, int], float] | None = None
    """Function that returns a completion's seconds in its place of the engine, from its slot and its number in the group."""

    first_lease_seconds: Callable[[int], float] | None = None
    """Function that returns how long after the start a worker asks for its first lease, from its number; 0 if unset."""

    cancels: bool = True
    """Whether engines that generate side by side stop leases that can no longer be used."""

    @property
    def rules(self) -> SchedulerRules:
        """Return the scheduler's rules for this scenario."""
        return make_rules(
            self.schedule,
            async_level=self.async_level,
            groups_per_step=self.groups_per_step,
            max_steps=self.num_steps,
            workers=self.num_workers,
        )


def make_rules(
    schedule: Schedule,
    *,
    async_level: int,
    groups_per_step: int,
    max_steps: int,
    workers: int,
    rollouts_per_group: int = 8,
) -> SchedulerRules:
    """Return a run's rules without a run. Leases never expire by themselves."""
    return SchedulerRules(
        run="0" * 64,
        async_level=schedule.async_level(groups_per_step, otherwise=async_level),
        groups_per_step=groups_per_step,
        rollouts_per_group=rollouts_per_group,
        max_steps=max_steps,
        lease_ms=10**12,
        strikes_max=2,
        workers_max=max(workers, 1),
        leases_per_worker_max=16,
        bundles_pending_per_worker_max=32,
        slots_ahead=schedule.slots_ahead(groups_per_step, async_level=async_level),
        **schedule_rules(schedule, groups_per_step),
    )
