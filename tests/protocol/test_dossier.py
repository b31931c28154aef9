"""Ban dossiers: a ban follows from its receipts, or the first fault is named."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from prime_protocol.assignment import Sampling
from prime_protocol.calibration import Calibration, PairMoments
from prime_protocol.check_policy import CheckPolicy
from prime_protocol.digest import digest_of
from prime_protocol.dossier import BanStatement, check_dossier
from prime_protocol.envelope import Envelope, PayloadType
from prime_protocol.errors import RemoteError
from prime_protocol.evidence import Moments, Sums, Wealth, Weighed, folded, log_evidence
from prime_protocol.identity import SigningKey
from prime_protocol.key_ring import RoleKeys
from prime_protocol.rollout import EngineInfo, RolloutHeader
from prime_protocol.run_spec import EnvironmentSpec, ModelFile, PinnedRun, RunSpec
from prime_protocol.verdict import BanKind, BundleStatus, Receipt, RejectReason

WORKER, OTHER = (SigningKey(bytes([n]) * 32).key_id for n in (1, 2))
RUN, CLASS = digest_of(b"run"), "toy/fp32/cpu"
ENGINE = EngineInfo(name="toy", version="1", dtype="fp32", device="cpu")
MOMENTS = Moments(cap=1.0, lambdas=(1.0, 2.0), log_moments=(0.01, 0.02), num_tokens=1_000)
CALIBRATION = Calibration(pairs=(PairMoments(worker=CLASS, validator=CLASS, moments={"margin": MOMENTS}),))


def spec(calibration: Calibration | None = CALIBRATION) -> RunSpec:
    return RunSpec(
        name="test",
        created_at_ms=0,
        keys=RoleKeys(root=(WORKER,), coordinator=(WORKER,), trainer=(WORKER,), validator=(WORKER,)),
        model_files=(ModelFile(name="config.json", digest=RUN, size=1),),
        vocab_size=8,
        environments=(EnvironmentSpec(name="toy", id="toy"),),
        sampling=Sampling(completion_tokens_max=8, stop_token_ids=()),
        max_steps=1,
        groups_per_step=1,
        rollouts_per_group=1,
        checks=CheckPolicy(calibration=calibration),
    )


def receipt(number: int, *, reason: RejectReason | None = None, evidence: Weighed | None = None) -> Receipt:
    return Receipt(
        run=RUN,
        worker=WORKER,
        lease_id=digest_of(b"lease"),
        bundle=digest_of(b"%d" % number),
        step=0,
        policy_version=0,
        num_rollouts=1,
        num_tokens=0,
        status=BundleStatus.REFUSED if reason else BundleStatus.ACCEPTED,
        reason=reason,
        at_ms=0,
        evidence=evidence,
    )


def weighed(*nats: float) -> list[Receipt]:
    """Return receipts as a coordinator writes them, for bundles of 64 tokens with this evidence."""
    wealth: dict[str, Wealth] = {}
    found = []
    for number, log_e in enumerate(nats, 1):
        sums = {"margin": Sums(num_tokens=64, log_e=(log_e, log_e))}
        wealth = folded(wealth, sums, statistics=CALIBRATION.statistics)
        evidence = Weighed(worker=CLASS, validator=CLASS, sums=sums, number=number, log_evidence=log_evidence(wealth))
        found.append(receipt(number, evidence=evidence))
    return found


def statement(receipts: Sequence[Receipt], kind: BanKind) -> BanStatement:
    return BanStatement(
        run=RUN,
        worker=WORKER,
        kind=kind,
        reason="",
        bundle=receipts[-1].bundle if receipts else None,
        step=0,
        at_ms=0,
        num_receipts=len(receipts),
    )


def check(receipts: Sequence[Receipt], kind: BanKind, *, of: RunSpec | None = None, **changes: object) -> None:
    check_dossier(statement(receipts, kind).model_copy(update=changes), receipts, pinned_as(of or spec()))


def pinned_as(of: RunSpec) -> PinnedRun:
    return PinnedRun(RUN, of, Envelope(PayloadType.RUN_SPEC, b"", ()))


STRIKES = [receipt(n, reason=RejectReason.SEED_MISMATCH) for n in (1, 2)]
PROOF = weighed(-0.3, 6.0, 9.0)


def test_bans_that_follow_from_their_receipts_hold() -> None:
    check(STRIKES, BanKind.HARD)
    check(PROOF, BanKind.STATISTICAL)
    check([], BanKind.OPERATOR)


def test_1_receipts_of_another_run_or_worker_and_doubled_ones_are_no_case() -> None:
    changes: list[dict[str, Any]] = [{"run": digest_of(b"other")}, {"worker": OTHER}]
    for change in changes:
        with pytest.raises(RemoteError, match="another run or worker"):
            check([STRIKES[0].model_copy(update=change), STRIKES[1]], BanKind.HARD)
        with pytest.raises(RemoteError, match="another run or worker"):
            check(STRIKES, BanKind.HARD, **change)
    with pytest.raises(RemoteError, match="twice"):
        check([STRIKES[0], STRIKES[0]], BanKind.HARD)


def test_2_a_receipt_that_is_missing_or_out_of_place_is_no_case() -> None:
    with pytest.raises(RemoteError, match="2 receipts instead of the statement's 3"):
        check(STRIKES, BanKind.HARD, num_receipts=3)
    with pytest.raises(RemoteError, match="order is wrong"):
        check(STRIKES, BanKind.HARD, bundle=STRIKES[0].bundle)


def test_3_too_few_strikes_are_no_case() -> None:
    for reasons in ((RejectReason.SEED_MISMATCH,), (RejectReason.SEED_MISMATCH, RejectReason.STALE)):
        with pytest.raises(RemoteError, match="1 strikes"):
            check([receipt(n, reason=reason) for n, reason in enumerate(reasons)], BanKind.HARD)


def test_4_evidence_that_does_not_add_up_is_no_case() -> None:
    with pytest.raises(RemoteError, match="no calibration"):
        check(PROOF, BanKind.STATISTICAL, of=spec(None))
    with pytest.raises(RemoteError, match="receipt 1 is not the worker's bundle 1"):
        check(PROOF[1:], BanKind.STATISTICAL)
    with pytest.raises(RemoteError, match="not the worker's bundle 2"):
        check([PROOF[0], receipt(7)], BanKind.STATISTICAL)
    with pytest.raises(RemoteError, match="below the run's limit"):
        check(PROOF[:2], BanKind.STATISTICAL)


def test_3_a_rejection_for_all_evidence_is_no_strike() -> None:
    reasons = (RejectReason.SEED_MISMATCH, RejectReason.STATISTICAL)
    with pytest.raises(RemoteError, match="1 strikes"):
        check([receipt(n, reason=reason) for n, reason in enumerate(reasons)], BanKind.HARD)
    with pytest.raises(RemoteError, match="is no strike"):
        check([*STRIKES, receipt(3, reason=RejectReason.STATISTICAL)], BanKind.HARD)


def header(**changes: object) -> RolloutHeader:
    fields: dict[str, object] = {
        "body_digest": RUN,
        "body_bytes": 1,
        "run": RUN,
        "worker": WORKER,
        "lease_id": STRIKES[0].lease_id,
        "step": 0,
        "policy_version": 0,
        "policy_digest": RUN,
        "num_rollouts": 1,
        "decompressed_bytes": 1,
        "engine": ENGINE,
        "created_at_ms": 0,
    }
    return RolloutHeader.model_validate(fields | changes)


@pytest.mark.parametrize("changes", [{"run": digest_of(b"other")}, {"worker": OTHER}, {"lease_id": RUN}])
def test_3_an_equivocation_needs_two_headers_for_its_lease(changes: dict[str, object]) -> None:
    receipts = [STRIKES[0], receipt(2, reason=RejectReason.EQUIVOCATION)]
    ban = statement(receipts, BanKind.HARD)
    check_dossier(ban, receipts, pinned_as(spec()), headers={"1": header(), "2": header(created_at_ms=1)})
    for headers in ({}, {"1": header()}, {"1": header(), "2": header(created_at_ms=1, **changes)}):
        with pytest.raises(RemoteError, match="two different headers for its lease are missing"):
            check_dossier(ban, receipts, pinned_as(spec()), headers=headers)


def test_a_ban_for_another_reason_names_no_original() -> None:
    copied = [STRIKES[0], receipt(2, reason=RejectReason.COPIED)]
    check(copied, BanKind.HARD, original=RUN)
    with pytest.raises(RemoteError, match="names an original"):
        check(STRIKES, BanKind.HARD, original=RUN)


def test_5_a_decision_of_the_operator_rests_on_nothing() -> None:
    accepted = receipt(1)
    with pytest.raises(RemoteError, match="no receipts and no bundle"):
        check([accepted], BanKind.OPERATOR)
    with pytest.raises(RemoteError, match="order is wrong"):
        check([], BanKind.OPERATOR, bundle=accepted.bundle)


def altered(one: Receipt, **changes: object) -> Receipt:
    assert one.evidence is not None
    return one.model_copy(update={"evidence": one.evidence.model_copy(update=changes)})


def test_4_sums_that_were_changed_are_no_case() -> None:
    with pytest.raises(RemoteError, match="do not add up to its stated evidence"):
        check([*PROOF[:2], altered(PROOF[2], log_evidence=20.0)], BanKind.STATISTICAL)
    louder = {"margin": Sums(num_tokens=64, log_e=(9.0, 12.0))}
    with pytest.raises(RemoteError, match="do not add up to its stated evidence"):
        check([*PROOF[:2], altered(PROOF[2], sums=louder)], BanKind.STATISTICAL)
    with pytest.raises(RemoteError, match="above the maximum for its number of tokens"):
        check(weighed(-0.3, 200.0), BanKind.STATISTICAL)
    with pytest.raises(RemoteError, match=r"no margin of .* under other"):
        check([altered(PROOF[0], validator="other"), *PROOF[1:]], BanKind.STATISTICAL)
