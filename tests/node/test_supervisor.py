"""The supervisor with real processes."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

from tests.time_world import until

from prime_node.cli.supervisor import Child, ChildState, Supervisor, last_lines

WAITS_FOR_EOF = "import sys; print('up', flush=True); sys.stdin.read(); print('parent gone', flush=True)"
IGNORES_TERM = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); signal.pause()"


def child(tmp_path: Path, code: str, **options: object) -> Child:
    return Child("child", ["-c", code], tmp_path / "child.log", **options)  # type: ignore[arg-type]


async def until_log_holds(path: Path, text: str) -> None:
    await until(lambda: text in last_lines(path, 100))


async def test_a_child_that_ends_well_is_done(tmp_path: Path) -> None:
    supervisor = Supervisor()
    await supervisor.start(child(tmp_path, "print('hello')"))
    ended = await supervisor.wait("child")
    assert (ended.state, ended.exit_code) == (ChildState.DONE, 0)
    assert last_lines(tmp_path / "child.log", 1) == "hello"


async def test_a_waiter_that_gives_up_does_not_disturb_the_watch_of_a_child(tmp_path: Path) -> None:
    supervisor = Supervisor()
    started = child(tmp_path, WAITS_FOR_EOF)
    await supervisor.start(started)
    waiting = asyncio.create_task(supervisor.wait("child"))
    await until_log_holds(tmp_path / "child.log", "up")
    waiting.cancel()
    await supervisor.stop("child", grace_s=10)
    assert (started.state, started.exit_code) == (ChildState.STOPPED, -signal.SIGTERM)


async def test_a_child_that_is_killed_is_started_again(tmp_path: Path) -> None:
    marker = tmp_path / "second"
    code = f"""
import os, pathlib, signal
first = pathlib.Path({str(marker)!r})
if not first.exists():
    first.touch()
    os.kill(os.getpid(), signal.SIGKILL)
"""
    supervisor = Supervisor()
    await supervisor.start(child(tmp_path, code))
    ended = await supervisor.wait("child")
    assert (ended.state, ended.exit_code, len(ended.ends)) == (ChildState.DONE, 0, 1)


async def test_a_final_exit_code_is_not_tried_again(tmp_path: Path) -> None:
    supervisor = Supervisor()
    await supervisor.start(child(tmp_path, "raise SystemExit(4)", final_codes=frozenset({0, 4})))
    ended = await supervisor.wait("child")
    assert (ended.state, ended.exit_code, ended.ends) == (ChildState.DONE, 4, [])


async def test_a_child_that_does_not_listen_is_killed_after_its_grace(tmp_path: Path) -> None:
    supervisor = Supervisor()
    started = child(tmp_path, IGNORES_TERM)
    await supervisor.start(started)
    await until_log_holds(tmp_path / "child.log", "up")
    await supervisor.stop("child", grace_s=0.1)
    assert (started.state, started.exit_code) == (ChildState.STOPPED, -signal.SIGKILL)


async def test_a_child_notices_that_its_supervisor_was_killed(tmp_path: Path) -> None:
    """A supervisor in a separate process is killed with SIGKILL; its child sees the end of its standard input."""
    log_file = tmp_path / "child.log"
    code = f"""
import asyncio, pathlib
from prime_node.cli.supervisor import Child, Supervisor
async def main():
    supervisor = Supervisor()
    await supervisor.start(Child("child", ["-c", {WAITS_FOR_EOF!r}], pathlib.Path({str(log_file)!r})))
    await supervisor.wait("child")
asyncio.run(main())
"""
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", code, env=dict(os.environ))
    await until_log_holds(log_file, "up")
    parent.kill()
    await parent.wait()
    await until_log_holds(log_file, "parent gone")


async def test_a_log_that_has_grown_is_rotated_while_its_child_writes(tmp_path: Path) -> None:
    code = "import sys; print('x' * 99, flush=True); sys.stdin.readline(); print('after', flush=True); sys.stdin.read()"
    supervisor, started, path = Supervisor(log_bytes_max=100), child(tmp_path, code), tmp_path / "child.log"
    await supervisor.start(started)
    line = "x" * 99 + "\n"
    await until(lambda: path.is_file() and path.read_text() == line)  # it may come in two writes
    supervisor.rotate_logs()
    assert (path.stat().st_size, (tmp_path / "child.log.1").read_text()) == (0, line)
    assert started.process is not None
    assert started.process.stdin is not None
    started.process.stdin.write(b"go on\n")
    await until(lambda: path.read_text() == "after\n")
    supervisor.rotate_logs()
    assert path.read_text() == "after\n"
    await supervisor.stop("child", grace_s=10)
