"""Persons: their events, and which machines belong to whom, by the delegations of joins (prime_protocol/delegation.py).

A person gains nothing by having machines: each is a newcomer of its own, counts for its own network, and uses up an invitation
of its own. So the sums of newcomers.py need no change. What a person can lose is shared: a ban of the person holds for all its
machines, known and new, and a ban of one machine ends the admission of new ones.

A machine's key stays with its person while the coordinator remembers it, so it cannot leave a banned person.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from prime_node.carrier import carrier
from prime_node.coordinator.state.records import State, WorkerRecord


@carrier(frozen=True, slots=True)
class PersonBanned:
    """Event: the operator bans a person, and so all its machines."""

    person: str
    reason: str
    type: Literal["person_banned"] = "person_banned"


@carrier(frozen=True, slots=True)
class PersonUnbanned:
    """Event: the operator lifts a person's ban and the operator's bans of its machines. Bans by evidence stay."""

    person: str
    type: Literal["person_unbanned"] = "person_unbanned"


@carrier(frozen=True, slots=True)
class MachineRevoked:
    """Event: a person revokes one of its machines. Its open leases lapse, and its key joins no more."""

    worker: str
    type: Literal["machine_revoked"] = "machine_revoked"


def machines_of(state: State, person: str) -> Iterator[WorkerRecord]:
    """Yield the machines of a person that the run knows, in the order of their first joins."""
    return (state.workers[key] for key in state.persons.get(person, ()))


def enter_person(state: State, worker: WorkerRecord, person: str, until_ms: int) -> None:
    """Record that a worker joined as a machine of a person, until a time. An empty `person` is none."""
    worker.delegated_until_ms = until_ms
    if person:
        worker.person = person
        state.persons.setdefault(person, {})[worker.worker] = None


def leave_person(state: State, worker: WorkerRecord) -> None:
    """Remove a worker that is forgotten from its person's machines."""
    if not worker.person:
        return
    machines = state.persons[worker.person]
    del machines[worker.worker]
    if not machines:
        del state.persons[worker.person]
