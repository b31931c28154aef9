"""The end of a role's process: the message after its first signal, and its causes."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
from subprocess import PIPE

import pytest

from prime_node.cli.lifetime import END_S, INTERRUPT_S, INTERRUPTED, run_role
from prime_node.cli.outcome import MAY_PASS
from prime_node.patience import in_a_hurry


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
    assert "stopping in order, within 2 s; the same signal again (Ctrl-C) stops at once" in caplog.text


def test_a_second_signal_ends_a_role_that_does_not(caplog: pytest.LogCaptureFixture) -> None:
    assert run_role(never, stop_with_parent=False, grace_s=30.0) == INTERRUPTED
    assert "stopping at once" in caplog.text


BUSY = """
import asyncio, logging, time
from prime_node.cli.lifetime import run_role

def compute():
    print("computing", flush=True)
    time.sleep(600)  # like a forward pass, it cannot be interrupted

async def main(stop):
    try:
        await asyncio.to_thread(compute)
    finally:
        print("cancelled", flush=True)
        while ENDLESS:
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                pass

logging.Formatter.formatTime = lambda *_: str(time.monotonic())
logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
raise SystemExit(run_role(main, stop_with_parent=False, grace_s=60.0))
"""


CTRL_C_S_MAX = 5.0


@pytest.mark.parametrize(("signals", "endless"), [(1, False), (2, False), (1, True)])
def test_ctrl_c_ends_a_process_whose_engine_is_busy(signals: int, endless: bool) -> None:
    """It ends 3 s after the first Ctrl-C, 1 s after a second one. Before, it ended with the computation.

    `endless`: nor does what waits for the engine leave when it is cancelled. The times are the process's own, in its log.
    """
    program = BUSY.replace("ENDLESS", str(endless))
    with subprocess.Popen([sys.executable, "-c", program], stdout=PIPE, stderr=PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            assert process.stdout.readline() == "computing\n"
            process.send_signal(signal.SIGINT)
            lines = [process.stderr.readline()]
            if signals == 2:  # sent at once, both would count as one
                process.send_signal(signal.SIGINT)
            assert process.wait(timeout=20) == INTERRUPTED
            assert process.stdout.read() == "cancelled\n"
            lines += process.stderr.read().splitlines()
            assert "stopping in order" in lines[0]
            assert "cannot be interrupted still runs" in lines[-1]
            asked, ended = (float(line.split()[0]) for line in (lines[0], lines[-1]))
            assert ended - asked <= CTRL_C_S_MAX, lines
            assert any("not finished 2 s after" in line for line in lines) is (signals == 1)
        finally:
            process.kill()


BLOCKED = """
import time
from prime_node.cli.lifetime import run_role

async def main(stop):
    print("computing", flush=True)
    WORK

raise SystemExit(run_role(main, stop_with_parent=False, grace_s=60.0))
"""


@pytest.mark.parametrize(
    "work",
    ["time.sleep(600)", "while True: pass", "import logging; [logging.warning('x' * 1_000) for _ in iter(int, 1)]"],
)
def test_ctrl_c_ends_a_process_whose_event_loop_is_blocked(work: str) -> None:
    """Before, the signal waited for the loop, and then for whatever reads the log, here nothing."""
    program = BLOCKED.replace("WORK", work)
    with subprocess.Popen([sys.executable, "-c", program], stdout=PIPE, stderr=PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "computing\n"
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=60) == INTERRUPTED
        finally:
            process.kill()


FAILED = """
import asyncio, time
from prime_node.cli.lifetime import run_role
from prime_node.files import disk_faults

async def main(stop):
    asyncio.get_running_loop().run_in_executor(None, time.sleep, 600)  # like an engine that starts
    with disk_faults():
        raise OSError(28, "No space left on device", "/data/parts")

run_role(main, stop_with_parent=False, grace_s=60.0)
"""


def test_a_role_that_has_failed_does_not_wait_for_an_engine_that_starts() -> None:
    """Before, a disk that was full during the first download ended the process when the engine was built."""
    found = subprocess.run([sys.executable, "-c", FAILED], capture_output=True, text=True, timeout=60, check=False)
    assert found.returncode == MAY_PASS
    assert "prime-node: /data/parts: No space left on device; free some space" in " ".join(found.stderr.split())


def test_the_ends_after_ctrl_c_leave_a_loaded_machine_two_of_its_five_seconds() -> None:
    assert INTERRUPT_S + END_S <= CTRL_C_S_MAX - 2.0


def test_only_ctrl_c_is_in_a_hurry() -> None:
    async def hurried(stop: asyncio.Event, number: signal.Signals) -> int:
        os.kill(os.getpid(), number)
        await stop.wait()
        return int(in_a_hurry(stop))

    for number, expected in ((signal.SIGINT, 1), (signal.SIGTERM, 0)):
        assert run_role(lambda stop, n=number: hurried(stop, n), stop_with_parent=False, grace_s=30.0) == expected
