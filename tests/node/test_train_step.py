"""A step of several batches: optimizer steps, the proximal policy, publication, and the cost of a kill between two batches."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.node.batch_coordinator import GROUPS, ROLLOUTS, BatchCoordinator, Fuse, KilledError, make_run
from tests.node.trainer_world import CONFIG, make_trainer, rows

from prime_node.ports.train_backend import Loss, StepStats
from prime_node.ports.train_samples import TrainSample
from prime_node.trainer.loop import run_trainer
from prime_node.trainer.recipe import Recipe
from prime_protocol.errors import LocalError

STEPS = 2
SEVERAL: dict[str, Any] = {"trigger_parameter_sync_step": GROUPS}


def coordinator() -> BatchCoordinator:
    return BatchCoordinator(make_run(max_steps=STEPS, async_level=2, **SEVERAL))


async def test_a_step_of_several_batches_is_as_many_optimizer_steps_and_one_policy(tmp_path: Path) -> None:
    world = coordinator()
    assert await run_trainer(make_trainer(tmp_path, world), asyncio.Event())
    assert len(world.manifests) == STEPS + 1
    assert world.manifests[-1].manifest.produced_by.optimizer_steps == CONFIG.sft.steps_max + STEPS * (GROUPS - 1)
    trained = rows(tmp_path, "reward_mean")
    assert [row["num_rollouts"] for row in trained] == [GROUPS * ROLLOUTS] * STEPS
    assert [row["num_flat_groups"] for row in trained] == [1] * STEPS


async def test_killed_between_two_batches_it_continues_bit_exactly(tmp_path: Path) -> None:
    whole, cut = coordinator(), coordinator()
    await run_trainer(make_trainer(tmp_path / "whole", whole), asyncio.Event())
    fuse = Fuse("after train_step", CONFIG.sft.steps_max + GROUPS)  # within the second step
    with pytest.raises(KilledError):
        await run_trainer(make_trainer(tmp_path / "cut", cut, fuse=fuse), asyncio.Event())
    await run_trainer(make_trainer(tmp_path / "cut", cut), asyncio.Event())
    assert cut.roots == whole.roots


async def test_stopped_between_two_batches_it_saves_nothing_that_is_half_a_step(tmp_path: Path) -> None:
    whole, cut, stop = coordinator(), coordinator(), asyncio.Event()
    await run_trainer(make_trainer(tmp_path / "whole", whole), asyncio.Event())
    trainer = make_trainer(tmp_path / "cut", cut)
    feed_take = trainer.feed.take

    async def take(step: int, part: int = 0, **options: Any) -> object:
        if (step, part) == (1, 1):
            stop.set()
            await asyncio.Event().wait()
        return await feed_take(step, part, **options)

    trainer.feed.take = take  # type: ignore[method-assign,assignment]
    assert not await run_trainer(trainer, stop)
    await run_trainer(make_trainer(tmp_path / "cut", cut), asyncio.Event())
    assert cut.roots == whole.roots


@pytest.mark.parametrize("setting", ["compute_prox_log_prob", "use_rollout_log_probs"])
async def test_each_batch_of_a_step_is_given_the_proximal_policy_that_was_asked_for(
    tmp_path: Path, setting: str
) -> None:
    world = coordinator()
    trainer = make_trainer(tmp_path, world, config=CONFIG.model_copy(update={setting: True}))
    seen: list[Sequence[TrainSample]] = []
    first: list[list[list[float]]] = []
    inner = trainer.backend.inner  # type: ignore[attr-defined]
    train = inner.train_step

    def watch(samples: Sequence[TrainSample], loss: Loss, *, lr: float) -> StepStats:
        if samples and samples[0].prox_logprobs:
            seen.append(samples)
            first.append(inner.logprobs(samples))
        return train(samples, loss, lr=lr)

    inner.train_step = watch
    assert await run_trainer(trainer, asyncio.Event())
    assert len(seen) == STEPS * (GROUPS - 1), "the flat group has nothing to train"
    moved = 0
    for samples, current in zip(seen, first, strict=True):
        for sample, at_hand in zip(samples, current, strict=True):
            if setting == "use_rollout_log_probs":
                assert sample.prox_logprobs == sample.inference_logprobs
            else:
                moved += sample.prox_logprobs != tuple(at_hand)
    assert setting == "use_rollout_log_probs" or 0 < moved < sum(map(len, seen)), (
        "later batches keep the first weights'"
    )


def test_two_proximal_policies_are_one_too_many() -> None:
    config = CONFIG.model_copy(update={"compute_prox_log_prob": True, "use_rollout_log_probs": True})
    with pytest.raises(LocalError, match="set one of them"):
        Recipe.of(config, max_steps=1, completion_tokens_max=1, vocab_size=8)
