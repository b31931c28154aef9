"""What becomes of an uploaded bundle, as a function of the state. This file decides; `state.tick` applies the decision."""

from __future__ import annotations

from prime_node.coordinator.state.carrier import carrier
from prime_node.coordinator.state.events import BundleArrived, BundleContradicted, BundleTurnedAway
from prime_node.coordinator.state.records import LeaseEnd, LeaseRecord, State
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.rollout import RolloutHeader
from prime_protocol.verdict import RejectReason, Verdict

_ENDED: dict[LeaseEnd | None, str] = {
    LeaseEnd.RETURNED: "was handed back",
    LeaseEnd.OVERTAKEN: "ended: another worker was leased the same groups and was faster",
}
ANOTHER_UPLOADED = Verdict.refuse(RejectReason.DUPLICATE, "another bundle was uploaded for this lease")


@carrier(frozen=True, slots=True)
class AlreadyAnswered:
    """Outcome: nothing new to record. The bundle was uploaded before, or the lease's one receipt is another bundle's."""

    verdict: Verdict | None
    """Its verdict; None while it is pending."""


UploadOutcome = AlreadyAnswered | BundleArrived | BundleTurnedAway | BundleContradicted
"""What becomes of an uploaded bundle: no change, or the event that records it."""


def decide_upload(
    state: State, header: RolloutHeader, lease: LeaseRecord, *, bundle: str, num_bytes: int
) -> UploadOutcome:
    """Return what becomes of a bundle for a lease. Raise RemoteError."""
    if lease.worker != header.worker:
        raise RemoteError(ErrorCode.LEASE_FOREIGN, "this lease belongs to another worker")
    if lease.bundle == bundle:
        return AlreadyAnswered(verdict_of_lease(state, lease))
    if lease.bundle is not None and lease.reason is None:  # accepted, or still to be judged
        return BundleContradicted(lease.lease_id, lease.worker, bundle)
    if lease.bundle is not None:
        return AlreadyAnswered(ANOTHER_UPLOADED)
    num_rollouts = len(lease.slots) * state.rules.rollouts_per_group
    reason, detail = _fault(state, header, lease)
    if reason is not None:
        return BundleTurnedAway(bundle, lease.lease_id, lease.worker, num_rollouts, reason, detail)
    if len(state.workers[lease.worker].pending) >= state.rules.bundles_pending_per_worker_max:
        raise RemoteError(
            ErrorCode.TOO_MANY_REQUESTS,
            "your earlier bundles still wait for a validator; try again later",
            retry_after_s=2.0,
        )
    return BundleArrived(bundle, lease.lease_id, lease.worker, num_rollouts, num_bytes)


def verdict_of_lease(state: State, lease: LeaseRecord) -> Verdict | None:
    """Return the verdict on the bundle of a lease; None while it is pending."""
    if lease.bundle in state.bundles:
        return None
    return Verdict.accept() if lease.reason is None else Verdict.refuse(lease.reason, lease.detail)


def _fault(state: State, header: RolloutHeader, lease: LeaseRecord) -> tuple[RejectReason | None, str]:
    fault = state.rules.admission.check(header.step, header.policy_version, current_step=state.current_step)
    if fault is not None and not state.is_evaluation(lease.slots):
        detail = (
            f"the bundle is for step {header.step} by policy {header.policy_version}, and step {state.current_step} "
            "is being trained"
        )
        return RejectReason(fault.value), detail
    if lease.end is LeaseEnd.LAPSED and state.workers[lease.worker].released:
        return (
            RejectReason.LEASE_EXPIRED,
            "the lease expired, and the run is ending: the tokens in escrow are credited already",
        )
    if not state.is_redeemable(lease):
        return (
            RejectReason.LEASE_EXPIRED,
            f"the lease {_ENDED.get(lease.end, 'ended, and its groups were leased to others')}",
        )
    return None, ""
