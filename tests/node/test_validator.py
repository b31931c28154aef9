"""A validator finds out each way in which a bundle can lie."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from tests.node.table_engine import STOP_TOKEN
from tests.node.validator_world import (
    OTHER_POLICY,
    POLICY,
    RUN,
    LengthEnvironment,
    LetterTokenizer,
    TableScorer,
    generate,
    judge_bundle,
    make_bundle,
    make_lease,
)
from tests.node.worker_world import STRANGER, make_run

from prime_node.ports.engine import ScoreRequest
from prime_node.ports.environment import EnvironmentGone
from prime_node.validator.judge import (
    Judgement,
    OpenedBundle,
    evidence_in,
    open_bundle,
    reward_bundle,
)
from prime_protocol.assignment import Lease
from prime_protocol.calibration import Calibration, PairMoments
from prime_protocol.check_policy import CheckPolicy
from prime_protocol.close_flips import CLOSE_FLIPS
from prime_protocol.evidence import Moments
from prime_protocol.excess_flips import EXCESS_FLIPS
from prime_protocol.rollout import Rollouts
from prime_protocol.run_spec import PinnedRun
from prime_protocol.verdict import RejectReason


async def judge(parcel: bytes, lease: Lease, run: PinnedRun = RUN) -> Judgement:
    opened = open_bundle(parcel, lease, RUN)
    if not isinstance(opened, OpenedBundle):
        return opened
    scorer = TableScorer()
    await scorer.load(POLICY, policy_version=0)
    environments = {"toy": LengthEnvironment()}
    return await judge_bundle(opened, scorer, run=run, environments=environments, tokenizer=LetterTokenizer())


async def reason_for(rollouts: Rollouts, lease: Lease, **changes: object) -> RejectReason | None:
    return (await judge(make_bundle(lease, rollouts, **changes), lease)).verdict.reason  # type: ignore[arg-type]


async def test_an_honest_bundle_is_accepted_with_the_validators_own_rewards() -> None:
    lease = make_lease()
    rollouts = await generate(lease)
    judgement = await judge(make_bundle(lease, rollouts), lease)
    assert judgement.verdict.accepted
    expected = [min(1.0, (len(c.token_ids) - (c.token_ids[-1] == STOP_TOKEN)) / 8) for c in rollouts.completions()]
    assert judgement.rewards == pytest.approx(expected)
    assert judgement.measured["logprob_error_max"] < 1e-5


def calibrated_for(worker: str) -> PinnedRun:
    """The same run with a calibration of the table model's own judge and such a worker."""
    moments = Moments(cap=1.0, lambdas=(1.0, 10.0), log_moments=(0.001, 0.01), num_tokens=1_000)
    pair = PairMoments(worker=worker, validator="table/fp32/cpu", moments={"margin": moments, "logprob": moments})
    return make_run(rollouts_per_group=16, checks=CheckPolicy(calibration=Calibration(pairs=(pair,))))


async def test_the_evidence_of_a_bundle_goes_with_the_verdict_accepted_or_not() -> None:
    lease, run = make_lease(), calibrated_for("table/fp32/cpu")
    honest = await judge(make_bundle(lease, await generate(lease)), lease, run)
    cheating = await judge(make_bundle(lease, await generate(lease, OTHER_POLICY)), lease, run)
    assert honest.verdict.accepted
    assert not cheating.verdict.accepted
    assert honest.evidence is not None
    assert cheating.evidence is not None
    assert set(honest.evidence.sums) == {"margin", "logprob"}
    assert max(honest.evidence.sums["margin"].log_e) < 0 < 12 < max(cheating.evidence.sums["margin"].log_e)
    assert honest.evidence.sums["margin"].num_tokens == honest.num_tokens


async def test_what_a_calibration_expects_of_two_engines_is_no_strike() -> None:
    """bf16 judged by fp32 errs by more than thresholds for fp32 allow. Without a calibration that is no strike either."""
    lease, rollouts = make_lease(), await generate(make_lease())
    noisy = Moments(cap=1.0, lambdas=(1.0, 10.0), log_moments=(0.1, 1.0), num_tokens=1_000)
    pair = PairMoments(worker="table/fp32/cpu", validator="table/fp32/cpu", moments={"logprob": noisy, "margin": noisy})
    tolerant = make_run(rollouts_per_group=16, checks=CheckPolicy(calibration=Calibration(pairs=(pair,))))
    mismatch = RejectReason.LOGPROB_MISMATCH
    unknown = RejectReason.UNVERIFIABLE
    for error, of, reason in [
        (0.05, tolerant, None),
        (0.05, RUN, unknown),
        (0.3, RUN, unknown),
        (0.6, RUN, mismatch),
        (0.3, tolerant, mismatch),
    ]:
        bundle = make_bundle(lease, replace(rollouts, logprobs_T=rollouts.logprobs_T - np.float32(error)))
        assert (await judge(bundle, lease, of)).verdict.reason is reason


async def test_an_engine_that_the_calibration_lacks_is_reported_as_such() -> None:
    lease = make_lease()
    judgement = await judge(make_bundle(lease, await generate(lease)), lease, calibrated_for("vllm/bf16/cuda"))
    assert judgement.evidence is not None
    assert (judgement.evidence.worker, judgement.evidence.sums) == ("table/fp32/cpu", {})
    assert (await judge(make_bundle(lease, await generate(lease)), lease)).evidence is None


async def test_flips_that_nothing_explains_are_weighed_where_the_run_says_so_and_no_filter_hides_their_share() -> None:
    lease = make_lease()
    shifted = [group.model_copy(update={"seeds": tuple(seed + 1 for seed in group.seeds)}) for group in lease.groups]
    other = await generate(lease.model_copy(update={"groups": tuple(shifted)}))
    parcel = make_bundle(lease, replace(other, seeds_N=other.seeds_N - 1))
    run = make_run(rollouts_per_group=16, checks=CheckPolicy(flips_explained=True, close_flips_seen=True))
    evidence = (await judge(parcel, lease, run)).evidence
    honest = (await judge(make_bundle(lease, await generate(lease)), lease, run)).evidence
    assert evidence is not None
    assert honest is not None
    for name in (EXCESS_FLIPS, CLOSE_FLIPS):
        assert min(evidence.sums[name].log_e) > 10
        assert max(honest.sums[name].log_e) < 0
    assert (await judge(parcel, lease, make_run(rollouts_per_group=16))).evidence is None
    filtered = lease.model_copy(update={"sampling": lease.sampling.model_copy(update={"top_p": 0.9})})
    opened = open_bundle(make_bundle(filtered, replace(other, seeds_N=other.seeds_N - 1)), filtered, run)
    assert isinstance(opened, OpenedBundle)
    assert evidence_in(opened, {}, run, judged_by="table/fp32/cpu") == evidence.model_copy(update={"sums": {}})


async def test_samples_of_another_policy_are_found_out() -> None:
    lease = make_lease()
    assert await reason_for(await generate(lease, OTHER_POLICY), lease) is RejectReason.LOGPROB_MISMATCH


async def test_another_policys_tokens_with_the_right_logprobs_are_found_out_by_the_seeds() -> None:
    """A cheap model samples, the right one rescores: no comparison of logprobs can detect it."""
    lease = make_lease()
    rollouts = await generate(lease, OTHER_POLICY)
    scorer = TableScorer()
    await scorer.load(POLICY, policy_version=0)
    prompts = [group.prompt_token_ids for group in lease.groups for _ in group.seeds]
    requests = [ScoreRequest(p, c.token_ids, 0) for p, c in zip(prompts, rollouts.completions(), strict=True)]
    rescored = replace(rollouts, logprobs_T=(await scorer.prefill(requests, lease.sampling)).logprobs_T)
    assert await reason_for(rescored, lease) is RejectReason.SEED_MISMATCH


async def test_another_temperature_is_found_out() -> None:
    lease = make_lease()
    colder = lease.sampling.model_copy(update={"temperature": 0.5})
    assert await reason_for(await generate(lease, sampling=colder), lease) is RejectReason.LOGPROB_MISMATCH


async def test_forged_logprobs_are_found_out() -> None:
    lease = make_lease()
    rollouts = await generate(lease)
    assert (
        await reason_for(replace(rollouts, logprobs_T=rollouts.logprobs_T - 0.6), lease)
        is RejectReason.LOGPROB_MISMATCH
    )


async def test_other_seeds_than_assigned_are_found_out() -> None:
    lease = make_lease()
    rollouts = await generate(lease)
    assert await reason_for(replace(rollouts, seeds_N=rollouts.seeds_N + 1), lease) is RejectReason.WRONG_ASSIGNMENT


async def test_seeds_that_were_claimed_but_not_used_are_found_out() -> None:
    lease = make_lease()
    groups = tuple(g.model_copy(update={"seeds": tuple(s + 1_000 for s in g.seeds)}) for g in lease.groups)
    shopped = await generate(lease.model_copy(update={"groups": groups}))
    assert await reason_for(replace(shopped, seeds_N=shopped.seeds_N - 1_000), lease) is RejectReason.SEED_MISMATCH


async def test_a_body_that_is_not_the_signed_one_is_malformed() -> None:
    lease = make_lease()
    parcel = bytearray(make_bundle(lease, await generate(lease)))
    parcel[-1] ^= 1
    assert (await judge(bytes(parcel), lease)).verdict.reason is RejectReason.MALFORMED


async def test_a_bundle_signed_by_another_key_is_malformed() -> None:
    lease = make_lease()
    assert await reason_for(await generate(lease), lease, key=STRANGER) is RejectReason.MALFORMED


async def test_a_zstd_bomb_is_malformed_and_never_unpacked() -> None:
    lease = make_lease()
    rollouts = await generate(lease)
    assert await reason_for(rollouts, lease, decompressed_bytes=2**40) is RejectReason.MALFORMED


async def test_a_grader_that_ended_is_not_asked_again_if_the_bundle_is_lost_anyway() -> None:
    lease, failing = make_lease(), FailingEnvironment()
    opened = open_bundle(make_bundle(lease, await generate(lease)), lease, RUN)
    assert isinstance(opened, OpenedBundle)
    judgement = await reward_bundle(opened, run=RUN, environments={"toy": failing}, tokenizer=LetterTokenizer())
    assert judgement.verdict.reason is RejectReason.UNVERIFIABLE
    assert failing.calls == 1


class FailingEnvironment(LengthEnvironment):
    calls = 0

    def score(self, index: int, completion: str, *, finished: bool) -> float:
        self.calls += 1
        raise EnvironmentGone("it took too long, and was ended")


class UnsureEnvironment(LengthEnvironment):
    """Environment whose judge gives 0.1, 0.9 and 0.2 in turn."""

    def __init__(self) -> None:
        self._said = itertools.cycle((0.1, 0.9, 0.2))

    def score(self, index: int, completion: str, *, finished: bool) -> float:
        return next(self._said)


async def test_a_judge_that_is_not_sure_is_asked_as_often_as_the_run_says_and_its_median_counts() -> None:
    toy = RUN.spec.environments[0].model_copy(update={"scorings": 3, "is_deterministic": False})
    run = make_run(rollouts_per_group=16, environments=(toy,))
    lease = make_lease()
    opened = open_bundle(make_bundle(lease, await generate(lease)), lease, RUN)
    assert isinstance(opened, OpenedBundle)
    unsure = {"toy": UnsureEnvironment()}
    judgement = await reward_bundle(opened, run=run, environments=unsure, tokenizer=LetterTokenizer())
    assert judgement.rewards == (0.2,) * 32
    assert judgement.measured["reward_spread_mean"] == pytest.approx(0.8)
