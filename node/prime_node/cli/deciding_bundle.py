"""The deciding bundle of a ban dossier: its lease, its own bytes and a forward pass, compared with the reason in its receipt."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from prime_node.cli.dossier_file import DossierFile, read_dossier_part, too_large
from prime_node.inside import place
from prime_protocol import limits
from prime_protocol.assignment import Lease
from prime_protocol.copies import fingerprints, is_repetitive, share_text
from prime_protocol.digest import digest_of
from prime_protocol.envelope import PayloadType, parse_json
from prime_protocol.errors import ErrorCode, LocalError, RemoteError
from prime_protocol.evidence import BundleEvidence
from prime_protocol.parcel import PARCEL_OVERHEAD_BYTES_MAX, open_parcel
from prime_protocol.reward_ranks import REWARD_RANKS
from prime_protocol.rollout import RolloutHeader, parse_body
from prime_protocol.shading import SHADING_BY_REWARD
from prime_protocol.verdict import BanKind, BundleStatus, RejectReason, Verdict, contradiction

if TYPE_CHECKING:
    from prime_node.validator.judge import OpenedBundle

BY_FORWARD_PASS = frozenset(
    {
        RejectReason.LOGPROB_MISMATCH,
        RejectReason.SEED_MISMATCH,
        RejectReason.BAD_TERMINATION,
        RejectReason.IMPLAUSIBLE,
        RejectReason.PROOF_MISMATCH,
    }
)
"""Reasons that a forward pass finds in a well-formed bundle. It finds no bad contexts of turns."""
BY_BYTES = frozenset(
    {
        RejectReason.MALFORMED,
        RejectReason.WRONG_ASSIGNMENT,
        RejectReason.TOKEN_OUT_OF_RANGE,
        RejectReason.WRONG_POLICY,
    }
)
"""Reasons that the lease and the bundle's own bytes alone decide, so that a well-formed bundle disproves them."""


def about_the_bundle(dossier: DossierFile, folder: Path, model: Path | None) -> str:
    """Check the lease and the bundle itself, and return the result.

    Raises RemoteError if one of them contradicts the ban or the lease is missing, LocalError for --model without a bundle.
    """
    bundle = dossier.statement.bundle
    if bundle is None:
        if model is not None:
            raise LocalError(
                "the ban is a decision of the operator, so --model has nothing to check; leave --model out"
            )
        if dossier.lease is not None or dossier.headers:
            raise RemoteError(ErrorCode.MALFORMED, "ban dossier: a decision of the operator rests on no bundle")
        return ""
    lease, reason = _deciding_lease(dossier), dossier.receipts[-1].reason
    parcel = _read_parcel(dossier, folder, bundle, "the deciding bundle")
    if parcel is None:
        if model is not None:
            raise LocalError(f"{folder}: no {bundle}.parcel, so --model has nothing to check; leave --model out")
        if reason is RejectReason.COPIED and dossier.statement.kind is BanKind.HARD:
            raise _unshown(f"{bundle}.parcel is not in the dossier's folder")
        return f"not checked, because {bundle}.parcel is not in the dossier's folder"
    return _about_the_parcel(parcel, lease, dossier, folder, model)


def _read_parcel(dossier: DossierFile, folder: Path, bundle: str, what: str) -> bytes | None:
    """Return a bundle's parcel; None if it is not in the folder. Raises RemoteError if it is another one or too large."""
    file = place(folder, f"{bundle}.parcel")
    if not file.is_file():
        return None
    bytes_max = dossier.run.spec.limits.rollout_bytes_max + PARCEL_OVERHEAD_BYTES_MAX
    if not dossier.is_pinned:
        bytes_max = min(bytes_max, limits.UNPINNED_DOSSIER_BYTES_MAX)
    parcel = read_dossier_part(file, bytes_max)
    if digest_of(parcel) != bundle:
        raise RemoteError(ErrorCode.DIGEST_MISMATCH, f"{file.name} does not belong to {what}")
    if not dossier.is_pinned:
        _require_small(parcel, limits.UNPINNED_DOSSIER_BYTES_MAX, what)
    return parcel


def _deciding_lease(dossier: DossierFile) -> Lease:
    """Return the lease of the deciding bundle. Raises RemoteError if there is none or if its receipt names another one."""
    lease, decided = dossier.lease, dossier.receipts[-1]
    if lease is None:
        raise RemoteError(ErrorCode.MALFORMED, "ban dossier: the lease of the deciding bundle is missing")
    stated = (lease.run, lease.worker, lease.lease_id, lease.step, lease.policy_version)
    if stated != (decided.run, decided.worker, decided.lease_id, decided.step, decided.policy_version):
        raise RemoteError(ErrorCode.DIGEST_MISMATCH, "the lease does not belong to the deciding bundle")
    # Another receipt repeats what the bundle says of itself.
    is_own = decided.status is BundleStatus.ACCEPTED or decided.at_ms < lease.issued_at_ms
    if is_own and (what := contradiction(decided, lease, dossier.run.spec)):
        raise RemoteError(ErrorCode.MALFORMED, f"the coordinator contradicts itself: {what}")
    return lease


def _about_the_parcel(parcel: bytes, lease: Lease, dossier: DossierFile, folder: Path, model: Path | None) -> str:
    """Compare the bundle's own bytes, and with `model` a forward pass, with the reason in its receipt."""
    from prime_node.validator.judge import OpenedBundle, open_bundle

    _require_answer(parcel, lease, dossier.lease_digest)
    decided, spans = dossier.receipts[-1], dossier.run.spec.schedule.swap.spans_policies
    reason = decided.reason
    if reason is RejectReason.EQUIVOCATION:
        return _about_the_headers(parcel, dossier)
    opened = open_bundle(parcel, lease, dossier.run, newest_policy=limits.STEP_MAX)
    found = None if isinstance(opened, OpenedBundle) else opened.verdict.reason
    if found is not None and found is reason:
        return f"{reason} by its own bytes"
    if reason is RejectReason.WRONG_POLICY and spans:
        return f"{reason}, which the bundle alone does not show"
    if not isinstance(opened, OpenedBundle) or reason in BY_BYTES:
        raise RemoteError(ErrorCode.MALFORMED, f"the bundle is {found or 'well-formed'}, but was rejected as {reason}")
    if reason is RejectReason.COPIED and dossier.statement.kind is BanKind.HARD:
        return _about_the_copy(opened, dossier, folder)
    if model is None:
        return "well-formed; --model repeats the forward pass"
    judge_class = decided.evidence.validator if decided.evidence else "transformers/fp32/cpu"
    if not judge_class.startswith("transformers/"):
        raise LocalError(
            f"a validator of class {judge_class} judged the deciding bundle, but --model can repeat the forward pass of "
            "transformers only; leave --model out to check everything else"
        )
    return asyncio.run(_judged_again(opened, dossier, model, judge_class))


def _require_answer(parcel: bytes, lease: Lease, lease_digest: str) -> None:
    """Raise RemoteError if the parcel is not the worker's answer to this lease.

    A coordinator takes no such bundle. So it has put another bundle or another lease into the dossier.
    """
    try:
        opened = open_parcel(parcel, body_bytes_max=len(parcel))
        header = parse_json(opened.envelope.verify(PayloadType.ROLLOUT, trusted=(lease.worker,)), RolloutHeader)
        opened.check_body(header)
    except RemoteError as error:
        raise RemoteError(error.code, f"the worker has not signed the deciding bundle: {error.detail}") from None
    named = (header.run, header.worker, header.lease_id, header.step, header.policy_version, header.policy_digest)
    stated = (lease.run, lease.worker, lease.lease_id, lease.step, lease.policy_version, lease.policy_digest)
    if (*named, header.num_rollouts) != (*stated, lease.num_rollouts):
        raise RemoteError(ErrorCode.DIGEST_MISMATCH, "the deciding bundle was signed for another lease")
    if header.lease_digest != lease_digest:
        raise RemoteError(
            ErrorCode.DIGEST_MISMATCH,
            "the bundle names the digest of another lease: the coordinator has changed the lease in the dossier",
        )


def _about_the_headers(parcel: bytes, dossier: DossierFile) -> str:
    """Check that the bundle's header is one of the two that check_dossier has counted. Raises RemoteError."""
    header = open_parcel(parcel, body_bytes_max=len(parcel)).envelope
    if header.digest not in dossier.headers:
        raise RemoteError(ErrorCode.DIGEST_MISMATCH, "the bundle's header is none of those that contradict each other")
    return f"{RejectReason.EQUIVOCATION} by two signed headers"


def _about_the_copy(bundle: OpenedBundle, dossier: DossierFile, folder: Path) -> str:
    """Find the text that was copied: twice in the bundle, or in the original for another slot. Raises RemoteError.

    The original's worker signed it. That it came first is the coordinator's word: neither bundle shows when it arrived.
    """
    original = dossier.statement.original
    marks = fingerprints(bundle.rollouts, bundle.lease.sampling)
    if is_repetitive(marks):
        return f"{RejectReason.COPIED} by its own bytes"
    if original is None:
        raise _unshown("it repeats no text of its own, and the ban names no other bundle")
    parcel = _read_parcel(dossier, folder, original, "the bundle that it copies")
    if parcel is None:
        raise _unshown(f"the bundle that it copies, {original}.parcel, is not in the dossier's folder")
    bounds = dossier.run.spec.limits
    opened = open_parcel(parcel, body_bytes_max=bounds.rollout_bytes_max)
    signer = opened.envelope.sole_signer()
    header = parse_json(opened.envelope.verify(PayloadType.ROLLOUT, trusted=(signer,)), RolloutHeader)
    if (header.run, header.worker) != (dossier.run.digest, signer):
        raise _unshown("the bundle that it copies is of another run or worker than its signature")
    rollouts = parse_body(header, opened.check_body(header), bounds)
    if not share_text(bundle.rollouts, rollouts, bundle.lease.sampling):
        raise _unshown(f"bundle {original[:12]} has no text of it for another slot")
    return f"{RejectReason.COPIED}: text of it is in bundle {original[:12]}, which came first as the coordinator says"


def _unshown(why: str) -> RemoteError:
    return RemoteError(ErrorCode.MALFORMED, f"the bundle was rejected as {RejectReason.COPIED}, but {why}")


def _require_small(parcel: bytes, bytes_max: int, what: str) -> None:
    """Raise RemoteError if the bundle is too large after decompression. `open_bundle` reports a malformed one."""
    try:
        header = parse_json(open_parcel(parcel, body_bytes_max=bytes_max).envelope.payload, RolloutHeader)
    except RemoteError:
        return
    if header.decompressed_bytes > bytes_max:
        raise too_large(what, bytes_max)


async def _judged_again(bundle: OpenedBundle, dossier: DossierFile, model: Path, judge_class: str) -> str:
    """Repeat the forward pass.

    Raises RemoteError if it does not confirm the rejection, LocalError if this machine computes it wrongly.
    """
    from prime_node.cli import wire, wire_scorers
    from prime_node.ports.engine import EngineMismatch, require_finite
    from prime_node.validator.judge import evidence_in, score_requests
    from prime_node.validator.spans import policies_of
    from prime_protocol.verify import statistics, summary, verdict_on

    decided = dossier.receipts[-1]
    if policies_of(bundle.rollouts) != [bundle.lease.policy_version]:
        return "well-formed; several policies sampled it, so --model cannot repeat it"
    spec = dossier.run.spec
    context = max(map(spec.context_tokens_max, spec.environments))
    kind = judge_class.rpartition("/")[0]  # on any device that this machine has
    scorer = wire_scorers.plain_scorer(kind, model, threads=1, context_tokens_max=context)
    try:
        await scorer.load(wire.plain_weights(model, random_seed=None), policy_version=bundle.lease.policy_version)
        prefill = require_finite(await scorer.prefill(score_requests(bundle), bundle.lease.sampling))
    except EngineMismatch as error:
        raise LocalError(f"this machine cannot repeat the forward pass: {error}") from None
    finally:
        await scorer.close()
    found = statistics(bundle.rollouts, prefill)
    version = decided.evidence.calibration if decided.evidence else 0
    weighed = evidence_in(bundle, found, dossier.run, judged_by=judge_class, calibration=version)
    if dossier.statement.kind is BanKind.STATISTICAL and decided.evidence is not None:
        return compared(decided.evidence, weighed)
    return confirmed(decided.reason, verdict_on(summary(found), weighed, dossier.run.spec.checks))


def confirmed(reason: RejectReason | None, verdict: Verdict) -> str:
    """Compare a forward pass with a rejection. Raises RemoteError if the pass should have confirmed it and does not."""
    if verdict.reason is reason:
        return f"{reason} by a forward pass"
    if reason in BY_FORWARD_PASS:
        raise RemoteError(ErrorCode.MALFORMED, f"a forward pass gives {verdict.reason or 'accepted'}, not {reason}")
    return f"{reason}, which a forward pass cannot check"


def compared(claimed: BundleEvidence, found: BundleEvidence | None) -> str:
    """Compare the evidence of a bundle with the claim in its receipt. Raises RemoteError if it is much weaker."""
    nats = {name: max(sums.log_e) for name, sums in claimed.sums.items() if sums.log_e}
    mine = {name: max(sums.log_e) for name, sums in found.sums.items() if sums.log_e} if found else {}
    if not nats:
        return "its receipt adds no evidence"
    loudest = max(nats, key=lambda name: nats[name])
    if loudest in REWARD_RANKS and claimed.compared:  # check_dossier has already recomputed it
        return f"{loudest} adds {nats[loudest]:.1f} nats, as the rewards in its receipt do"
    if loudest in REWARD_RANKS:
        return f"{loudest} adds {nats[loudest]:.1f} nats, by the validator's own samples, which a forward pass does not repeat"
    if loudest == SHADING_BY_REWARD:
        return f"{loudest} adds {nats[loudest]:.1f} nats, by rewards, which a forward pass does not repeat"
    if loudest not in mine or mine[loudest] < nats[loudest] - abs(nats[loudest]) / 2:
        raise RemoteError(
            ErrorCode.MALFORMED,
            f"{loudest} adds {mine.get(loudest, 0.0):.1f} nats by a forward pass, not {nats[loudest]:.1f}",
        )
    return f"{loudest} adds {mine[loudest]:.1f} nats by a forward pass, {nats[loudest]:.1f} in the receipt"
