"""Amendments of a calibration: they only add pairs, so evidence of an earlier version keeps its meaning."""

from __future__ import annotations

from typing import Any

import pytest
from tests.builder import pinned

from prime_protocol import limits
from prime_protocol.amendment import CalibrationAmendment
from prime_protocol.calibration import Calibration, PairMoments, require_possible
from prime_protocol.check_policy import CheckPolicy
from prime_protocol.dossier import BanStatement, check_dossier
from prime_protocol.envelope import Envelope, PayloadType, seal
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.evidence import BundleEvidence, Moments, Sums, Weighed, folded, log_evidence
from prime_protocol.identity import SigningKey
from prime_protocol.key_ring import KeyRing
from prime_protocol.run_spec import PinnedRun
from prime_protocol.verdict import BanKind, BundleStatus, Receipt

OLD, NEW, THIRD = "toy/fp32/cpu", "toy/bf16/cpu", "toy/bf16/cuda"
NEW_ROOT = SigningKey(b"\x60" * 32)


def moments(*rates: float) -> Moments:
    return Moments(cap=1.0, lambdas=rates, log_moments=tuple(rate / 100 for rate in rates), num_tokens=1_000)


def pair(worker: str, validator: str, *rates: float, name: str = "logprob") -> PairMoments:
    return PairMoments(worker=worker, validator=validator, moments={name: moments(*(rates or (1.0, 2.0)))})


@pytest.fixture
def run(sample: Any) -> PinnedRun:
    """A run with a calibration of one pair."""
    checks = CheckPolicy(calibration=Calibration(pairs=(pair(OLD, OLD),)))
    return pinned(sample.run.spec.model_copy(update={"checks": checks}), sample.root)


def amendment(run: PinnedRun, key: SigningKey, /, *pairs: PairMoments, **changes: object) -> Envelope:
    """Return the next amendment, with `changes`."""
    fields: dict[str, Any] = {
        "run": run.digest,
        "version": run.calibrations.version + 1,
        "previous": run.calibrations.digest,
        "pairs": pairs,
        "created_at_ms": 0,
    }
    return seal(CalibrationAmendment.model_construct(**(fields | changes)), PayloadType.CALIBRATION, key)


def replace_root(run: PinnedRun, root: SigningKey) -> None:
    ring = KeyRing(
        run=run.digest,
        version=1,
        previous=run.digest,
        keys=run.spec.keys.model_copy(update={"root": (NEW_ROOT.key_id,)}),
        published=None,
        created_at_ms=0,
    )
    run.keys.add(seal(ring, PayloadType.KEY_RING, root, NEW_ROOT))


def test_an_amendment_adds_pairs_and_keeps_the_versions_before_it(run: PinnedRun, sample: Any) -> None:
    run.calibrations.add(amendment(run, sample.root, pair(NEW, OLD)))
    run.calibrations.add(amendment(run, sample.root, pair(NEW, NEW), pair(THIRD, OLD)))
    known = [sorted(run.checks_at(version).worker_classes) for version in range(3)]
    assert known == [[OLD], [NEW, OLD], [NEW, THIRD, OLD]]
    assert run.checks.validator_classes == {OLD, NEW}
    assert run.checks_at(0) == run.spec.checks
    assert run.checks.statistics == run.spec.checks.statistics
    assert run.checks.moments_of(worker=NEW, validator=OLD) == {"logprob": moments(1.0, 2.0)}
    assert run.checks.moments_of(worker=OLD, validator=OLD) == run.spec.checks.moments_of(worker=OLD, validator=OLD)


def test_the_newest_amendment_may_come_again(run: PinnedRun, sample: Any) -> None:
    first = amendment(run, sample.root, pair(NEW, OLD))
    assert run.calibrations.add(first) == run.calibrations.add(first)
    assert run.calibrations.version == 1


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([pair(OLD, OLD, 1.0, 2.0)], "must occur once"),
        ([pair(NEW, OLD), pair(NEW, OLD)], "must occur once"),
        ([pair(NEW, OLD, name="margin")], "does not use"),
        ([pair(NEW, OLD, 1.0)], "different numbers of lambdas"),
        ([pair(f"{number}", OLD) for number in range(limits.CALIBRATION_PAIRS_MAX)], "at most 64"),
    ],
)
def test_an_amendment_that_replaces_or_changes_the_evidence_is_refused(
    run: PinnedRun, sample: Any, pairs: list[PairMoments], message: str
) -> None:
    with pytest.raises(RemoteError, match=message) as caught:
        run.calibrations.add(amendment(run, sample.root, *pairs))
    assert caught.value.code is ErrorCode.MALFORMED
    assert run.calibrations.version == 0


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"version": 2}, ErrorCode.CHAIN_BROKEN),
        ({"previous": "00" * 32}, ErrorCode.CHAIN_BROKEN),
        ({"run": "00" * 32}, ErrorCode.WRONG_RUN),
        ({"note": "x" * limits.CALIBRATION_BYTES_MAX}, ErrorCode.TOO_LARGE),
    ],
)
def test_an_amendment_out_of_place_is_refused(
    run: PinnedRun, sample: Any, changes: dict[str, object], code: ErrorCode
) -> None:
    with pytest.raises(RemoteError) as caught:
        run.calibrations.check(amendment(run, sample.root, pair(NEW, OLD), **changes))
    assert caught.value.code is code


def test_only_the_root_amends_and_a_former_root_adds_nothing_after_the_new_one(run: PinnedRun, sample: Any) -> None:
    for key in (sample.coordinator, sample.validator):
        with pytest.raises(RemoteError, match="trusted signatures"):
            run.calibrations.check(amendment(run, key, pair(NEW, OLD)))
    first = amendment(run, sample.root, pair(NEW, OLD))
    replace_root(run, sample.root)
    run.calibrations.add(first)
    run.calibrations.add(amendment(run, NEW_ROOT, pair(NEW, NEW)))
    with pytest.raises(RemoteError, match="trusted signatures"):
        run.calibrations.check(amendment(run, sample.root, pair(THIRD, OLD)))


def test_a_run_without_a_calibration_stays_without_one(sample: Any) -> None:
    run = pinned(sample.run.spec, sample.root)
    with pytest.raises(RemoteError, match="no calibration"):
        run.calibrations.check(amendment(run, sample.root, pair(NEW, OLD)))


def test_evidence_counts_only_under_the_version_that_it_names(run: PinnedRun, sample: Any) -> None:
    run.calibrations.add(amendment(run, sample.root, pair(NEW, OLD)))
    sums = {"logprob": Sums(num_tokens=8, log_e=(0.1, 0.1))}
    for version in (0, 1):
        evidence = BundleEvidence(worker=NEW, validator=OLD, sums=sums, calibration=version)
        known = run.checks_at(evidence.calibration).moments_of(worker=NEW, validator=OLD)
        if version == 1:
            require_possible(evidence, known)
            continue
        with pytest.raises(RemoteError, match="in the run's calibration"):
            require_possible(evidence, known)
    with pytest.raises(RemoteError, match="calibration 2 is not known"):
        run.checks_at(2)


def test_a_ban_by_amended_evidence_needs_the_amendment(run: PinnedRun, sample: Any) -> None:
    sums = {"logprob": Sums(num_tokens=64, log_e=(20.0, 20.0))}
    total = log_evidence(folded({}, sums, statistics=run.spec.checks.statistics))
    evidence = Weighed(worker=NEW, validator=OLD, sums=sums, number=1, log_evidence=total, calibration=1)
    receipt = Receipt(
        run=run.digest,
        worker=sample.worker.key_id,
        lease_id="11" * 32,
        bundle="22" * 32,
        step=0,
        policy_version=0,
        num_rollouts=1,
        num_tokens=0,
        status=BundleStatus.ACCEPTED,
        reason=None,
        at_ms=0,
        evidence=evidence,
    )
    ban = BanStatement(
        run=run.digest,
        worker=sample.worker.key_id,
        kind=BanKind.STATISTICAL,
        reason="",
        bundle=receipt.bundle,
        step=0,
        at_ms=0,
        num_receipts=1,
    )
    with pytest.raises(RemoteError, match="calibration 1 is not known"):
        check_dossier(ban, [receipt], run)
    run.calibrations.add(amendment(run, sample.root, pair(NEW, OLD)))
    check_dossier(ban, [receipt], run)
