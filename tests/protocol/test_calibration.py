"""Calibrations: the moments for two engine classes, and a bundle's evidence under them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from pydantic import ValidationError

from prime_protocol.calibration import (
    BUNDLES_OF_A_LIFE,
    Calibration,
    PairMoments,
    evidence_of,
    is_calibrated,
    shown_alone,
)
from prime_protocol.evidence import BundleEvidence, Moments, Sums, sums_of
from prime_protocol.rollout import EngineInfo

MOMENTS = Moments(cap=0.5, lambdas=(1.0, 10.0), log_moments=(0.001, 0.02), num_tokens=1_000)
OTHER = Moments(cap=0.5, lambdas=(1.0,), log_moments=(0.001,), num_tokens=1_000)
A, B = "transformers/fp32/cpu", "vllm/bf16/cpu"


def pair(worker: str, validator: str, moments: Moments = MOMENTS) -> PairMoments:
    return PairMoments(worker=worker, validator=validator, moments={"margin": moments})


def test_an_engine_s_class_is_what_its_errors_depend_on() -> None:
    info = EngineInfo(name="transformers", version="5.19.0", dtype="fp32", device="cpu")
    assert info.calibration_class == A
    assert EngineInfo(name="x" * 200, version="1", dtype="y" * 200, device="z" * 200).calibration_class.count("x") == 60


def test_a_bundle_is_summed_under_the_moments_of_its_own_two_engines() -> None:
    calibration = Calibration(pairs=(pair(A, A), pair(B, A)))
    values = np.array([0.0, 0.3], np.float32)
    found = evidence_of({"margin": values, "smell": values}, calibration, worker=B, validator=A)
    assert found.sums == {"margin": sums_of(values, MOMENTS)}


def test_two_engines_that_are_not_known_together_give_no_sums() -> None:
    calibration = Calibration(pairs=(pair(A, A), pair(B, A)))
    found = evidence_of({"margin": np.ones(3)}, calibration, worker=A, validator=B)
    assert (found.worker, found.validator, found.sums) == (A, B, {})


def test_a_bundle_is_rejected_by_its_own_evidence_where_an_honest_life_has_no_such_bundle() -> None:
    def evidence(*log_e: float, **more: float) -> BundleEvidence:
        sums = {"margin": Sums(num_tokens=8, log_e=log_e)}
        sums |= {name: Sums(num_tokens=8, log_e=(value,)) for name, value in more.items()}
        return BundleEvidence(worker=A, validator=A, sums=sums)

    limit = math.log(BUNDLES_OF_A_LIFE * 1e5)
    assert shown_alone(evidence(), evidence_max=1e5) is None
    assert shown_alone(evidence(limit - 0.01), evidence_max=1e5) is None
    assert shown_alone(evidence(limit + 0.01), evidence_max=1e5) == "margin"
    assert shown_alone(evidence(limit + 0.01, -50.0), evidence_max=1e5) is None, "the mean counts, not the largest"
    assert shown_alone(evidence(limit + 0.01, norm=limit + 0.02), evidence_max=1e5) == "norm"
    assert shown_alone(evidence(limit + 0.01), evidence_max=1e6) is None


def test_a_calibration_knows_the_pairs_that_it_names_and_no_other() -> None:
    calibration = Calibration(pairs=(pair(A, A),))

    def evidence(worker: str) -> BundleEvidence:
        return evidence_of({"margin": np.full(8, 0.4)}, calibration, worker=worker, validator=A)

    assert is_calibrated(evidence(A))
    assert not is_calibrated(evidence(B))


def test_a_pair_occurs_once() -> None:
    with pytest.raises(ValidationError, match="must occur once"):
        Calibration(pairs=(pair(A, B), pair(A, B)))


def test_evidence_continues_under_another_validator() -> None:
    with pytest.raises(ValidationError, match="different numbers of lambdas"):
        Calibration(pairs=(pair(A, A), pair(A, B, OTHER)))
