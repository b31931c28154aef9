"""Leases whose groups no batch can take any more, as functions of the state. Their workers stop and give them back.

An open lease is useless if all its groups would be dropped as stale: the next batch is further from the lease's policy than the
schedule allows, and batches only move on. A completion that may continue under a newer policy, and whose age counts from there,
is not useless: the worker keeps its text and continues. Nor is a lease on the newest policy, because nothing fresher could
replace it. Evaluations are not trained on, so they are finished.

A worker names what it works on in its heartbeats. The answer names what is useless, and what has ended and is not redeemable:
others filled its groups, or took them over. A worker that returns a useless lease has abandoned nothing (endings.py). If it
finishes it instead, the bundle is judged as ever, and its groups are dropped.
"""

from __future__ import annotations

from collections.abc import Iterable

from prime_node.coordinator.state.batches import next_step
from prime_node.coordinator.state.records import LeaseEnd, LeaseRecord, State


def is_outdated(state: State, policy_version: int) -> bool:
    """Return whether a group that is leased on an older policy than the newest one would be dropped as stale."""
    lag_max = state.rules.admission.lag_max
    if lag_max is None or policy_version >= state.head or not state.rules.ages_from_lease:
        return False
    return next_step(state) - policy_version > lag_max


def is_useless(state: State, lease: LeaseRecord) -> bool:
    """Return whether no batch can take any group of an open lease."""
    return not state.is_evaluation(lease.slots) and is_outdated(state, lease.policy_version)


def cancelled_leases(state: State, worker: str, holding: Iterable[str]) -> tuple[str, ...]:
    """Return those of a worker's leases whose bundles could not be used."""
    return tuple(lease_id for lease_id in holding if _is_over(state, worker, lease_id))


def _is_over(state: State, worker: str, lease_id: str) -> bool:
    lease = state.lease_of(lease_id, worker)
    if lease is None:
        return True
    if lease.worker != worker or lease.end is LeaseEnd.REDEEMED:
        return False
    return is_useless(state, lease) if lease.end is None else not state.is_redeemable(lease)
