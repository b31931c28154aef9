"""The trainer uses the validator's own logprobs of audited bundles, and never a worker's claims."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import numpy as np
import pytest
from tests.node.coordinator_world import (
    ANNA,
    BEN,
    STOP_TOKEN,
    TRAINER,
    VALIDATOR,
    World,
    make_parcel,
    make_run,
    memory_parts,
    refused,
    running,
)
from tests.node.validators_world import Scorer, validator_of

from prime_node.coordinator.api.bundles import LOGPROBS_MAX
from prime_node.ports.train_samples import Group
from prime_node.training_data.feed import Feed
from prime_node.validator.loop import run_validator as run_validator
from prime_protocol.assignment import Lease
from prime_protocol.check_policy import AuditPolicy, CheckPolicy
from prime_protocol.digest import digest_of
from prime_protocol.envelope import PayloadType
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.identity import SigningKey
from prime_protocol.parcel import open_logprobs, pack_logprobs, pack_parcel
from prime_protocol.replies import CheckTask
from prime_protocol.requests import CheckResultRequest
from prime_protocol.rollout import Completion, FinishReason, pack_body, rollouts_for
from prime_protocol.run_spec import PinnedRun
from prime_protocol.verdict import Verdict

TRUE = (-0.1, -0.2, -0.3)
SHADED = (-0.2, -0.3, -0.4)
RUN = make_run(groups_per_step=1, checks=CheckPolicy(logprobs_judged=True))


def shaded_parcel(lease: Lease, key: SigningKey = ANNA) -> bytes:
    """Return a bundle whose logprobs are claimed 0.1 nats too low."""
    completion = Completion((7, 7, STOP_TOKEN), SHADED, FinishReason.STOP)
    packed, size = pack_body(rollouts_for(lease, [completion] * lease.num_rollouts))
    return make_parcel(lease, key, body=packed, decompressed_bytes=size)


async def trained(world: World, run: PinnedRun = RUN) -> Group:
    """Return the trainer's data for step 0."""
    feed = Feed(world.client(TRAINER), run, clock=world.parts.clock)
    batch = await feed.take(0)
    world.batch = batch.digest
    await feed.close()
    return batch.groups[0]


def logprobs_of(group: Group) -> list[tuple[float, ...]]:
    return [tuple(round(value, 5) for value in one.logprobs) for one in group.completions]


async def test_a_real_validator_s_logprobs_take_the_place_of_shaded_ones_and_the_bundle_stays_as_signed() -> None:
    async with running(memory_parts(RUN), ANNA) as world:
        parcel = shaded_parcel(await world.lease(ANNA, rollouts_max=2))
        uploaded = await world.client(ANNA).upload(parcel)
        scorer, stop = Scorer(), asyncio.Event()
        scorer.may_score.set()
        validator = validator_of(world, VALIDATOR, scorer)
        lenient = CheckPolicy(logprobs_judged=True, logprob_error_mean_max=1.0)  # its thresholds let it pass
        validator.run = PinnedRun(RUN.digest, RUN.spec.model_copy(update={"checks": lenient}), RUN.envelope)
        judging = asyncio.create_task(run_validator(validator, stop))
        group = await trained(world)
        stop.set()
        await judging
        stored = await world.parts.bundles.get(uploaded.bundle)
    assert logprobs_of(group) == [TRUE, TRUE]
    assert not group.claimed
    assert stored == parcel


@dataclass
class Judging:
    """Bundle that waits for its verdict."""

    world: World
    task: CheckTask

    async def verdict(self, logprobs: str | None, *, num_tokens: int = 6) -> None:
        await self.world.client(VALIDATOR).check_result(
            CheckResultRequest(
                bundle=self.task.bundle,
                verdict=Verdict.accept(),
                rewards=(1.0, 0.0),
                num_tokens=num_tokens,
                logprobs=logprobs,
            )
        )


async def judging_of(world: World) -> Judging:
    await world.publish()
    await world.join(ANNA, BEN)
    await world.client(ANNA).upload(shaded_parcel(await world.lease(ANNA, rollouts_max=2)))
    return Judging(world, await world.take_task(VALIDATOR))


async def test_an_audited_bundle_is_not_accepted_without_a_validator_s_logprobs_or_with_another_s() -> None:
    async with running(memory_parts(RUN)) as world:
        judging, client = await judging_of(world), world.client(VALIDATOR)
        with pytest.raises(RemoteError, match="has none"):
            await judging.verdict(None)
        with pytest.raises(RemoteError, match="upload them first"):
            await judging.verdict("0" * 64)
        short = await client.put_logprobs(judging.task.bundle, np.full(5, -1.0, np.float32))
        with pytest.raises(RemoteError, match="5 logprobs for a bundle of 6 tokens"):
            await judging.verdict(short)
        await world.client(BEN).upload(shaded_parcel(await world.lease(BEN, rollouts_max=2), BEN))
        other = (await world.take_task(VALIDATOR)).bundle
        foreign = await client.put_logprobs(other, np.full(6, -1.0, np.float32))
        with pytest.raises(RemoteError, match="not " + judging.task.bundle[:12]):
            await judging.verdict(foreign)
        good = await client.put_logprobs(judging.task.bundle, np.array(2 * TRUE, np.float32))
        await judging.verdict(good)
        assert logprobs_of(await trained(world)) == [TRUE, TRUE]


async def test_logprobs_are_taken_from_validators_alone_for_bundles_that_wait() -> None:
    async with running(memory_parts(RUN)) as world:
        judging = await judging_of(world)
        values = np.array(2 * TRUE, np.float32)
        for key, code in ((ANNA, ErrorCode.WRONG_ROLE), (TRAINER, ErrorCode.WRONG_ROLE)):
            parcel = pack_logprobs(values, run=RUN.digest, bundle=judging.task.bundle, key=key)
            await refused(world, code, "/v1/logprobs", parcel)
        good = pack_logprobs(values, run=RUN.digest, bundle=judging.task.bundle, key=VALIDATOR)
        await refused(world, ErrorCode.DIGEST_MISMATCH, "/v1/logprobs", good[:-1] + b"\x00")
        unknown = pack_logprobs(values, run=RUN.digest, bundle="0" * 64, key=VALIDATOR)
        await refused(world, ErrorCode.NOT_FOUND, "/v1/logprobs", unknown)
        stray = pack_logprobs(values, run="0" * 64, bundle=judging.task.bundle, key=VALIDATOR)
        await refused(world, ErrorCode.WRONG_RUN, "/v1/logprobs", stray)
        assert (await world.post("/v1/logprobs", good))[0] == 200


async def test_a_validator_stores_few_logprobs_of_a_bundle_and_none_longer_than_it() -> None:
    """Before, a stolen one filled the disk: each of any number stayed until the coordinator's next start."""
    async with running(memory_parts(RUN)) as world:
        judging, client = await judging_of(world), world.client(VALIDATOR)
        bundle, most = judging.task.bundle, 2 * RUN.spec.sampling.completion_tokens_max
        with pytest.raises(RemoteError, match=f"at most {most} completion tokens"):
            await client.put_logprobs(bundle, np.full(most + 1, -1.0, np.float32))
        values = [np.full(6, -float(number), np.float32) for number in range(LOGPROBS_MAX + 1)]
        stored = [await client.put_logprobs(bundle, one) for one in values[:-1]]
        with pytest.raises(RemoteError, match="are stored already"):
            await client.put_logprobs(bundle, values[-1])
        assert await client.put_logprobs(bundle, values[0]) == stored[0]
        await judging.verdict(stored[-1])
        assert logprobs_of(await trained(world)) == [(-float(LOGPROBS_MAX - 1),) * 3] * 2


def test_a_trainer_takes_only_what_a_validator_signed_for_this_bundle() -> None:
    values = np.array(TRUE, np.float32)
    bounds = {"run": RUN.digest, "keys": RUN.keys, "bytes_max": 2**20, "bundle": "ab" * 32, "num_tokens": 3}
    good = pack_logprobs(values, run=RUN.digest, bundle="ab" * 32, key=VALIDATOR)
    assert open_logprobs(good, **bounds)[1].tolist() == values.tolist()  # type: ignore[arg-type]
    with pytest.raises(RemoteError):
        open_logprobs(pack_logprobs(values, run=RUN.digest, bundle="ab" * 32, key=ANNA), **bounds)  # type: ignore[arg-type]
    for place in range(0, len(good), 7):
        damaged = bytearray(good)
        damaged[place] ^= 1
        with pytest.raises(RemoteError):
            open_logprobs(bytes(damaged), **bounds)  # type: ignore[arg-type]
    header, _ = open_logprobs(good, **bounds)  # type: ignore[arg-type]
    for bad in (np.nan, np.inf, -np.inf, 0.5):
        body = np.array([-0.1, bad, -0.3], "<f4").tobytes()
        forged = header.model_copy(update={"body_digest": digest_of(body)})
        with pytest.raises(RemoteError, match="not finite, or above 0"):
            open_logprobs(pack_parcel(forged, body, PayloadType.LOGPROBS, VALIDATOR), **bounds)  # type: ignore[arg-type]


async def test_an_unaudited_bundle_keeps_its_claims() -> None:
    """A worker's claim counts until an audit detects it: for three bundles of four at the floor."""
    never = AuditPolicy.model_construct(share_min=0.0, newcomer_bundles=0, escrow_bundles=8)
    checks = RUN.spec.checks.model_copy(update={"audits": never})
    run = PinnedRun(RUN.digest, RUN.spec.model_copy(update={"checks": checks}), RUN.envelope)
    async with running(memory_parts(run)) as world:
        judging = await judging_of(world)  # a newcomer's first bundle is audited whatever the policy is
        await judging.verdict(
            await world.client(VALIDATOR).put_logprobs(judging.task.bundle, np.array(2 * TRUE, np.float32))
        )
        await world.client(ANNA).upload(shaded_parcel(await world.lease(ANNA, rollouts_max=2)))
        task = await world.take_task(VALIDATOR)
        assert not task.audit
        await Judging(world, task).verdict(None)
        feed = Feed(world.client(TRAINER), run, clock=world.parts.clock)
        groups = [(await feed.take(step)).groups[0] for step in (0, 1)]
        await feed.close()
    assert [logprobs_of(group) for group in groups] == [[TRUE, TRUE], [SHADED, SHADED]]


async def test_the_logprobs_are_deleted_with_their_step_and_not_before() -> None:
    async with running(memory_parts(RUN)) as world:
        judging = await judging_of(world)
        digest = await world.client(VALIDATOR).put_logprobs(judging.task.bundle, np.array(2 * TRUE, np.float32))
        await judging.verdict(digest)
        await trained(world)
        assert await world.parts.bundles.has(digest)
        await world.publish()
        feed = Feed(world.client(TRAINER), RUN, clock=world.parts.clock)
        taking = asyncio.create_task(feed.take(1, durable_step=1))

        async def is_gone() -> bool:
            return not await world.parts.bundles.has(digest)

        await world.until(is_gone)
        taking.cancel()
        await feed.close()
