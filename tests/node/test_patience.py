"""Waits that end with an error and are cancelled in the same moment."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from functools import partial
from typing import Any

import pytest

from prime_node.adapters.system_clock import SystemClock
from prime_node.broadcast.swarm.swarm_tasks import SwarmTasks
from prime_node.patience import at_once

TURNS_TO_END = 5


@pytest.mark.parametrize("turns", range(1, TURNS_TO_END + 8))
async def test_a_cancellation_is_not_lost_while_failed_work_ends(turns: int) -> None:
    """Before, the caller got the error alone: a loop that tries again after an error was never ended."""

    async def keep() -> None:
        while True:
            try:
                await at_once([end_slowly, fail], most=2)
            except OSError:
                await asyncio.Event().wait()

    assert await ends(keep(), turns)


@pytest.mark.parametrize("turns", range(1, TURNS_TO_END + 8))
async def test_a_part_of_the_swarm_that_fails_while_it_is_to_end_ends(turns: int) -> None:
    async def work() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(end_slowly())
            tasks.create_task(fail())

    assert await ends(SwarmTasks(SystemClock()).keep("a part", work), turns)


async def fail() -> None:
    raise OSError("the first error")


async def end_slowly() -> None:
    try:
        await asyncio.Event().wait()
    finally:
        for _ in range(TURNS_TO_END):
            await asyncio.sleep(0)


async def ends(keep: Coroutine[Any, Any, None], turns: int) -> bool:
    """Return whether a task ends that is cancelled after so many turns of the loop."""
    keeping = asyncio.create_task(keep)
    for _ in range(turns):
        await asyncio.sleep(0)
    keeping.cancel()
    done, _ = await asyncio.wait({keeping}, timeout=5.0)
    keeping.cancel()
    return bool(done)


@pytest.mark.parametrize("turns", range(TURNS_TO_END))
async def test_the_first_error_of_work_is_raised_whenever_it_comes(turns: int) -> None:
    """Before, it became a cancellation that nothing had asked for."""

    async def fail_later() -> None:
        for _ in range(turns):
            await asyncio.sleep(0)
        await fail()

    for work in ([fail_later], [end_slowly, fail_later], [fail_later, end_slowly]):
        with pytest.raises(OSError, match="the first error"):
            await at_once(work, most=2)
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_work_gives_its_results_in_order_and_no_work_gives_none() -> None:
    async def after(turns: int) -> int:
        for _ in range(turns):
            await asyncio.sleep(0)
        return turns

    assert await at_once([partial(after, turns) for turns in (3, 0, 2)], most=2) == [3, 0, 2]
    assert await at_once([], most=1) == []


async def test_a_part_of_the_swarm_that_fails_begins_again() -> None:
    begun = asyncio.Semaphore(0)

    async def work() -> None:
        begun.release()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(end_slowly())
            tasks.create_task(fail())

    keeping = asyncio.create_task(SwarmTasks(SystemClock()).keep("a part", work))
    async with asyncio.timeout(30.0):
        for _ in range(2):
            await begun.acquire()
    keeping.cancel()
    await asyncio.wait({keeping})
