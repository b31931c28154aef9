"""The data that the coordinator remembers. `state.tick` is the only function that changes it.

Everything here is made of plain values, so that a snapshot is one JSON text and two states can be compared. Each record lives
in exactly one place: a lease is open (`State.leases`), waits with its bundle (`State.bundles`) or has ended
(`Worker.ended`).
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from enum import StrEnum

from pydantic import TypeAdapter

from prime_node.broadcast.paths import Route
from prime_protocol.run_spec import PinnedRun
from prime_protocol.verdict import BundleStatus, RejectReason


@dataclass(frozen=True, slots=True)
class Rules:
    """What the state machine needs of the RunSpec."""

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


def rules_of(run: PinnedRun) -> Rules:
    spec = run.spec
    return Rules(
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
    )


WASTED_MAX = 2
"""A worker that wasted this many leases in a row is leased little, and slowly."""


class LeaseEnd(StrEnum):
    """How a lease ended."""

    LAPSED = "lapsed"
    """Expired, or its worker went away. Still redeemable while nobody else was leased any of its slots."""
    RETURNED = "returned"
    REDEEMED = "redeemed"
    """A bundle came for it."""


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


@dataclass(slots=True)
class PendingBundle:
    """A bundle without a verdict."""

    bundle: str
    lease: LeaseRecord
    num_rollouts: int
    num_bytes: int
    arrived_at_ms: int


@dataclass(frozen=True, slots=True)
class AcceptedGroup:
    """A slot's group, settled for good."""

    worker: str
    policy_version: int
    bundle: str
    first: int
    """Index of its first completion in the bundle."""
    rewards: tuple[float, ...]


@dataclass(slots=True)
class Step:
    """The R slots of one step."""

    open: list[int]
    """Slots that wait to be leased, ascending."""
    attempts: dict[int, int] = field(default_factory=dict)
    """Slot -> times leased."""
    accepted: dict[int, AcceptedGroup] = field(default_factory=dict)
    bundles: list[str] = field(default_factory=list)
    """Bundles whose bytes are deleted with the step."""
    fixed: bool = False
    """The trainer has been given this batch."""


@dataclass(frozen=True, slots=True)
class Ban:
    at_ms: int
    step: int
    """The step that was in training."""
    reason: str
    evidence: str | None
    """The bundle that decided it. Its bytes are kept."""


@dataclass(slots=True)
class Worker:
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
    wasted: int = 0
    """Leases that lapsed or were handed back since its last accepted bundle."""
    pause_until_ms: int = 0
    """It is leased nothing before this time."""
    accepted: int = 0
    """Rollouts."""
    refused: dict[RejectReason, int] = field(default_factory=dict)
    """Rollouts by reason."""
    leases: list[str] = field(default_factory=list)
    """Ids of its open leases."""
    pending: dict[str, str] = field(default_factory=dict)
    """Lease id -> its bundle that waits for a verdict."""
    ended: dict[str, LeaseRecord] = field(default_factory=dict)
    """Its last leases that ended and wait for nothing, oldest first."""

    @property
    def is_wasteful(self) -> bool:
        return self.wasted >= WASTED_MAX

    @property
    def has_history(self) -> bool:
        return bool(self.accepted or self.refused or self.strikes or self.banned or self.pending or self.ended)


@dataclass(frozen=True, slots=True)
class Publication:
    """A published policy."""

    digest: str
    """Of its manifest."""
    routes: tuple[Route, ...]
    """The encodings whose bytes are kept."""


@dataclass(slots=True)
class State:
    """Everything that survives a restart. `State(rules)` is the first one."""

    rules: Rules
    head: int = -1
    """Newest published policy."""
    first_step: int = 0
    """Earlier steps are trained and durable, and forgotten."""
    steps: dict[int, Step] = field(default_factory=dict)
    """first_step, first_step + 1, ... in order."""
    workers: dict[str, Worker] = field(default_factory=dict)
    num_active: int = 0
    leases: dict[str, LeaseRecord] = field(default_factory=dict)
    """Open leases in the order in which they were granted, which is that of their expiry."""
    num_leases: int = 0
    """Leases ever granted."""
    bundles: dict[str, PendingBundle] = field(default_factory=dict)
    """In the order in which they came."""
    evidence: list[str] = field(default_factory=list)
    """Bundles that a ban rests on."""
    published: dict[int, Publication] = field(default_factory=dict)
    """Policies whose bytes are kept."""
    draining: bool = False
    accepted: int = 0
    """Rollouts of the whole run."""
    refused: dict[RejectReason, int] = field(default_factory=dict)
    """Rollouts of the whole run, by reason."""
    bytes_published: int = 0

    @property
    def current_step(self) -> int:
        """The step that the trainer works at: the newest policy's."""
        return max(0, self.head)

    @property
    def last_step(self) -> int:
        """The last step that anybody may be leased now; -1 before the first policy."""
        return min(self.head + self.rules.async_level, self.rules.max_steps - 1) if self.head >= 0 else -1

    @property
    def is_complete(self) -> bool:
        """Every rollout of the run has been accepted: nothing will be leased any more."""
        return all(self.is_ready(step) for step in range(self.first_step, self.rules.max_steps))

    def is_ready(self, step: int) -> bool:
        """All slots of a step of the window are accepted."""
        return step in self.steps and len(self.steps[step].accepted) == self.rules.groups_per_step

    def lease_of(self, lease_id: str, worker: str) -> LeaseRecord | None:
        """An open lease of anybody, or one of this worker's own that waits for a verdict or has ended lately."""
        if lease_id in self.leases:
            return self.leases[lease_id]
        known = self.workers[worker]
        if lease_id in known.pending:
            return self.bundles[known.pending[lease_id]].lease
        return known.ended.get(lease_id)

    def is_redeemable(self, lease: LeaseRecord) -> bool:
        """Open; or lapsed while all its slots still wait for somebody, so that nothing speaks against a late bundle."""
        if lease.end is not LeaseEnd.LAPSED or lease.bundle is not None:
            return lease.end is None
        step = self.steps.get(lease.step)
        return step is not None and all(
            step.attempts[slot] == attempt + 1 and contains(step.open, slot)
            for slot, attempt in zip(lease.slots, lease.attempts, strict=True)
        )


class Topic(StrEnum):
    """What somebody may be waiting for."""

    LEASE = "lease"
    CHECK = "check"
    BATCH = "batch"
    HEAD = "head"


@dataclass(frozen=True, slots=True)
class Woken:
    """Effect: whoever waits for this should look again."""

    topic: Topic


@dataclass(frozen=True, slots=True)
class Settled:
    """Effect: a bundle's receipt is to be signed and stored, in the same transaction as the event."""

    bundle: str
    lease: LeaseRecord
    num_rollouts: int
    num_tokens: int
    status: BundleStatus
    reason: RejectReason | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class BundleForgotten:
    """Effect: a bundle's bytes may be deleted once the event is durable."""

    bundle: str


@dataclass(frozen=True, slots=True)
class Banned:
    """Effect: a worker was banned; the operator should know."""

    worker: str
    ban: Ban


Effect = Woken | Settled | BundleForgotten | Banned

_STATE: TypeAdapter[State] = TypeAdapter(State)


def to_json(state: State) -> str:
    return _STATE.dump_json(state).decode()


def from_json(payload: str) -> State:
    """A snapshot of our own. A pydantic ValidationError means that another release wrote it."""
    return _STATE.validate_json(payload)


def contains(ascending: list[int], value: int) -> bool:
    """Membership in a sorted list."""
    place = bisect_left(ascending, value)
    return place < len(ascending) and ascending[place] == value
