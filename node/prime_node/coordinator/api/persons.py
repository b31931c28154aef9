"""Machines of a person at the coordinator: who may join as one, and how a person ends that. SPEC.md, section 24.

The checks of a join, in their order:

    (1) a key is a person or a machine, never both                                    WRONG_ROLE
    (2) a known machine stays with its person                                         WRONG_ROLE
    (3) the delegation is by the person's key, for this machine, this run and now     open_delegation; NOT_INVITED if expired
    (4) the person has not revoked the machine's key, for which no date matters       REVOKED
    (5) the person is not banned                                                      BANNED
    (6) of a new machine: no other one of the person is banned                        NOT_INVITED
    (7) of a new machine: the person has fewer than the limit                         NOT_INVITED
"""

from __future__ import annotations

from dataclasses import dataclass

from prime_node.coordinator.config import CoordinatorConfig
from prime_node.coordinator.decisions import Decisions
from prime_node.coordinator.presence import Presence
from prime_node.coordinator.state.persons import MachineRevoked, machines_of
from prime_node.ports.clock import Clock
from prime_protocol.delegation import Delegation, open_delegation, read_delegation
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.requests import RevokeRequest
from prime_protocol.run_spec import PinnedRun
from prime_protocol.visible import number_of


@dataclass(slots=True)
class PersonRules:
    """The checks of delegations, and revocations."""

    run: PinnedRun
    config: CoordinatorConfig
    clock: Clock
    decisions: Decisions
    presence: Presence

    def admit(self, signer: str, text: str) -> Delegation | None:
        """Return the delegation of a machine that joins; None for a worker without one. Raise RemoteError."""
        state = self.decisions.state
        if signer in state.persons:  # (1)
            raise RemoteError(
                ErrorCode.WRONG_ROLE, "this key authorises machines of this run: a machine needs a key of its own"
            )
        worker = state.workers.get(signer)
        person = "" if worker is None else worker.person
        if not text:
            if person:  # (2)
                raise RemoteError(
                    ErrorCode.WRONG_ROLE, f"this key takes part as a machine of {person}: join with its delegation"
                )
            return None
        try:
            delegation = open_delegation(text, signer, self.run.digest, now_ms=self.clock.now_ms())  # (3)
        except RemoteError as error:
            if error.code is not ErrorCode.EXPIRED or read_delegation(text)[0].expires_at_ms > self.clock.now_ms():
                raise
            raise RemoteError(ErrorCode.NOT_INVITED, error.detail) from None  # EXPIRED is for clocks: callers ask again
        if delegation.person in state.workers:  # (1)
            raise RemoteError(
                ErrorCode.WRONG_ROLE, f"{delegation.person} takes part itself: it cannot be a person's key"
            )
        if person not in ("", delegation.person):  # (2)
            raise RemoteError(
                ErrorCode.WRONG_ROLE, f"this key takes part as a machine of {person}, not of another person"
            )
        if worker is not None and worker.revoked_at_ms:  # (4)
            raise RemoteError(
                ErrorCode.REVOKED, "its person has revoked this key: move identity.* away, and authorise the new key"
            )
        if (ban := state.banned_persons.get(delegation.person)) is not None:  # (5)
            raise RemoteError(ErrorCode.BANNED, f"the person of this machine is banned: {ban.reason}")
        if not person:
            self._admit_new(delegation.person)
        return delegation

    def _admit_new(self, person: str) -> None:
        machines = list(machines_of(self.decisions.state, person))
        if any(machine.banned is not None for machine in machines):  # (6)
            raise RemoteError(
                ErrorCode.NOT_INVITED,
                "a machine of this person is banned: no new one may join until the operator lifts that ban",
            )
        if len(machines) >= self.config.machines_per_person_max:  # (7)
            raise RemoteError(
                ErrorCode.NOT_INVITED, f"this person has {number_of(len(machines), 'machine')} here, which is the limit"
            )

    async def revoke(self, signer: str, request: RevokeRequest) -> None:
        """End the work of a machine for its person, who signed. Idempotent. Raise RemoteError."""
        state = self.decisions.state
        if request.machine not in state.persons.get(signer, ()):
            raise RemoteError(
                ErrorCode.UNKNOWN_WORKER, f"{request.machine} has not joined this run as a machine of {signer}"
            )
        self.decisions.decide(MachineRevoked(request.machine))
        self.presence.forget(request.machine)
