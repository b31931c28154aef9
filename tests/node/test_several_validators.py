"""Several validators share the work of one run, and one of them may die over a bundle at any moment."""

from __future__ import annotations

import asyncio

from tests.node.coordinator_world import (
    ANNA,
    VALIDATOR,
    World,
    make_parcel,
    make_run,
    memory_parts,
    running,
)
from tests.node.validators_world import SECOND, Scorer, keys_with, validator_of

from prime_node.broadcast.audit.ledger_audit import audit_ledger
from prime_node.validator.loop import run_validator as run_validator
from prime_protocol.requests import CheckResultRequest
from prime_protocol.verdict import Verdict

RUN = make_run(keys=keys_with(SECOND))


async def upload(world: World, count: int) -> None:
    await world.publish()
    await world.join(ANNA)
    for _ in range(count):
        await world.client(ANNA).upload(make_parcel(await world.lease(ANNA, rollouts_max=2), ANNA))


async def test_what_a_dead_validator_held_is_judged_by_another_one() -> None:
    async with running(memory_parts(RUN, check_seconds=0.5, second_look_share=0.0)) as world:
        await upload(world, 6)
        first, second, stop = Scorer(), Scorer(), asyncio.Event()
        dying = asyncio.create_task(run_validator(validator_of(world, VALIDATOR, first), asyncio.Event()))
        await first.began.wait()  # in the middle of a check, and more is fetched
        second.may_score.set()
        living = validator_of(world, SECOND, second)
        judging = asyncio.create_task(run_validator(living, stop))
        dying.cancel()
        await world.until_status("pending_bundles", 0)
        stop.set()
        await asyncio.gather(dying, judging, return_exceptions=True)
        report = await audit_ledger(world.client(ANNA), world.run)
    assert living.verdicts == {"accepted": 6}, "the dead one's too, and none of them twice"
    assert (report.faults, report.num_entries, report.accounts[ANNA.key_id].rollouts) == ([], 6, 12)


async def test_two_validators_at_once_judge_each_bundle_once() -> None:
    async with running(memory_parts(RUN, second_look_share=0.0)) as world:
        await upload(world, 8)
        stop = asyncio.Event()
        scorers = [Scorer(), Scorer()]
        validators = [
            validator_of(world, key, scorer) for key, scorer in zip((VALIDATOR, SECOND), scorers, strict=True)
        ]
        tasks = [asyncio.create_task(run_validator(validator, stop)) for validator in validators]
        for scorer in scorers:  # both are in the middle of one before either continues
            await scorer.began.wait()
        for scorer in scorers:
            scorer.may_score.set()
        await world.until_status("pending_bundles", 0)
        stop.set()
        await asyncio.gather(*tasks)
        report = await audit_ledger(world.client(ANNA), world.run)
    counts = [validator.verdicts["accepted"] for validator in validators]
    assert sum(counts) == 8
    assert min(counts) >= 1
    assert (report.num_entries, report.accounts[ANNA.key_id].rollouts) == (8, 16)


async def test_a_verdict_that_comes_after_another_validator_s_changes_nothing() -> None:
    async with running(memory_parts(RUN, check_seconds=0.1, second_look_share=0.0)) as world:
        await upload(world, 1)
        late = await world.take_task(VALIDATOR)
        soon = await world.take_task(SECOND)  # once the first one's time was up
        assert soon.bundle == late.bundle
        await world.give_verdict(soon, validator=SECOND)
        rewards = (0.0,) * late.lease.num_rollouts
        await world.client(VALIDATOR).check_result(
            CheckResultRequest(bundle=late.bundle, verdict=Verdict.accept(), rewards=rewards, num_tokens=999)
        )
        report = await audit_ledger(world.client(ANNA), world.run)
    assert (report.num_entries, report.accounts[ANNA.key_id].tokens) == (1, 2)
