"""A dishonest validator where no second one is asked: numbers, small evidence and fingerprints that it sends alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.node.coordinator_world import (
    ANNA,
    BEN,
    HEARTBEAT,
    VALIDATOR,
    World,
    folder_parts,
    make_parcel,
    make_run,
    memory_parts,
    running,
)
from tests.node.dossiers_world import BY_ROLLOUT, CALIBRATED, CLASS, TEXTS_RUN, rollouts_of, upload_texts
from tests.node.validators_world import SECOND, keys_with

from prime_protocol.check_policy import CheckPolicy
from prime_protocol.copies import fingerprints
from prime_protocol.envelope import open_envelope, parse_json
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.evidence import BundleEvidence, Sums
from prime_protocol.identity import SigningKey
from prime_protocol.limits import COUNT_MAX
from prime_protocol.replies import CheckTask, NotYet
from prime_protocol.requests import CheckRequest, CheckResultRequest, ReceiptsRequest
from prime_protocol.verdict import Receipt, RejectReason, Verdict

TWO = keys_with(SECOND)


def found(nats: float, num_tokens: int = 6) -> BundleEvidence:
    sums = {"margin": Sums(num_tokens=num_tokens, log_e=(min(nats, 5.9), nats))}
    return BundleEvidence(worker=CLASS, validator=CLASS, sums=sums)


async def at_work(world: World, *validators: SigningKey) -> None:
    """Publish a policy. These validators ask for work and find none."""
    await world.publish()
    await world.join(ANNA, BEN)
    for key in validators:
        assert isinstance(await world.client(key).check(CheckRequest(policy_versions=())), NotYet)


async def uploaded(world: World) -> None:
    await world.client(ANNA).upload(make_parcel(await world.lease(ANNA, rollouts_max=2), ANNA))


async def last_receipt(world: World, key: SigningKey = ANNA) -> Receipt:
    shown = (await world.client(key).receipts(ReceiptsRequest(after=0))).receipts[-1]
    return parse_json(open_envelope(shown.encode()).payload, Receipt)


async def nats_of(world: World) -> float:
    evidence = (await last_receipt(world)).evidence
    assert evidence is not None
    return evidence.log_evidence


async def test_a_validator_claims_no_more_tokens_than_the_lease_allows() -> None:
    """Credits that add up to more than a receipt can state would end the coordinator, after each start again."""
    async with running(memory_parts(make_run(checks=CALIBRATED))) as world:
        await at_work(world)
        await uploaded(world)
        task = await world.take_task(VALIDATOR)
        most = 2 * 4
        for num_tokens, evidence in ((COUNT_MAX, None), (most + 1, None), (most, found(1e6, COUNT_MAX))):
            result = CheckResultRequest(
                bundle=task.bundle,
                verdict=Verdict.accept(),
                rewards=(1.0, 0.0),
                num_tokens=num_tokens,
                evidence=evidence,
            )
            with pytest.raises(RemoteError, match="at most 8 completion tokens"):
                await world.client(VALIDATOR).check_result(result)
        await world.client(VALIDATOR).check_result(result.model_copy(update={"evidence": found(0.0, most)}))
        assert (await last_receipt(world)).num_tokens == most


async def test_one_validator_cannot_raise_evidence_so_far_that_the_next_honest_verdict_bans() -> None:
    async with running(memory_parts(make_run(checks=CALIBRATED, keys=TWO))) as world:
        await at_work(world, SECOND)
        for nats in (3.0, 11.0, 8.0, 8.0):
            await uploaded(world)
            await world.give_verdict(await world.take_task(VALIDATOR), evidence=found(nats))
            await world.give_verdict(await world.take_task(SECOND), validator=SECOND, evidence=found(0.1))
            assert await nats_of(world) < 1.0, "the lesser evidence counts"
        await uploaded(world)
        await world.give_verdict(await world.take_task(SECOND), validator=SECOND, evidence=found(0.5))
        assert (await last_receipt(world)).status == "accepted"
        await world.client(ANNA).heartbeat(HEARTBEAT)  # which a banned worker may not


@pytest.mark.parametrize("second_says", [RejectReason.UNVERIFIABLE, None], ids=str)
async def test_evidence_that_two_find_is_counted_and_that_of_one_alone_is_not(
    second_says: RejectReason | None,
) -> None:
    async with running(memory_parts(make_run(checks=CALIBRATED, keys=TWO))) as world:
        await at_work(world, SECOND)
        await uploaded(world)
        await world.give_verdict(await world.take_task(VALIDATOR), evidence=found(5.0))
        assert (await last_receipt(world)).status == "pending"
        task = await world.take_task(SECOND)
        evidence = None if second_says else found(5.0)
        await world.give_verdict(task, validator=SECOND, reason=second_says, evidence=evidence)
        receipt = await last_receipt(world)
        assert (await world.status())["validators"]["num_contradictions"] == 0
    assert receipt.status == "accepted"
    assert (receipt.evidence is None) == bool(second_says)


async def test_evidence_that_does_not_count_leaves_no_second_look_to_its_own_validator() -> None:
    """Before, the accepted bundle had no validator, and the one that had judged it got it again."""
    async with running(memory_parts(make_run(checks=CALIBRATED, keys=TWO), second_look_share=1.0)) as world:
        await at_work(world, SECOND)
        await uploaded(world)
        await world.give_verdict(await world.take_task(VALIDATOR), evidence=found(5.0))
        await world.give_verdict(await world.take_task(SECOND), validator=SECOND, reason=RejectReason.UNVERIFIABLE)
        assert (await last_receipt(world)).status == "accepted"
        assert isinstance(await world.client(VALIDATOR).check(CheckRequest(policy_versions=())), NotYet)
        assert (await world.take_task(SECOND)).audit


async def test_alone_a_validator_s_evidence_counts_at_once() -> None:
    async with running(memory_parts(make_run(checks=CALIBRATED, keys=TWO))) as world:
        await at_work(world)
        await uploaded(world)
        await world.give_verdict(await world.take_task(VALIDATOR), evidence=found(5.0))
        assert await nats_of(world) > 2.3


async def accept(world: World, key: SigningKey, task: CheckTask, names: tuple[str, ...]) -> None:
    """Accept a bundle with the fingerprints of these texts, whatever it holds."""
    texts = rollouts_of(task.lease, names)
    marks = tuple((int(texts.slots_N[index]), mark) for index, mark in fingerprints(texts, task.lease.sampling))
    assert marks
    await world.client(key).check_result(
        CheckResultRequest(bundle=task.bundle, verdict=Verdict.accept(), rewards=(1.0, 0.0), fingerprints=marks)
    )


STRICT = make_run(sampling=TEXTS_RUN.spec.sampling, checks=CheckPolicy(strikes_max=1), keys=TWO)


async def test_a_forged_fingerprint_of_an_earlier_bundle_makes_no_worker_a_copier(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The honest verdict of a second validator names the copy: it does not see the earlier bundle."""
    async with running(memory_parts(STRICT)) as world:
        await at_work(world, SECOND)
        await upload_texts(world, BEN, ("c", "d"))
        earlier = await world.take_task(VALIDATOR)
        await upload_texts(world, ANNA, BY_ROLLOUT)
        await accept(world, VALIDATOR, earlier, BY_ROLLOUT)
        for key in (SECOND, VALIDATOR):
            await accept(world, key, await world.take_task(key), BY_ROLLOUT)
        assert (await last_receipt(world)).status == "accepted"
        await world.client(ANNA).heartbeat(HEARTBEAT)
    assert "a validator forged a fingerprint" in caplog.text


@pytest.mark.parametrize("is_rotten", [False, True], ids=["deleted", "rotten"])
@pytest.mark.parametrize("lost", [BEN, ANNA], ids=["the original", "the copy"])
async def test_a_copy_of_bytes_that_are_lost_is_refused_without_a_strike(
    lost: SigningKey, is_rotten: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Before, rotten bytes let a copy pass, and the log said that its validator had forged a fingerprint."""
    parts = await folder_parts(STRICT, tmp_path)

    async def lose(bundle: str) -> None:
        await parts.bundles.delete(bundle)
        if is_rotten:
            await parts.bundles.put(b"other bytes", digest=bundle)

    async with running(parts) as world:
        await at_work(world)
        for worker in (BEN, ANNA):
            await upload_texts(world, worker, BY_ROLLOUT)
            task = await world.take_task(VALIDATOR)
            if worker is ANNA and lost is ANNA:
                await lose(task.bundle)
            await accept(world, VALIDATOR, task, BY_ROLLOUT)
            if worker is BEN and lost is BEN:
                await lose(task.bundle)
        assert (await last_receipt(world)).reason is RejectReason.UNVERIFIABLE
        await world.client(ANNA).heartbeat(HEARTBEAT)
    assert "forged" not in caplog.text


async def test_a_copy_that_the_bytes_show_is_a_strike() -> None:
    async with running(memory_parts(STRICT)) as world:
        await at_work(world)
        for worker in (BEN, ANNA):
            await upload_texts(world, worker, BY_ROLLOUT)
            await accept(world, VALIDATOR, await world.take_task(VALIDATOR), BY_ROLLOUT)
        assert (await last_receipt(world)).reason is RejectReason.COPIED
        with pytest.raises(RemoteError) as caught:
            await world.client(ANNA).heartbeat(HEARTBEAT)
    assert caught.value.code is ErrorCode.BANNED


async def test_names_of_measured_values_do_not_fill_the_metrics() -> None:
    async with running(memory_parts(make_run())) as world:
        await at_work(world)
        for number in range(2):
            await uploaded(world)
            result = CheckResultRequest(
                bundle=(await world.take_task(VALIDATOR)).bundle,
                verdict=Verdict.accept(),
                rewards=(1.0, 0.0),
                measured={f"name {number} {index}": 1.0 for index in range(64)},
            )
            await world.client(VALIDATOR).check_result(result)
        metrics = (await world.get("/metrics"))[1].decode()
    assert metrics.count("prime_check_measured_count{") == 64
