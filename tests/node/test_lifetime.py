"""The end of a role's process: the message after its first signal, and its causes."""

from __future__ import annotations

import asyncio
import logging
import os
import signal

import pytest

from prime_node.cli.lifetime import INTERRUPTED, run_role


async def until_stopped(stop: asyncio.Event) -> int:
    os.kill(os.getpid(), signal.SIGINT)
    await stop.wait()
    return 7


async def never(stop: asyncio.Event) -> int:
    os.kill(os.getpid(), signal.SIGINT)
    await stop.wait()
    os.kill(os.getpid(), signal.SIGINT)
    await asyncio.Event().wait()
    return 7


async def terminated_twice(stop: asyncio.Event) -> int:
    os.kill(os.getpid(), signal.SIGTERM)
    await stop.wait()
    os.kill(os.getpid(), signal.SIGTERM)
    ended = asyncio.Event()
    asyncio.get_running_loop().call_later(0.1, ended.set)
    await ended.wait()
    return 7


def test_a_sigterm_that_comes_twice_at_once_counts_once() -> None:
    assert run_role(terminated_twice, stop_with_parent=False, grace_s=30.0) == 7


def test_the_first_signal_says_what_a_second_one_does(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert run_role(until_stopped, stop_with_parent=False, grace_s=30.0) == 7
    assert "stopping in order, within 30 s; the same signal again (Ctrl-C) stops at once" in caplog.text


def test_a_second_signal_ends_a_role_that_does_not(caplog: pytest.LogCaptureFixture) -> None:
    assert run_role(never, stop_with_parent=False, grace_s=30.0) == INTERRUPTED
    assert "stopping at once" in caplog.text
