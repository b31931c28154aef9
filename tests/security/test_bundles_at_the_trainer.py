"""Accepted bundles that break the run's bounds, as one wrong validator accepts them: the trainer continues without them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.builder import build_header, build_lease
from tests.node import coordinator_world
from tests.node.batch_coordinator import (
    COORDINATOR,
    ROLLOUTS,
    STOP_TOKEN,
    VALIDATOR,
    WORKER,
    BatchCoordinator,
    Fuse,
    KilledError,
    make_run,
)
from tests.node.trainer_world import make_trainer, rows
from tests.node.validator_world import RUN as JUDGED_RUN
from tests.node.validator_world import LengthEnvironment, LetterTokenizer, generate, make_bundle, make_lease

from prime_node.ports.train_samples import Group
from prime_node.trainer.config import SftConfig
from prime_node.trainer.loop import run_trainer
from prime_node.training_data.bundles import groups_of, open_trained_bundle, with_logprobs
from prime_node.validator.judge import OpenedBundle, open_bundle, reward_bundle
from prime_protocol.assignment import GroupAssignment, Lease, Problem
from prime_protocol.digest import digest_of
from prime_protocol.envelope import Envelope, PayloadType, parse_json, seal
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.limits import REWARD_MAX
from prime_protocol.parcel import pack_logprobs, pack_parcel
from prime_protocol.replies import BatchGroup, NotYet, TrainBatch
from prime_protocol.requests import BatchRequest, CheckResultRequest
from prime_protocol.rollout import Completion, FinishReason, Rollouts, pack_body, rollouts_for
from prime_protocol.verdict import RejectReason, Verdict

RUN = make_run()
PROMPT = (258, 97, 259)
REWARDS = (0.0, 1.0, 0.0, 1.0)
GOOD = Completion((97, STOP_TOKEN), (-0.5, -0.5), FinishReason.STOP)


def lease() -> Lease:
    """Slots 0 and 1, four rollouts each."""
    groups = [
        GroupAssignment(
            slot=slot,
            problem=Problem(environment="echo", index=slot),
            prompt_token_ids=PROMPT,
            seeds=tuple(range(10 * slot, 10 * slot + ROLLOUTS)),
        )
        for slot in range(2)
    ]
    return build_lease(RUN, WORKER, groups)


def honest() -> Rollouts:
    return rollouts_for(lease(), [GOOD] * 2 * ROLLOUTS)


def with_second(completion: Completion) -> Rollouts:
    """One completion of the first group is another."""
    return rollouts_for(lease(), [GOOD, completion, *[GOOD] * (2 * ROLLOUTS - 2)])


def in_turns(numbers: Sequence[int], rows: Sequence[tuple[int, int]], context: Sequence[int] = ()) -> Rollouts:
    """Each completion is a turn: the number of its rollout, and its row (kept, new)."""
    slots = np.array([number // ROLLOUTS for number in numbers], np.int64)
    size = len(numbers)
    return replace(
        honest(),
        token_ids_T=np.array([97, STOP_TOKEN] * size, np.int32),
        logprobs_T=np.full(2 * size, -0.5, np.float32),
        lengths_N=np.full(size, 2, np.int32),
        finish_N=np.full(size, FinishReason.STOP, np.uint8),
        slots_N=slots,
        seeds_N=np.zeros(size, np.int64),
        spans_S3=np.array([(index, 0, 2) for index in range(size)], np.int32),
        turns_N3=np.array([(number, *row) for number, row in zip(numbers, rows, strict=True)], np.int32),
        context_P=np.array(context, np.int32) if context else None,
    )


def parcel_of(rollouts: Rollouts | bytes, **changes: Any) -> bytes:
    """Return a bundle, with `changes` to its header."""
    body, size = (rollouts, 1_000) if isinstance(rollouts, bytes) else pack_body(rollouts)
    return pack_parcel(build_header(lease(), body, size, **changes), body, PayloadType.ROLLOUT, WORKER)


def usable(
    rollouts: Rollouts | bytes,
    rewards: Sequence[tuple[float, ...]] = (REWARDS, REWARDS),
    logprobs: int | None = None,
    environments: Sequence[str] = ("echo", "echo"),
    trained_at: int = 0,
    **header: Any,
) -> list[Group]:
    """Return the groups that the trainer finds in an accepted bundle; a validator computed `logprobs` logprobs."""
    parcel = parcel_of(rollouts, **header)
    digest = digest_of(parcel)
    bundle = open_trained_bundle(parcel, digest=digest, worker=WORKER.key_id, run=RUN)
    if logprobs is not None:
        values = pack_logprobs(np.full(logprobs, -1.0, np.float32), run=RUN.digest, bundle=digest, key=VALIDATOR)
        bundle = with_logprobs(bundle, values, digest=digest, logprobs=digest_of(values), run=RUN)
    entries = tuple(
        BatchGroup(
            slot=slot,
            problem=Problem(environment=environments[slot], index=slot),
            prompt_token_ids=PROMPT,
            worker=WORKER.key_id,
            policy_version=0,
            bundle=digest,
            first=slot * ROLLOUTS,
            rewards=each,
        )
        for slot, each in enumerate(rewards)
    )
    return groups_of(TrainBatch(run=RUN.digest, step=trained_at, groups=entries), {digest: bundle}, RUN)


def test_an_honest_bundle_is_used_whole() -> None:
    assert [group.slot for group in usable(honest(), logprobs=honest().num_tokens)] == [0, 1]


FAULTS: dict[str, Callable[[], Rollouts]] = {
    "a token id is not below 264": lambda: with_second(replace(GOOD, token_ids=(2**31 - 1, STOP_TOKEN))),
    "longer than the run's limit": lambda: with_second(Completion((97,) * 200, (-0.5,) * 200, FinishReason.LENGTH)),
    "does not fit its completion's last token": lambda: with_second(replace(GOOD, finish=FinishReason.LENGTH)),
    "continues after a stop token": lambda: with_second(
        Completion((STOP_TOKEN, 97, 97, STOP_TOKEN), (-0.5,) * 4, FinishReason.STOP)
    ),
    "of other policies than the leased one": lambda: with_second(replace(GOOD, spans=((2**31 - 1, 2),))),
    "of another slot": lambda: replace(honest(), slots_N=np.array([0, 5, 0, 0, 1, 1, 1, 1])),
    "1001 turns, environment echo has 1": lambda: in_turns(
        [0] * 1_001 + list(range(1, 8)), [(3, 0)] + [(2 * place + 3, 0) for place in range(1, 1_001)] + [(3, 0)] * 7
    ),
    "keeps 1000 of 3 tokens": lambda: in_turns(range(8), [(1_000, 0)] + [(3, 0)] * 7),
    "a prompt of 0 tokens": lambda: in_turns(range(8), [(0, 0)] + [(3, 0)] * 7),
    "a prompt differs": lambda: in_turns(range(8), [(2, 0)] + [(3, 0)] * 7),
    "a token id is not below": lambda: in_turns(range(8), [(3, 1)] + [(3, 0)] * 7, [10**6]),
}


@pytest.mark.parametrize("why", list(FAULTS))
def test_the_group_that_breaks_a_bound_is_left_out_and_the_others_stay(
    why: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert [group.slot for group in usable(FAULTS[why]())] == [1]
    assert why in caplog.text
    assert f"step 0 trains without slot 0 of worker {WORKER.key_id}" in caplog.text


@pytest.mark.parametrize("reward", [1e39, -1e308, REWARD_MAX * 1.001])
def test_a_group_with_an_unbounded_reward_is_left_out(reward: float, caplog: pytest.LogCaptureFixture) -> None:
    assert len(usable(honest(), (REWARDS, (0.0, REWARD_MAX, -REWARD_MAX, 0.0)))) == 2
    assert [group.slot for group in usable(honest(), (REWARDS, (0.0, reward, 0.0, 0.0)))] == [0]
    assert "a reward is above 1e+06 in magnitude" in caplog.text


def test_a_group_of_an_environment_that_the_run_does_not_have_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    assert [group.slot for group in usable(honest(), environments=("other", "echo"))] == [1]
    assert [group.slot for group in usable(FAULTS["keeps 1000 of 3 tokens"](), environments=("other", "echo"))] == [1]
    assert "the run has no environment other" in caplog.text


def test_damaged_logprobs_of_a_validator_never_let_the_claimed_ones_be_trained() -> None:
    parcel = parcel_of(honest())
    digest = digest_of(parcel)
    bundle = open_trained_bundle(parcel, digest=digest, worker=WORKER.key_id, run=RUN)
    assert bundle.fault == ""
    damaged = with_logprobs(bundle, b"other bytes", digest=digest, logprobs=digest_of(b"bytes"), run=RUN)
    assert "its logprobs are damaged" in damaged.fault


def test_a_body_that_cannot_be_read_and_a_wrong_number_of_logprobs_cost_their_own_groups_only() -> None:
    assert usable(b"no tensors") == []
    assert usable(honest(), logprobs=honest().num_tokens - 1) == []


@pytest.mark.parametrize("change", [{"step": 1}, {"policy_version": 1}, {"run": "0" * 64}])
def test_a_bundle_whose_header_names_something_else_is_left_out(
    change: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Before, it ended the trainer at each start."""
    assert usable(honest(), **change) == []
    assert "its header names another run, worker, step or policy than the batch" in caplog.text


def test_a_stale_bundle_that_a_validator_called_fresh_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """Before, it ended the trainer at each start."""
    assert usable(honest(), trained_at=9) == []
    assert "policy 0 is stale for step 9" in caplog.text


class WrongValidator(BatchCoordinator):
    """Its validator accepted unbounded rewards: of one group in step 1, of all groups in step 2."""

    async def batch(self, request: BatchRequest) -> Envelope | NotYet:
        answer = await super().batch(request)
        if isinstance(answer, NotYet) or request.step not in (1, 2):
            return answer
        batch = parse_json(answer.payload, TrainBatch)
        spoilt = len(batch.groups) if request.step == 2 else 1
        groups = [
            group.model_copy(update={"rewards": (1e39,) * ROLLOUTS}) if place < spoilt else group
            for place, group in enumerate(batch.groups)
        ]
        return seal(batch.model_copy(update={"groups": tuple(groups)}), PayloadType.BATCH, COORDINATOR)


@pytest.mark.parametrize("minis", [1, 3])
async def test_a_fixed_batch_that_lost_groups_trains_and_a_restart_makes_the_same_policies(
    tmp_path: Path, minis: int
) -> None:
    def world() -> WrongValidator:
        return WrongValidator(make_run(max_steps=4, require_batches=minis))

    whole, cut = world(), world()
    assert await run_trainer(make_trainer(tmp_path / "whole", whole), asyncio.Event())
    trained = rows(tmp_path / "whole", "step_seconds")
    assert [row["num_groups_left_out"] for row in trained] == [0, 1, 3, 0]
    assert [row["num_groups"] for row in trained] == [3, 2, 0, 3]
    fuse = Fuse("before publish", 4)
    with pytest.raises(KilledError):
        await run_trainer(make_trainer(tmp_path / "cut", cut, fuse=fuse), asyncio.Event())
    assert await run_trainer(make_trainer(tmp_path / "cut", cut), asyncio.Event())
    assert cut.roots == whole.roots


class UnboundedEnvironment(LengthEnvironment):
    """Its reward is any float."""

    def __init__(self, reward: float) -> None:
        self._reward = reward

    def score(self, index: int, completion: str, *, finished: bool) -> float:
        return self._reward


@pytest.mark.parametrize(("reward", "is_scored"), [(1e39, False), (-1e308, False), (-REWARD_MAX, True)])
async def test_a_validator_does_not_score_with_an_unbounded_reward(reward: float, is_scored: bool) -> None:
    judged = make_lease()
    opened = open_bundle(make_bundle(judged, await generate(judged)), judged, JUDGED_RUN)
    assert isinstance(opened, OpenedBundle)
    judgement = await reward_bundle(
        opened, run=JUDGED_RUN, environments={"toy": UnboundedEnvironment(reward)}, tokenizer=LetterTokenizer()
    )
    assert judgement.verdict.accepted == is_scored
    assert judgement.verdict.reason == (None if is_scored else RejectReason.UNVERIFIABLE)


async def test_the_coordinator_refuses_a_verdict_with_an_unbounded_reward() -> None:
    async with coordinator_world.running(coordinator_world.memory_parts(coordinator_world.make_run())) as world:
        await world.publish()
        await world.join(coordinator_world.ANNA)
        leased = await world.lease(coordinator_world.ANNA, rollouts_max=2)
        await world.client(coordinator_world.ANNA).upload(coordinator_world.make_parcel(leased, coordinator_world.ANNA))
        bundle = (await world.take_task(coordinator_world.VALIDATOR)).bundle
        result = CheckResultRequest(bundle=bundle, verdict=Verdict.accept(), rewards=(1e39, 0.0), num_tokens=2)
        with pytest.raises(RemoteError, match="a reward is above 1e\\+06"):
            await world.client(coordinator_world.VALIDATOR).check_result(result)
        await world.client(coordinator_world.VALIDATOR).check_result(
            result.model_copy(update={"rewards": (REWARD_MAX, 0.0)})
        )


async def test_intake_refuses_a_header_that_does_not_fit_its_lease() -> None:
    """Before, a validator alone compared them."""
    anna = coordinator_world.ANNA
    async with coordinator_world.running(coordinator_world.memory_parts(coordinator_world.make_run())) as world:
        await world.publish()
        await world.join(anna)
        leased = await world.lease(anna, rollouts_max=2)
        changes: list[dict[str, Any]] = [{"step": 1}, {"policy_digest": "ab" * 32}, {"num_rollouts": 1}]
        for change in changes:
            parcel = coordinator_world.make_parcel(leased, anna, **change)
            with pytest.raises(
                RemoteError, match="another step, policy or number of rollouts than its lease"
            ) as raised:
                await world.client(anna).upload(parcel)
            assert raised.value.code is ErrorCode.WRONG_TYPE
        assert (await world.client(anna).upload(coordinator_world.make_parcel(leased, anna))).verdict is None


@pytest.mark.parametrize("versions", [((9, 9),), ((1, 0),), ((0, 1),)])
async def test_the_coordinator_refuses_a_verdict_with_policies_that_cannot_be_in_the_bundle(
    versions: tuple[tuple[int, int], ...],
) -> None:
    anna, validator = coordinator_world.ANNA, coordinator_world.VALIDATOR
    async with coordinator_world.running(coordinator_world.memory_parts(coordinator_world.make_run())) as world:
        await world.publish()
        await world.join(anna)
        leased = await world.lease(anna, rollouts_max=2)
        await world.client(anna).upload(coordinator_world.make_parcel(leased, anna))
        bundle = (await world.take_task(validator)).bundle
        result = CheckResultRequest(
            bundle=bundle, verdict=Verdict.accept(), rewards=(1.0, 0.0), num_tokens=6, versions=versions
        )
        with pytest.raises(RemoteError, match="versions name policies that cannot be in the bundle: 0 to 0 can"):
            await world.client(validator).check_result(result)
        await world.client(validator).check_result(result.model_copy(update={"versions": ((0, 0),)}))


async def test_samples_that_are_longer_than_the_model_s_positions_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Before, one of them ended the trainer at each start."""
    trainer = make_trainer(tmp_path, BatchCoordinator(make_run(max_steps=1)))
    longest = trainer.backend.sequence_tokens_max
    trainer.backend.inner.sequence_tokens_max = len(PROMPT) + 1  # type: ignore[attr-defined]
    trainer.config = trainer.config.model_copy(update={"sft": SftConfig()})
    assert longest > trainer.backend.sequence_tokens_max
    assert await run_trainer(trainer, asyncio.Event())
    assert any("samples are longer than the model's" in line for line in caplog.messages)
