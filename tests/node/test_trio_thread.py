"""Calls between the two event loops lose nothing on either side."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import trio

from prime_node.adapters.peers.trio_thread import TrioThread


async def test_a_result_whose_asker_was_cancelled_as_it_came_is_given_back() -> None:
    thread = TrioThread("test")
    token: list[trio.lowlevel.TrioToken] = []

    async def main(is_ready: Callable[[], None], stopping: trio.Event) -> None:
        token.append(trio.lowlevel.current_trio_token())
        is_ready()
        await stopping.wait()

    scope, is_cancelled = trio.CancelScope(), threading.Event()
    given_back: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def lend() -> str:
        token[0].run_sync_soon(scope.cancel)
        assert is_cancelled.wait(5.0)  # in asyncio's thread, so that the cancellation arrives there after this result
        return "slot"

    async def asker() -> None:
        with scope:
            try:
                await thread.borrow(lend, given_back.set_result)
            finally:
                is_cancelled.set()

    await thread.start(main)
    try:
        await thread.call(asker)
        assert await asyncio.wait_for(given_back, 5.0) == "slot"
    finally:
        await thread.stop()
