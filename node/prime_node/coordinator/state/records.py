"""The data that the coordinator remembers. `state.tick` is the only function that changes it.

Everything here is made of plain values, so that a snapshot is one JSON text and two states can be compared. Each record lives
in exactly one place: a lease is open (`State.leases`), waits with its bundle (`State.bundles`) or has ended
(`Worker.ended`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from prime_node.broadcast.follow.paths import UpdateRoute
from prime_node.coordinator.state.curriculum import Curriculum
from prime_node.coordinator.state.networks import NOTHING, Network, Part
from prime_node.coordinator.state.rules import SchedulerRules
from prime_node.coordinator.state.slot_records import Evaluation, Results, StepSlots
from prime_protocol.evidence import Wealth, Weighed
from prime_protocol.verdict import BanKind, RejectReason

WASTED_MAX = 2
"""A worker that wasted this many leases in a row is leased little, and slowly."""


class LeaseEnd(StrEnum):
    """How a lease ended."""

    LAPSED = "lapsed"
    """Expired, or its worker went away. Still redeemable while nobody else was leased any of its slots."""
    RETURNED = "returned"
    REDEEMED = "redeemed"
    """A bundle came for it."""
    OVERTAKEN = "overtaken"
    """Another worker's bundle for the same groups was accepted first."""


@dataclass(slots=True)
class LeaseRecord:
    """One lease. Its problems and seeds follow from policy and slots (assignments.py)."""

    lease_id: str
    worker: str
    step: int
    policy_version: int
    policy_digest: str
    slots: tuple[int, ...]
    attempts: tuple[int, ...]
    """How often each slot had been leased before."""
    issued_at_ms: int
    expires_at_ms: int
    end: LeaseEnd | None = None
    """None while it is open."""
    bundle: str | None = None
    """The bundle that redeemed it or was turned away for it."""
    reason: RejectReason | None = None
    """Why that bundle was refused."""
    detail: str = ""
    draws: tuple[int, ...] = ()
    """Of each slot, where one is not the first: bundles and bans may speak of it when the curriculum has forgotten."""


@dataclass(slots=True)
class PendingBundle:
    """A bundle without a verdict."""

    bundle: str
    lease: LeaseRecord
    num_rollouts: int
    num_bytes: int
    arrived_at_ms: int
    audited: bool = True
    """It gets a forward pass (audits.py)."""
    seeded: bool = True
    """Its tokens are claimed to be those of the assigned seeds."""


@dataclass(slots=True)
class Surety:
    """An accepted bundle whose tokens are not credited yet."""

    lease: LeaseRecord
    num_rollouts: int
    num_tokens: int
    audited: bool
    credited: int = 0
    """What its own receipt credits: the tokens of an older one."""
    weighed: Weighed | None = None
    """What its receipt says of evidence."""


@dataclass(frozen=True, slots=True)
class Claim:
    """How fast a worker says it is, before anything of it was measured. It may lie (scheduler.py says what that gains)."""

    rollout_ms: int
    """One rollout takes it so long, where it samples as many at once as it likes."""
    tokens_per_s: int
    download_bytes_per_s: int
    """As its first policy came."""


@dataclass(frozen=True, slots=True)
class Ban:
    at_ms: int
    step: int
    """The step that was in training."""
    reason: str
    evidence: str | None
    """The bundle that decided it. Its bytes are kept."""
    kind: BanKind = BanKind.HARD


@dataclass(slots=True)
class WorkerRecord:
    """What is known of one key."""

    worker: str
    name: str
    software: str
    engine: str
    rollouts_max: int
    joined_at_ms: int
    active: bool = False
    """Takes part at the moment."""
    banned: Ban | None = None
    strikes: int = 0
    evidence: dict[str, Wealth] = field(default_factory=dict)
    """By statistic, since it began or was forgiven (suspicion.py)."""
    num_weighed: int = 0
    """Bundles that this evidence is from."""
    forgiven_at_ms: int = 0
    """What leases granted before this gave is no part of it."""
    calibrated: bool | None = None
    """Whether the run's calibration knew its engine when its last bundle was judged; None before the first."""
    wasted: int = 0
    """Leases that lapsed or were handed back since its last accepted bundle."""
    pause_until_ms: int = 0
    """It is leased nothing before this time."""
    rollout_ms: float = 0.0
    """How long one rollout takes it, a mean that forgets; 0 before the first bundle."""
    claimed: Claim | None = None
    """What it says itself of its speed."""
    arrived_at_ms: int = 0
    """When its last bundle came."""
    network: str = ""
    """Where it joined from (newcomers.py); empty: from a network that the operator trusts."""
    counted: Part = NOTHING
    """What of it is in its network's sums."""
    hardware: str = ""
    """What it says about its machine."""
    invite: str = ""
    """The invitation that it came with."""
    session: str = ""
    """The one process that takes part under this key, as it named itself when it joined."""
    streak: int = 0
    """Audits passed in a row (audits.py)."""
    abandoned: int = 0
    """Leases that ended without a bundle."""
    surety: list[Surety] = field(default_factory=list)
    """Its last accepted bundles, oldest first."""
    released: bool = False
    """Its surety was credited, because the run ends: for what comes now nothing would stand."""
    accepted: int = 0
    """Rollouts."""
    refused: dict[RejectReason, int] = field(default_factory=dict)
    """Rollouts by reason."""
    leases: tuple[str, ...] = ()
    """Ids of its open leases."""
    pending: tuple[str, ...] = ()
    """Its bundles that wait for a verdict."""
    ended: tuple[LeaseRecord, ...] = ()
    """Its last leases that ended and wait for nothing, oldest first."""

    def ended_lease(self, lease_id: str) -> LeaseRecord | None:
        return next((lease for lease in self.ended if lease.lease_id == lease_id), None)

    @property
    def is_wasteful(self) -> bool:
        return self.wasted >= WASTED_MAX

    @property
    def has_history(self) -> bool:
        is_judged = self.accepted or self.refused or self.strikes or self.banned
        return bool(is_judged or self.pending or self.ended or self.invite)


@dataclass(frozen=True, slots=True)
class Publication:
    """A published policy."""

    digest: str
    """Of its manifest."""
    routes: tuple[UpdateRoute, ...]
    """The encodings whose bytes are kept."""


@dataclass(slots=True)
class Original:
    """Who said something first."""

    bundle: str
    worker: str
    slot: int
    arrived_at_ms: int
    seeded: bool = True
    """Proven to be what the slot's seeds give."""


@dataclass(slots=True)
class State:
    """Everything that survives a restart. `State(rules)` is the first one."""

    rules: SchedulerRules
    head: int = -1
    """Newest published policy."""
    durable_step: int = 0
    """The trainer would resume here: the batches of earlier steps are forgotten."""
    first_step: int = 0
    """The slots of earlier steps are trained, durable and forgotten."""
    steps: dict[int, StepSlots] = field(default_factory=dict)
    """From first_step to last_step, ascending, without those that are forgotten already."""
    evaluations: dict[int, Evaluation] = field(default_factory=dict)
    """By the policy that is evaluated, until all is settled."""
    results: dict[int, Results] = field(default_factory=dict)
    """Of the newest evaluations that are over, by policy."""
    batches: dict[int, list[tuple[int, ...]]] = field(default_factory=dict)
    """Step -> the slots of each batch that the trainer was given for it."""
    num_ready: int = 0
    """Accepted groups that no batch has taken."""
    workers: dict[str, WorkerRecord] = field(default_factory=dict)
    num_active: int = 0
    networks: dict[str, Network] = field(default_factory=dict)
    """By the names that workers have them under; those that the operator trusts are one, under the empty name."""
    by_away: dict[int, dict[str, None]] = field(default_factory=dict)
    """Number of keys that may be forgotten -> the networks that have so many, but for the trusted one."""
    invites: dict[str, int] = field(default_factory=dict)
    """Invitation -> keys that have come with it."""
    crowd: int = 0
    """Workers that take part and do not count where a step is shared out: all newcomers of a network count as one."""
    leases: dict[str, LeaseRecord] = field(default_factory=dict)
    """Open leases in the order in which they were granted, which is that of their expiry."""
    num_leases: int = 0
    """Leases ever granted."""
    bundles: dict[str, PendingBundle] = field(default_factory=dict)
    """In the order in which they came."""
    evidence: list[str] = field(default_factory=list)
    """Bundles that a ban rests on."""
    originals: OrderedDict[str, Original] = field(default_factory=OrderedDict)
    """By fingerprint, in the order in which they were judged (copies.py)."""
    published: dict[int, Publication] = field(default_factory=dict)
    """Policies whose bytes are kept."""
    draining: bool = False
    accepted: int = 0
    """Rollouts of the whole run."""
    refused: dict[RejectReason, int] = field(default_factory=dict)
    """Rollouts of the whole run, by reason."""
    bytes_published: int = 0
    num_accepted_groups: int = 0
    """Groups ever accepted; those that were dropped again too."""
    num_dropped_groups: int = 0
    """Accepted groups that were thrown away: they had become stale, or taught nothing."""
    rollout_ms: float = 0.0
    """How long a rollout takes on average, a mean over bundles that forgets; 0 before the first one."""
    step_ms: float = 0.0
    """Between two publications, likewise."""
    published_at_ms: int = 0
    curriculum: Curriculum = field(default_factory=Curriculum)
    failing: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Slot -> who has said that its problem fails (failing.py)."""
    num_redrawn: int = 0
    """Problems that were exchanged because they failed."""
    unverifiable: int = 0
    """Bundles in a row that no validator could judge."""
    unverifiable_detail: str = ""

    @property
    def current_step(self) -> int:
        """The step that the trainer works at: the newest policy's."""
        return max(0, self.head)

    @property
    def last_step(self) -> int:
        """The last step that anybody may be leased now; -1 before the first policy."""
        return self.last_step_at(self.head)

    def last_step_at(self, head: int) -> int:
        """The same while `head` is the newest policy."""
        return min(self.rules.admission.last_step(head), self.rules.max_steps - 1) if head >= 0 else -1

    @property
    def is_ending(self) -> bool:
        """Nothing will be leased any more."""
        return self.draining or self.is_complete

    @property
    def is_complete(self) -> bool:
        """Every batch of the run is settled: nothing will be leased any more.

        Before that an accepted group may be dropped (stale, copied, taken back from a cheat) and wanted again.
        """
        return self.head >= self.rules.closing_head and all(step.fixed for step in self.steps.values())

    @property
    def steps_over(self) -> int:
        """All groups of the steps below this one were given to the trainer, so none of them is ever leased again."""
        return next((number for number, step in self.steps.items() if not step.fixed), self.last_step + 1)

    def is_ready(self, step: int) -> bool:
        """All slots of a step of the window are accepted."""
        return step in self.steps and len(self.steps[step].accepted) == self.rules.groups_per_step

    def is_given(self, step: int) -> bool:
        """The trainer has been given all batches of a step."""
        return len(self.batches.get(step, ())) == self.rules.batches_per_step

    def step_of(self, lease: LeaseRecord) -> StepSlots | None:
        """Where a lease's slots are; None where they are settled and forgotten."""
        where = self.steps if lease.slots[0] < self.rules.slots_end else self.evaluations
        return where.get(lease.step)

    def step_bundles(self) -> Iterator[str]:
        """Bundles whose bytes go with a step or an evaluation."""
        for where in (self.steps, self.evaluations):
            for step in where.values():
                yield from step.bundles

    def is_evaluation(self, slots: tuple[int, ...]) -> bool:
        """Whether slots of a lease are those of an evaluation."""
        return slots[0] >= self.rules.slots_end

    def lease_of(self, lease_id: str, worker: str) -> LeaseRecord | None:
        """An open lease of anybody, or one of this worker's own that waits for a verdict or has ended lately."""
        lease = self.leases.get(lease_id)
        if lease is not None:
            return lease
        known = self.workers[worker]
        waiting = (self.bundles[bundle].lease for bundle in known.pending)
        return next((one for one in waiting if one.lease_id == lease_id), None) or known.ended_lease(lease_id)

    def is_redeemable(self, lease: LeaseRecord) -> bool:
        """Open; or lapsed while all its slots still wait for somebody, so that nothing speaks against a late bundle."""
        if lease.end is None:
            return True
        if lease.end is not LeaseEnd.LAPSED or lease.bundle is not None:
            return False
        step = self.step_of(lease)
        if isinstance(step, Evaluation) and not set(step.open).issuperset(lease.slots):
            return False  # given up: the policy is too old, or they were asked in vain often enough
        return step is not None and all(
            step.attempts[slot] == attempt + 1 and slot not in step.held and slot not in step.accepted
            for slot, attempt in zip(lease.slots, lease.attempts, strict=True)
        )
