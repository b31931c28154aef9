"""Batches of a step that is re-executed: each is the one that the manifest leads to, and its rewards and prompts follow."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from tests.node.batch_coordinator import COORDINATOR, GROUPS, STRANGER, write_model
from tests.node.replay_world import PublishedRun, replayable_run, replayed, signing_again, trained, with_batches
from tests.node.trainer_world import CONFIG, EchoEnvironment
from tests.time_world import VirtualClock

from prime_node.adapters.models.hf_tokenizer import HfTokenizer
from prime_node.envs.source import prompt_of
from prime_node.ports.train_samples import Group
from prime_node.replay.checks import BatchChecks, check_batches, reward_faults
from prime_node.replay.finding import ReplayOutcome, ReplayReport, Unfaithful
from prime_node.replay.material import Material
from prime_node.training_data.feed import Feed
from prime_protocol.envelope import PayloadType, parse_json, seal
from prime_protocol.replies import TrainBatch
from prime_protocol.requests import BatchRequest
from prime_protocol.rollout import Completion, FinishReason


@pytest.fixture(scope="module")
def parted(tmp_path_factory: pytest.TempPathFactory) -> PublishedRun:
    """One step of three batches with one group each."""
    config = CONFIG.model_copy(update={"sft": CONFIG.sft.model_copy(update={"steps_max": 0})})
    published = replayable_run(config, max_steps=1, trigger_parameter_sync_step=GROUPS)
    return asyncio.run(trained(tmp_path_factory.mktemp("parted"), published, config))


def batches_of(published: PublishedRun) -> list[TrainBatch]:
    return [parse_json(published.batches[0, part].payload, TrainBatch) for part in range(GROUPS)]


async def take(published: PublishedRun, part: int) -> None:
    assert published.run.spec.replay is not None
    await Material(published, published.run, published.run.spec.replay).batch(
        BatchRequest(step=0, part=part, durable_step=0)
    )


async def test_a_step_of_several_batches_is_exact(tmp_path: Path, parted: PublishedRun) -> None:
    report = await replayed(parted, tmp_path, [0])
    assert report.outcome is ReplayOutcome.EXACT, report


async def test_an_earlier_batch_of_a_step_is_the_one_that_the_last_one_follows(parted: PublishedRun) -> None:
    """Before, only the last batch was compared with the manifest, so an operator could exchange all others."""
    first, second, third = batches_of(parted)
    (group,) = first.groups
    other = first.model_copy(update={"groups": (group.model_copy(update={"rewards": (1.0, 0.0, 0.0, 0.0)}),)})
    exchanged = signing_again(parted, 1)
    exchanged.batches = parted.batches | {(0, 0): seal(other, PayloadType.BATCH, COORDINATOR)}
    for part in range(GROUPS):
        with pytest.raises(Unfaithful, match="the one after batch 0 of step 0 follows another batch"):
            await take(exchanged, part)
    for changed in (
        [first, second.model_copy(update={"previous": None}), third],
        [first.model_copy(update={"previous": "0" * 64}), second, third],
    ):
        with pytest.raises(Unfaithful, match=r"follows another batch|names one before it"):
            await take(with_batches(parted, 0, changed), 0)


async def test_no_slot_is_in_two_batches_of_a_step(parted: PublishedRun) -> None:
    first, second, third = batches_of(parted)
    twice = with_batches(parted, 0, [first, second.model_copy(update={"groups": first.groups}), third])
    with pytest.raises(Unfaithful, match="a slot in two of its batches"):
        await take(twice, 0)


async def test_a_batch_that_the_coordinator_has_not_signed_is_a_fault_of_the_run(
    tmp_path: Path, parted: PublishedRun
) -> None:
    """Before, it ended `replay --batches-only` as if the run promised no re-execution."""
    foreign = with_batches(parted, 0, batches_of(parted), key=STRANGER)
    assert foreign.run.spec.replay is not None
    material = Material(foreign, foreign.run, foreign.run.spec.replay)
    feed = Feed(material, foreign.run, clock=VirtualClock(), kept=True)
    checks = BatchChecks(material, None, HfTokenizer(write_model(tmp_path)), None)
    with pytest.raises(Unfaithful, match="step 0"):
        await check_batches(checks, feed, [0], ReplayReport(foreign.run.digest, pinned=True), lambda finding: None)
    await feed.close()


async def test_rewards_are_those_of_the_problem_that_the_prompt_asks(tmp_path: Path, parted: PublishedRun) -> None:
    """Before, a group could state a problem whose answer its completions give, under the prompt of another one."""
    tokenizer, echo = HfTokenizer(write_model(tmp_path)), EchoEnvironment()
    answer = Completion((*tokenizer.encode(echo.answer(3)), tokenizer.stop_token_id), (0.0, 0.0), FinishReason.STOP)
    group = Group(
        slot=0,
        prompt_token_ids=prompt_of(echo, 3, tokenizer),
        completions=(answer,),
        rewards=(1.0,),
        policy_versions=(0,),
        worker="w",
        environment="echo",
        problem_index=3,
    )
    spec = parted.run.spec
    assert await reward_faults([group], {"echo": echo}, tokenizer, spec) == (1, [])
    (fault,) = (await reward_faults([replace(group, rewards=(0.5,))], {"echo": echo}, tokenizer, spec))[1]
    assert "its reward is 0.5 in the batch, 1 here" in fault
    elsewhere = replace(group, prompt_token_ids=prompt_of(echo, 4, tokenizer))
    assert await reward_faults([elsewhere], {"echo": echo}, tokenizer, spec) == (
        0,
        ["slot 0: its prompt is not that of problem 3"],
    )
