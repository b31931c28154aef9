"""Admission of workers: the checks of a join request.

They follow the checks that every signed request passes (requests.py):

    (0) no other machine takes part with this key              IN_USE
    (1) the software is at least the operator's minimum        VERSION_UNSUPPORTED
        its delegation, if it has one, holds                   persons.py
    (2) the key or its person is on the operator's list, if there is one
                                                               NOT_INVITED
    (3) a new key has an invitation, if one is required        NOT_INVITED, BAD_SIGNATURE, WRONG_RUN
    (4) there is room in the run, and for its network          UNAVAILABLE, TOO_MANY_REQUESTS
    (5) no other key of its network was banned recently        TOO_MANY_REQUESTS

A worker's limits then grow with its record (state/newcomers.py).
"""

from __future__ import annotations

import logging
import math
import re
from dataclasses import dataclass

from prime_node.coordinator.api.callers import is_in, prefix_of
from prime_node.coordinator.api.persons import PersonRules
from prime_node.coordinator.assignments import Assigner
from prime_node.coordinator.config import CoordinatorConfig
from prime_node.coordinator.decisions import Decisions
from prime_node.coordinator.presence import Presence, require_session
from prime_node.coordinator.state import events as ev
from prime_node.coordinator.state import newcomers
from prime_node.coordinator.state.records import State
from prime_node.ports.clock import Clock
from prime_protocol import limits
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.invite import open_invite
from prime_protocol.replies import JoinReply
from prime_protocol.requests import JoinRequest
from prime_protocol.run_spec import PinnedRun
from prime_protocol.telemetry import Hardware
from prime_protocol.visible import number_of

log = logging.getLogger(__name__)

ROOM_RETRY_S = 60.0
CROWD = 16
"""New workers of one network, of which the log says how to lift their limits."""
SAY_CROWDED_S = 600.0
"""Shortest time between two of these lines."""


@dataclass(frozen=True, slots=True)
class JoiningRules:
    """The limits on who joins that are in force: the operator's, else the settings'."""

    workers_max: int
    workers_per_network_max: int
    invites_needed: bool


def joining_rules(state: State, config: CoordinatorConfig) -> JoiningRules:
    """Return the limits that are in force. The operator cannot exceed the signed limit of workers."""
    asked = state.joining
    of_network, invites = asked.workers_per_network_max, asked.invites_needed
    return JoiningRules(
        workers_max=min(state.rules.workers_max, asked.workers_max or state.rules.workers_max),
        workers_per_network_max=config.workers_per_network_max if of_network is None else of_network,
        invites_needed=config.invites_needed if invites is None else invites,
    )


@dataclass(slots=True)
class WorkerAdmission:
    """Admission of workers to the run."""

    run: PinnedRun
    config: CoordinatorConfig
    clock: Clock
    decisions: Decisions
    assigner: Assigner
    presence: Presence
    persons: PersonRules
    _said_s: float = -math.inf

    async def admit_worker(self, signer: str, request: JoinRequest, *, address: str) -> JoinReply:
        """Let a worker join, or start again with the same key. Raise RemoteError."""
        state, config = self.decisions.state, self.config
        joining = joining_rules(state, config)
        worker = state.workers.get(signer)
        is_active, is_known = worker is not None and worker.active, worker is not None and worker.has_history
        require_session(state, self.presence, signer, request.session, self.clock)  # (0)
        _check_software(request.software, config.software_min)  # (1)
        if not (request.engine.seeded or self.run.spec.checks.unseeded):
            raise RemoteError(
                ErrorCode.NOT_INVITED, "this run refuses unseeded engines: start the worker with worker.seeded = true"
            )
        delegation = self.persons.admit(signer, request.delegation)
        person = "" if delegation is None else delegation.person
        if config.allowed_workers and {signer, person}.isdisjoint(config.allowed_workers):  # (2)
            raise RemoteError(
                ErrorCode.NOT_INVITED, f"this run admits only listed keys; send its operator your key, {signer}"
            )
        invite = "" if worker is None else worker.invite
        if joining.invites_needed and not (is_known or invite):
            invite = self._redeem(request)  # (3)
        network = self.name_of_network(address)
        if not is_active:
            if state.num_active >= joining.workers_max:  # (4)
                raise RemoteError(
                    ErrorCode.UNAVAILABLE,
                    "the run has reached its limit of workers; wait until one leaves",
                    retry_after_s=ROOM_RETRY_S,
                )
            if network and (num := newcomers.num_active(state, network)) >= joining.workers_per_network_max:
                self._say_crowded(address, f"has {number_of(num, 'worker')}, which is the limit, and further ones wait")
                raise RemoteError(
                    ErrorCode.TOO_MANY_REQUESTS,
                    f"your network has {number_of(num, 'worker')} here, which is the limit; wait until one leaves, or ask the "
                    "run's operator to raise coordinator.workers_per_network_max or to trust your network",
                    retry_after_s=ROOM_RETRY_S,
                )
        if network and not is_known and (pause_ms := newcomers.pause_ms(state, network, self.clock.now_ms())):  # (5)
            raise RemoteError(
                ErrorCode.TOO_MANY_REQUESTS,
                "another key of your network was banned: new keys have to wait",
                retry_after_s=min(pause_ms / 1_000, limits.RETRY_AFTER_S_MAX),
            )
        engine = request.engine
        self.decisions.decide(
            ev.WorkerJoined(
                worker=signer,
                name=request.name,
                software=request.software,
                engine=f"{engine.name} {engine.version} {engine.dtype} {engine.device}{'' if engine.seeded else ' unseeded'}",
                rollouts_max=request.rollouts_max,
                network=network,
                invite=invite,
                hardware=_described(request.hardware),
                session=request.session,
                person=person,
                delegated_until_ms=0 if delegation is None else delegation.expires_at_ms,
            )
        )
        self.presence.heard(signer, self.clock.monotonic_s())
        if network and (num := state.networks[network].newcomers) >= CROWD:
            self._say_crowded(address, f"has {num} new workers, which together hold the leases of one")
        return JoinReply(
            step=state.current_step,
            head=state.head,
            server_time_ms=self.clock.now_ms(),
            notice=self._notice(request),
        )

    def _say_crowded(self, address: str, what: str) -> None:
        """Tell the operator from time to time how to lift the limits of a network."""
        now_s = self.clock.monotonic_s()
        if now_s >= self._said_s + SAY_CROWDED_S:
            self._said_s = now_s
            log.warning(
                "network %s %s: if you know whose machines they are, add their address to coordinator.trusted_networks, and "
                "start the coordinator and these workers again",
                prefix_of(address),
                what,
            )

    def name_of_network(self, address: str) -> str:
        """Return a keyed hash of the network of an address; empty for a network that the operator trusts."""
        if is_in(address, self.config.trusted):
            return ""
        return self.assigner.network_name(prefix_of(address))

    def _notice(self, request: JoinRequest) -> str:
        checks, engine = self.run.checks, request.engine.calibration_class
        if checks.calibration is None or engine in checks.worker_classes:
            return ""
        return (
            f"this run has no calibration for {engine}: each of your bundles is checked in full, so credit takes longer, "
            "and one that differs from fp32 by more than rounding is not accepted. The operator may add the engine during "
            "the run; your log says so then, and you need not start again"
        )

    def _redeem(self, request: JoinRequest) -> str:
        if not request.invite:
            raise RemoteError(
                ErrorCode.NOT_INVITED,
                "this run needs an invitation: ask its operator for a join link that holds one",
            )
        try:
            invite = open_invite(request.invite, self.run, now_ms=self.clock.now_ms())
        except RemoteError as error:
            if error.code is not ErrorCode.EXPIRED:
                raise
            raise RemoteError(ErrorCode.NOT_INVITED, error.detail) from None  # EXPIRED is for clocks: callers ask again
        used = self.decisions.state.invites.get(invite.invite, 0)
        if used >= invite.keys_max:
            raise RemoteError(
                ErrorCode.NOT_INVITED,
                f"this invitation was used by {used} keys, which is its limit; ask the operator for another one",
            )
        return invite.invite


def _described(hardware: Hardware | None) -> str:
    if hardware is None:
        return ""
    return f"{hardware.device}, {hardware.cores} cores, {hardware.memory_bytes / 2**30:.0f} GiB"


def _check_software(software: str, least: str) -> None:
    """Compare `software`, a name and a version, with the minimum. Versions of other implementations are not compared."""
    ours, wanted = _version(software), _version(f"prime-node {least}") if least else None
    if ours is not None and wanted is not None and ours < wanted:
        raise RemoteError(
            ErrorCode.VERSION_UNSUPPORTED,
            f"this run needs prime-node {least} or newer, and you have {software}: run `prime-node upgrade`, or install "
            "the release that the run's operator names, and start again",
        )


def _version(software: str) -> tuple[int, ...] | None:
    found = re.fullmatch(r"prime-node (\d{1,6}(?:\.\d{1,6}){0,3}).*", software)
    return None if found is None else tuple(int(part) for part in found[1].split("."))
