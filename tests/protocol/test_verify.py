from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from prime_protocol.assignment import Sampling
from prime_protocol.check_policy import CheckPolicy
from prime_protocol.digest import digest_of
from prime_protocol.rollout import Completion, FinishReason, rollouts_for
from prime_protocol.verdict import RejectReason, Verdict
from prime_protocol.verify import Measured, Prefill, check_assignment, judge, outer, statistics, summary

STOP = 257
S, L = FinishReason.STOP, FinishReason.LENGTH


def check(sample: Any, **changes: Any) -> Verdict:
    header = changes.pop("header", sample.header)
    lease = changes.pop("lease", sample.lease)
    return check_assignment(header, replace(sample.rollouts, **changes), lease, vocab_size=264)


def header_with(sample: Any, **fields: object) -> Any:
    return sample.header.model_copy(update=fields)


def test_an_honest_bundle_passes(sample: Any) -> None:
    assert check(sample) == Verdict.accept()


@pytest.mark.parametrize("fields", [{"policy_version": 0}, {"policy_digest": digest_of(b"other")}])
def test_1_another_policy_than_the_leases_is_refused(fields: dict[str, object], sample: Any) -> None:
    assert check(sample, header=header_with(sample, **fields)).reason is RejectReason.WRONG_POLICY


@pytest.mark.parametrize("version", [0, 2, 2**31 - 1])
def test_1_a_span_of_another_policy_is_refused(version: int, sample: Any) -> None:
    spans = sample.rollouts.spans_S3.copy()
    spans[2, 1] = version
    assert check(sample, spans_S3=spans).reason is RejectReason.WRONG_POLICY


def test_1_two_spans_of_one_completion_are_of_two_policies(sample: Any) -> None:
    spans = sample.rollouts.spans_S3
    (place,) = np.flatnonzero(spans[:, 0] == spans[0, 0])
    halves = np.stack([spans[place]] * 2)
    halves[:, 2] = (1, spans[place, 2] - 1)
    doubled = np.concatenate((spans[:place], halves, spans[place + 1 :]))
    assert check(sample, spans_S3=doubled).reason is RejectReason.WRONG_POLICY


@pytest.mark.parametrize(
    "fields", [{"step": 1}, {"lease_id": digest_of(b"other")}, {"run": digest_of(b"other")}, {"worker": "somebody"}]
)
def test_2_another_lease_is_refused(fields: dict[str, object], sample: Any) -> None:
    assert check(sample, header=header_with(sample, **fields)).reason is RejectReason.WRONG_ASSIGNMENT


@pytest.mark.parametrize("field", ["slots_N", "seeds_N"])
def test_2_other_groups_order_or_seeds_are_refused(field: str, sample: Any) -> None:
    assigned = getattr(sample.rollouts, field)
    for i in range(len(assigned)):
        changed = assigned.copy()
        changed[i] += 1
        assert check(sample, **{field: changed}).reason is RejectReason.WRONG_ASSIGNMENT
    assert check(sample, **{field: assigned[::-1]}).reason is RejectReason.WRONG_ASSIGNMENT
    assert check(sample, **{field: assigned[:-1]}).reason is RejectReason.WRONG_ASSIGNMENT


def test_3_a_token_outside_the_vocabulary_is_refused(sample: Any) -> None:
    tokens = sample.rollouts.token_ids_T.copy()
    tokens[2] = 263
    assert check(sample, token_ids_T=tokens).accepted
    tokens[2] = 264
    assert check(sample, token_ids_T=tokens).reason is RejectReason.TOKEN_OUT_OF_RANGE


def completion(*tokens: int, finish: FinishReason) -> Completion:
    return Completion(tokens, (-1.0,) * len(tokens), finish)


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (completion(1, STOP, 2, STOP, finish=S), "continues after"),
        (completion(STOP, 1, 2, 3, finish=L), "continues after"),
        (completion(STOP, STOP, finish=S), "continues after"),
        (completion(1, 2, finish=L), "before the length limit"),
        (completion(1, 2, finish=S), "does not fit"),
        (completion(1, 2, 3, 4, finish=S), "does not fit"),
        (completion(1, STOP, finish=L), "does not fit"),
        (completion(1, 2, 3, STOP, finish=L), "does not fit"),
        (completion(1, 2, 3, 4, 5, finish=L), "longer"),
        (completion(1, 2, 3, 4, STOP, finish=S), "longer"),
    ],
)
@pytest.mark.parametrize("place", range(4))
def test_4_a_completion_that_ends_where_it_must_not_is_refused(
    bad: Completion, why: str, place: int, sample: Any
) -> None:
    completions = [*sample.completions[:place], bad, *sample.completions[place + 1 :]]
    verdict = check_assignment(sample.header, rollouts_for(sample.lease, completions), sample.lease, vocab_size=264)
    assert verdict.reason is RejectReason.BAD_TERMINATION
    assert why in verdict.detail


def test_4_a_run_without_stop_tokens_ends_by_length_alone(sample: Any) -> None:
    lease = sample.lease.model_copy(update={"sampling": Sampling(completion_tokens_max=2, stop_token_ids=())})
    rollouts = rollouts_for(lease, [completion(1, STOP, finish=L)] * 4)
    assert check_assignment(sample.header, rollouts, lease, vocab_size=264).accepted


def test_the_first_check_that_fails_gives_the_reason(sample: Any) -> None:
    wrong: Callable[[str], Any] = lambda field: getattr(sample.rollouts, field) + 1_000  # noqa: E731
    everything = {
        "header": header_with(sample, policy_version=0),
        "seeds_N": wrong("seeds_N"),
        "token_ids_T": wrong("token_ids_T"),
    }
    reasons = []
    for field in list(everything):
        reasons.append(check(sample, **everything).reason)
        del everything[field]
    assert reasons == [RejectReason.WRONG_POLICY, RejectReason.WRONG_ASSIGNMENT, RejectReason.TOKEN_OUT_OF_RANGE]


# The numbers of a trusted forward pass


def prefill(sample: Any, *, error: float = 0.0, flips: int = 0) -> Prefill:
    margins = np.zeros(11, np.float32)
    margins[:flips] = 0.5
    return Prefill(sample.rollouts.logprobs_T + np.float32(error), margins)


def test_exact_claims_measure_as_zero(sample: Any) -> None:
    measured = summary(statistics(sample.rollouts, prefill(sample)))
    assert measured == Measured(0.0, 0.0, 0.0)
    assert judge(measured, CheckPolicy()).accepted


def test_each_token_says_by_how_much_it_is_off(sample: Any) -> None:
    claims = prefill(sample, error=-0.25, flips=2)
    claims.margins_T[3], claims.logprobs_T[3] = np.nan, -np.inf
    found = statistics(sample.rollouts, claims)
    assert found["margin"].tolist() == [0.5, 0.5, 0.0, np.inf, *[0.0] * 7]
    assert found["logprob"][3] == np.inf
    assert np.allclose(np.delete(found["logprob"], 3), 0.25)


def test_errors_over_their_spread_are_squared_too_and_what_is_below_0_stays(sample: Any) -> None:
    cooler = np.linspace(-0.2, 0.2, 11, dtype=np.float32)
    cooler[[1, 2, 3]] = np.nan, -np.inf, np.inf
    claims = replace(
        prefill(sample, error=0.25), spread_T=np.full(11, 0.5, np.float32), cooler_T=cooler, looser_T=-cooler
    )
    found = statistics(sample.rollouts, claims)
    assert np.allclose(found["norm"], 0.25 / np.hypot(0.5, 0.01))
    assert np.allclose(found["square"], found["norm"] ** 2)
    assert found["cooler"][[0, 1, 2, 3]].tolist() == [np.float32(-0.2), np.inf, -60.0, np.inf]
    assert found["looser"][[0, 1, 2, 3]].tolist() == [np.float32(0.2), np.inf, np.inf, -60.0]


def test_5_claims_that_are_off_on_average_are_refused(sample: Any) -> None:
    assert judge(summary(statistics(sample.rollouts, prefill(sample, error=0.009))), CheckPolicy()).accepted
    verdict = judge(summary(statistics(sample.rollouts, prefill(sample, error=-0.011))), CheckPolicy())
    assert verdict.reason is RejectReason.LOGPROB_MISMATCH


def test_5_one_claim_that_is_far_off_is_refused(sample: Any) -> None:
    policy = CheckPolicy(logprob_error_mean_max=1.0)
    claims = prefill(sample)
    claims.logprobs_T[7] -= 0.6
    assert judge(summary(statistics(sample.rollouts, claims)), policy).reason is RejectReason.LOGPROB_MISMATCH


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_5_what_is_not_a_number_counts_against_the_bundle(value: float, sample: Any) -> None:
    claims = prefill(sample)
    claims.logprobs_T[0] = value
    assert judge(summary(statistics(sample.rollouts, claims)), CheckPolicy()).reason is RejectReason.LOGPROB_MISMATCH


def test_6_tokens_that_the_seeds_do_not_choose_are_refused(sample: Any) -> None:
    policy = CheckPolicy(seed_flips_share_max=0.1)
    assert judge(summary(statistics(sample.rollouts, prefill(sample, flips=1))), policy).accepted
    assert (
        judge(summary(statistics(sample.rollouts, prefill(sample, flips=2))), policy).reason
        is RejectReason.SEED_MISMATCH
    )


def test_6_a_margin_that_is_not_a_number_is_a_flip(sample: Any) -> None:
    claims = prefill(sample)
    claims.margins_T[:] = np.nan
    assert summary(statistics(sample.rollouts, claims)).seed_flips_share == 1.0


@pytest.mark.parametrize(("mean", "largest"), [(6.1, 6.1), (1.0, 13.1), (np.inf, np.inf)])
def test_7_hidden_states_that_are_not_those_of_the_proofs_are_refused(mean: float, largest: float) -> None:
    assert judge(Measured(0.0, 0.0, 0.0, 6.0, 13.0), CheckPolicy()).accepted
    verdict = judge(Measured(0.0, 0.0, 0.0, mean, largest), CheckPolicy())
    assert verdict.reason is RejectReason.PROOF_MISMATCH


def test_a_forward_pass_of_other_tokens_is_our_bug(sample: Any) -> None:
    with pytest.raises(AssertionError):
        summary(statistics(sample.rollouts, Prefill(np.zeros(1, np.float32), np.zeros(1, np.float32))))


def test_the_outer_bound_of_a_stop_token_is_that_of_any_token() -> None:
    measured = Measured(0.0, 0.0, 0.0, seed_margin_max=1.0, stop_margin_max=1.0)
    assert judge(measured, CheckPolicy()).reason is RejectReason.BAD_TERMINATION
    assert judge(measured, outer(CheckPolicy())).accepted
    gross = replace(measured, seed_margin_max=2.5, stop_margin_max=2.5)
    assert judge(gross, outer(CheckPolicy())).reason is RejectReason.BAD_TERMINATION


@pytest.mark.parametrize(
    ("number", "bound", "reason"),
    [
        ("logprob_error_mean", "logprob_error_mean_max", RejectReason.LOGPROB_MISMATCH),
        ("logprob_error_max", "logprob_error_max", RejectReason.LOGPROB_MISMATCH),
        ("seed_flips_share", "seed_flips_share_max", RejectReason.SEED_MISMATCH),
        ("stop_margin_max", "stop_margin_max", RejectReason.BAD_TERMINATION),
        ("seed_margin_max", "seed_margin_max", RejectReason.SEED_MISMATCH),
        ("choice_deviation", "choice_deviation_max", RejectReason.IMPLAUSIBLE),
        ("proof_error_mean", "proof_error_mean_max", RejectReason.PROOF_MISMATCH),
        ("proof_error_max", "proof_error_max", RejectReason.PROOF_MISMATCH),
    ],
)
def test_a_number_at_its_threshold_passes_and_the_next_one_is_refused(
    number: str, bound: str, reason: RejectReason
) -> None:
    policy = CheckPolicy()
    most = float(getattr(policy, bound))
    assert judge(replace(Measured(0.0, 0.0, 0.0), **{number: most}), policy).accepted
    beyond = float(np.nextafter(most, np.inf))
    assert judge(replace(Measured(0.0, 0.0, 0.0), **{number: beyond}), policy).reason is reason


def test_almost_certain_tokens_are_not_judged_by_the_little_chance_that_is_in_them(sample: Any) -> None:
    exact, small = prefill(sample), np.full(11, 0.01, np.float32)
    found = summary(statistics(sample.rollouts, replace(exact, expected_T=exact.logprobs_T + small, variance_T=small)))
    assert found.choice_deviation == pytest.approx(0.11)
    likely = np.full(11, 4.0, np.float32)
    found = summary(
        statistics(sample.rollouts, replace(exact, expected_T=exact.logprobs_T + likely, variance_T=likely))
    )
    assert found.choice_deviation == pytest.approx(44 / 44**0.5)
