"""Validators that contradict each other are detected and named, and a verdict that another validator denies bans no worker."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.node.coordinator_world import (
    ANNA,
    BEN,
    HEARTBEAT,
    VALIDATOR,
    World,
    make_parcel,
    make_run,
    memory_parts,
    running,
)
from tests.node.validators_world import SECOND, THIRD, keys_with

from prime_node.adapters.prometheus_metrics import PrometheusMetrics
from prime_node.adapters.web.aiohttp_server import AiohttpServer
from prime_node.cli.run_status import RunStatus
from prime_node.coordinator.agreement import RETRY_CHECKS, UNANSWERED_MAX, Agreement, Opinion
from prime_protocol.check_policy import CheckPolicy
from prime_protocol.envelope import open_envelope, parse_json
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.evidence import BundleEvidence, Sums
from prime_protocol.identity import SigningKey
from prime_protocol.replies import CheckTask, NotYet
from prime_protocol.requests import CheckRequest, CheckResultRequest, ReceiptsRequest
from prime_protocol.verdict import Receipt, RejectReason, Verdict

RUN = make_run(checks=CheckPolicy(strikes_max=1), keys=keys_with(SECOND, THIRD))
FORGED = RejectReason.LOGPROB_MISMATCH


async def at_work(world: World, *validators: SigningKey) -> None:
    """Two validators that have asked for work and found none."""
    for key in validators:
        assert isinstance(await world.client(key).check(CheckRequest(policy_versions=())), NotYet)


async def upload(world: World, key: SigningKey = ANNA) -> None:
    if world.head is None:
        await world.publish()
        await world.join(ANNA, BEN)
    await world.client(key).upload(make_parcel(await world.lease(key, rollouts_max=2), key))


async def say(world: World, key: SigningKey, task: CheckTask, reason: RejectReason | None = None) -> None:
    """Return this validator's verdict on a bundle."""
    verdict = Verdict.refuse(reason) if reason else Verdict.accept()
    rewards = () if reason else (1.0, 0.0)
    result = CheckResultRequest(bundle=task.bundle, verdict=verdict, rewards=rewards, num_tokens=len(rewards))
    await world.client(key).check_result(result)


async def outcome_of(world: World) -> tuple[str, bool]:
    """Return the status of Anna's only receipt, and whether its key is banned. Both are current, while the status may lag."""
    (one,) = (await world.client(ANNA).receipts(ReceiptsRequest(after=0))).receipts
    receipt = parse_json(open_envelope(one.encode()).payload, Receipt)
    is_banned = False
    try:
        await world.client(ANNA).heartbeat(HEARTBEAT)
    except RemoteError as error:
        is_banned = error.code is ErrorCode.BANNED
    return str(receipt.reason or receipt.status), is_banned


async def status_with(world: World, num_contradictions: int) -> Any:
    """Return the status of validators once it has this many entries."""
    found: dict[str, Any] = {}

    async def is_shown() -> bool:
        found.update((await world.status())["validators"])
        return bool(found["num_contradictions"] == num_contradictions)

    await world.until(is_shown)
    return found


async def test_a_strike_is_given_once_a_second_validator_says_the_same() -> None:
    async with running(memory_parts(RUN)) as world:
        await at_work(world, SECOND)
        await upload(world)
        first = await world.take_task(VALIDATOR)
        await say(world, VALIDATOR, first, FORGED)
        assert await outcome_of(world) == ("pending", False), "one word is held"
        assert isinstance(await world.client(VALIDATOR).check(CheckRequest(policy_versions=())), NotYet)
        second = await world.take_task(SECOND)
        assert second.bundle == first.bundle
        await say(world, SECOND, second, FORGED)
        assert await outcome_of(world) == (FORGED, True)
        await status_with(world, 0)


async def test_after_a_restart_the_first_validator_to_come_back_convicts_no_worker_alone() -> None:
    """Before, it was the only one that the coordinator knew of: each restart let a stolen one ban whom it liked."""
    parts = memory_parts(RUN)
    async with running(parts) as world:
        await at_work(world, SECOND)
        await upload(world)
    async with running(replace(parts, web=AiohttpServer(), metrics=PrometheusMetrics())) as world:
        await say(world, VALIDATOR, await world.take_task(VALIDATOR), FORGED)
        assert await outcome_of(world) == ("pending", False)
        await say(world, SECOND, await world.take_task(SECOND))
        await say(world, THIRD, await world.take_task(THIRD))
        assert await outcome_of(world) == ("accepted", False)


async def test_two_that_contradict_each_other_are_named_and_no_worker_is_banned(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running(memory_parts(RUN)) as world:
        await at_work(world, SECOND)
        await upload(world)
        task = await world.take_task(VALIDATOR)
        await say(world, VALIDATOR, task, FORGED)
        await say(world, SECOND, await world.take_task(SECOND))
        assert await outcome_of(world) == (RejectReason.UNVERIFIABLE, False)
        (one,) = (await status_with(world, 1))["contradictions"]
        metrics = (await world.get("/metrics"))[1].decode()
    assert one["said"] == {VALIDATOR.key_id: "logprob_mismatch", SECOND.key_id: "accepted"}
    assert (one["bundle"], one["worker"]) == (task.bundle, ANNA.key_id)
    assert "prime_validator_contradictions 1.0" in metrics
    (line,) = [line for line in caplog.messages if "disagree about" in line and VALIDATOR.key_id in line]
    assert SECOND.key_id in line


@pytest.mark.parametrize("third_accepts", [True, False])
async def test_a_third_validator_decides(third_accepts: bool) -> None:
    async with running(memory_parts(RUN)) as world:
        await at_work(world, SECOND, THIRD)
        await upload(world)
        await say(world, VALIDATOR, await world.take_task(VALIDATOR), FORGED)
        await say(world, SECOND, await world.take_task(SECOND))
        assert await outcome_of(world) == ("pending", False)
        await say(world, THIRD, await world.take_task(THIRD), None if third_accepts else FORGED)
        assert await outcome_of(world) == (("accepted", False) if third_accepts else (FORGED, True))
        await status_with(world, 1)


@pytest.mark.parametrize("second_is_silent", [True, False])
async def test_a_conviction_that_a_second_validator_gives_no_word_on_is_no_strike(second_is_silent: bool) -> None:
    async with running(memory_parts(RUN, check_seconds=0.3 if second_is_silent else 30.0)) as world:
        await upload(world)
        first = await world.take_task(VALIDATOR)
        await at_work(world, SECOND)
        await say(world, VALIDATOR, first, FORGED)
        if not second_is_silent:
            await say(world, SECOND, await world.take_task(SECOND), RejectReason.UNVERIFIABLE)

        async def is_refused() -> bool:
            return await outcome_of(world) == (RejectReason.UNVERIFIABLE, False)

        await world.until(is_refused)
        (silent,) = (await status_with(world, 0))["unanswered"]
        assert silent == {"validator": SECOND.key_id, "total": 1, "in_a_row": 1, "waited_for": True}
        (line,) = RunStatus.model_validate(await world.status()).validators.lines()
        metrics = (await world.get("/metrics"))[1].decode()
    assert SECOND.key_id in line
    assert "prime_validator_unanswered 1.0" in metrics


async def test_a_second_validator_that_never_says_anything_shields_few_cheats() -> None:
    async with running(memory_parts(RUN)) as world:
        await at_work(world, SECOND)
        for _ in range(UNANSWERED_MAX):
            await upload(world)
            await say(world, VALIDATOR, await world.take_task(VALIDATOR), FORGED)
            await say(world, SECOND, await world.take_task(SECOND), RejectReason.UNVERIFIABLE)
            await world.client(ANNA).heartbeat(HEARTBEAT)  # which a banned worker may not
        await upload(world)
        await say(world, VALIDATOR, await world.take_task(VALIDATOR), FORGED)
        with pytest.raises(RemoteError) as caught:
            await world.client(ANNA).heartbeat(HEARTBEAT)
        assert caught.value.code is ErrorCode.BANNED
        (silent,) = (await status_with(world, 0))["unanswered"]
    assert silent == {"validator": SECOND.key_id, "total": 3, "in_a_row": 3, "waited_for": False}


async def test_alone_a_validator_is_believed_at_once() -> None:
    async with running(memory_parts(RUN)) as world:
        await upload(world)
        await say(world, VALIDATOR, await world.take_task(VALIDATOR), FORGED)
        assert await outcome_of(world) == (FORGED, True)


async def test_a_share_of_the_accepted_bundles_is_judged_twice_and_a_validator_that_accepts_all_is_named() -> None:
    async with running(memory_parts(RUN, second_look_share=1.0)) as world:
        await at_work(world, SECOND)
        await upload(world)
        first = await world.take_task(VALIDATOR)
        await say(world, VALIDATOR, first)
        assert await outcome_of(world) == ("accepted", False), "it waits for nobody"
        second = await world.take_task(SECOND)
        assert (second.bundle, second.lease) == (first.bundle, first.lease)
        await say(world, VALIDATOR, first)  # sent again, without new information
        await say(world, SECOND, second, FORGED)
        assert await outcome_of(world) == ("accepted", False)
        (one,) = (await status_with(world, 1))["contradictions"]
    assert one["said"] == {VALIDATOR.key_id: "accepted", SECOND.key_id: "logprob_mismatch"}


async def test_a_second_look_that_agrees_is_silent() -> None:
    async with running(memory_parts(RUN, second_look_share=1.0)) as world:
        await at_work(world, SECOND)
        await upload(world)
        await say(world, VALIDATOR, await world.take_task(VALIDATOR))
        await say(world, SECOND, await world.take_task(SECOND))
        assert await status_with(world, 0) == {
            "num_contradictions": 0,
            "contradictions": [],
            "differing": [],
            "unanswered": [],
        }
        assert isinstance(await world.client(SECOND).check(CheckRequest(policy_versions=())), NotYet)


def opinion(validator: str, *, convicts: bool, nats: float = -1.0, bundle: int = 0) -> Opinion:
    evidence = BundleEvidence(worker="a", validator="b", sums={"flip": Sums(num_tokens=8, log_e=(nats,))})
    verdict = Verdict.refuse(FORGED) if convicts else Verdict.accept()
    rewards = () if convicts else (1.0,)
    result = CheckResultRequest(bundle=f"{bundle:064x}", verdict=verdict, rewards=rewards, evidence=evidence)
    return Opinion(validator, result, convicts)


@pytest.mark.parametrize("shares", [(0.1, 0.1), (0.0, 0.0), (0.3, 0.3)], ids=str)
def test_two_that_find_the_same_shares_are_not_reported_as_different(shares: tuple[float, float]) -> None:
    for seed in range(20):
        rng, agreement = np.random.default_rng(seed), Agreement(check_s=30.0)
        for number in range(1_000):
            which = number % 2
            agreement.heard("first", 0.0)
            agreement.heard("second", 0.0)
            mine = opinion(("first", "second")[which], convicts=bool(rng.random() < shares[which]))
            assert agreement.count(mine, 0.0) == ""


def test_two_whose_shares_differ_are_named_once_for_strikes_and_for_evidence() -> None:
    for convicts, nats in ((True, -1.0), (False, 5.0)):
        agreement, lines = Agreement(check_s=30.0), []
        for number in range(200):
            agreement.heard("first", 0.0)
            agreement.heard("second", 0.0)
            is_strict = number % 2 == 0 and number % 10 < 4
            mine = opinion(
                ("first", "second")[number % 2], convicts=convicts and is_strict, nats=nats if is_strict else -1.0
            )
            lines.append(agreement.count(mine, 0.0))
        (line,) = [line for line in lines if line]
        assert line.startswith("validators first and second disagree more often than chance")
        assert agreement.as_row()["differing"][0]["validators"] == ["first", "second"]


@pytest.mark.parametrize("restart", ["none", "class claimed", "class not claimed yet"])
def test_what_another_class_of_engine_cannot_detect_contradicts_no_validator(restart: str) -> None:
    """Before, each restart brought false contradictions to a run whose validators have engines of two classes."""
    agreement = Agreement(30.0, ("b", "transformers/bf16/cpu"))
    strict, lenient = opinion("first", convicts=True), opinion("second", convicts=False)
    assert lenient.result.evidence is not None
    evidence = lenient.result.evidence.model_copy(update={"validator": "transformers/bf16/cpu"})
    lenient = replace(lenient, result=lenient.result.model_copy(update={"evidence": evidence}))
    if restart != "none":
        agreement.expect(("first", "second"), 0.0)
    agreement.heard("first", 0.0, strict.result)
    if restart != "class not claimed yet":
        agreement.heard("second", 0.0, lenient.result)
        assert agreement.conclude(strict, "anna", 0.0, 0) is strict
        return
    assert agreement.conclude(strict, "anna", 0.0, 0) is None
    agreement.heard("second", 0.0, lenient.result)
    assert agreement.conclude(lenient, "anna", 0.0, 0) is strict
    assert not agreement.num_contradictions
    assert not agreement.is_held(strict.result.bundle)


async def test_status_names_both_on_the_operator_s_screen() -> None:
    async with running(memory_parts(RUN)) as world:
        await at_work(world, SECOND)
        await upload(world)
        await say(world, VALIDATOR, await world.take_task(VALIDATOR), FORGED)
        await say(world, SECOND, await world.take_task(SECOND))
        await status_with(world, 1)
        (line,) = RunStatus.model_validate(await world.status()).validators.lines()
    assert "1 contradictions" in line
    assert f"{VALIDATOR.key_id} says logprob_mismatch; {SECOND.key_id} says accepted" in line


def left_unanswered(agreement: Agreement, bundle: int, now_s: float) -> bool:
    """The first validator convicts, and the second is active and silent. Return whether the conviction remains."""
    mine = opinion("first", convicts=True, bundle=bundle)
    agreement.heard("first", now_s)
    agreement.heard("second", now_s)
    found = agreement.conclude(mine, "anna", now_s, 0)
    if found is None:
        later_s = now_s + 2 * agreement.check_s + 0.1
        assert agreement.overdue(later_s) == [mine.result.bundle]
        found = agreement.settle(mine.result.bundle, later_s)
    return found.convicts


def test_a_silent_validator_is_tried_again_now_and_then_and_waited_for_once_it_gives_its_word() -> None:
    agreement, pause_s = Agreement(check_s=1.0), 1.0 * RETRY_CHECKS
    stood = [left_unanswered(agreement, number, now_s=10.0 * number) for number in range(UNANSWERED_MAX)]
    assert not any(stood)
    end_s = 10.0 * UNANSWERED_MAX
    stood = [left_unanswered(agreement, 100 + number, end_s + 0.5 * number) for number in range(200)]
    assert stood.count(False) <= 100 / pause_s, "one try in each pause of 20 check times"
    now_s = end_s + 200.0
    agreement.heard("second", now_s)
    held = opinion("first", convicts=True, bundle=500)
    assert agreement.conclude(held, "anna", now_s, 0) is None, "the next try"
    assert agreement.conclude(opinion("first", convicts=True, bundle=501), "anna", now_s, 0) is not None, "only one"
    assert agreement.may_judge(held.result.bundle, "second")
    assert agreement.conclude(opinion("second", convicts=True, bundle=500), "anna", now_s, 0) is held
    assert agreement.conclude(opinion("first", convicts=True, bundle=502), "anna", now_s, 0) is None, "trusted again"


def test_only_a_validator_that_was_given_the_bundle_is_counted_as_silent() -> None:
    agreement = Agreement(check_s=1.0)
    for name in ("first", "second", "third"):
        agreement.heard(name, 0.0)
    held = opinion("first", convicts=True)
    assert agreement.conclude(held, "anna", 0.0, 0) is None
    agreement.handed(held.result.bundle, "second")
    assert not agreement.may_judge(held.result.bundle, "second"), "it is not given the bundle twice"
    assert agreement.may_judge(held.result.bundle, "third")
    agreement.settle(held.result.bundle, 3.0)
    assert [one["validator"] for one in agreement.as_row()["unanswered"]] == ["second"]


def test_where_one_gives_no_word_a_third_one_is_asked() -> None:
    agreement = Agreement(check_s=1.0)
    for name in ("first", "second", "third"):
        agreement.heard(name, 0.0)
    held = opinion("first", convicts=True)
    assert agreement.conclude(held, "anna", 0.0, 0) is None
    unsure = opinion("second", convicts=False)
    verdict = Verdict.refuse(RejectReason.UNVERIFIABLE)
    unsure = Opinion("second", unsure.result.model_copy(update={"verdict": verdict, "rewards": ()}), False)
    assert agreement.conclude(unsure, "anna", 0.0, 0) is None
    assert agreement.conclude(opinion("third", convicts=True), "anna", 0.0, 0) is held


async def test_an_accepted_bundle_that_names_a_copy_needs_a_second_word() -> None:
    """A validator that accuses another worker by a fingerprint convicts as much as one that refuses."""
    async with running(memory_parts(RUN)) as world:
        await at_work(world, VALIDATOR, SECOND)
        for worker in (BEN, ANNA):
            await upload(world, worker)
            task = await world.take_task(VALIDATOR)
            accepted = CheckResultRequest(
                bundle=task.bundle,
                verdict=Verdict.accept(),
                rewards=(1.0, 0.0),
                num_tokens=2,
                fingerprints=((task.lease.groups[0].slot, "a" * 24),),
            )
            await world.client(VALIDATOR).check_result(accepted)
        assert isinstance(await world.client(SECOND).check(CheckRequest(policy_versions=())), CheckTask)
        assert (await world.status())["pending_bundles"] == 1


def test_a_validator_that_never_gave_evidence_needs_a_second_word_too() -> None:
    agreement = Agreement(check_s=30.0)
    known = opinion("second", convicts=False)
    agreement.heard("first", 0.0)
    agreement.heard("second", 0.0, known.result)
    assert agreement.conclude(opinion("first", convicts=True, bundle=1), "anna", 0.0, 0) is None
