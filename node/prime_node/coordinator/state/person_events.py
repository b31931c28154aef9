"""Events of persons and their machines (persons.py). They are among those of events.py."""

from __future__ import annotations

from typing import Literal

from prime_node.carrier import carrier


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
