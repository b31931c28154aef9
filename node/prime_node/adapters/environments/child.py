"""One environment process: its pipes, its requests and answers, its end.

All its output is bounded. A line that is too long, malformed, or answers no request ends the process: its code is untrusted,
and pending requests fail with EnvironmentFailed. Request numbers are random, so code that writes answers in advance is
detected. What it prints goes to our log, with a limit per minute and without control characters.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import logging
import os
import secrets
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Late
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from prime_node.adapters.environments.frames import Answered, Asked, read_message_frame
from prime_node.adapters.environments.launcher import Launched
from prime_node.adapters.sandbox.bubblewrap import kill_wrapped
from prime_node.ports.environment import Ask, EnvironmentGone, EnvironmentSilent
from prime_node.scratch import Scratch
from prime_protocol import limits
from prime_protocol.errors import LocalError, TransientFault
from prime_protocol.rollout import Completion
from prime_protocol.visible import printable

log = logging.getLogger(__name__)

START_S_MAX = 120.0
"""Limit on the start, including imports and data sets."""
END_S_MAX = 5.0
"""Time for the pipes of a killed child to close: its descendants may hold them open."""
MINUTE_S = 60.0
READ_BYTES = 2**16


@dataclass(frozen=True, slots=True)
class Start:
    """Start of a process: its command line, its variables, and its launcher."""

    line: list[str] = field(default_factory=list)
    """Command line."""
    variables: dict[str, str] = field(default_factory=dict)
    """Environment variables of the process; it gets no others."""
    launch: Callable[[], Launched] | None = None
    """Function that starts the process through a launcher instead, for a confined role. Raises LocalError."""


Process = subprocess.Popen[bytes] | Launched
Command = Callable[[Path], Start]
"""Function from the process's own folder to its start."""


class EnvironmentFailed(Exception):
    """An environment's code raised, took too long, or ended its process."""


class Ended(EnvironmentFailed, EnvironmentGone):
    """The process itself failed."""


class Hung(EnvironmentFailed, EnvironmentSilent):
    """One episode or one grading took too long."""


class EnvironmentChild:
    """A running environment process.

    The constructor blocks until the environments are ready. Raises LocalError with the error that the child reports,
    and TransientFault after START_S_MAX: the machine may be overloaded.
    """

    def __init__(self, command: Command, description: Mapping[str, Any]) -> None:
        self.asks: dict[int, tuple[asyncio.AbstractEventLoop, Ask]] = {}
        self.is_gone = False
        self.is_worn = False
        """Whether its environments leave threads behind: it finishes its work and gets nothing new."""
        self._waiting: dict[int, Future[Any]] = {}
        self._asked: dict[int, int] = {}
        """Number of requests to the model, by episode."""
        self._num_stray = 0
        self._outbox: SimpleQueue[bytes | None] = SimpleQueue()
        self._ending = threading.Lock()
        self._scratch = Scratch(
            "environments", mode=0o711 if os.geteuid() == 0 else 0o700
        )  # root's run as another user
        start = command(self._scratch.path)
        started: Future[Process] = Future()
        # The thread that starts the process must live as long as it does: the system ends the process with that thread.
        self._threads = [threading.Thread(target=self._read, args=(started, start), name="environments", daemon=True)]
        self._threads[0].start()
        try:
            self._process = started.result()
        except (OSError, LocalError) as error:
            self._scratch.close()
            raise LocalError(f"the environment process does not start: {error}") from None
        self.pid = self._process.pid
        atexit.register(self.end)
        for work in (self._write, self._log):
            self._threads.append(threading.Thread(target=work, name="environments", daemon=True))
            self._threads[-1].start()
        _, ready = self.send(**description)
        try:
            self.ready: dict[str, Any] = _checked(ready.result(START_S_MAX))
        except Late:
            self.end()
            raise TransientFault(f"the environments did not start within {START_S_MAX:.0f} s") from None
        except (EnvironmentFailed, ValueError) as error:
            self.end()
            raise LocalError(str(error) or "the environments do not start") from None

    def send(self, number: int | None = None, /, **message: Any) -> tuple[int, Future[Any]]:
        """Send a request. Return its number and the future of its answer."""
        answer: Future[Any] = Future()
        number = new_number() if number is None else number
        self._waiting[number] = answer
        self.tell(id=number, **message)
        if self.is_gone:
            self._fail()
        return number, answer

    def tell(self, **message: Any) -> None:
        """Queue a message without blocking."""
        self._outbox.put(json.dumps(message).encode() + b"\n")

    def end(self) -> None:
        """End the process. Idempotent; may take seconds."""
        self.is_gone = True
        with self._ending:
            atexit.unregister(self.end)
            _kill(self._process)
            self._process.wait()
            self._outbox.put(None)
            for thread in self._threads:
                if thread is not threading.current_thread():
                    thread.join(END_S_MAX)
            if self._process.stdin is not None:
                with contextlib.suppress(OSError):
                    self._process.stdin.close()
            self._scratch.close()

    def _write(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            while (line := self._outbox.get()) is not None:
                left = memoryview(line)
                while left:
                    left = left[os.write(self._process.stdin.fileno(), left) :]
        self.is_gone = True
        self._fail()

    def _read(self, started: Future[Process], start: Start) -> None:
        process: Process
        try:
            if start.launch is not None:
                process = start.launch()
            else:
                process = subprocess.Popen(
                    start.line,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    cwd=self._scratch.path,
                    env=start.variables,
                    start_new_session=True,
                )
        except (OSError, LocalError) as error:
            started.set_exception(error)
            return
        started.set_result(process)
        assert process.stdout is not None
        try:
            while line := process.stdout.readline(limits.ENVIRONMENT_LINE_BYTES_MAX + 1):
                if not line.endswith(b"\n"):
                    raise ValueError(f"a line has more than {limits.ENVIRONMENT_LINE_BYTES_MAX} bytes, or no end")
                self._take(read_message_frame(line))
        except ValueError as error:
            log.warning("ending the environment process: it wrote an invalid message (%s)", error)
            _kill(process)
        finally:
            self.is_gone = True
            process.stdout.close()
            self._fail()

    def _take(self, frame: Asked | Answered) -> None:
        """Handle one frame. Raises ValueError for an answer without a request, or for too many requests."""
        if isinstance(frame, Asked):
            self._pass_on(frame)
            return
        self.is_worn |= frame.is_worn
        answer = self._waiting.pop(frame.number, None)
        if answer is None:
            raise ValueError("an answer without a request")
        if not answer.set_running_or_notify_cancel():
            return
        if frame.error is not None:
            answer.set_exception((Hung if frame.is_silent else EnvironmentFailed)(frame.error))
        else:
            answer.set_result(frame.result)

    def _pass_on(self, asked: Asked) -> None:
        """Pass an episode's request to the model. An episode that has just ended may still send one."""
        loop, ask = self.asks.get(asked.episode, (None, None))
        if loop is None or ask is None:
            self._num_stray += 1
            if self._num_stray > limits.ENVIRONMENT_STRAY_ASKS_MAX:
                raise ValueError(f"more than {limits.ENVIRONMENT_STRAY_ASKS_MAX} requests by finished episodes")
            return
        self._asked = {number: count for number, count in self._asked.items() if number in self.asks}
        self._asked[asked.episode] = count = self._asked.get(asked.episode, 0) + 1
        if count > limits.ENVIRONMENT_ASKS_MAX:
            raise ValueError(f"more than {limits.ENVIRONMENT_ASKS_MAX} requests by one episode")

        async def answer() -> None:
            completion = await ask(asked.prompt)
            self.tell(answer=asked.number, completion=None if completion is None else to_wire(completion))

        with contextlib.suppress(RuntimeError):  # the loop of a finished episode may be closed
            asyncio.run_coroutine_threadsafe(answer(), loop)

    def _log(self) -> None:
        """Log what its code prints, line by line."""
        assert self._process.stderr is not None
        left, since, rest = limits.ENVIRONMENT_LOG_BYTES_MAX, time.monotonic(), b""
        with self._process.stderr as stream:
            while data := os.read(stream.fileno(), READ_BYTES):
                if time.monotonic() - since > MINUTE_S:
                    left, since = limits.ENVIRONMENT_LOG_BYTES_MAX, time.monotonic()
                *lines, rest = (rest + data).split(b"\n")
                if len(rest) > limits.ENVIRONMENT_LOG_LINE_BYTES_MAX:
                    lines, rest = [*lines, rest], b""
                for line in lines:
                    was_left, left = left, left - len(line) - 1
                    if left > 0:
                        log.info("environments: %s", _readable(line))
                    elif was_left > 0:
                        log.warning("environments print too much; their output is dropped for a minute")
            if rest and left > 0:
                log.info("environments: %s", _readable(rest))

    def _fail(self) -> None:
        for number in list(self._waiting):
            answer = self._waiting.pop(number, None)  # another thread may have taken it
            if answer is not None and not answer.done():
                answer.set_exception(Ended("the environment process ended"))


def _kill(process: Process) -> None:
    if isinstance(process, subprocess.Popen):
        kill_wrapped(process)
    else:
        process.kill()


def new_number() -> int:
    """Return an unpredictable number for a request or an episode."""
    return secrets.randbelow(limits.COUNT_MAX)


def to_wire(completion: Completion) -> dict[str, Any]:
    """Return the fields of a completion that are sent to the process."""
    return {"token_ids": completion.token_ids, "logprobs": completion.logprobs, "finish": int(completion.finish)}


def _checked(ready: object) -> dict[str, Any]:
    """Check a child's first answer. Raises ValueError."""
    if (
        not isinstance(ready, dict)
        or not isinstance(ready.get("missing"), list)
        or not isinstance(ready.get("turns"), list)
        or not all(isinstance(each, str) for each in (*ready["missing"], *ready["turns"]))
    ):
        raise ValueError("the first answer of the environment process is not valid")
    return ready


def _readable(line: bytes) -> str:
    cut = line[: limits.ENVIRONMENT_LOG_LINE_BYTES_MAX].decode("utf-8", "backslashreplace")
    return printable(cut, limits.ENVIRONMENT_LOG_LINE_BYTES_MAX)
