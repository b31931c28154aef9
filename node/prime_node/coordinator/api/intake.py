"""Intake of rollouts: the checks of an uploaded bundle.

    (1) framing and size                                  MALFORMED, TOO_LARGE, ...
    (2) the signer takes part and is not banned           UNKNOWN_WORKER, BANNED
    (3) signature over the header's raw bytes             WRONG_PAYLOAD_TYPE, BAD_SIGNATURE
    (4) the header's schema, run, signer and sizes        UNKNOWN_FIELD, WRONG_TYPE, WRONG_RUN, TOO_LARGE
    (5) its lease                                         LEASE_UNKNOWN, LEASE_FOREIGN, verdict DUPLICATE, EQUIVOCATION
                                                          or LEASE_EXPIRED
    (6) its step                                          verdict STALE or FUTURE
    (7) sizes that the lease can possibly need            TOO_LARGE, DECOMPRESSED_TOO_LARGE
    (8) the body is the one that was signed               DIGEST_MISMATCH

A new bundle counts against its worker's rate (TOO_MANY_REQUESTS), and is a sign of life. A repeated bundle has a rate of its
own, because anyone who has recorded it can send it again. Neither is charged if the worker's announcement was (bodies.py).

First the bytes are made durable, then the event, then the answer is sent. So a worker that got an answer may delete the bundle.
One that got none sends it again: the same bundle gets the same answer. The body is not opened here. A validator judges its
content; its verdict on a body that cannot be read is MALFORMED.
"""

from __future__ import annotations

from dataclasses import replace

from prime_node.coordinator.api.receipts import replaced, verdict_of
from prime_node.coordinator.api.requests import Caller, RequestGate, require_role, wrong_run
from prime_node.coordinator.core import Core
from prime_node.coordinator.state import audits
from prime_node.coordinator.state import events as ev
from prime_node.coordinator.state.records import LeaseEnd, LeaseRecord, State
from prime_protocol.digest import digest_of
from prime_protocol.envelope import PayloadType, parse_json
from prime_protocol.errors import ErrorCode, LimitExceeded, PeerError
from prime_protocol.messages import UploadReply
from prime_protocol.parcel import Parcel, open_parcel
from prime_protocol.rollout import RolloutHeader, body_bytes_max
from prime_protocol.run_spec import PinnedRun
from prime_protocol.verdict import RejectReason, Verdict

AGAIN = "again "
"""Prefix of the bucket name for repeated uploads, from the worker or from anyone who has recorded them."""


async def upload(core: Core, gate: RequestGate, parcel: bytes, *, address: str, paid_by: str = "") -> UploadReply:
    """Accept one bundle. `paid_by` is the key whose rate is charged already. Raise PeerError."""

    def charge(bucket: str) -> None:
        if paid_by != header.worker:
            gate.limiter.by_key.spend(bucket, now_s)

    with gate.blame(address, core.clock.monotonic_s()):
        opened = open_parcel(parcel, body_bytes_max=core.run.spec.limits.rollout_bytes_max)  # (1)
        header = read_header(opened, run=core.run, state=core.state)  # (2) to (4)
    bundle, now_s = digest_of(parcel), core.clock.monotonic_s()
    lease = core.state.lease_of(header.lease_id, header.worker)
    if lease is None:
        charge(AGAIN + header.worker)
        return await _answer_of_old(core, header, bundle)
    decision = decide(core.state, header, lease, bundle=bundle, num_bytes=len(parcel))  # (5), (6)
    if isinstance(decision, UploadReply):
        charge(AGAIN + header.worker)
        return decision
    check_sizes(header, lease, core.run)  # (7)
    opened.check_body(header)  # (8); before any conviction: anyone who has seen a header can attach another body to it
    charge(header.worker)
    core.presence.heard(header.worker, now_s)
    if isinstance(decision, ev.BundleArrived):
        decision = await _store(core, header, decision, parcel)
    if isinstance(decision, UploadReply):
        return decision
    if isinstance(decision, ev.BundleContradicted):
        return await _keep_both(core, decision, lease, opened)
    if isinstance(decision, ev.BundleArrived):
        drawn = core.assigner.audit_draw(bundle) < audits.audit_share(
            core.state.rules, core.state.workers[header.worker]
        )
        seeded = header.engine.seeded
        decision = replace(decision, audited=drawn or not seeded, seeded=seeded)
    core.decide(decision)
    if isinstance(decision, ev.BundleTurnedAway):
        return UploadReply(bundle=bundle, verdict=Verdict.refuse(decision.reason, decision.detail))
    return UploadReply(bundle=bundle)


def read_header(opened: Parcel, *, run: PinnedRun, state: State) -> RolloutHeader:
    """Check steps (2) to (4). Raise PeerError."""
    signer = opened.envelope.sole_signer()
    require_role(signer, Caller.WORKER, run=run, state=state)  # (2)
    payload = opened.envelope.verify(PayloadType.ROLLOUT, trusted=(signer,))  # (3)
    header = parse_json(payload, RolloutHeader)  # (4)
    if header.run != run.digest:
        raise wrong_run(header.run, run)
    if header.worker != signer:
        raise PeerError(ErrorCode.BAD_SIGNATURE, "the header names another worker than its signer")
    bound = run.spec.limits.rollout_decompressed_bytes_max
    if header.decompressed_bytes > bound:
        raise LimitExceeded(
            "rollout_decompressed_bytes_max",
            header.decompressed_bytes,
            bound,
            code=ErrorCode.DECOMPRESSED_TOO_LARGE,
        )
    return header


def check_sizes(header: RolloutHeader, lease: LeaseRecord, run: PinnedRun) -> None:
    """Check step (7). Raise PeerError if the declared sizes exceed what the lease's completions can need."""
    bound = body_bytes_max(
        num_rollouts=len(lease.slots) * run.spec.rollouts_per_group,
        completion_tokens_max=run.spec.sampling.completion_tokens_max,
        turns_max=run.spec.turns_max,
        context_tokens_max=max(map(run.spec.context_tokens_max, run.spec.environments)),
    )
    if header.body_bytes > bound:  # compression makes it smaller, or larger by far less than the bound's slack
        raise LimitExceeded("the lease's body_bytes_max", header.body_bytes, bound)
    if header.decompressed_bytes > bound:
        code = ErrorCode.DECOMPRESSED_TOO_LARGE
        raise LimitExceeded("the lease's body_bytes_max", header.decompressed_bytes, bound, code=code)


def decide(
    state: State, header: RolloutHeader, lease: LeaseRecord, *, bundle: str, num_bytes: int
) -> ev.BundleArrived | ev.BundleTurnedAway | ev.BundleContradicted | UploadReply:
    """Check steps (5) and (6): return the event to record for a bundle, or the reply if it is settled. Raise PeerError."""
    if lease.worker != header.worker:
        raise PeerError(ErrorCode.LEASE_FOREIGN, "this lease belongs to another worker")
    if lease.bundle == bundle:
        return UploadReply(bundle=bundle, verdict=_verdict_on(state, lease))
    if lease.bundle is not None and lease.reason is None:  # accepted, or still to be judged
        return ev.BundleContradicted(lease.lease_id, lease.worker, bundle)
    if lease.bundle is not None:  # nothing new to record: the lease's one receipt is another bundle's
        refusal = Verdict.refuse(RejectReason.DUPLICATE, "another bundle was uploaded for this lease")
        return UploadReply(bundle=bundle, verdict=refusal)
    num_rollouts = len(lease.slots) * state.rules.rollouts_per_group
    reason, detail = _fault(state, header, lease)
    if reason is not None:
        return ev.BundleTurnedAway(bundle, lease.lease_id, lease.worker, num_rollouts, reason, detail)
    if len(state.workers[lease.worker].pending) >= state.rules.bundles_pending_per_worker_max:
        raise PeerError(ErrorCode.TOO_MANY_REQUESTS, "your earlier bundles wait for a validator", retry_after_s=2.0)
    return ev.BundleArrived(bundle, lease.lease_id, lease.worker, num_rollouts, num_bytes)


def _fault(state: State, header: RolloutHeader, lease: LeaseRecord) -> tuple[RejectReason | None, str]:
    fault = state.rules.admission.check(header.step, header.policy_version, current_step=state.current_step)
    if fault is not None and not state.is_evaluation(lease.slots):
        detail = f"step {header.step} by policy {header.policy_version} while step {state.current_step} is trained"
        return RejectReason(fault.value), detail
    if lease.end is LeaseEnd.LAPSED and state.workers[lease.worker].released:
        return RejectReason.LEASE_EXPIRED, "the lease lapsed, the run ends, and your surety is credited already"
    if not state.is_redeemable(lease):
        return (
            RejectReason.LEASE_EXPIRED,
            f"the lease {_ENDED.get(lease.end, 'ended, and others took its groups over')}",
        )
    return None, ""


_ENDED: dict[LeaseEnd | None, str] = {
    LeaseEnd.RETURNED: "was handed back",
    LeaseEnd.OVERTAKEN: "ended: another worker was given the same groups, and was faster",
}


async def _store(
    core: Core, header: RolloutHeader, arrived: ev.BundleArrived, parcel: bytes
) -> ev.BundleArrived | ev.BundleTurnedAway | ev.BundleContradicted | UploadReply:
    """Make the bytes durable, then decide again: meanwhile the lease may have ended, or the same bundle arrived twice."""
    await core.bundles.put(parcel, digest=arrived.bundle)
    require_role(header.worker, Caller.WORKER, run=core.run, state=core.state)
    lease = core.state.lease_of(header.lease_id, header.worker)
    if lease is None:
        raise PeerError(ErrorCode.LEASE_UNKNOWN, "the lease ended during the upload")
    return decide(core.state, header, lease, bundle=arrived.bundle, num_bytes=arrived.num_bytes)


async def _keep_both(
    core: Core, contradicted: ev.BundleContradicted, lease: LeaseRecord, opened: Parcel
) -> UploadReply:
    """Keep two signed headers for one lease for the operator, then convict their worker.

    The same header in other JSON is no evidence: anyone can produce it. Nor is there evidence once the first bundle is deleted.
    """
    assert lease.bundle is not None
    try:
        first = open_parcel(await core.bundles.get(lease.bundle), body_bytes_max=core.run.spec.limits.rollout_bytes_max)
    except KeyError:  # its step is trained
        refusal = Verdict.refuse(RejectReason.DUPLICATE, "another bundle was uploaded for this lease")
        return UploadReply(bundle=contradicted.other, verdict=refusal)
    if first.envelope.payload == opened.envelope.payload:
        return UploadReply(bundle=contradicted.other, verdict=_verdict_on(core.state, lease))
    headers = [first.envelope, opened.envelope]
    name = f"equivocation-{lease.worker}-{lease.lease_id[:16]}.jsonl"
    await core.private.write(name, b"".join(header.to_bytes() + b"\n" for header in headers))
    receipt = await replaced(core, lease.bundle)
    worker = core.state.workers.get(contradicted.worker)
    is_known = worker is not None and core.state.lease_of(contradicted.lease_id, contradicted.worker) is lease
    if is_known and lease.reason is None:  # meanwhile a second copy may have arrived, or the lease may be forgotten
        core.decide(replace(contradicted, replaced=(receipt,)))
    detail = "two bundles were signed for this lease"
    return UploadReply(bundle=contradicted.other, verdict=Verdict.refuse(RejectReason.EQUIVOCATION, detail))


async def _answer_of_old(core: Core, header: RolloutHeader, bundle: str) -> UploadReply:
    """Answer for a bundle whose lease is forgotten: from its receipt, if it was ever accepted for judgement."""
    stored = await core.store.receipt(bundle)
    if stored is not None:
        return UploadReply(bundle=bundle, verdict=verdict_of(stored))
    if header.step < core.state.current_step:
        refusal = Verdict.refuse(RejectReason.STALE, f"step {core.state.current_step} is trained now")
        return UploadReply(bundle=bundle, verdict=refusal)
    raise PeerError(ErrorCode.LEASE_UNKNOWN, "no such lease; ask for a new one")


def _verdict_on(state: State, lease: LeaseRecord) -> Verdict | None:
    if lease.bundle in state.bundles:
        return None
    return Verdict.accept() if lease.reason is None else Verdict.refuse(lease.reason, lease.detail)
