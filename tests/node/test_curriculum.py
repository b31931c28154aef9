"""Difficulty pools and online filtering against the real daemon: leased problems, retired ones, and state after a restart."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from tests.node.coordinator_world import (
    ANNA,
    TRAINER,
    VALIDATOR,
    Letters,
    World,
    folder_parts,
    make_parcel,
    make_run,
    memory_parts,
    running,
)

from prime_node.coordinator.assembly import Parts
from prime_node.coordinator.config import CoordinatorConfig
from prime_node.coordinator.curriculum_config import AdvantageRangeGate, CurriculumConfig
from prime_node.coordinator.state.curriculum import EXAMPLES_MAX, Curriculum, Pool, Rating
from prime_protocol.assignment import Problem
from prime_protocol.envelope import Envelope, parse_json
from prime_protocol.errors import LocalError
from prime_protocol.replies import CheckTask, TrainBatch
from prime_protocol.requests import BatchRequest, CheckRequest, CheckResultRequest
from prime_protocol.verdict import Verdict

QUESTIONS = 6
POOLS = {"easy_threshold": 0.9, "hard_threshold": 0.1}


class FewQuestions(Letters):
    """Data set in which indices beyond the end repeat it."""

    def prompt(self, index: int) -> str:
        return f"question {index % QUESTIONS}"


def question(problem: Problem) -> int:
    return problem.index % QUESTIONS


Judge = Callable[[Problem], tuple[float, float]]
"""Return the rewards of a group's two rollouts."""


def mixed(problem: Problem) -> tuple[float, float]:
    return (1.0, 0.0)


def by_question(problem: Problem) -> tuple[float, float]:
    """Answer question 0 always correctly, question 1 never."""
    return {0: (1.0, 1.0), 1: (0.0, 0.0)}.get(question(problem), (1.0, 0.0))


def few(parts: Parts) -> Parts:
    return replace(parts, environments={"letters": FewQuestions()})


async def train_step(world: World, step: int, judge: Judge) -> tuple[TrainBatch, list[Problem]]:
    """Run one whole step. Return its batch and all problems leased for it."""
    asked: list[Problem] = []
    trainer, validator = world.client(TRAINER), world.client(VALIDATOR)
    while True:
        answer = await trainer.batch(BatchRequest(step=step, durable_step=step))
        if isinstance(answer, Envelope):
            world.batch = answer.digest
            return parse_json(answer.payload, TrainBatch), asked
        lease = await world.lease(ANNA)
        asked += [group.problem for group in lease.groups]
        await world.client(ANNA).upload(make_parcel(lease, ANNA))
        task = await validator.check(CheckRequest(policy_versions=(), wait_s=5.0))
        assert isinstance(task, CheckTask)
        assert task.lease.groups == lease.groups  # the check gets the leased problems
        rewards = tuple(reward for group in lease.groups for reward in judge(group.problem))
        await validator.check_result(
            CheckResultRequest(bundle=task.bundle, verdict=Verdict.accept(), rewards=rewards, num_tokens=2)
        )


async def figures(world: World) -> dict[str, float]:
    """Return the curriculum's metrics by prime-rl's names."""
    _, text, _ = await world.get("/metrics")
    lines = [line for line in text.decode().splitlines() if line.startswith("prime_curriculum{")]
    return {line.split('"')[1]: float(line.rsplit(" ", 1)[1]) for line in lines}


async def begin(world: World) -> None:
    await world.join(ANNA)
    await world.publish()


async def test_solved_and_hopeless_problems_are_asked_no_more() -> None:
    rows: list[dict[str, Any]] = []

    class Kept:
        """Recorder that implements observe.Recorder."""

        def record(self, **fields: Any) -> None:
            rows.append(fields)

        def close(self) -> None: ...

    async with running(replace(few(memory_parts(make_run(), curriculum=POOLS)), rows=Kept())) as world:
        await begin(world)
        asked: list[int] = []
        for step in range(12):
            batch, problems = await train_step(world, step, by_question)
            assert [group.problem for group in batch.groups] == problems
            asked += [question(problem) for problem in problems]
            await world.publish()
        assert 0 in asked
        assert 1 in asked
        # Steps ahead are leased one by one here, so a problem comes twice only within the lease that first rated it.
        last = max(asked.index(0), asked.index(1)) // 4 * 4 + 4
        assert not {0, 1} & set(asked[last:])
        assert len(set(asked[last:])) == QUESTIONS - 2
        found = await figures(world)
        assert found["pool/letters/easy"] == found["pool/letters/hard"] == pytest.approx(1 / QUESTIONS)
        assert found["pool/letters/normal"] == pytest.approx(4 / QUESTIONS)
        assert (found["evicted_examples/letters/easy"], found["evicted_examples/letters/hard"]) == (1, 1)
        evicting = [row for row in rows if row.get("evicted_examples/letters/hard") == 1]
        assert evicting
        assert evicting[-1]["pool/letters/hard"] > 0


async def test_groups_without_a_lesson_are_replaced_by_other_problems() -> None:
    settings = {"online_difficulty_filtering": True, "oversampling_factor": 9.0}
    async with running(few(memory_parts(make_run(), curriculum=settings))) as world:
        await begin(world)
        thrown_away = 0
        for step in range(6):
            batch, asked = await train_step(world, step, by_question)
            assert {group.rewards for group in batch.groups} == {(1.0, 0.0)}
            assert not {0, 1} & {question(group.problem) for group in batch.groups}
            assert all(group.problem in asked for group in batch.groups)
            thrown_away += len(asked) - len(batch.groups)
            await world.publish()
        assert thrown_away > 0
        found = await figures(world)
        easy, hard = (found.get(f"filtered_rollouts/letters/{pool}", 0.0) for pool in ("easy", "hard"))
        assert easy + hard == 2 * thrown_away


def test_a_gate_rejects_groups_whose_advantages_all_lie_in_its_range() -> None:
    """prime-rl's default range holds 0 alone: equal rewards of any size, whose mean rounds."""
    gate = AdvantageRangeGate()
    assert not gate.admits((0.1,) * 7)
    assert not gate.admits((0.5,))
    assert gate.admits((0.1, 0.2))
    wide = AdvantageRangeGate(reject_min=-0.1, reject_max=0.2)
    assert not wide.admits((0.5, 0.5, 0.65))
    assert wide.admits((0.5, 0.5, 0.9)), "0.9 - 19/30 is above 0.2"
    with pytest.raises(ValidationError, match="reject_min must not be above reject_max"):
        AdvantageRangeGate(reject_min=0.1)
    config = CurriculumConfig(gates={"signal": gate})
    assert config.is_on
    assert [config.filtered_as(rewards) for rewards in ((0.5, 0.5), (0.0, 0.0), (1.0, 1.0), (0.0, 1.0))] == [
        Pool.NORMAL,
        Pool.HARD,
        Pool.EASY,
        None,
    ]
    assert CurriculumConfig().filtered_as((0.0, 0.0)) is None


async def test_a_group_that_a_gate_rejects_is_replaced() -> None:
    settings = {"gates": {"signal": {"type": "advantage_range"}}, "oversampling_factor": 9.0}
    async with running(few(memory_parts(make_run(), curriculum=settings))) as world:
        await begin(world)
        for step in range(3):
            batch, _ = await train_step(
                world, step, lambda problem: (0.5, 0.5) if question(problem) < 2 else (1.0, 0.0)
            )
            assert {group.rewards for group in batch.groups} == {(1.0, 0.0)}
            await world.publish()
        assert (await figures(world)).get("filtered_rollouts/letters/normal", 0.0) > 0.0


async def test_problems_of_a_pool_of_small_weight_are_drawn_less_often() -> None:
    pools = {"solved": {"threshold": 1.0, "weight": 0.0}, "other": {"threshold": 0.75, "weight": 2.0}}
    settings = {"sampler": {"type": "difficulty_pool", "pools": pools}}
    async with running(few(memory_parts(make_run(), curriculum=settings))) as world:
        await begin(world)
        asked: list[int] = []
        for step in range(12):
            asked += [question(problem) for problem in (await train_step(world, step, by_question))[1]]
            await world.publish()
        last = asked.index(0) // 4 * 4 + 4
        assert 0 not in asked[last:], "a weight of 0"
        assert 1 in asked[last:], "the pool `other` has no lower end"
        found = await figures(world)
        assert found["pool/letters/solved"] == pytest.approx(1 / QUESTIONS)
        assert found["pool/letters/other"] == pytest.approx(5 / QUESTIONS)
        assert not any(name.startswith("evicted_examples") for name in found)


async def test_if_all_problems_have_the_weight_0_any_is_drawn() -> None:
    pools = {"all": {"threshold": 0.75, "weight": 0.0}, "solved": {"threshold": 1.0, "weight": 1.0}}
    settings = {"sampler": {"type": "difficulty_pool", "pools": pools}}
    async with running(few(memory_parts(make_run(), curriculum=settings))) as world:
        await begin(world)
        for step in range(6):
            await train_step(world, step, mixed)
            await world.publish()


async def test_oversampling_has_an_end() -> None:
    settings = {"online_difficulty_filtering": True, "oversampling_factor": 1.5}
    async with running(few(memory_parts(make_run(), curriculum=settings))) as world:
        await begin(world)
        batch, asked = await train_step(world, 0, lambda problem: (0.0, 0.0))
        assert (len(asked), len(batch.groups)) == (6, 4)
        assert {group.rewards for group in batch.groups} == {(0.0, 0.0)}


async def test_the_pools_outlive_a_restart_and_a_share_of_them_is_lifted(tmp_path: Path) -> None:
    run = make_run()
    async with running(few(await folder_parts(run, tmp_path, curriculum=POOLS))) as world:
        await begin(world)
        for step in range(8):
            await train_step(world, step, by_question)
            await world.publish()
        before = await figures(world)
        head = world.head
        written = tmp_path / "evidence" / "easy_examples.jsonl"

        async def is_written() -> bool:
            return written.exists() and bool(written.read_text())

        await world.until(is_written)
    lines = [json.loads(line) for line in written.read_text().splitlines()]
    assert [line["index"] % QUESTIONS for line in lines] == [0]
    assert lines[0].keys() == {"example", "environment", "index", "reward_mean", "step"}

    async with running(few(await folder_parts(run, tmp_path, curriculum=POOLS))) as world:
        assert await figures(world) == before
    async with running(few(await folder_parts(run, tmp_path, curriculum=POOLS | {"easy_fraction": 1.0}))) as world:
        lifted = await figures(world)
        assert (lifted["pool/letters/easy"], lifted["pool/letters/hard"]) == (0.0, before["pool/letters/hard"])
        world.head = head
        await world.join(ANNA)
        asked: list[int] = []
        for step in range(8, 13):
            asked += [question(problem) for problem in (await train_step(world, step, mixed))[1]]
            await world.publish()
        assert 0 in asked
        assert 1 not in asked


async def test_a_new_run_begins_with_the_pools_in_its_folder() -> None:
    parts = few(memory_parts(make_run(), curriculum=POOLS))
    async with running(parts) as world:
        await begin(world)
        for step in range(8):
            await train_step(world, step, by_question)
            await world.publish()

        async def is_written() -> bool:
            try:
                return bool(await parts.private.read("hard_examples.jsonl"))
            except KeyError:
                return False

        await world.until(is_written)
    later = few(memory_parts(make_run(), curriculum=POOLS))
    for name in ("easy_examples.jsonl", "hard_examples.jsonl"):
        await later.private.write(name, await parts.private.read(name))
    async with running(later) as world:
        await begin(world)
        asked = [question(problem) for problem in (await train_step(world, 0, mixed))[1]]
        assert not {0, 1} & set(asked)
    broken = few(memory_parts(make_run(), curriculum=POOLS))
    await broken.private.write("hard_examples.jsonl", b"[]\n")
    with pytest.raises(LocalError, match=r"hard_examples\.jsonl: .* repair or delete this file"):
        async with running(broken):
            pass


async def test_without_a_curriculum_every_slot_keeps_its_first_draw() -> None:
    async with (
        running(few(memory_parts(make_run()))) as world,
        running(few(memory_parts(make_run(), curriculum=POOLS))) as watched,
    ):
        await begin(world)
        await begin(watched)
        plain, _ = await train_step(world, 0, mixed)
        same, _ = await train_step(watched, 0, mixed)
        assert [group.problem for group in plain.groups] == [group.problem for group in same.groups]
        assert await figures(world) == {}


def test_the_memory_of_examples_is_bounded_and_forgets_the_one_not_seen_for_longest() -> None:
    curriculum = Curriculum()
    for number in (*range(EXAMPLES_MAX), 0, EXAMPLES_MAX):
        rating = Rating(0, str(number), "letters", number, 1.0, Pool.EASY)
        curriculum.rate(rating, step=0, num_rollouts=2)
    assert len(curriculum.examples) == EXAMPLES_MAX
    assert "1" not in curriculum.examples
    assert "0" in curriculum.examples
    assert curriculum.counts == {"evicted_examples/letters/easy": EXAMPLES_MAX + 1}


POOLED = {"type": "difficulty_pool"}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"easy_threshold": 0.3, "hard_threshold": 0.4}, "hard_threshold must be below easy_threshold"),
        ({"sampler": POOLED, "easy_threshold": 0.9}, "choose one"),
        ({"sampler": POOLED | {"seed": 42}}, "the assignment secret of the coordinator determines the draws"),
        ({"sampler": POOLED | {"pools": {"all": {"threshold": 1.0, "weight": 0.0}}}}, "a weight above 0"),
        (
            {"sampler": POOLED | {"pools": {name: {"threshold": 1.0, "weight": 1.0} for name in ("a", "b")}}},
            "each pool needs another threshold",
        ),
        ({"sampler": {"pools": {"all": {"threshold": 1.0, "weight": 1.0}}}}, "pools need the type"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(LocalError, match=said):
        CoordinatorConfig.load({"coordinator": {"curriculum": settings}})
