from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError

from prime_protocol import limits
from prime_protocol.digest import digest_of
from prime_protocol.envelope import parse_json
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.step import StepFault
from prime_protocol.verdict import BundleStatus, Receipt, RejectReason, Verdict

Raises = Callable[..., RemoteError]


def receipt(sample: Any, **fields: Any) -> dict[str, Any]:
    return {
        "run": sample.run.digest,
        "worker": sample.worker.key_id,
        "lease_id": sample.lease.lease_id,
        "bundle": digest_of(sample.parcel),
        "step": 2,
        "policy_version": 1,
        "num_rollouts": 4,
        "num_tokens": 11,
        "status": BundleStatus.ACCEPTED,
        "at_ms": 1,
    } | fields


def test_a_refusal_has_a_reason_and_an_acceptance_has_none() -> None:
    assert Verdict.accept() == Verdict(accepted=True)
    assert Verdict.refuse(RejectReason.STALE, "x") == Verdict(accepted=False, reason=RejectReason.STALE, detail="x")
    with pytest.raises(ValidationError):
        Verdict(accepted=False)
    with pytest.raises(ValidationError):
        Verdict(accepted=True, reason=RejectReason.STALE)


def test_a_refusal_by_an_error_s_text_always_fits() -> None:
    detail = Verdict.refuse(RejectReason.MALFORMED, "\x1b\n\ud800" * 1_000).detail
    assert detail == "?" * limits.TEXT_CHARS_MAX


def test_every_step_fault_is_a_reason_of_the_same_name() -> None:
    assert [RejectReason(fault) for fault in StepFault] == [RejectReason.STALE, RejectReason.FUTURE]


def test_only_reasons_without_an_honest_cause_are_dishonest() -> None:
    excused = {reason for reason in RejectReason if not reason.is_dishonest}
    assert excused == {
        RejectReason.STALE,
        RejectReason.FUTURE,
        RejectReason.UNPROVEN,
        RejectReason.LEASE_EXPIRED,
        RejectReason.DUPLICATE,
        RejectReason.BANNED,
        RejectReason.UNVERIFIABLE,
        RejectReason.INCOMPLETE,
    }


def test_reasons_of_time_leases_bans_and_all_evidence_are_the_coordinators_alone() -> None:
    assert {reason for reason in RejectReason if not reason.is_for_validators} == {
        RejectReason.STALE,
        RejectReason.FUTURE,
        RejectReason.UNPROVEN,
        RejectReason.LEASE_EXPIRED,
        RejectReason.DUPLICATE,
        RejectReason.BANNED,
        RejectReason.EQUIVOCATION,
        RejectReason.STATISTICAL,
    }


def test_a_receipt_has_a_reason_exactly_where_it_refuses(sample: Any) -> None:
    Receipt(**receipt(sample))
    Receipt(**receipt(sample, status=BundleStatus.PENDING))
    Receipt(**receipt(sample, status=BundleStatus.REFUSED, reason=RejectReason.STALE))
    for fields in (
        {"status": BundleStatus.REFUSED},
        {"status": BundleStatus.ACCEPTED, "reason": RejectReason.STALE},
        {"status": BundleStatus.PENDING, "reason": RejectReason.STALE},
    ):
        with pytest.raises(ValidationError):
            Receipt(**receipt(sample, **fields))


@pytest.mark.parametrize(
    ("payload", "code"),
    [
        (b'{"accepted":false,"reason":"unheard_of"}', ErrorCode.WRONG_TYPE),
        (b'{"accepted":1}', ErrorCode.WRONG_TYPE),
        (b'{"accepted":"true"}', ErrorCode.WRONG_TYPE),
        (b'{"accepted":true,"detail":"\\u001b[2J"}', ErrorCode.WRONG_TYPE),
        (b'{"accepted":true,"detail":"\\u202e"}', ErrorCode.WRONG_TYPE),
        (b'{"accepted":true,"score":1}', ErrorCode.UNKNOWN_FIELD),
        (b'{"accepted":true,"detail":"' + b"x" * 501 + b'"}', ErrorCode.WRONG_TYPE),
    ],
)
def test_a_misshapen_verdict_is_refused(payload: bytes, code: ErrorCode, raises: Raises) -> None:
    raises(code, parse_json, payload, Verdict)
