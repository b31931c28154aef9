"""A refusal's detail: enough to fix a machine, and nothing about a bundle's distance from a threshold."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.node.coordinator_world import ANNA, VALIDATOR, make_parcel, make_run, memory_parts, running

from prime_protocol.check_policy import CheckPolicy
from prime_protocol.requests import CheckResultRequest
from prime_protocol.verdict import RejectReason, Verdict
from prime_protocol.verify import Measured, judge

HONEST = Measured(
    logprob_error_mean=0.0,
    logprob_error_max=0.0,
    seed_flips_share=0.0,
    proof_error_mean=0.0,
    proof_error_max=0.0,
    seed_margin_max=0.0,
    stop_margin_max=0.0,
    choice_deviation=0.0,
)
POLICY = CheckPolicy()
FIELDS = {
    "logprob_error_mean": (POLICY.logprob_error_mean_max, RejectReason.LOGPROB_MISMATCH),
    "logprob_error_max": (POLICY.logprob_error_max, RejectReason.LOGPROB_MISMATCH),
    "seed_flips_share": (POLICY.seed_flips_share_max, RejectReason.SEED_MISMATCH),
    "seed_margin_max": (POLICY.seed_margin_max, RejectReason.SEED_MISMATCH),
    "stop_margin_max": (POLICY.stop_margin_max, RejectReason.BAD_TERMINATION),
    "choice_deviation": (POLICY.choice_deviation_max, RejectReason.IMPLAUSIBLE),
    "proof_error_mean": (POLICY.proof_error_mean_max, RejectReason.PROOF_MISMATCH),
    "proof_error_max": (POLICY.proof_error_max, RejectReason.PROOF_MISMATCH),
}


def refusal(field: str, value: float) -> tuple[RejectReason | None, str]:
    verdict = judge(replace(HONEST, **{field: value}), POLICY)
    return verdict.reason, verdict.detail


@pytest.mark.parametrize("field", FIELDS)
def test_no_refusal_tells_a_measured_number(field: str) -> None:
    threshold, reason = FIELDS[field]
    for factor in (1.0001, 1.01, 1.5, 3.0, 100.0):
        found, detail = refusal(field, threshold * factor)
        assert found is reason
        assert detail
        assert not any(char.isdigit() for char in detail.replace("bf16", "")), detail


@pytest.mark.parametrize("field", FIELDS)
def test_two_bundles_near_a_threshold_get_the_same_detail(field: str) -> None:
    threshold, _ = FIELDS[field]
    assert refusal(field, threshold * 1.0001) == refusal(field, threshold * 1.5)


def test_every_measured_field_is_tried_above() -> None:
    assert set(FIELDS) == set(Measured.__dataclass_fields__)


def test_a_broken_machine_is_distinguished_from_a_wrong_precision() -> None:
    _, near = refusal("logprob_error_mean", POLICY.logprob_error_mean_max * 1.5)
    _, far = refusal("logprob_error_mean", 4.4814)
    assert "precision" in near
    assert "memory" in far
    _, all_flipped = refusal("seed_flips_share", 0.9)
    assert "does not use the assigned seeds" in all_flipped


async def test_the_public_metrics_do_not_show_one_bundles_measurements() -> None:
    async with running(memory_parts(make_run()), ANNA) as world:
        for error in (0.01234, 0.01444):
            await world.client(ANNA).upload(make_parcel(await world.lease(ANNA, rollouts_max=2), ANNA))
            task = await world.take_task(VALIDATOR)
            result = CheckResultRequest(
                bundle=task.bundle,
                verdict=Verdict.accept(),
                rewards=(1.0,) * task.lease.num_rollouts,
                measured={"logprob_error_mean": error},
            )
            await world.client(VALIDATOR).check_result(result)
        lines = (await world.get("/metrics"))[1].decode().splitlines()
        sums = [float(line.split()[1]) for line in lines if line.startswith("prime_check_measured_sum")]
        assert sums == pytest.approx([0.02])
