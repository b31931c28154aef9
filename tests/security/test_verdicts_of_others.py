"""A validator judges only bundles that it was handed: it chooses neither its bundles nor their second look."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from tests.node.coordinator_world import (
    ANNA,
    BEN,
    VALIDATOR,
    World,
    make_parcel,
    make_run,
    memory_parts,
    refused,
    running,
)
from tests.node.validators_world import SECOND, keys_with

from prime_node.coordinator.agreement import Agreement, Opinion
from prime_node.coordinator.state.records import LeaseRecord, PendingBundle
from prime_protocol.check_policy import CheckPolicy
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.evidence import BundleEvidence
from prime_protocol.identity import SigningKey
from prime_protocol.parcel import pack_logprobs
from prime_protocol.replies import CheckTask, NotYet
from prime_protocol.requests import CheckRequest, CheckResultRequest
from prime_protocol.verdict import RejectReason, Verdict

RUN = make_run(checks=CheckPolicy(logprobs_judged=True), keys=keys_with(SECOND))
KNOWN = ("transformers/fp32/cpu", "vllm/bf16/cuda")
VALUES = np.full(2, -0.5, np.float32)


async def uploaded(world: World, key: SigningKey = ANNA) -> str:
    """Return a bundle that waits for its verdict."""
    return (await world.client(key).upload(make_parcel(await world.lease(key, rollouts_max=2), key))).bundle


async def say(
    world: World, key: SigningKey, bundle: str, reason: RejectReason | None = None, logprobs: str | None = None
) -> None:
    verdict = Verdict.refuse(reason) if reason else Verdict.accept()
    rewards = () if reason else (1.0, 0.0)
    result = CheckResultRequest(
        bundle=bundle, verdict=verdict, rewards=rewards, num_tokens=len(rewards), logprobs=logprobs
    )
    await world.client(key).check_result(result)


async def is_not_its_own(world: World, key: SigningKey, bundle: str, reason: RejectReason | None = None) -> None:
    """Neither the verdict nor the logprobs of this validator are taken."""
    with pytest.raises(RemoteError, match="is not assigned to this validator") as caught:
        await say(world, key, bundle, reason)
    assert caught.value.code is ErrorCode.NOT_FOUND
    parcel = pack_logprobs(VALUES, run=RUN.digest, bundle=bundle, key=key)
    await refused(world, ErrorCode.NOT_FOUND, "/v1/logprobs", parcel)


async def test_a_validator_judges_no_bundle_that_it_was_not_handed() -> None:
    async with running(memory_parts(RUN), ANNA, BEN) as world:
        bundle = await uploaded(world)
        await is_not_its_own(world, SECOND, bundle)
        await is_not_its_own(world, SECOND, bundle, RejectReason.LOGPROB_MISMATCH)
        assert (await world.take_task(VALIDATOR)).bundle == bundle
        await is_not_its_own(world, SECOND, bundle)
        assert (await world.status())["pending_bundles"] == 1
        good = await world.client(VALIDATOR).put_logprobs(bundle, VALUES)
        await say(world, VALIDATOR, bundle, logprobs=good)
        assert (await world.status())["rollouts"]["accepted"] == 2
        await say(world, VALIDATOR, bundle, RejectReason.LOGPROB_MISMATCH)  # a repeat changes nothing
        assert (await world.status())["rollouts"] == {"accepted": 2, "refused": {}}


async def test_a_late_verdict_counts_until_another_validator_has_the_bundle() -> None:
    async with running(memory_parts(RUN, check_seconds=0.2), ANNA) as world:
        bundle = await uploaded(world)
        assert (await world.take_task(VALIDATOR)).bundle == bundle
        assert (await world.take_task(SECOND)).bundle == bundle  # once the first one's time was up
        await is_not_its_own(world, VALIDATOR, bundle)
        good = await world.client(SECOND).put_logprobs(bundle, VALUES)
        await say(world, SECOND, bundle, logprobs=good)


async def test_a_validator_that_only_takes_bundles_cannot_have_them_refused_while_another_one_works() -> None:
    """Before, one that asked often took each bundle until the attempts were used up, and it was refused as unverifiable."""
    async with running(memory_parts(RUN, check_seconds=0.2), ANNA) as world:
        bundle = await uploaded(world)
        assert isinstance(await world.client(SECOND).check(CheckRequest(policy_versions=(), wait_s=0.0)), CheckTask)
        hoarding = asyncio.create_task(world.client(SECOND).check(CheckRequest(policy_versions=(), wait_s=5.0)))
        assert (await world.take_task(VALIDATOR)).bundle == bundle
        hoarding.cancel()


async def test_a_verdict_names_no_logprobs_of_another_validator() -> None:
    async with running(memory_parts(RUN, check_seconds=0.2), ANNA) as world:
        bundle = await uploaded(world)
        await world.take_task(VALIDATOR)
        theirs = await world.client(VALIDATOR).put_logprobs(bundle, VALUES)
        await world.take_task(SECOND)
        with pytest.raises(RemoteError, match="another validator"):
            await say(world, SECOND, bundle, logprobs=theirs)


async def test_a_verdict_on_anothers_bundle_sets_no_class() -> None:
    """Otherwise a verdict on any bundle would choose the validator of the next second looks."""
    async with running(memory_parts(RUN), ANNA) as world:
        bundle = await uploaded(world)
        assert (await world.take_task(VALIDATOR)).bundle == bundle
        evidence = BundleEvidence(worker="a", validator="a class of its own", sums={})
        claim = CheckResultRequest(bundle=bundle, verdict=Verdict.accept(), rewards=(1.0, 0.0), evidence=evidence)
        with pytest.raises(RemoteError, match="is not assigned to this validator"):
            await world.client(SECOND).check_result(claim)
        assert isinstance(await world.client(SECOND).check(CheckRequest(policy_versions=())), NotYet)


def says(validator: str, engine: str, *, convicts: bool = True) -> Opinion:
    verdict = Verdict.refuse(RejectReason.LOGPROB_MISMATCH) if convicts else Verdict.accept()
    evidence = BundleEvidence(worker=KNOWN[0], validator=engine, sums={})
    rewards = () if convicts else (1.0, 0.0)
    return Opinion(
        validator, CheckResultRequest(bundle="ab" * 32, verdict=verdict, rewards=rewards, evidence=evidence), convicts
    )


def hears(agreement: Agreement, *opinions: Opinion) -> None:
    for one in opinions:
        agreement.heard(one.validator, 0.0, one.result)


def test_a_class_that_no_calibration_knows_keeps_no_second_word_away() -> None:
    agreement = Agreement(30.0, KNOWN)
    strange, usual = says("strange", "a class of its own"), says("usual", KNOWN[0])
    hears(agreement, strange, usual)
    assert agreement.conclude(strange, "anna", 0.0, 0) is None
    assert agreement.may_judge(strange.result.bundle, "usual")
    other = Agreement(30.0, KNOWN)
    hears(other, says("first", KNOWN[0]), says("second", KNOWN[1]))
    alone = says("first", KNOWN[0])
    assert other.conclude(alone, "anna", 0.0, 0) is alone, "known arithmetic of another kind may see less"


def test_a_validator_that_claims_two_classes_is_named_and_counts_as_one_of_every_class(
    caplog: pytest.LogCaptureFixture,
) -> None:
    agreement = Agreement(30.0, KNOWN)
    hears(agreement, says("turncoat", KNOWN[0]), says("usual", KNOWN[0]))
    for engine in (KNOWN[1], KNOWN[0], KNOWN[1]):
        hears(agreement, says("turncoat", engine))
        assert agreement.others("turncoat", 0.0) == ["usual"]
    (line,) = caplog.messages
    assert f"validator turncoat claimed engine class {KNOWN[0]} and now {KNOWN[1]}" in line


def test_what_the_only_validator_of_a_class_accepts_is_looked_at_by_one_of_another_class() -> None:
    agreement = Agreement(30.0, KNOWN)
    first, second = says("first", KNOWN[0], convicts=False), says("second", KNOWN[1])
    hears(agreement, first, second)
    lease = LeaseRecord.__new__(LeaseRecord)
    pending = PendingBundle("ab" * 32, lease, num_rollouts=2, num_bytes=1, arrived_at_ms=0)
    assert agreement.look_again(pending, first, 0.0)
    assert agreement.may_judge(pending.bundle, "second")
    assert not agreement.may_judge(pending.bundle, "first")


async def test_a_validator_cannot_give_a_reason_that_only_the_coordinator_finds() -> None:
    """Otherwise one validator would ban by `equivocation`, or drop honest bundles as `stale` without a second validator."""
    async with running(memory_parts(make_run()), ANNA) as world:
        await uploaded(world)
        task = await world.take_task(VALIDATOR)
        for reason in RejectReason:
            if reason.is_for_validators:
                continue
            with pytest.raises(RemoteError) as refusal:
                await world.give_verdict(task, reason=reason)
            assert refusal.value.code is ErrorCode.WRONG_TYPE
        await world.give_verdict(task)
        (worker,) = (await world.status())["workers"]
        assert (worker["accepted"], worker["strikes"], worker["refused"]) == (2, 0, {})
