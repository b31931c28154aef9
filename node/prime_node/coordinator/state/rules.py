"""The part of the RunSpec that the state machine needs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from prime_protocol.check_policy import ALL_AUDITED, EVIDENCE_MAX
from prime_protocol.run_spec import PinnedRun
from prime_protocol.schedule import Schedule, Selection, StalenessFrom, StalePolicy, SwapPolicy
from prime_protocol.step import Admission


@dataclass(frozen=True)
class SchedulerRules:
    """The run's numbers and choices."""

    run: str
    async_level: int
    groups_per_step: int
    rollouts_per_group: int
    max_steps: int
    lease_ms: int
    strikes_max: int
    workers_max: int
    leases_per_worker_max: int
    bundles_pending_per_worker_max: int
    slots_ahead: int | None = None
    """Slots that may be begun ahead, floor(R (1 + eta)), if the schedule names eta; None: eta is async_level."""
    max_run_ahead: int | None = None
    """Steps that may be given to the trainer and not be published; beyond, nothing is begun or given. None: no such bound."""
    inflight_max: int | None = None
    """Groups that may be leased or wait for a verdict at once. None: no bound."""
    selection: Selection = Selection.IN_ORDER
    window_groups: int = 0
    """Slots that Selection.WINDOW chooses from."""
    batches_per_step: int = 1
    """Batches per step, K in the SPEC."""
    lag_max: int | None = None
    """Lag behind its step beyond which a group is stale."""
    staleness_from: StalenessFrom = StalenessFrom.START
    stale: StalePolicy = StalePolicy.KEEP
    leases_per_slot_max: int = 1
    straggler_factor: float = 2.0
    slow_factor: float | None = None
    requeues: bool = False
    """Whether workers return leases when a newer policy arrives. Such a lease does not count as abandoned."""
    spans: bool = False
    """Whether a completion may hold tokens of several policies."""
    statistics: tuple[str, ...] = ()
    """Statistics of the evidence (CheckPolicy.statistics)."""
    evidence_max: float = EVIDENCE_MAX
    """Evidence at which a worker is banned."""

    audit_share_min: float = 1.0
    """Minimum share of a worker's bundles that are audited (audits.py); 1: all of them."""
    newcomer_bundles: int = 16
    """Audits that a worker has to pass before fewer are made."""
    escrow_bundles: int = 0
    """Maximum number of a worker's accepted bundles in escrow."""

    @cached_property
    def admission(self) -> Admission:
        """The admission rule of step.py."""
        size = self.groups_per_step
        ahead = (1 + self.async_level) * size if self.slots_ahead is None else self.slots_ahead
        lag_max = self.lag_max if self.stale is StalePolicy.DROP else None
        return Admission(size, ahead, self.selection is Selection.IN_ORDER, lag_max)

    @cached_property
    def waits_for_begun(self) -> bool:
        """Whether a batch may wait for a group that is begun, so that the end of its lease may complete the batch."""
        return self.stale is StalePolicy.WAIT or self.selection is Selection.VERSION_FIFO

    @cached_property
    def ages_from_lease(self) -> bool:
        """Whether the policy of its lease alone decides how old a group is, however it is generated."""
        return self.staleness_from is StalenessFrom.START or not self.spans

    @cached_property
    def slots_end(self) -> int:
        """The end of the run's slots. Higher slots belong to evaluations."""
        return self.max_steps * self.groups_per_step

    @cached_property
    def closing_head(self) -> int:
        """The first policy from which on the last step of the run may be leased."""
        return max(0, self.max_steps - 1 - self.admission.lag_leased)

    @cached_property
    def is_batched_by_step(self) -> bool:
        """Whether a batch is exactly the slots of one step."""
        return self.selection is Selection.IN_ORDER and self.batches_per_step == 1

    @cached_property
    def batch_groups(self) -> int:
        """Groups of one batch; `batches_per_step` batches are a step."""
        return self.groups_per_step // self.batches_per_step


def rules_of(run: PinnedRun) -> SchedulerRules:
    """Return the rules of a pinned run."""
    spec, schedule = run.spec, run.spec.schedule
    audits = spec.checks.audits or ALL_AUDITED
    return SchedulerRules(
        run=run.digest,
        async_level=spec.async_level,
        groups_per_step=spec.groups_per_step,
        rollouts_per_group=spec.rollouts_per_group,
        max_steps=spec.max_steps,
        lease_ms=round(spec.lease_seconds * 1_000),
        strikes_max=spec.checks.strikes_max,
        workers_max=spec.limits.workers_max,
        leases_per_worker_max=spec.limits.leases_per_worker_max,
        bundles_pending_per_worker_max=spec.limits.bundles_pending_per_worker_max,
        slots_ahead=spec.admission.slots_ahead,
        **schedule_rules(schedule, spec.groups_per_step),
        statistics=spec.checks.statistics,
        evidence_max=spec.checks.evidence_max,
        audit_share_min=audits.share_min,
        newcomer_bundles=audits.newcomer_bundles,
        escrow_bundles=audits.escrow_bundles,
    )


def schedule_rules(schedule: Schedule, groups_per_step: int) -> dict[str, Any]:
    """Return the fields of SchedulerRules that a schedule alone decides."""
    return {
        "max_run_ahead": schedule.max_run_ahead,
        "inflight_max": schedule.inflight_max(groups_per_step),
        "selection": schedule.selection,
        "window_groups": schedule.window_steps * groups_per_step if schedule.selection is Selection.WINDOW else 0,
        "batches_per_step": schedule.batches_per_step,
        "lag_max": schedule.max_off_policy_steps,
        "staleness_from": schedule.staleness_from,
        "stale": schedule.stale,
        "leases_per_slot_max": schedule.leases_per_slot_max,
        "straggler_factor": schedule.straggler_factor,
        "slow_factor": schedule.slow_factor,
        "requeues": schedule.swap is SwapPolicy.ABORT_AND_REQUEUE,
        "spans": schedule.swap.spans_policies,
    }
