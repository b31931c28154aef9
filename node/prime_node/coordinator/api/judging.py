"""The endpoints for validators: a bundle to judge, its bytes, and the verdict."""

from __future__ import annotations

import asyncio
import logging
from functools import partial

from prime_node.coordinator import curation
from prime_node.coordinator.agreement import Contradiction, Opinion
from prime_node.coordinator.api.leasing import note_failed
from prime_node.coordinator.api.receipts import replaced
from prime_node.coordinator.api.requests import Caller, RequestGate, require_role
from prime_node.coordinator.core import Core
from prime_node.coordinator.state import copies
from prime_node.coordinator.state import events as ev
from prime_node.coordinator.state.effects import Topic
from prime_node.coordinator.state.records import PendingBundle
from prime_protocol.calibration import require_possible
from prime_protocol.digest import digest_of
from prime_protocol.errors import ErrorCode, PeerError
from prime_protocol.judged_logprobs import open_logprobs
from prime_protocol.messages import BundleRequest, CheckRequest, CheckResultRequest, CheckTask, NotYet
from prime_protocol.parcel import open_parcel
from prime_protocol.verdict import RejectReason

log = logging.getLogger(__name__)

RETRY_S = 0.2
"""Pause before a validator that waited without result may ask again."""


async def next_check_task(core: Core, signer: str, request: CheckRequest) -> CheckTask | NotYet:
    """Return the oldest pending bundle, those of the validator's own policies first."""
    core.agreement.heard(signer, core.clock.monotonic_s())
    bundle = await core.news.until(
        Topic.CHECK,
        lambda: core.checks.take(
            request.policy_versions, core.clock.monotonic_s(), validator=signer, may=partial(_may_take, core, signer)
        ),
        is_worth_waiting=lambda found: found is None,
        wait_s=request.wait_s,
    )
    pending = None if bundle is None else _pending(core, bundle)
    if bundle is None or pending is None:
        return NotYet(reason="no bundle waits for a verdict", retry_after_s=RETRY_S)
    core.agreement.handed(bundle, signer)
    check_ms = round(core.checks.check_s * 1_000)
    lease = core.assigner.lease(pending.lease)
    newest = core.state.head if core.run.spec.schedule.swap.spans_policies else None
    return CheckTask.model_construct(
        bundle=bundle,
        lease=lease,
        deadline_ms=core.clock.now_ms() + check_ms,
        newest_policy=newest,
        audit=pending.audited,
        left_ms=check_ms if request.asks_left else None,
    )


async def check_result(core: Core, signer: str, request: CheckResultRequest) -> None:
    """Record the verdict of the validator that has the bundle. Raise PeerError.

    Idempotent: the first verdict stands, unless another validator has to confirm it (agreement.py).
    """
    pending = core.state.bundles.get(request.bundle)
    if pending is None and request.bundle not in core.agreement.looks:
        if await core.store.receipt(request.bundle) is None:
            raise PeerError(ErrorCode.NOT_FOUND, f"no bundle {request.bundle[:12]}")
        return
    if core.agreement.has_answered(request.bundle, signer):
        return
    _require_holder(core, signer, request.bundle)
    if pending is None:
        _second_look(core, signer, request)
        return
    verdict = request.verdict
    if len(request.rewards) != (pending.num_rollouts if verdict.accepted else 0):
        raise PeerError(
            ErrorCode.WRONG_TYPE,
            f"an accepted bundle of {pending.num_rollouts} has as many rewards, a refused one none",
        )
    if request.versions and len(request.versions) != len(pending.lease.slots):
        raise PeerError(ErrorCode.WRONG_TYPE, f"a bundle of {len(pending.lease.slots)} groups has as many versions")
    if any(slot not in pending.lease.slots for slot, _ in request.fingerprints):
        raise PeerError(ErrorCode.WRONG_TYPE, "a fingerprint names a slot that is not the lease's")
    checks, evidence = core.run.spec.checks, request.evidence
    if evidence is not None and checks.statistics:
        known_moments = checks.moments_of(worker=evidence.worker, validator=evidence.validator)
        await asyncio.to_thread(require_possible, evidence, known_moments)  # ranks of a thousand rewards take a while
    await _require_logprobs(core, pending, signer, request)
    if (opinion := _concluded(core, signer, request)) is not None:
        await _decide(core, opinion)


def _may_take(core: Core, signer: str, bundle: str) -> bool:
    """Return whether a validator may judge a bundle. One that let its deadline pass leaves it to the other active ones."""
    if core.checks.is_held_by(bundle, signer) and core.agreement.active_others(signer, core.clock.monotonic_s()):
        return False
    return core.agreement.may_judge(bundle, signer)


def _pending(core: Core, bundle: str) -> PendingBundle | None:
    """Return a bundle that waits for a verdict or for a second look."""
    look = core.agreement.looks.get(bundle)
    return core.state.bundles.get(bundle) or (None if look is None else look.pending)


def _concluded(core: Core, signer: str, request: CheckResultRequest) -> Opinion | None:
    """Return the opinion that decides a pending bundle; None if another validator has to judge it first."""
    pending = core.state.bundles.get(request.bundle)
    if pending is None or not core.checks.is_held_by(request.bundle, signer):  # settled, or answered at the same time
        return None
    agreement, worker, now_s = core.agreement, pending.lease.worker, core.clock.monotonic_s()
    agreement.heard(signer, now_s, request)
    mine = agreement.opinion(core.state, worker, signer, request)
    if pending.audited and (differ := agreement.count(mine, now_s)):
        log.warning("%s; look at their versions, arithmetic and hardware", differ)
    told = agreement.num_contradictions
    opinion = agreement.conclude(mine, worker, now_s, core.clock.now_ms())
    if agreement.num_contradictions > told:
        _tell(agreement.contradictions[-1])
    if opinion is None and agreement.is_held(request.bundle):
        core.checks.again(request.bundle, pending.lease.policy_version)
        core.news.publish(Topic.CHECK)
    return opinion


def _second_look(core: Core, signer: str, request: CheckResultRequest) -> None:
    """Compare a second validator's opinion on an accepted bundle with the first."""
    core.agreement.heard(signer, core.clock.monotonic_s(), request)
    core.checks.settled([request.bundle])
    look = core.agreement.looks[request.bundle]
    mine = core.agreement.opinion(core.state, look.pending.lease.worker, signer, request)
    exact = all(one.is_deterministic and one.scorings == 1 for one in core.run.spec.environments)
    if found := core.agreement.looked(mine, exact_rewards=exact, now_ms=core.clock.now_ms()):
        _tell(found)


def _require_holder(core: Core, signer: str, bundle: str) -> None:
    """Raise PeerError(NOT_FOUND) unless the bundle was handed to this validator, and to no other one since."""
    if not core.checks.is_held_by(bundle, signer):
        detail = (
            f"bundle {bundle[:12]} does not wait for this validator: it was not handed to it, or to another one since"
        )
        raise PeerError(ErrorCode.NOT_FOUND, detail)


def _tell(found: Contradiction) -> None:
    said = "; ".join(f"{validator} says {what}" for validator, what in found.said)
    log.warning("validators contradict each other on bundle %s of %s: %s", found.bundle[:12], found.worker, said)


async def _decide(core: Core, opinion: Opinion) -> None:
    request, verdict = opinion.result, opinion.result.verdict
    known = await _copies_replaced(core, request)
    if (pending := core.state.bundles.get(request.bundle)) is None:  # another validator was faster
        return
    reason = verdict.reason
    if reason is RejectReason.WRONG_CONTEXT and core.state.is_evaluation(pending.lease.slots):
        # Older workers without evaluations run another problem under that number. It is refused, so they gain nothing by it.
        reason = RejectReason.INCOMPLETE
    core.decide(
        ev.VerdictGiven(
            bundle=request.bundle,
            reason=reason,
            detail=verdict.detail,
            rewards=request.rewards,
            num_tokens=request.num_tokens,
            validator=opinion.validator,
            versions=request.versions,
            unscored=request.unscored,
            evidence=request.evidence,
            fingerprints=request.fingerprints,
            replaced=known,
            logprobs=request.logprobs or "",
        )
    )
    if verdict.accepted:
        curation.rate(core, pending.lease, request.bundle)
    elif reason in (RejectReason.INCOMPLETE, RejectReason.UNVERIFIABLE):
        note_failed(core, pending.lease, is_judged=reason is RejectReason.UNVERIFIABLE)
    for name, value in request.measured.items():
        core.metrics.observe("prime_check_measured", coarse(value), number=name)
    is_drawn = core.assigner.look_draw(request.bundle) < core.config.second_look_share
    is_looked_at = verdict.accepted and pending.audited and is_drawn
    if is_looked_at and core.agreement.look_again(pending, opinion, core.clock.monotonic_s()):
        core.checks.again(request.bundle, pending.lease.policy_version)
        core.news.publish(Topic.CHECK)


async def put_logprobs(core: Core, gate: RequestGate, parcel: bytes, *, address: str) -> str:
    """Store a validator's own logprobs of a bundle that it is about to accept. Content-addressed and idempotent."""
    with gate.blame(address, core.clock.monotonic_s()):
        opened = open_parcel(parcel, body_bytes_max=core.run.spec.limits.rollout_bytes_max)
        signer = opened.envelope.sole_signer()
        require_role(signer, Caller.VALIDATOR, run=core.run, state=core.state)
        header, _ = open_logprobs(
            parcel,
            run=core.run.digest,
            keys=core.run.keys,
            bytes_max=core.run.spec.limits.rollout_bytes_max,
        )
    _require_holder(core, signer, header.bundle)
    if header.bundle in core.agreement.looks:  # another validator's are stored already
        return digest_of(parcel)
    return await core.bundles.put(parcel, digest=digest_of(parcel))


async def _require_logprobs(core: Core, pending: PendingBundle, signer: str, request: CheckResultRequest) -> None:
    """Check the logprobs of a verdict, so that the trainer gets nothing that it would stop at. Raise PeerError."""
    spec = core.run.spec
    if request.logprobs is None:
        is_trained = request.verdict.accepted and not core.state.is_evaluation(pending.lease.slots)
        if spec.checks.logprobs_judged and pending.audited and is_trained:
            raise PeerError(
                ErrorCode.WRONG_TYPE,
                "this run trains on validators' logprobs, and the verdict on an audited bundle names none; "
                "update the validator",
            )
        return
    if not request.verdict.accepted:
        raise PeerError(ErrorCode.WRONG_TYPE, "logprobs go with an accepted bundle")
    try:
        parcel = await core.bundles.get(request.logprobs)
    except KeyError:
        raise PeerError(
            ErrorCode.NOT_FOUND, f"logprobs {request.logprobs[:12]} are not here; upload them first"
        ) from None
    open_logprobs(
        parcel,
        run=core.run.digest,
        keys=core.run.keys,
        bytes_max=spec.limits.rollout_bytes_max,
        bundle=request.bundle,
        num_tokens=request.num_tokens,
    )
    if open_parcel(parcel, body_bytes_max=spec.limits.rollout_bytes_max).envelope.sole_signer() != signer:
        raise PeerError(ErrorCode.WRONG_TYPE, f"logprobs {request.logprobs[:12]} are another validator's")


def coarse(value: float) -> float:
    """Round to one significant digit.

    The metrics are public: their sum must not show a worker how its last bundle measured.
    """
    return float(f"{value:.0e}")


async def _copies_replaced(core: Core, request: CheckResultRequest) -> tuple[ev.Replaced, ...]:
    """Return the receipts of bundles that this one shows to be copies, and that were judged and accepted before it."""
    known: dict[str, ev.Replaced] = {}
    while (pending := core.state.bundles.get(request.bundle)) is not None:
        later = copies.found_later(core.state, pending, request.fingerprints)
        if (unknown := next((one.bundle for one in later if one.bundle not in known), None)) is None:
            break
        known[unknown] = await replaced(core, unknown)
    return tuple(known.values())


async def bundle(core: Core, signer: str, request: BundleRequest) -> bytes:
    """Return a bundle's bytes, for validators and the trainer only."""
    try:
        return await core.bundles.get(request.bundle)
    except KeyError:
        raise PeerError(ErrorCode.NOT_FOUND, f"no bundle {request.bundle[:12]}; it may be deleted") from None


async def settle_held(core: Core) -> None:
    """Refuse the bundles that a second validator should have judged in time but did not."""
    for bundle in core.agreement.overdue(core.clock.monotonic_s()):
        opinion = core.agreement.settle(bundle, core.clock.monotonic_s())
        if bundle in core.state.bundles:
            await _decide(core, opinion)


def expire_checks(core: Core) -> None:
    """Requeue bundles that their validator did not judge in time. After several attempts, refuse them as unverifiable."""
    before = len(core.checks)
    for overdue in core.checks.overdue(core.clock.monotonic_s()):
        if overdue not in core.state.bundles or core.agreement.is_held(overdue):  # settle_held decides the latter
            core.checks.settled([overdue])
            continue
        core.decide(
            ev.VerdictGiven(
                bundle=overdue,
                reason=RejectReason.UNVERIFIABLE,
                detail="no validator judged it in time",
                rewards=(),
                num_tokens=0,
                validator="",
            )
        )
    if before:
        core.news.publish(Topic.CHECK)
