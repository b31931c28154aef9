"""Effects of an event that the daemon carries out: wake, sign, delete, log. `state.tick` returns them in order."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from prime_node.carrier import carrier
from prime_node.coordinator.state.records import Ban, LeaseRecord
from prime_protocol.evidence import Weighed
from prime_protocol.verdict import BundleStatus, RejectReason


class Topic(StrEnum):
    """Changes that a request can wait for."""

    LEASE = "lease"
    CHECK = "check"
    BATCH = "batch"
    HEAD = "head"


@carrier(frozen=True, slots=True)
class Woken:
    """Effect: requests that wait for this topic check again."""

    topic: Topic
    is_offer: bool = False
    """If true, wake the requests one after another, the longest waiting first, while work is left. Otherwise wake all at once."""


CHECK_CHANGED, BATCH_CHANGED = Woken(Topic.CHECK), Woken(Topic.BATCH)
LEASE_CHANGED = Woken(Topic.LEASE, is_offer=True)
"""A slot may be available to lease."""
LEASE_CHANGED_FOR_ALL = Woken(Topic.LEASE)
"""Waiting may be useless: a newer policy is needed, or nothing more is leased."""


@carrier(frozen=True, slots=True)
class LeaseEnded:
    """Effect: an open lease ended without a bundle; `end` says how."""

    lease: LeaseRecord


@dataclass(slots=True)
class Settled:
    """Effect: the daemon signs and stores a bundle's receipt, in the same transaction as the event; a pending one when asked."""

    bundle: str
    lease: LeaseRecord
    num_rollouts: int
    num_tokens: int
    status: BundleStatus
    reason: RejectReason | None = None
    detail: str = ""
    weighed: Weighed | None = None
    """The evidence against the worker that this bundle added."""
    credited_before: int = 0
    """Tokens of `num_tokens` that the receipt which this one replaces has credited already."""


@carrier(frozen=True, slots=True)
class Evaluated:
    """Effect: an evaluation is complete; `State.results` has its results."""

    policy_version: int


@carrier(frozen=True, slots=True)
class BundleForgotten:
    """Effect: a bundle's bytes may be deleted once the event is durable."""

    bundle: str


@carrier(frozen=True, slots=True)
class WorkerWasBanned:
    """Effect: a worker was banned; the operator is notified."""

    worker: str
    ban: Ban


Effect = Woken | LeaseEnded | Settled | Evaluated | BundleForgotten | WorkerWasBanned
