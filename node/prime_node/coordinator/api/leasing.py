"""The other endpoints for workers: heartbeat, lease, return a lease, leave."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import lru_cache

from prime_node.coordinator.api.requests import Caller, require_role
from prime_node.coordinator.assignments import Assigner
from prime_node.coordinator.curation import Curation
from prime_node.coordinator.decisions import Decisions
from prime_node.coordinator.measure.observer import Observer
from prime_node.coordinator.presence import Presence, require_session
from prime_node.coordinator.state import events as ev
from prime_node.coordinator.state.blockers import Blockers
from prime_node.coordinator.state.effects import Topic
from prime_node.coordinator.state.endings import leases_remembered
from prime_node.coordinator.state.records import Claim, LeaseRecord
from prime_node.coordinator.state.scheduler import Grant, NothingToLease, cancelled_leases, choose_slots, is_useless
from prime_node.coordinator.waiting import Notifications
from prime_node.ports.clock import Clock
from prime_node.ports.web import Response
from prime_node.traces import of_lease, spanned
from prime_protocol.envelope import Envelope, PayloadType, seal
from prime_protocol.errors import ErrorCode, LocalError, RemoteError
from prime_protocol.identity import SigningKey
from prime_protocol.replies import HeartbeatReply, NotYet
from prime_protocol.requests import HeartbeatRequest, LeaseRequest, LeaveRequest, ReturnLeaseRequest
from prime_protocol.run_spec import PinnedRun
from prime_protocol.telemetry import Speed
from prime_protocol.visible import printable

log = logging.getLogger(__name__)

ENVIRONMENT_RETRY_S = 5.0
"""Pause after an environment failed: it may be a service that recovers."""
RETRY_S = 0.2
"""Pause before the next request if waiting here would not help, because a new policy is needed first."""


@dataclass(slots=True)
class Leasing:
    """Leases, and the signs of life of the workers that hold them."""

    run: PinnedRun
    key: SigningKey
    clock: Clock
    decisions: Decisions
    assigner: Assigner
    curation: Curation
    notifications: Notifications
    presence: Presence
    observer: Observer
    blockers: Blockers

    async def take_heartbeat(self, signer: str, request: HeartbeatRequest) -> Response:
        """Answer a heartbeat."""
        return self.answer_heartbeat(signer, request)

    def answer_heartbeat(self, signer: str, request: HeartbeatRequest) -> Response:
        """Return the answer to a heartbeat, which may be sent once it is `answerable`."""
        self._require_session(signer, request.session)
        state = self.decisions.state
        if request.policy_version > state.head:  # the value is public, so an impossible one is not stored
            request = request.model_copy(update={"policy_version": -1})
        self.presence.reported(signer, request, self.clock.monotonic_s())
        if request.usable_after_ms is not None and request.policy_version >= 0:
            swap_s = None if request.swap_ms is None else request.swap_ms / 1_000
            self.observer.usable(
                signer, request.policy_version, request.usable_after_ms / 1_000, self.clock.now_ms(), swap_s=swap_s
            )
        fields = state.current_step, state.head, state.draining or state.is_complete, self.presence.hint(signer)
        cancelled = cancelled_leases(state, signer, request.holding) if request.holding else ()
        return _heartbeat_reply(*fields, cancelled) if cancelled else _common_heartbeat_reply(*fields)

    async def lease(self, signer: str, request: LeaseRequest) -> Envelope | NotYet:
        """Return a lease on the lowest open slots that the policy may serve, or after at most `wait_s` why there are none."""
        self._require_session(signer, request.session)
        self.presence.heard(signer, self.clock.monotonic_s())
        self._note_claim(signer, request.speed)
        if request.holding is not None:
            # A reply may have been lost; without this, its groups would wait until the lease expires.
            held = self.decisions.state.workers[signer].leases
            unknown = tuple(lease for lease in held if lease not in request.holding)
            if unknown:
                self.decisions.decide(ev.LeasesExpired(unknown))

        def look() -> Grant | NothingToLease:
            state = self.decisions.state
            require_role(signer, Caller.WORKER, run=self.run, state=state)  # the state may have changed meanwhile
            self._require_session(signer, request.session)
            refusal = self._policy_fault(request)
            return refusal or choose_slots(
                state,
                state.workers[signer],
                policy_version=request.policy_version,
                rollouts_max=request.rollouts_max,
                now_ms=self.clock.now_ms(),
            )

        found = await self.notifications.until(
            Topic.LEASE,
            look,
            is_worth_waiting=lambda found: isinstance(found, NothingToLease) and found.is_worth_waiting,
            wait_s=request.wait_s,
        )
        self.presence.heard(signer, self.clock.monotonic_s())
        match found:
            case NothingToLease():
                self.presence.set_hint(signer, found.reason)
                return NotYet(reason=found.reason, retry_after_s=max(RETRY_S, found.pause_s))
            case Grant():
                self.presence.set_hint(signer, "")
                return self._grant(signer, request, found)

    async def return_lease(self, signer: str, request: ReturnLeaseRequest) -> None:
        """End a lease without a bundle. Idempotent."""
        self._require_session(signer, request.session)
        record = self.decisions.state.lease_of(request.lease_id, signer)
        if record is None:
            raise RemoteError(ErrorCode.LEASE_UNKNOWN, "no such lease")
        if record.worker != signer:
            raise RemoteError(ErrorCode.LEASE_FOREIGN, "this lease belongs to another worker")
        if record.end is None:
            cancelled = not request.failed and is_useless(self.decisions.state, record)
            self.decisions.decide(ev.LeaseReturned(request.lease_id, cancelled=cancelled))
            if request.failed:
                note_failed(self.decisions, record)

    async def take_leave(self, signer: str, request: LeaveRequest) -> None:
        """Let a worker leave."""
        self._require_session(signer, request.session)
        self.decisions.decide(ev.WorkerLeft(signer))
        self.presence.forget(signer)

    def _require_session(self, signer: str, session: str) -> None:
        require_session(self.decisions.state, self.presence, signer, session, self.clock)

    def _note_claim(self, signer: str, speed: Speed | None) -> None:
        """Record a worker's first claim, unless its speed has been measured already."""
        worker = self.decisions.state.workers[signer]
        if speed is not None and worker.claimed is None and not worker.rollout_ms:
            claim = Claim(speed.rollout_ms, speed.tokens_per_s, speed.download_bytes_per_s)
            self.decisions.decide(ev.SpeedClaimed(signer, claim))

    def _environment_fault(self, grant: Grant, draws: tuple[int, ...]) -> str:
        """Return why the problems of a grant cannot be made; empty if they can. The slots stay open."""
        try:
            for place, slot in enumerate(grant.slots):
                self.assigner.problem(slot, draws[place] if draws else 0)
        except Exception as error:  # an environment's code may raise anything; the coordinator continues
            if not self.blockers.environment_fault:
                log.exception(
                    "step %d: an environment failed to make a problem; the step's slots are not leased until "
                    "it succeeds",
                    grant.step,
                )
            detail = str(error) if isinstance(error, LocalError) else type(error).__name__
            self.blockers.environment_fault = printable(
                f"an environment fails to make problems of step {grant.step}: {detail}", 300
            )
            return self.blockers.environment_fault
        self.blockers.environment_fault = ""
        return ""

    def _grant(self, signer: str, request: LeaseRequest, grant: Grant) -> Envelope | NotYet:
        state, rules = self.decisions.state, self.decisions.state.rules
        draws = self.curation.draws_of(grant.slots)
        if fault := self._environment_fault(grant, draws):
            return NotYet(reason=fault, retry_after_s=ENVIRONMENT_RETRY_S)
        draws = self.assigner.asked_draws(grant.slots, draws)
        lease_id = self.assigner.lease_id(signer, state.num_leases)
        granted = ev.LeaseGranted(
            lease_id=lease_id,
            worker=signer,
            step=grant.step,
            policy_version=request.policy_version,
            policy_digest=request.policy_digest,
            slots=grant.slots,
            expires_at_ms=self.clock.now_ms() + rules.lease_ms,
            draws=draws,
            remembered=leases_remembered(state),
            prompts=self.assigner.prompts_digest(grant.slots, draws),
        )
        with spanned("lease", of_lease(lease_id), is_root=True, step=grant.step, worker=signer[-8:]):
            self.decisions.decide(granted)
            return seal(self.assigner.lease_payload(state.leases[lease_id]), PayloadType.LEASE, self.key)

    def _policy_fault(self, request: LeaseRequest) -> NothingToLease | None:
        """Check that the worker holds a policy that is published here, with the same digest."""
        state, version = self.decisions.state, request.policy_version
        publication = state.published.get(version)
        if publication is None:
            reason = (
                "no policy is published yet"
                if state.head < 0
                else f"policy {version} is not published here; policy {state.head} is the newest"
            )
            if version > state.head >= 0:
                reason = (
                    f"the coordinator does not have policy {version}; its newest is {state.head}. If this lasts, report "
                    "it to the operator"
                )
            return NothingToLease(reason, is_worth_waiting=False)
        if publication.digest != request.policy_digest:
            raise RemoteError(
                ErrorCode.CHAIN_BROKEN,
                (
                    f"policy {version} has manifest {publication.digest[:12]} at the coordinator and "
                    f"{request.policy_digest[:12]} at this worker; fetch the policy again"
                ),
            )
        return None


@lru_cache(1_024)
def _common_heartbeat_reply(step: int, head: int, draining: bool, notice: str) -> Response:
    """Return the reply to a heartbeat that most of the workers get."""
    return _heartbeat_reply(step, head, draining, notice, ())


def _heartbeat_reply(step: int, head: int, draining: bool, notice: str, cancelled: tuple[str, ...]) -> Response:
    reply = HeartbeatReply(step=step, head=head, draining=draining, notice=notice, cancelled=cancelled)
    return Response(reply.model_dump_json().encode())


def note_failed(decisions: Decisions, record: LeaseRecord, *, is_judged: bool = False) -> None:
    """Record that a lease failed because of its environment. Evaluations do not count: all workers get the same problems."""
    if decisions.state.is_evaluation(record.slots):
        return
    before = decisions.state.num_redrawn
    decisions.decide(ev.EpisodesFailed(record.worker, record.slots, is_judged))
    if (redrawn := decisions.state.num_redrawn - before) > 0:
        log.warning(
            "step %d: %d problems failed for a quorum of workers; other problems replace them", record.step, redrawn
        )
