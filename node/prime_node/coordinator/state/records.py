"""The records of the coordinator's state. Only `state.tick` changes them.

All records consist of plain values, so a snapshot is one JSON text and two states can be compared. Each record has exactly one
place: a lease is open (`State.leases`), waits with its bundle (`State.bundles`) or has ended (`WorkerRecord.ended`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from prime_node.broadcast.routes import UpdateRoute
from prime_node.coordinator.state.curriculum import Curriculum
from prime_node.coordinator.state.networks import NOTHING, Network, Part
from prime_node.coordinator.state.rules import SchedulerRules
from prime_node.coordinator.state.slot_records import Evaluation, Results, StepSlots
from prime_protocol.evidence import Wealth, Weighed
from prime_protocol.verdict import BanKind, RejectReason

WASTED_MAX = 2
"""Abandoned leases in a row after which a worker gets small leases with pauses."""


class LeaseEnd(StrEnum):
    """The end of a lease."""

    LAPSED = "lapsed"
    """Expired, or its worker left. Still redeemable until another worker gets any of its slots."""
    RETURNED = "returned"
    REDEEMED = "redeemed"
    """A bundle arrived for it."""
    OVERTAKEN = "overtaken"
    """Another worker's bundle for the same groups was accepted first."""
    CANCELLED = "cancelled"
    """Returned because no batch could take its groups any more (scheduler.py). It does not count as abandoned."""


@dataclass(slots=True)
class LeaseRecord:
    """One lease. Policy and slots determine its problems and seeds (assignments.py)."""

    lease_id: str
    worker: str
    step: int
    policy_version: int
    policy_digest: str
    slots: tuple[int, ...]
    attempts: tuple[int, ...]
    """Number of earlier leases of each slot."""
    issued_at_ms: int
    expires_at_ms: int
    end: LeaseEnd | None = None
    """End of the lease; None while it is open."""
    bundle: str | None = None
    """Bundle that redeemed it, or that was rejected for it."""
    reason: RejectReason | None = None
    """Reason why that bundle was rejected."""
    detail: str = ""
    draws: tuple[int, ...] = ()
    """Draw of each slot if any is not the first. Bundles and bans may refer to it after the curriculum has forgotten it."""
    original: str = ""
    """Earlier bundle that the rejected one is a copy of, if the coordinator found it."""
    prompts: str = ""
    """Digest of the prompts that the worker got, if the run commits to them."""


@dataclass(slots=True)
class PendingBundle:
    """A bundle without a verdict."""

    bundle: str
    lease: LeaseRecord
    num_rollouts: int
    num_bytes: int
    arrived_at_ms: int
    audited: bool = True
    """Whether it gets a forward pass (audits.py)."""
    seeded: bool = True
    """Whether its engine claims to sample by the assigned seeds."""
    engine_class: str = ""
    """Class of the engine that its header names."""


@dataclass(slots=True)
class Escrow:
    """An accepted bundle whose tokens are in escrow."""

    lease: LeaseRecord
    num_rollouts: int
    num_tokens: int
    audited: bool
    credited: int = 0
    """Tokens that its own receipt credits: those of older bundles."""
    arrived_at_ms: int = 0
    weighed: Weighed | None = None
    """Evidence that its receipt states."""


@dataclass(frozen=True, slots=True)
class Claim:
    """The speed that a worker claims before any was measured. The claim may be false (scheduler.py describes the gain)."""

    rollout_ms: int
    """Time per rollout, if it may sample as many at once as it likes."""
    tokens_per_s: int
    download_bytes_per_s: int
    """Rate at which it downloaded its first policy."""


@dataclass(frozen=True, slots=True)
class Ban:
    """A ban of one key."""

    at_ms: int
    step: int
    """Step in training at the time of the ban."""
    reason: str
    evidence: str | None
    """Bundle that decided the ban. Its bytes are kept."""
    kind: BanKind = BanKind.HARD


@dataclass(slots=True)
class WorkerRecord:
    """The record of one key."""

    worker: str
    name: str
    software: str
    engine: str
    rollouts_max: int
    joined_at_ms: int
    active: bool = False
    """Whether it takes part now."""
    banned: Ban | None = None
    strikes: int = 0
    evidence: dict[str, Wealth] = field(default_factory=dict)
    """Evidence by statistic, since the worker began or was unbanned (suspicion.py)."""
    num_weighed: int = 0
    """Bundles that this evidence comes from."""
    forgiven_at_ms: int = 0
    """Time of the last unban. Bundles of leases granted before it are not part of the evidence."""
    calibrated: bool | None = None
    """Whether the run's calibration knows its engine: True after an accepted bundle of a calibrated pair of classes, False after
    a bundle of another pair, None before both."""
    wasted: int = 0
    """Leases that lapsed or were returned since its last accepted bundle."""
    pause_until_ms: int = 0
    """Time before which it gets no lease."""
    left: tuple[str, ...] = ()
    """Leases that it handed back when it left: the same slots are offered to it first (endings.py)."""
    resumed: bool = False
    """Whether it got one of those again since its last accepted bundle."""
    rollout_ms: float = 0.0
    """EWMA of the time per rollout; 0 before the first bundle."""
    claimed: Claim | None = None
    """Speed that it claims."""
    arrived_at_ms: int = 0
    """Arrival of its last bundle."""
    network: str = ""
    """Network that it joined from (newcomers.py); empty: a network that the operator trusts."""
    counted: Part = NOTHING
    """Its part in the sums of its network."""
    hardware: str = ""
    """Description of its machine, as it reports it."""
    invite: str = ""
    """Invitation that it joined with."""
    session: str = ""
    """Name of the one process that takes part under this key, chosen by that process at its join."""
    audit_score: int = 0
    """Audit score: audits passed in a row (audits.py)."""
    audited_in_full: bool = False
    """Whether all its bundles are audited until one passes, because no validator judged one in time."""
    abandoned: int = 0
    """Leases that ended without a bundle."""
    escrow: list[Escrow] = field(default_factory=list)
    """Accepted bundles in escrow, oldest first."""
    released: bool = False
    """Whether its escrow was credited because the run ends. Later bundles would have no escrow."""
    person: str = ""
    """Person whose machine it is (persons.py); empty: none."""
    delegated_until_ms: int = 0
    """End of the delegation that it joined with; 0: it needs none."""
    revoked_at_ms: int = 0
    """Time when its person revoked it; 0: it did not. All its delegations are void."""
    accepted: int = 0
    """Accepted rollouts."""
    refused: dict[RejectReason, int] = field(default_factory=dict)
    """Rejected rollouts by reason."""
    leases: tuple[str, ...] = ()
    """Ids of its open leases."""
    pending: tuple[str, ...] = ()
    """Its bundles that wait for a verdict."""
    ended: tuple[LeaseRecord, ...] = ()
    """Its last ended leases without a pending bundle, oldest first."""

    def ended_lease(self, lease_id: str) -> LeaseRecord | None:
        """Return the record of an ended lease; None if it is not kept."""
        return next((lease for lease in self.ended if lease.lease_id == lease_id), None)

    @property
    def is_wasteful(self) -> bool:
        """Whether it abandoned WASTED_MAX leases in a row."""
        return self.wasted >= WASTED_MAX

    @property
    def has_history(self) -> bool:
        """Whether its record is worth keeping when it leaves."""
        is_judged = self.accepted or self.refused or self.strikes or self.banned
        return bool(is_judged or self.pending or self.ended or self.invite or self.revoked_at_ms)


@dataclass(frozen=True, slots=True)
class Publication:
    """A published policy."""

    digest: str
    """Digest of its manifest."""
    routes: tuple[UpdateRoute, ...]
    """Encodings whose bytes are kept."""


@dataclass(slots=True)
class Original:
    """The first bundle with a fingerprint."""

    bundle: str
    worker: str
    slot: int
    arrived_at_ms: int
    seeded: bool = True
    """Whether its tokens are proven to follow from the slot's seeds."""


@dataclass(frozen=True, slots=True)
class JoiningLimits:
    """Limits on who joins that the operator has set during the run. None: as the coordinator's settings say."""

    workers_max: int | None = None
    workers_per_network_max: int | None = None
    invites_needed: bool | None = None


@dataclass(slots=True)
class State:
    """The state that survives a restart. `State(rules)` is the initial one."""

    rules: SchedulerRules
    head: int = -1
    """Newest published policy."""
    durable_step: int = 0
    """Step at which the trainer would resume. The batches of earlier steps are forgotten."""
    first_step: int = 0
    """First step of the window. The slots of earlier steps are trained, durable and forgotten."""
    steps: dict[int, StepSlots] = field(default_factory=dict)
    """Steps from first_step to last_step, ascending, without those that are forgotten already."""
    evaluations: dict[int, Evaluation] = field(default_factory=dict)
    """Open evaluations by their policy."""
    results: dict[int, Results] = field(default_factory=dict)
    """Results of the newest completed evaluations, by policy."""
    batches: dict[int, list[tuple[int, ...]]] = field(default_factory=dict)
    """Step -> the slots of each batch that the trainer got for it."""
    num_ready: int = 0
    """Accepted groups that no batch has taken."""
    workers: dict[str, WorkerRecord] = field(default_factory=dict)
    num_active: int = 0
    networks: dict[str, Network] = field(default_factory=dict)
    """Networks by keyed hash. All networks that the operator trusts are one, under the empty name."""
    by_away: dict[int, dict[str, None]] = field(default_factory=dict)
    """Number of forgettable keys -> the networks with that number, except the trusted one."""
    invites: dict[str, int] = field(default_factory=dict)
    """Invitation -> keys that joined with it."""
    persons: dict[str, dict[str, None]] = field(default_factory=dict)
    """Person -> keys of its machines, in the order of their first joins."""
    banned_persons: dict[str, Ban] = field(default_factory=dict)
    """Bans of persons by the operator."""
    crowd: int = 0
    """Active workers that do not count for the fair share: all newcomers of a network count as one."""
    leases: dict[str, LeaseRecord] = field(default_factory=dict)
    """Open leases by lease id, in the order of grant, which is also the order of expiry."""
    num_leases: int = 0
    """Leases ever granted."""
    bundles: dict[str, PendingBundle] = field(default_factory=dict)
    """Pending bundles, in the order of arrival."""
    evidence: list[str] = field(default_factory=list)
    """Bundles that a ban is based on."""
    originals: OrderedDict[str, Original] = field(default_factory=OrderedDict)
    """Originals by fingerprint, in the order of judgement (copies.py)."""
    published: dict[int, Publication] = field(default_factory=dict)
    """Policies whose bytes are kept."""
    draining: bool = False
    paused_at_ms: int = 0
    """Time when the operator paused the run; 0: it is not paused (operator_orders.py)."""
    pause_reason: str = ""
    joining: JoiningLimits = JoiningLimits()
    accepted: int = 0
    """Accepted rollouts of the whole run."""
    refused: dict[RejectReason, int] = field(default_factory=dict)
    """Rejected rollouts of the whole run, by reason."""
    bytes_published: int = 0
    num_accepted_groups: int = 0
    """Groups ever accepted, including those that were dropped later."""
    num_dropped_groups: int = 0
    """Accepted groups that were dropped because they had become stale or gave no learning signal."""
    rollout_ms: float = 0.0
    """EWMA over bundles of the time per rollout; 0 before the first bundle."""
    step_ms: float = 0.0
    """EWMA of the time between two publications; 0 before the second."""
    published_at_ms: int = 0
    curriculum: Curriculum = field(default_factory=Curriculum)
    failing: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Slot -> the reporters of its problem's failure (failing.py)."""
    num_redrawn: int = 0
    """Problems that were exchanged because they failed."""
    unverifiable: int = 0
    """Bundles in a row that no validator could judge."""
    unverifiable_detail: str = ""
    calibrations: list[str] = field(default_factory=list)
    """Digests of the calibration's amendments, version 1 first."""

    @property
    def current_step(self) -> int:
        """The step that the trainer works on: the newest policy's."""
        return max(0, self.head)

    @property
    def last_step(self) -> int:
        """The last step that may be leased now; -1 before the first policy."""
        return self.last_step_at(self.head)

    def last_step_at(self, head: int) -> int:
        """Return `last_step` for the time when `head` is the newest policy."""
        return min(self.rules.admission.last_step(head), self.rules.max_steps - 1) if head >= 0 else -1

    @property
    def is_ending(self) -> bool:
        """Whether nothing more is leased."""
        return self.draining or self.is_complete

    @property
    def is_complete(self) -> bool:
        """Whether every batch of the run is fixed, so that nothing more is leased.

        Before that, an accepted group may be dropped (stale, copied, taken back from a cheat) and its slot leased again.
        """
        return self.head >= self.rules.closing_head and all(step.fixed for step in self.steps.values())

    @property
    def steps_over(self) -> int:
        """The first step with groups that the trainer has not got. Groups of earlier steps are never leased again."""
        return next((number for number, step in self.steps.items() if not step.fixed), self.last_step + 1)

    def is_ready(self, step: int) -> bool:
        """Return whether all slots of a step of the window are accepted."""
        return step in self.steps and len(self.steps[step].accepted) == self.rules.groups_per_step

    def is_given(self, step: int) -> bool:
        """Return whether the trainer has got all batches of a step."""
        return len(self.batches.get(step, ())) == self.rules.batches_per_step

    def step_of(self, lease: LeaseRecord) -> StepSlots | None:
        """Return the step or evaluation of a lease's slots; None if it is settled and forgotten."""
        where = self.steps if lease.slots[0] < self.rules.slots_end else self.evaluations
        return where.get(lease.step)

    def step_bundles(self) -> Iterator[str]:
        """Yield the bundles whose bytes are deleted with a step or an evaluation."""
        for where in (self.steps, self.evaluations):
            for step in where.values():
                yield from step.bundles

    def is_evaluation(self, slots: tuple[int, ...]) -> bool:
        """Return whether the slots of a lease belong to an evaluation."""
        return slots[0] >= self.rules.slots_end

    def lease_of(self, lease_id: str, worker: str) -> LeaseRecord | None:
        """Return an open lease of any worker, or one of this worker's own that waits for a verdict or has ended recently."""
        lease = self.leases.get(lease_id)
        if lease is not None:
            return lease
        known = self.workers[worker]
        waiting = (self.bundles[bundle].lease for bundle in known.pending)
        return next((one for one in waiting if one.lease_id == lease_id), None) or known.ended_lease(lease_id)

    def is_redeemable(self, lease: LeaseRecord) -> bool:
        """Return whether a bundle may redeem the lease: it is open, or lapsed and nothing else has taken its slots."""
        if lease.end is None:
            return True
        if lease.end is not LeaseEnd.LAPSED or lease.bundle is not None:
            return False
        step = self.step_of(lease)
        if isinstance(step, Evaluation) and not set(step.open).issuperset(lease.slots):
            return False  # given up: the policy is too old, or no attempts are left
        return step is not None and all(
            step.attempts[slot] == attempt + 1 and slot not in step.held and slot not in step.accepted
            for slot, attempt in zip(lease.slots, lease.attempts, strict=True)
        )
