"""Schedules through the real daemon: batches of a step, stale groups, failing environments, and what a run waits for."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Any

import pytest
from tests.node.coordinator_world import (
    ANNA,
    BEN,
    COORDINATOR,
    TRAINER,
    Letters,
    World,
    make_manifest,
    make_parcel,
    make_run,
    memory_parts,
    running,
)

from prime_protocol.envelope import Envelope, PayloadType, parse_json
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.replies import NotYet, TrainBatch
from prime_protocol.requests import BatchRequest, LeaseRequest
from prime_protocol.verdict import RejectReason

STREAM = {"preset": "verl_stream", "trigger_parameter_sync_step": 2}


def stream_run(**changes: Any) -> Any:
    return make_run(async_level=0, schedule=STREAM | changes, groups_per_step=4)


async def ask(world: World, step: int, part: int) -> TrainBatch | NotYet:
    answer = await world.client(TRAINER).batch(BatchRequest(step=step, durable_step=step, part=part))
    if not isinstance(answer, Envelope):
        return answer
    world.batch = answer.digest
    return parse_json(answer.verify(PayloadType.BATCH, trusted=(COORDINATOR.key_id,)), TrainBatch)


async def finish(world: World, key: Any, **wanted: Any) -> tuple[int, ...]:
    lease = await world.lease(key, **wanted)
    await world.client(key).upload(make_parcel(lease, key))
    await world.judge()
    return tuple(group.slot for group in lease.groups)


async def test_short_groups_train_while_long_ones_are_generated() -> None:
    async with running(memory_parts(stream_run()), ANNA, BEN) as world:
        slow = await world.lease(ANNA, rollouts_max=4)
        assert isinstance(await ask(world, 0, 0), NotYet)
        done = await finish(world, BEN, rollouts_max=4)
        first = await ask(world, 0, 0)
        assert isinstance(first, TrainBatch)
        first_digest = world.batch
        assert tuple(group.slot for group in first.groups) == done == (2, 3)
        assert isinstance(await ask(world, 0, 1), NotYet)
        await world.client(ANNA).upload(make_parcel(slow, ANNA))
        await world.judge()
        second = await ask(world, 0, 1)
        assert isinstance(second, TrainBatch)
        assert (second.part, second.previous) == (1, first_digest)
        assert await ask(world, 0, 0) == first, "the same question gives the same batch"
        with pytest.raises(RemoteError, match="2 batches"):
            await ask(world, 0, 2)


async def test_a_policy_names_the_last_batch_of_its_step() -> None:
    async with running(memory_parts(stream_run()), ANNA) as world:
        while not isinstance(await ask(world, 0, 0), TrainBatch):
            await finish(world, ANNA)
        first = world.batch
        early, _ = make_manifest(world.run, world.head, batch=first)
        with pytest.raises(RemoteError) as refused:
            await world.client(TRAINER).publish(early.envelope)
        assert refused.value.code in (ErrorCode.CHAIN_BROKEN, ErrorCode.NOT_FOUND)
        assert isinstance(await ask(world, 0, 1), TrainBatch)
        world.batch = first
        with pytest.raises(RemoteError, match="another batch"):
            await world.publish()


async def test_groups_that_became_too_old_are_dropped_and_leased_again() -> None:
    schedule = {"preset": "prime_rl_lag1", "max_off_policy_steps": 0, "selection": "ready_first"}
    async with running(memory_parts(make_run(async_level=3, schedule=schedule, groups_per_step=2)), ANNA) as world:
        assert await finish(world, ANNA, rollouts_max=4) == (0, 1)
        assert await finish(world, ANNA, rollouts_max=4) == (2, 3)
        assert isinstance(await ask(world, 0, 0), TrainBatch)
        await world.publish()
        assert isinstance(await ask(world, 1, 0), NotYet), "what policy 0 made for step 1 is too old by now"
        assert await finish(world, ANNA, rollouts_max=4) == (2, 3)
        batch = await ask(world, 1, 0)
        assert isinstance(batch, TrainBatch)
        assert {group.policy_version for group in batch.groups} == {1}


class Moody(Letters):
    """Environment that fails on demand."""

    fails = True

    def prompt(self, index: int) -> str:
        if self.fails:
            raise ConnectionError("the sandbox is away\nand more")
        return super().prompt(index)


async def test_an_environment_that_fails_is_named_and_nothing_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    moody = Moody()
    parts = memory_parts(make_run(groups_per_step=1), watchdog_seconds=0.2)
    async with running(replace(parts, environments={"letters": moody})) as world:
        await world.join(ANNA)
        head = await world.publish()
        request = LeaseRequest(policy_version=0, policy_digest=head.digest, rollouts_max=8)
        answer = await world.client(ANNA).lease(request)
        assert isinstance(answer, NotYet)
        assert "an environment fails to make problems of step 0: ConnectionError" in answer.reason
        assert (await world.status())["waiting_for"][0].startswith("the operator: an environment fails")

        async def barked() -> bool:
            return "the run has made no progress" in caplog.text

        with caplog.at_level(logging.WARNING):
            await asyncio.wait_for(world.until(barked), 5.0)
        assert "Waiting for: the operator: an environment fails" in caplog.text
        moody.fails = False
        assert await finish(world, ANNA) == (0,)
        assert not any("operator" in waits for waits in (await world.status())["waiting_for"])


async def test_bundles_that_no_validator_can_judge_are_reported_to_the_operator() -> None:
    async with running(memory_parts(make_run(groups_per_step=1)), ANNA) as world:
        for _ in range(3):
            lease = await world.lease(ANNA)
            await world.client(ANNA).upload(make_parcel(lease, ANNA))
            await world.judge(reason=RejectReason.UNVERIFIABLE)
        assert (await world.status())["waiting_for"][0].startswith("the operator: 3 bundles in a row")
