"""Rewards that the trainer found itself are those of the first time in steps that it computes again."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.node.batch_coordinator import BatchCoordinator, Fuse, KilledError, make_run
from tests.node.trainer_world import CONFIG, EchoEnvironment, make_trainer

from prime_node.adapters.models.hf_tokenizer import HfTokenizer
from prime_node.trainer.config import TrainerConfig
from prime_node.trainer.further_rewards import KeptRewards, RewardsKey
from prime_node.trainer.lessons import Lessons
from prime_node.trainer.loop import run_trainer
from prime_node.trainer.trainer import Trainer
from prime_protocol.errors import LocalError

STEPS = 8
"""More than a trainer computes while its fourth policy is published: its last step writes a checkpoint."""
REMAX: dict[str, Any] = {"advantage": {"type": "remax"}}
GDPO: dict[str, Any] = {"advantage": {"type": "gdpo", "gdpo_reward_keys": "reward,format"}}


class Moody(EchoEnvironment):
    """Grades that differ from one process to the next, as those of a judge do."""

    def __init__(self, mood: float) -> None:
        self.mood = mood

    def score(self, index: int, completion: str, *, finished: bool) -> float:
        return (len(completion) + index + 8.0 * self.mood) % 7.0 / 7.0

    def parts(self, index: int, completion: str, *, finished: bool) -> Mapping[str, float]:
        return {"format": (len(completion) * (1.0 + self.mood) + index) % 5.0}


def trainer_of(
    folder: Path, coordinator: BatchCoordinator, algorithm: dict[str, Any], *, mood: float, fuse: Fuse | None = None
) -> Trainer:
    """Return a trainer that keeps no checkpoint but the first, so that a later one computes all steps again."""
    changes = {"checkpoint_every": STEPS + 1, "evaluate_every": 0, **algorithm}
    config = TrainerConfig.model_validate(CONFIG.model_dump() | changes)
    trainer = make_trainer(folder, coordinator, config=config, fuse=fuse)
    tokenizer, worlds = HfTokenizer(folder / "model"), {"echo": Moody(mood)}
    trainer.lessons = Lessons(worlds, {"echo": 1.0}, tokenizer, seed=3, problems=20, batch_size=4)
    return trainer


async def killed(folder: Path, algorithm: dict[str, Any], place: str, at: int) -> BatchCoordinator:
    coordinator = BatchCoordinator(make_run(max_steps=STEPS))
    with pytest.raises(KilledError):
        await run_trainer(trainer_of(folder, coordinator, algorithm, mood=0.0, fuse=Fuse(place, at)), asyncio.Event())
    return coordinator


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [REMAX, GDPO], ids=["remax", "gdpo"])
async def test_killed_after_a_publication_it_uses_the_rewards_of_the_first_time(
    tmp_path: Path, algorithm: dict[str, Any]
) -> None:
    coordinator = await killed(tmp_path / "cut", algorithm, "after publish", 4)
    published = coordinator.roots
    assert len(published) == 4
    shutil.copytree(tmp_path / "cut", tmp_path / "lost")
    resumed = trainer_of(tmp_path / "cut", coordinator, algorithm, mood=1.0)
    assert await run_trainer(resumed, asyncio.Event())
    assert coordinator.roots[:4] == published
    assert len(coordinator.roots) == STEPS + 1

    shutil.rmtree(tmp_path / "lost" / "rewards")
    with pytest.raises(LocalError, match="but this trainer computed"):
        await run_trainer(trainer_of(tmp_path / "lost", coordinator, algorithm, mood=1.0), asyncio.Event())


@pytest.mark.slow
async def test_killed_before_the_publication_the_step_has_the_rewards_that_it_began_with(tmp_path: Path) -> None:
    whole = BatchCoordinator(make_run(max_steps=STEPS))
    assert await run_trainer(trainer_of(tmp_path / "whole", whole, REMAX, mood=0.0), asyncio.Event())
    for place, at in (("before train_step", 4), ("after train_step", 4)):  # three of them are supervised
        folder = tmp_path / place
        coordinator = await killed(folder, REMAX, place, at)
        assert len(coordinator.roots) <= 1
        resumed = trainer_of(folder, coordinator, REMAX, mood=1.0, fuse=Fuse("after publish", 2))
        with pytest.raises(KilledError):
            await run_trainer(resumed, asyncio.Event())
        assert coordinator.roots[:2] == whole.roots[:2]


async def test_rewards_of_the_steps_before_the_durable_one_are_deleted(tmp_path: Path) -> None:
    coordinator = BatchCoordinator(make_run(max_steps=STEPS))
    algorithm = {**REMAX, "checkpoint_every": 1, "checkpoints_kept": 1}
    assert await run_trainer(trainer_of(tmp_path, coordinator, algorithm, mood=0.0), asyncio.Event())
    kept = sorted(path.name for path in (tmp_path / "rewards").iterdir())
    assert kept
    assert "00000000-0-greedy-0.json" not in kept
    assert f"{STEPS - 1:08d}-0-greedy-0.json" in kept


KEY = RewardsKey(3, 1, "a" * 64, "greedy-0", (7, 8))


def test_kept_rewards_are_read_as_they_were_to_the_last_bit(tmp_path: Path) -> None:
    rewards = [0.1 + 0.2, None, 1e-300, 5e-324, -0.0]
    KeptRewards(tmp_path).keep(KEY, rewards)
    assert repr(KeptRewards(tmp_path).read(KEY)) == repr(rewards)
    assert KeptRewards(tmp_path).read(RewardsKey(3, 1, "b" * 64, "greedy-0", (7, 8))) is None
    assert KeptRewards(tmp_path).read(RewardsKey(3, 1, "a" * 64, "greedy-0", (7,))) is None
    assert KeptRewards(tmp_path).read(RewardsKey(3, 0, "a" * 64, "greedy-0", (7, 8))) is None


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "a bit": lambda data: data[:-3] + bytes([data[-3] ^ 1]) + data[-2:],
    "the end": lambda data: data[:-1],
    "all of it": lambda data: b"",
    "text that is none": lambda data: b"\xff" * 70,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_not_used_and_an_unfinished_one_is_deleted(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    kept = KeptRewards(tmp_path)
    kept.keep(KEY, [1.0, 0.0])
    path = tmp_path / KEY.file_name
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    (tmp_path / "x.partial").touch()
    with caplog.at_level(logging.WARNING):
        assert KeptRewards(tmp_path).read(KEY) is None
    assert "its rewards are found again" in caplog.text
    assert [one.name for one in tmp_path.iterdir()] == [KEY.file_name]


def test_rewards_that_cannot_be_kept_stop_the_step(tmp_path: Path) -> None:
    kept = KeptRewards(tmp_path / "rewards")
    shutil.rmtree(tmp_path / "rewards")
    with pytest.raises(LocalError, match=KEY.file_name):
        kept.keep(KEY, [1.0])
