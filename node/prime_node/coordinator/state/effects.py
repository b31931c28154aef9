"""What follows from an event, for the daemon to do: wake, sign, delete, tell. `state.tick` returns them in order."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from prime_node.coordinator.state.carrier import carrier
from prime_node.coordinator.state.records import Ban, LeaseRecord
from prime_protocol.evidence import Weighed
from prime_protocol.verdict import BundleStatus, RejectReason


class Topic(StrEnum):
    """What somebody may be waiting for."""

    LEASE = "lease"
    CHECK = "check"
    BATCH = "batch"
    HEAD = "head"


@carrier(frozen=True, slots=True)
class Woken:
    """Effect: whoever waits for this should look again."""

    topic: Topic
    is_offer: bool = False
    """One after another, the one who waits longest first, while anything is left. Otherwise all at once."""


CHECK_NEWS, BATCH_NEWS = Woken(Topic.CHECK), Woken(Topic.BATCH)
LEASE_NEWS = Woken(Topic.LEASE, is_offer=True)
"""There may be something to lease."""
LEASE_NEWS_FOR_ALL = Woken(Topic.LEASE)
"""It may be in vain to wait on: a newer policy is needed, or nothing more is leased."""


@carrier(frozen=True, slots=True)
class LeaseEnded:
    """Effect: an open lease ended without a bundle; `end` says how."""

    lease: LeaseRecord


@dataclass(slots=True)
class Settled:
    """Effect: a bundle's receipt is to be signed and stored, in the same transaction as the event."""

    bundle: str
    lease: LeaseRecord
    num_rollouts: int
    num_tokens: int
    status: BundleStatus
    reason: RejectReason | None = None
    detail: str = ""
    weighed: Weighed | None = None
    """What it added to the evidence against its worker."""
    newly_accepted: bool = False
    """Its verdict has come just now, so its slots' problems are still those of its lease."""


@carrier(frozen=True, slots=True)
class Evaluated:
    """Effect: an evaluation is over; `State.results` has it."""

    policy_version: int


@carrier(frozen=True, slots=True)
class BundleForgotten:
    """Effect: a bundle's bytes may be deleted once the event is durable."""

    bundle: str


@carrier(frozen=True, slots=True)
class WorkerWasBanned:
    """Effect: a worker was banned; the operator should know."""

    worker: str
    ban: Ban


Effect = Woken | LeaseEnded | Settled | Evaluated | BundleForgotten | WorkerWasBanned
