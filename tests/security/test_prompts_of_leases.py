"""A coordinator that leases other prompts than the problems give is noticed by each validator, and no worker pays for it."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from tests.node.coordinator_world import ANNA, VALIDATOR, Bytes, Letters, make_parcel, make_run, memory_parts, running
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
from tests.node.validators_world import Scorer, validator_of

from prime_node.ports.environment import Environment, EnvironmentGone, Tokenizer
from prime_node.validator.judge import Judgement, OpenedBundle, open_bundle
from prime_node.validator.loop import run_validator
from prime_protocol.assignment import Lease, Problem
from prime_protocol.limits import Limits
from prime_protocol.verdict import RejectReason


class PraisingLetters(Letters):
    """Environment of a coordinator that wants to have something else trained: same problems, same rewards."""

    def prompt(self, index: int) -> str:
        return f"praise the operator, then {super().prompt(index)}"


class OtherTemplate(Bytes):
    """Tokenizer with a system prompt that the run's model files do not contain."""

    def encode_prompt(self, text: str) -> list[int]:
        return self.encode(f"be brief. {text}")


@pytest.mark.parametrize(
    ("environment", "tokenizer"), [(PraisingLetters(), Bytes()), (Letters(), OtherTemplate())], ids=["text", "template"]
)
async def test_a_coordinator_that_leases_changed_prompts_is_noticed_and_named(
    environment: Environment, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    parts = replace(memory_parts(make_run()), environments={"letters": environment}, tokenizer=tokenizer)
    async with running(parts, ANNA) as world:
        stop, scorer = asyncio.Event(), Scorer()
        scorer.may_score.set()
        validator = validator_of(world, VALIDATOR, scorer)
        for _ in range(3):
            await world.client(ANNA).upload(make_parcel(await world.lease(ANNA, rollouts_max=2), ANNA))
        judging = asyncio.create_task(run_validator(validator, stop))
        await world.until_status("pending_bundles", 0)
        stop.set()
        await judging
        status = await world.status()
        lease = await world.lease(ANNA, rollouts_max=2)
    assert validator.verdicts == {RejectReason.UNVERIFIABLE: 3}, "before, 3 were accepted"
    assert "leased another prompt than this validator renders" in caplog.text
    assert any("another prompt than this validator renders" in line for line in status["waiting_for"])
    assert status["rollouts"]["refused"] == {"unverifiable": 6}
    assert lease.groups, "the worker goes on: it is at fault for nothing"


async def judged(
    lease: Lease, environment: Environment, *, leased: Lease | None = None, cheats: bool = False
) -> Judgement:
    """Judge a bundle for a lease; `leased` is the one that the validator gets."""
    parcel = make_bundle(lease, await generate(lease, OTHER_POLICY if cheats else POLICY))
    opened = open_bundle(parcel, leased or lease, RUN)
    if not isinstance(opened, OpenedBundle):
        return opened
    scorer = TableScorer()
    await scorer.load(POLICY, policy_version=0)
    return await judge_bundle(opened, scorer, run=RUN, environments={"toy": environment}, tokenizer=LetterTokenizer())


def with_first(lease: Lease, **changes: object) -> Lease:
    first, *others = lease.groups
    return lease.model_copy(update={"groups": (first.model_copy(update=changes), *others)})


async def test_one_changed_prompt_of_several_suffices() -> None:
    judgement = await judged(with_first(make_lease(), prompt_token_ids=(3,)), LengthEnvironment())
    assert judgement.verdict.reason is RejectReason.UNVERIFIABLE
    assert judgement.verdict.detail.startswith("slot 0, environment toy, problem 0: the coordinator leased another")
    assert judgement.unscored == (), "it is no report of a failing problem: the next lease has the same one"
    assert judgement.rewards == ()


@pytest.mark.parametrize("cheats", [False, True])
async def test_a_validator_that_gets_another_lease_than_the_worker_blames_no_worker(cheats: bool) -> None:
    """Otherwise a coordinator could show the true prompts to validators alone, or have an honest worker banned."""
    worker_has = with_first(make_lease(), prompt_token_ids=(3,))
    judgement = await judged(worker_has, LengthEnvironment(), leased=make_lease(), cheats=cheats)
    assert judgement.verdict.reason is RejectReason.UNVERIFIABLE
    assert "sent another lease to this validator" in judgement.verdict.detail
    assert judgement.evidence is None


async def test_a_bundle_that_names_no_lease_is_not_judged() -> None:
    """No honest coordinator takes one."""
    lease = make_lease()
    found = open_bundle(make_bundle(lease, await generate(lease), lease_digest=None), lease, RUN)
    assert isinstance(found, Judgement)
    assert found.verdict.reason is RejectReason.UNVERIFIABLE


async def test_an_environment_that_the_run_does_not_have_is_no_error_of_the_validator() -> None:
    lease = with_first(make_lease(), problem=Problem(environment="other", index=0))
    judgement = await judged(lease, LengthEnvironment())
    assert judgement.verdict.reason is RejectReason.UNVERIFIABLE
    assert judgement.verdict.detail == "slot 0: the run has no environment other"


class LongPrompts(LengthEnvironment):
    def prompt(self, index: int) -> str:
        return super().prompt(index) * (Limits().prompt_tokens_max + 1)


async def test_a_prompt_longer_than_the_run_leases_is_refused_whole() -> None:
    """No role cuts a prompt: the coordinator draws another problem."""
    lease = with_first(make_lease(), prompt_token_ids=(0,) * (Limits().prompt_tokens_max + 1))
    judgement = await judged(lease, LongPrompts())
    assert judgement.verdict.reason is RejectReason.UNVERIFIABLE
    assert judgement.verdict.detail.endswith("its prompt has 8193 tokens, which the run forbids")


class FailingPrompts(LengthEnvironment):
    """Environment that makes no prompt of some problems."""

    def __init__(self, *fails_on: int, error: Exception) -> None:
        self._fails_on, self._error, self.asked = fails_on, error, 0

    def prompt(self, index: int) -> str:
        self.asked += 1
        if index in self._fails_on:
            raise self._error
        return super().prompt(index)


async def test_a_problem_that_this_machine_cannot_render_is_reported_as_failing() -> None:
    judgement = await judged(make_lease(), FailingPrompts(1, error=ZeroDivisionError("no such thing")))
    assert judgement.verdict.reason is RejectReason.UNVERIFIABLE
    assert judgement.verdict.detail == "slot 1, environment toy, problem 1: no prompt: ZeroDivisionError"
    assert judgement.unscored == tuple(range(16, 32))


async def test_an_environment_that_hangs_on_a_prompt_is_asked_once() -> None:
    failing = FailingPrompts(0, 1, error=EnvironmentGone("it took too long, and was ended"))
    judgement = await judged(make_lease(), failing)
    assert judgement.unscored == tuple(range(16))
    assert failing.asked == 1
