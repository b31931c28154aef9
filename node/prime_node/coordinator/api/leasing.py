"""The other endpoints for workers: heartbeat, lease, return a lease, leave."""

from __future__ import annotations

import logging

from prime_node.coordinator.api.requests import Caller, require_role
from prime_node.coordinator.api.sessions import require_session
from prime_node.coordinator.core import Core
from prime_node.coordinator.curation import draws_of
from prime_node.coordinator.state import events as ev
from prime_node.coordinator.state.effects import Topic
from prime_node.coordinator.state.endings import leases_remembered
from prime_node.coordinator.state.records import Claim, LeaseRecord
from prime_node.coordinator.state.scheduler import Grant, NothingToLease, choose_slots
from prime_protocol.envelope import Envelope, PayloadType, seal
from prime_protocol.errors import ErrorCode, LocalError, PeerError
from prime_protocol.messages import (
    HeartbeatReply,
    HeartbeatRequest,
    LeaseRequest,
    LeaveRequest,
    NotYet,
    ReturnLeaseRequest,
)
from prime_protocol.telemetry import Speed
from prime_protocol.visible import printable

log = logging.getLogger(__name__)

ENVIRONMENT_RETRY_S = 5.0
"""Pause after an environment failed: it may be a service that recovers."""
RETRY_S = 0.2
"""Pause before the next request if waiting here would not help, because a new policy is needed first."""


async def take_heartbeat(core: Core, signer: str, request: HeartbeatRequest) -> HeartbeatReply:
    """Answer a heartbeat."""
    require_session(core, signer, request.session)
    if request.policy_version > core.state.head:  # the value is public, so an impossible one is not stored
        request = request.model_copy(update={"policy_version": -1})
    core.presence.reported(signer, request, core.clock.monotonic_s())
    if request.usable_after_ms is not None and request.policy_version >= 0:
        swap_s = None if request.swap_ms is None else request.swap_ms / 1_000
        core.observer.usable(
            signer, request.policy_version, request.usable_after_ms / 1_000, core.clock.now_ms(), swap_s=swap_s
        )
    state = core.state
    return HeartbeatReply.model_construct(
        step=state.current_step,
        head=state.head,
        draining=state.draining or state.is_complete,
        notice=core.hints.get(signer, ""),
    )


async def lease(core: Core, signer: str, request: LeaseRequest) -> Envelope | NotYet:
    """Return a lease on the lowest open slots that the policy may serve, or after at most `wait_s` why there are none."""
    require_session(core, signer, request.session)
    core.presence.heard(signer, core.clock.monotonic_s())
    _note_claim(core, signer, request.speed)
    if request.holding is not None:
        # A reply may have been lost; without this, its groups would wait until the lease expires.
        unknown = tuple(lease for lease in core.state.workers[signer].leases if lease not in request.holding)
        if unknown:
            core.decide(ev.LeasesExpired(unknown))

    def look() -> Grant | NothingToLease:
        require_role(signer, Caller.WORKER, run=core.run, state=core.state)  # the state may have changed meanwhile
        require_session(core, signer, request.session)
        refusal = _policy_fault(core, request)
        return refusal or choose_slots(
            core.state,
            core.state.workers[signer],
            policy_version=request.policy_version,
            rollouts_max=request.rollouts_max,
            now_ms=core.clock.now_ms(),
        )

    found = await core.news.until(
        Topic.LEASE,
        look,
        is_worth_waiting=lambda found: isinstance(found, NothingToLease) and found.is_worth_waiting,
        wait_s=request.wait_s,
    )
    core.presence.heard(signer, core.clock.monotonic_s())
    if isinstance(found, NothingToLease):
        core.hints[signer] = found.reason
        return NotYet(reason=found.reason, retry_after_s=max(RETRY_S, found.pause_s))
    core.hints.pop(signer, None)
    return _grant(core, signer, request, found)


async def return_lease(core: Core, signer: str, request: ReturnLeaseRequest) -> None:
    """End a lease without a bundle. Idempotent."""
    require_session(core, signer, request.session)
    record = core.state.lease_of(request.lease_id, signer)
    if record is None:
        raise PeerError(ErrorCode.LEASE_UNKNOWN, "no such lease")
    if record.worker != signer:
        raise PeerError(ErrorCode.LEASE_FOREIGN, "this lease belongs to another worker")
    if record.end is None:
        core.decide(ev.LeaseReturned(request.lease_id))
        if request.failed:
            note_failed(core, record)


def note_failed(core: Core, record: LeaseRecord, *, is_judged: bool = False) -> None:
    """Record that a lease failed because of its environment. Exempt are evaluations: they ask all workers the same problems."""
    if core.state.is_evaluation(record.slots):
        return
    before = core.state.num_redrawn
    core.decide(ev.EpisodesFailed(record.worker, record.slots, is_judged))
    if (redrawn := core.state.num_redrawn - before) > 0:
        log.warning("step %d: %d problems fail for everybody who plays them; others are drawn", record.step, redrawn)


async def take_leave(core: Core, signer: str, request: LeaveRequest) -> None:
    """Let a worker leave."""
    require_session(core, signer, request.session)
    core.decide(ev.WorkerLeft(signer))
    core.presence.forget(signer)
    core.hints.pop(signer, None)


def _note_claim(core: Core, signer: str, speed: Speed | None) -> None:
    """Record a worker's first claim, unless its speed has been measured already."""
    worker = core.state.workers[signer]
    if speed is not None and worker.claimed is None and not worker.rollout_ms:
        claim = Claim(speed.rollout_ms, speed.tokens_per_s, speed.download_bytes_per_s)
        core.decide(ev.SpeedClaimed(signer, claim))


def _environment_fault(core: Core, grant: Grant, draws: tuple[int, ...]) -> str:
    """Return why the problems of a grant cannot be made, before it is leased. The slots stay open; the operator is notified."""
    try:
        for place, slot in enumerate(grant.slots):
            core.assigner.problem(slot, draws[place] if draws else None)
    except Exception as error:  # an environment's code may raise anything; the coordinator goes on
        if not core.environment_fault:
            log.exception("step %d: a problem cannot be made; nothing of it is leased until it can", grant.step)
        detail = str(error) if isinstance(error, LocalError) else type(error).__name__
        core.environment_fault = printable(f"an environment fails at slots of step {grant.step}: {detail}", 300)
        return core.environment_fault
    core.environment_fault = ""
    return ""


def _grant(core: Core, signer: str, request: LeaseRequest, grant: Grant) -> Envelope | NotYet:
    state, rules = core.state, core.state.rules
    draws = draws_of(core, grant.slots)
    if fault := _environment_fault(core, grant, draws):
        return NotYet(reason=fault, retry_after_s=ENVIRONMENT_RETRY_S)
    lease_id = core.assigner.lease_id(signer, state.num_leases)
    core.decide(
        ev.LeaseGranted(
            lease_id=lease_id,
            worker=signer,
            step=grant.step,
            policy_version=request.policy_version,
            policy_digest=request.policy_digest,
            slots=grant.slots,
            expires_at_ms=core.clock.now_ms() + rules.lease_ms,
            draws=draws,
            remembered=leases_remembered(state),
        )
    )
    return seal(core.assigner.lease(state.leases[lease_id]), PayloadType.LEASE, core.key)


def _policy_fault(core: Core, request: LeaseRequest) -> NothingToLease | None:
    """Check that the worker holds a policy that is published here, with the same digest."""
    state, version = core.state, request.policy_version
    publication = state.published.get(version)
    if publication is None:
        reason = "no policy is published yet" if state.head < 0 else f"fetch policy {state.head}"
        if version > state.head >= 0:
            reason = f"policy {version} is not known here, the newest is {state.head}: tell the operator if this lasts"
        return NothingToLease(reason, is_worth_waiting=False)
    if publication.digest != request.policy_digest:
        raise PeerError(
            ErrorCode.CHAIN_BROKEN,
            f"policy {version} has manifest {publication.digest[:12]} here, you hold {request.policy_digest[:12]}",
        )
    return None
