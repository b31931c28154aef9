"""`prime-node evaluate`: the policies that it evaluates, and its scores."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from tests.node.worker_world import TRAINER, WORKER, make_run

from prime_node.cli.evaluate import each_policy, marks_of


@dataclass
class Numbered:
    """Fake of a follower's policy, as far as the command reads it."""

    version: int
    weights: Any = None


class Counting:
    """Fake of trainer.evaluate.Evaluator and of observe.Recorder, as far as the command calls them."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    async def evaluate(self, weights: Any, policy_version: int) -> dict[str, float]:
        return {"eval_greedy": 0.5, "eval_greedy_low": 0.4, "eval_greedy_high": 0.6}

    def record(self, **fields: Any) -> None:
        self.rows.append(fields)

    def close(self) -> None: ...


async def evaluated(versions: list[int], *, every: int, max_steps: int) -> list[dict[str, Any]]:
    made, come = Counting(), iter(versions)

    async def wait_newer(version: int) -> Any:
        found = next(come, None)
        if found is None:
            stop.set()
            await asyncio.Event().wait()
        assert found is None or found > version
        return Numbered(found or 0)

    stop, run = asyncio.Event(), make_run(max_steps=max_steps)
    marks = marks_of(run, WORKER.key_id)
    await each_policy(wait_newer, made, made, stop, run=run, every=every, marks=marks)  # type: ignore[arg-type]
    return made.rows


async def test_the_first_the_last_and_one_of_so_many_policies_are_evaluated() -> None:
    assert [row["step"] for row in await evaluated([0, 1, 2, 3, 5, 8, 9, 10], every=3, max_steps=10)] == [
        0,
        3,
        8,
        9,
        10,
    ]
    assert [row["step"] for row in await evaluated([4, 5], every=1, max_steps=10)] == [4, 5]


async def test_rows_say_who_evaluated_and_whether_the_run_trusts_that_key() -> None:
    (row,) = await evaluated([10], every=1, max_steps=10)
    assert row["eval_by"] == WORKER.key_id
    assert row["eval_trusted"] is False
    assert marks_of(make_run(), TRAINER.key_id)["eval_trusted"] is True
