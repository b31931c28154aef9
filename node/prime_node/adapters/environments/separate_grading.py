"""Grading in a process for each set of answers: whatever an answer makes a scorer do, it decides the credits of its set at most.

The process is a fork of the one that holds the environments, which itself evaluates no answer. It has no pipe of its parent,
may only read files, and may start no process, so it can neither change how the next set is graded nor outlive its own. A set is
a bundle's answers, which one worker gave: a fork takes some 20 ms.

Concurrency: `grade` blocks. It forks from the thread of the event loop. If environments hold other threads, these do not exist
in the child; a lock that one of them held at that moment stays locked there, and the child fails at its time limit.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import pickle
import resource
import select
import signal
import struct
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from prime_node.adapters.environments.frames import as_parts
from prime_node.adapters.sandbox import landlock, privileges
from prime_node.adapters.sandbox.confine import confine
from prime_node.adapters.sandbox.rules import ProcessLimits, SandboxRules
from prime_node.envs.source import ProblemSource, SourceProblem, parts_of
from prime_node.ports.environment import GRADED_TOGETHER, EnvironmentSilent

GRADE_S_MAX = 45.0
"""Limit on one grading: shorter than the host's limit on one score, after which the host ends the whole process."""
GRADE_S_EACH = 1.0
"""Seconds that each further answer of a set adds to the time of the whole set, which begins with GRADE_S_MAX."""
RESULT_BYTES_MAX = 4_096
ERROR_CHARS_MAX = 400
_PR_SET_PDEATHSIG = 1
_SIZE = struct.Struct("<Q")
_STDERR, _FIRST_FREE = 2, 3
"""Descriptor of stderr, and the first one after stdin, stdout and stderr."""
_RULES = SandboxRules(read=(Path("/"),), shared_ipc=False, log_denials=False, limits=ProcessLimits(processes=0))
"""Rules on top of those of the environments' process: reading where that one may read, and nothing else."""


class GradingFailed(Exception):
    """A scorer raised, took too long, or gave no credit in [0, 1]."""


class GradingHung(GradingFailed, EnvironmentSilent):
    """A scorer took too long: a bundle's next answers may hang it too, so that each of them would cost as much time."""


class SeparateGrading:
    """Implementation of envs.source.ProblemSource that grades another source's answers in processes of their own.

    Answers of one set (ports.environment.graded_together) share a process.
    """

    def __init__(
        self, source: ProblemSource, *, seconds_max: float = GRADE_S_MAX, seconds_each: float = GRADE_S_EACH
    ) -> None:
        self._source, self._seconds_max, self._seconds_each = source, seconds_max, seconds_each
        self._child: _Child | None = None
        self._together = ""
        self._left_s = seconds_max
        """Time that is left of the set."""

    def draw(self, number: int) -> SourceProblem:
        """Return problem `number`."""
        return self._source.draw(number)

    def grade(self, problem: SourceProblem, answer: str) -> float:
        """Return the credit for an answer. Raises GradingFailed.

        A set of n answers takes seconds_max + n * seconds_each at most: many slow answers cost no more than one that hangs.
        """
        return _credit(self._asked(problem, answer, wants_parts=False))

    def parts(self, problem: SourceProblem, answer: str) -> Mapping[str, float]:
        """Return the further rewards of an answer, within the same time. Raises GradingFailed."""
        try:
            return as_parts(_read(self._asked(problem, answer, wants_parts=True)).get("parts"))
        except ValueError as error:
            raise GradingFailed(f"the process that graded an answer gave no rewards: {error}") from None

    def _asked(self, problem: SourceProblem, answer: str, *, wants_parts: bool) -> bytes:
        together = GRADED_TOGETHER.get()
        if not together or together != self._together:
            self._end()
            self._left_s = self._seconds_max
        if self._child is None:
            self._child, self._together = _Child(self._source), together
        began = time.monotonic()
        limit = min(self._seconds_max, max(self._seconds_each, self._left_s))
        try:
            self._child.ask(problem, answer, wants_parts, began + limit)
            return self._child.answer(began + limit)
        except TimeoutError:
            self._end()
            raise GradingHung(f"an answer was not graded within {limit:g} s") from None
        except OSError:
            self._end()
            raise GradingFailed("the process that graded an answer ended without a result") from None
        finally:
            self._left_s += self._seconds_each - (time.monotonic() - began)
            if not together:
                self._end()

    def _end(self) -> None:
        if self._child is not None:
            self._child.end()
            self._child = None


class _Child:
    """A fork of this process that grades."""

    def __init__(self, source: ProblemSource) -> None:
        self._flags = fcntl.fcntl(_STDERR, fcntl.F_GETFL)
        (requests, self._requests), (self._results, results) = os.pipe(), os.pipe()
        limits = replace(_RULES.limits, address_bytes=_address_bytes_max())
        self._pid = os.fork()
        if self._pid == 0:
            _run_child(requests, results, source, replace(_RULES, limits=limits))
        os.close(requests)
        os.close(results)
        os.set_blocking(self._requests, False)

    def ask(self, problem: SourceProblem, answer: str, wants_parts: bool, until: float) -> None:
        """Send an answer. Raises TimeoutError and OSError."""
        data = pickle.dumps((problem, answer, wants_parts))
        left = memoryview(_SIZE.pack(len(data)) + data)
        while left:
            if not select.select([], [self._requests], [], max(0.0, until - time.monotonic()))[1]:
                raise TimeoutError
            left = left[os.write(self._requests, left) :]

    def answer(self, until: float) -> bytes:
        """Return the line that the child writes. Raises TimeoutError and OSError."""
        found = b""
        while not found.endswith(b"\n"):
            if not select.select([self._results], [], [], max(0.0, until - time.monotonic()))[0]:
                raise TimeoutError
            data = os.read(self._results, RESULT_BYTES_MAX)
            if not data or len(found) > RESULT_BYTES_MAX:
                raise OSError("the child has ended or writes too much")
            found += data
        return found

    def end(self) -> None:
        """End the child. It shares stderr, and may have made it fail later sets' scorers that print (O_NONBLOCK)."""
        os.close(self._requests)
        os.close(self._results)
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        fcntl.fcntl(_STDERR, fcntl.F_SETFL, self._flags)


def close_memory() -> None:
    """Keep the processes that grade from this one's memory and pipes on a kernel without Landlock. Raises OSError."""
    if landlock.abi() == 0:
        privileges.forbid_dumps()


def _run_child(requests: int, results: int, source: ProblemSource, rules: SandboxRules) -> NoReturn:
    try:
        _leave_parent(requests, results, rules)
        with os.fdopen(requests, "rb") as messages:
            while size := messages.read(_SIZE.size):
                problem, answer, wants_parts = pickle.loads(messages.read(*_SIZE.unpack(size)))
                os.write(results, _graded(source, problem, answer, wants_parts))
    except BaseException as error:  # noqa: BLE001 (the edge of a process: the first answer fails with the reason)
        os.write(results, _failed(error))
    finally:
        os._exit(0)


def _graded(source: ProblemSource, problem: SourceProblem, answer: str, wants_parts: bool) -> bytes:
    try:
        if wants_parts:
            return _line(parts=dict(parts_of(source, problem, answer)))
        return _line(credit=float(source.grade(problem, answer)))
    except BaseException as error:  # noqa: BLE001 (the scorer is not ours)
        return _failed(error)


def _failed(error: BaseException) -> bytes:
    return _line(error=f"{type(error).__name__}: {error}"[:ERROR_CHARS_MAX])


def _line(**result: float | str | dict[str, float]) -> bytes:
    return json.dumps(result).encode() + b"\n"


def _address_bytes_max() -> int | None:
    """Return how much a grading process may map; None if nothing bounds its parent's memory. Raises OSError.

    It is what the parent has mapped, and the memory that it may have. The parent's own limit covers private memory that can be
    written, so shared memory, or memory that is made read-only afterwards, passes it.
    """
    most = resource.getrlimit(resource.RLIMIT_DATA)[1]
    if most == resource.RLIM_INFINITY:
        return None
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize() + most


def _leave_parent(requests: int, results: int, rules: SandboxRules) -> None:
    """Give up what the parent has: its pipes, its files to write, its processes. Raises OSError."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.set_wakeup_fd(-1)  # the event loop's
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    first = _FIRST_FREE
    for kept in (*sorted((requests, results)), os.sysconf("SC_OPEN_MAX")):
        os.closerange(first, kept)
        first = kept + 1
    confine(rules)


def _read(result: bytes) -> dict[str, object]:
    """Return what a child wrote. Raises GradingFailed, also for its error: its code may have been an answer's."""
    try:
        found = json.loads(result)
    except (ValueError, RecursionError):
        raise GradingFailed("the process that graded an answer ended without a result") from None
    if not isinstance(found, dict):
        return {}
    if isinstance(error := found.get("error"), str):
        raise GradingFailed(error[:ERROR_CHARS_MAX])
    return found


def _credit(result: bytes) -> float:
    """Return the credit that a child wrote. Raises GradingFailed."""
    credit = _read(result).get("credit")
    if not isinstance(credit, float) or not 0.0 <= credit <= 1.0:
        raise GradingFailed("the process that graded an answer gave no credit from 0 to 1")
    return credit
