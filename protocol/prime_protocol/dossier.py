"""Ban dossiers: everything that a ban rests on, as signed statements that anyone can check again. SPEC.md, section 22.

A dossier is a file of envelopes, one per line: the RunSpec, the key rings, the amendments of the calibration, the
coordinator's BanStatement, the lease of the deciding bundle, two headers for each counted rejection as `equivocation`,
and the counted receipts, oldest first. The parcel of that bundle, signed by its worker, is a second file; that of a
bundle that it copies is a third.

It proves that the ban follows from the receipts by the run's own rules. Each receipt is a statement that the
coordinator signed and the worker got too. For the correctness of a bundle's sums it relies on the validators, until
someone with the policy recomputes them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from pydantic import Field

from prime_protocol.assignment import Count, Step, Text
from prime_protocol.calibration import NATS_ERROR_MAX, require_possible
from prime_protocol.digest import Digest
from prime_protocol.envelope import WireModel
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.evidence import Wealth, folded, log_evidence
from prime_protocol.identity import KeyId
from prime_protocol.rollout import RolloutHeader
from prime_protocol.run_spec import PinnedRun
from prime_protocol.verdict import BanKind, Receipt, RejectReason


class BanStatement(WireModel):
    """Coordinator's statement that a worker is banned, with the reason (envelope type BAN)."""

    run: Digest
    worker: KeyId
    kind: BanKind
    reason: Text
    bundle: Digest | None
    """Bundle that decided; null for a decision of the operator."""
    step: Step
    """Step that was in training."""
    at_ms: Count
    num_receipts: Count
    """Number of receipts that the ban rests on."""
    original: Digest | None = Field(default=None, exclude_if=lambda value: value is None)
    """Earlier bundle with text of the deciding one, if the coordinator rejected the latter as its copy."""


def check_dossier(
    statement: BanStatement,
    receipts: Iterable[Receipt],
    run: PinnedRun,
    *,
    headers: Mapping[str, RolloutHeader] | None = None,
) -> None:
    """Check that receipts with verified signatures justify the ban. Raises RemoteError that says what does not hold.

    `headers`: headers of bundles that the worker signed, by the digest of their payload.

    (1) statement and receipts are of this run and this worker, and no bundle occurs twice;
    (2) their number is the stated one, and the last one is of the deciding bundle;
    (3) hard: at least `strikes_max` of them are strikes (`is_strike`), the last one among them; for each one rejected as
        `equivocation` there are two different headers for its lease;
    (4) statistical: they are numbered from 1 without gaps; their sums fold to the evidence that each of them states, under the
        version of the run's calibration that it names, and finally reach `evidence_max`;
    (5) operator: there are no receipts, and so no bundle.
    """
    listed = list(receipts)
    bundles = {receipt.bundle for receipt in listed}
    strangers = [one for one in listed if (one.run, one.worker) != (run.digest, statement.worker)]
    if statement.run != run.digest or strangers or len(bundles) != len(listed):  # (1)
        raise _no_dossier("the statement or a receipt is of another run or worker, or a bundle occurs twice")
    if len(listed) != statement.num_receipts or (listed[-1].bundle if listed else None) != statement.bundle:  # (2)
        raise _no_dossier(
            f"{len(listed)} receipts instead of the statement's {statement.num_receipts}, or their order is wrong"
        )
    if statement.kind is BanKind.HARD:  # (3)
        strikes = [receipt for receipt in listed if is_strike(receipt)]
        if len(strikes) < run.spec.checks.strikes_max:
            raise _no_dossier(f"{len(strikes)} strikes are below the run's limit of {run.spec.checks.strikes_max}")
        if strikes[-1] is not listed[-1]:
            raise _no_dossier("the rejection of the deciding bundle is no strike")
        for receipt in strikes:
            if receipt.reason is RejectReason.EQUIVOCATION:
                _check_equivocation(receipt, (headers or {}).values())
    if statement.kind is BanKind.STATISTICAL:  # (4)
        _check_evidence(listed, run)
    if statement.kind is BanKind.OPERATOR and listed:  # (5)
        raise _no_dossier("a decision of the operator rests on no receipts and no bundle")
    if statement.original is not None and (not listed or listed[-1].reason is not RejectReason.COPIED):
        raise _no_dossier("it names an original, but the deciding bundle was not rejected as a copy")


def is_strike(receipt: Receipt) -> bool:
    """Return whether a hard ban counts a receipt. One for `statistical` rests on other bundles, and bans by itself."""
    reason = receipt.reason
    return reason is not None and reason.is_dishonest and reason is not RejectReason.STATISTICAL


def _check_equivocation(receipt: Receipt, headers: Iterable[RolloutHeader]) -> None:
    names = (receipt.run, receipt.worker, receipt.lease_id)
    found = [one for one in headers if (one.run, one.worker, one.lease_id) == names]
    leases = {one.lease_digest for one in found if one.lease_digest is not None}
    if len(leases) > 1:
        raise _no_dossier(
            f"the coordinator gave two leases one id, so that bundle {receipt.bundle[:12]} had to contradict"
        )
    if len(found) < 2:
        raise _no_dossier(
            f"bundle {receipt.bundle[:12]} was rejected as equivocation, but two different headers for its lease are missing"
        )


def _check_evidence(receipts: list[Receipt], run: PinnedRun) -> None:
    checks = run.spec.checks
    if not checks.statistics:
        raise _no_dossier("the run has no calibration, so no evidence accumulates")
    wealth: dict[str, Wealth] = {}
    for number, receipt in enumerate(receipts, 1):
        if receipt.evidence is None or receipt.evidence.number != number:
            raise _no_dossier(f"receipt {number} is not the worker's bundle {number}")
        about = receipt.evidence
        known = run.checks_at(about.calibration)
        require_possible(about, known.moments_of(worker=about.worker, validator=about.validator))
        wealth = folded(wealth, about.sums, statistics=checks.statistics)
        if abs(log_evidence(wealth) - about.log_evidence) > NATS_ERROR_MAX:
            raise _no_dossier(f"the sums of receipt {number} do not add up to its stated evidence")
    if log_evidence(wealth) < math.log(checks.evidence_max) - NATS_ERROR_MAX:
        raise _no_dossier(f"the evidence is {log_evidence(wealth):.1f} nats, below the run's limit")


def _no_dossier(what: str) -> RemoteError:
    return RemoteError(ErrorCode.MALFORMED, f"ban dossier: {what}")
