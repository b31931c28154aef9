"""Grading in a process of its own for each answer: whatever an answer makes a scorer do, it decides its own credit at most.

The process is a fork of the one that holds the environments, which itself evaluates no answer. It has no pipe of its parent,
may only read files, and may start no process, so it can neither change how the next answer is graded nor outlive its own.

Concurrency: `grade` blocks. It forks from the thread of the event loop. If environments hold other threads, these do not exist
in the child; a lock that one of them held at that moment stays locked there, and the child fails at its time limit.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NoReturn

from prime_node.adapters.sandbox import landlock, privileges
from prime_node.adapters.sandbox.confine import confine
from prime_node.adapters.sandbox.rules import ProcessLimits, SandboxRules
from prime_node.envs.source import ProblemSource, SourceProblem

GRADE_S_MAX = 45.0
"""Limit on one grading: shorter than the host's limit on one score, after which the host ends the whole process."""
RESULT_BYTES_MAX = 4_096
ERROR_CHARS_MAX = 400
_PR_SET_PDEATHSIG = 1
_FIRST_FREE = 3
"""First file descriptor after stdin, stdout and stderr."""
_RULES = SandboxRules(read=(Path("/"),), shared_ipc=False, log_denials=False, limits=ProcessLimits(processes=0))
"""Rules on top of those of the environments' process: reading where that one may read, and nothing else."""


class GradingFailed(Exception):
    """A scorer raised, took too long, or gave no credit in [0, 1]."""


class SeparateGrading:
    """Implementation of envs.source.ProblemSource that grades each answer of another source in a process of its own."""

    def __init__(self, source: ProblemSource, *, seconds_max: float = GRADE_S_MAX) -> None:
        self._source, self._seconds_max = source, seconds_max

    def draw(self, number: int) -> SourceProblem:
        """Return problem `number`."""
        return self._source.draw(number)

    def grade(self, problem: SourceProblem, answer: str) -> float:
        """Return the credit for an answer. Raises GradingFailed."""
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            _run_child(writer, partial(self._source.grade, problem, answer))
        os.close(writer)
        try:
            return _credit(_read(reader, time.monotonic() + self._seconds_max))
        except TimeoutError:
            raise GradingFailed(f"an answer was not graded within {self._seconds_max:g} s") from None
        finally:
            os.close(reader)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def close_memory() -> None:
    """Keep the processes that grade from this one's memory and pipes on a kernel without Landlock. Raises OSError."""
    if landlock.abi() == 0:
        privileges.forbid_dumps()


def _run_child(writer: int, grade: Callable[[], float]) -> NoReturn:
    try:
        _leave_parent(writer)
        result: dict[str, float | str] = {"credit": float(grade())}
    except BaseException as error:  # noqa: BLE001 (the edge of a process; the scorer is not ours)
        result = {"error": f"{type(error).__name__}: {error}"[:ERROR_CHARS_MAX]}
    try:
        os.write(writer, json.dumps(result).encode())
    finally:
        os._exit(0)


def _leave_parent(writer: int) -> None:
    """Give up what the parent has: its pipes, its files to write, its processes. Raises OSError."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.set_wakeup_fd(-1)  # the event loop's
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.closerange(_FIRST_FREE, writer)
    os.closerange(writer + 1, os.sysconf("SC_OPEN_MAX"))
    confine(_RULES)


def _read(reader: int, until: float) -> bytes:
    """Read to the end. Raises TimeoutError."""
    found = b""
    while len(found) <= RESULT_BYTES_MAX:
        if not select.select([reader], [], [], max(0.0, until - time.monotonic()))[0]:
            raise TimeoutError
        data = os.read(reader, RESULT_BYTES_MAX)
        if not data:
            break
        found += data
    return found


def _credit(result: bytes) -> float:
    """Return the credit that a child wrote. Raises GradingFailed: its code may have been an answer's."""
    try:
        found = json.loads(result)
    except ValueError:
        raise GradingFailed("the process that graded an answer ended without a result") from None
    if isinstance(found, dict) and isinstance(found.get("error"), str):
        raise GradingFailed(found["error"][:ERROR_CHARS_MAX])
    credit = found.get("credit") if isinstance(found, dict) else None
    if not isinstance(credit, float) or not 0.0 <= credit <= 1.0:
        raise GradingFailed("the process that graded an answer gave no credit from 0 to 1")
    return credit
