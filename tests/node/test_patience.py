"""Waits that end with an error and are cancelled in the same moment."""

from __future__ import annotations

import asyncio

import pytest

from prime_node.patience import at_once

TURNS_TO_END = 5


@pytest.mark.parametrize("turns", range(1, TURNS_TO_END + 8))
async def test_a_cancellation_is_not_lost_while_failed_work_ends(turns: int) -> None:
    """Before, the caller got the error alone: a loop that tries again after an error was never ended."""

    async def fail() -> None:
        raise OSError("the first error")

    async def end_slowly() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            for _ in range(TURNS_TO_END):
                await asyncio.sleep(0)

    async def keep() -> None:
        while True:
            try:
                await at_once([end_slowly, fail], most=2)
            except OSError:
                await asyncio.Event().wait()

    keeping = asyncio.create_task(keep())
    for _ in range(turns):
        await asyncio.sleep(0)
    keeping.cancel()
    done, _ = await asyncio.wait({keeping}, timeout=5.0)
    if not done:
        keeping.cancel()
    assert done
