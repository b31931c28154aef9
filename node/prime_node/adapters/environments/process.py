"""Environments in a process of their own: their code sees neither keys nor the run's folder, and cannot take its host down.

Who waits for whom: one thread writes to the child, so that nobody waits for a child that does not read, and one reads its
answers and wakes whoever asked. Problems and scores are asked for synchronously, as the port says, one after another; an
episode is awaited, and what it asks the model for is answered on the loop that awaits it. An episode that is silent for too
long fails alone, if its child still answers, and retires its child: what hangs there, a thread perhaps, cannot be ended without
it. So does an episode at whose end many threads are left behind. The child's other episodes go on, each held to the same bound,
and the last to end ends it. A child that is retired, dies, or does not answer in time is replaced at the next question; whoever
waits for one that is ended gets EnvironmentFailed.

Lines of JSON each way. From us: {"id", "method", "environment", ...} and {"answer", "completion"}; from the child: {"id",
"result"} or {"id", "error"}, with "worn" where it wants to be replaced, and {"ask", "id", "prompt"} for what an episode wants
to be sampled.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import itertools
import json
import logging
import os
import subprocess
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Late
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from prime_node.ports.environment import Ask, EnvironmentGone, EnvironmentSilent
from prime_node.scratch import Scratch
from prime_protocol.errors import LocalError
from prime_protocol.rollout import Completion

log = logging.getLogger(__name__)

START_S_MAX = 120.0
"""Imports, data sets and all."""
ANSWER_S_MAX = 60.0
"""One problem or one score; an environment that takes longer has failed."""
SILENCE_S_MAX = 300.0
"""For an episode that neither ends nor asks for anything. Tools and judges may be slow; a hostile answer may hang a grader."""
END_S_MAX = 5.0
"""For the pipes of a killed child to close: what it has started may hold on to them."""
CACHED_PROMPTS = 4_096
PASSED_ON = ("PATH", "LANG", "LC_ALL", "TZ", "PYTHONPATH", "VIRTUAL_ENV", "OMP_NUM_THREADS")
"""Of our own environment variables; whatever else is there may be a secret."""
FOR_ENVIRONMENTS = "PRIME_ENVIRONMENT_"
"""A variable PRIME_ENVIRONMENT_X of ours is X there: for judges that need a key of their own."""


class EnvironmentFailed(Exception):
    """An environment's code raised, took too long, or took its process with it."""


class _Ended(EnvironmentFailed, EnvironmentGone):
    """The process is what failed."""


class _Silent(EnvironmentFailed, EnvironmentSilent):
    """One episode is what failed."""


class EnvironmentProcess:
    """A child that holds some environments. Starts when it is made; `close` ends it, and so does our own end."""

    def __init__(
        self, command: Sequence[str], description: Mapping[str, Any], *, silence_s_max: float = SILENCE_S_MAX
    ) -> None:
        """`command`: what runs prime_node.cli.environment_process. Raises LocalError with what the child says is wrong."""
        self.silence_s_max = silence_s_max
        self._command = list(command)
        self._description = dict(description)
        self._lock = threading.Lock()
        self._asking = threading.Lock()
        self._numbers = itertools.count(1)
        self._child = _Child(self._command, self._description)
        self._retired: set[_Child] = set()
        self.ready = self._child.ready

    def ask(self, method: str, environment: str, **arguments: Any) -> Any:
        """The result. Raises EnvironmentFailed. Whoever asks from another thread meanwhile waits: its time begins then."""
        with self._asking:
            child = self._started()
            answer = child.send(next(self._numbers), method=method, environment=environment, **arguments)
            try:
                return answer.result(ANSWER_S_MAX)
            except Late:
                child.end()
                raise _Ended(f"{method} took longer than {ANSWER_S_MAX:.0f} s") from None

    async def play(self, environment: str, ask: Ask, **arguments: Any) -> float:
        """The reward of one episode. Raises EnvironmentFailed: EnvironmentSilent where the episode hangs, EnvironmentGone where
        the process does. Cancelling it cancels the episode."""
        while not self._is_fit(child := self._child):
            await asyncio.to_thread(self._started)
        number, loop = next(self._numbers), asyncio.get_running_loop()
        open_asks = 0

        async def answered(prompt: tuple[int, ...]) -> Completion | None:
            """While the model is asked it is our turn, however long that takes."""
            nonlocal open_asks
            open_asks += 1
            silence.reschedule(None)
            try:
                return await ask(prompt)
            finally:
                open_asks -= 1
                if number in child.asks and not open_asks:
                    silence.reschedule(loop.time() + self.silence_s_max)

        try:
            async with asyncio.timeout(self.silence_s_max) as silence:
                child.asks[number] = (loop, answered)
                answer = child.send(number, method="play", environment=environment, **arguments)
                return float(await asyncio.wrap_future(answer))
        except TimeoutError:
            self._retired.add(child)
            child.tell(cancel=number)
            await self._hear(child)
            raise _Silent(f"an episode did nothing for {self.silence_s_max:.0f} s") from None
        except asyncio.CancelledError:
            child.tell(cancel=number)
            raise
        finally:
            child.asks.pop(number, None)
            if child.is_worn:
                self._retired.add(child)
            if child in self._retired and not child.asks:
                loop.run_in_executor(None, self._end_retired, child)  # nobody waits for it

    async def _hear(self, child: _Child) -> None:
        """Raises EnvironmentGone where the child answers nobody any more: code that blocks holds up all of its episodes."""
        answer_s_max = min(ANSWER_S_MAX, self.silence_s_max)
        answer = child.send(next(self._numbers), method="ping")
        try:
            await asyncio.wait_for(asyncio.wrap_future(answer), answer_s_max)
        except TimeoutError:
            await asyncio.to_thread(child.end)  # it may take seconds
            raise _Ended(f"the environments' process did not answer for {answer_s_max:.0f} s") from None

    @property
    def pid(self) -> int:
        """Of the child at hand."""
        return self._started().pid

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            for child in (self._child, *tuple(self._retired)):
                child.end()

    def _started(self) -> _Child:
        with self._lock:
            if not self._is_fit(self._child):
                log.warning("the environments' process is gone or hangs; starting another")
                if self._child not in self._retired:
                    self._child.end()
                self._child = _Child(self._command, self._description)
            return self._child

    def _is_fit(self, child: _Child) -> bool:
        """Whether it is to be asked anything new."""
        return not child.is_gone and child not in self._retired

    def _end_retired(self, child: _Child) -> None:
        with self._asking:  # whoever asked before it was retired still gets an answer
            child.end()
        self._retired.discard(child)


class _Child:
    """One life of the process."""

    def __init__(self, command: Sequence[str], description: Mapping[str, Any]) -> None:
        self.asks: dict[int, tuple[asyncio.AbstractEventLoop, Ask]] = {}
        self._waiting: dict[int, Future[Any]] = {}
        self._outbox: SimpleQueue[bytes | None] = SimpleQueue()
        self._scratch = Scratch("environments")
        folder = self._scratch.path
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=folder, env=passed_on(folder)
        )
        self.pid = self._process.pid
        self.is_gone = False
        self.is_worn = False
        """Its environments leave threads behind: it does what it has, and nothing new."""
        self._ending = threading.Lock()
        atexit.register(self.end)
        self._threads = [
            threading.Thread(target=work, name="environments", daemon=True) for work in (self._read, self._write)
        ]
        for thread in self._threads:
            thread.start()
        started = self.send(0, **description, folder=str(folder))
        try:
            self.ready: dict[str, Any] = started.result(START_S_MAX)
        except (Late, EnvironmentFailed) as error:
            self.end()
            raise LocalError(str(error) or f"the environments did not start within {START_S_MAX:.0f} s") from None

    def send(self, number: int, /, **message: Any) -> Future[Any]:
        answer: Future[Any] = Future()
        self._waiting[number] = answer
        self.tell(id=number, **message)
        if self.is_gone:
            self._fail()
        return answer

    def tell(self, **message: Any) -> None:
        """Never waits."""
        self._outbox.put(json.dumps(message).encode() + b"\n")

    def end(self) -> None:
        """Idempotent. May take seconds."""
        self.is_gone = True
        with self._ending:
            atexit.unregister(self.end)
            self._process.kill()
            self._process.wait()
            self._outbox.put(None)
            for thread in self._threads:
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

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                message = json.loads(line)
            except ValueError:
                log.warning("the environments' process wrote what is no answer: %.80r", line)
                break
            if "ask" in message:
                self._pass_on(message)
                continue
            self.is_worn |= "worn" in message
            answer = self._waiting.pop(message["id"], None)
            if answer is None or not answer.set_running_or_notify_cancel():
                continue
            if "error" in message:
                answer.set_exception(EnvironmentFailed(message["error"]))
            else:
                answer.set_result(message["result"])
        self._process.stdout.close()
        self.is_gone = True
        self._fail()

    def _pass_on(self, message: Mapping[str, Any]) -> None:
        """An episode asks the model for something."""
        loop, ask = self.asks.get(message["id"], (None, None))
        if loop is None or ask is None:
            return

        async def answer() -> None:
            completion = await ask(tuple(message["prompt"]))
            self.tell(answer=message["ask"], completion=None if completion is None else to_wire(completion))

        asyncio.run_coroutine_threadsafe(answer(), loop)

    def _fail(self) -> None:
        for number in list(self._waiting):
            answer = self._waiting.pop(number, None)  # the other thread may be faster
            if answer is not None and not answer.done():
                answer.set_exception(_Ended("the environments' process ended"))


def passed_on(folder: Path) -> dict[str, str]:
    """What a child learns of our environment variables."""
    kept = {name: value for name, value in os.environ.items() if name in PASSED_ON}
    kept |= {name: value for name, value in os.environ.items() if name.startswith("HF_") and "TOKEN" not in name}
    kept |= {
        name.removeprefix(FOR_ENVIRONMENTS): value
        for name, value in os.environ.items()
        if name.startswith(FOR_ENVIRONMENTS)
    }
    kept.setdefault("HF_HOME", str(Path.home() / ".cache" / "huggingface"))
    # The hub's cache may be read there, not written, and a token that may not be read would be an error to its library.
    of_the_hub = {"HF_DATASETS_CACHE": str(folder / "datasets"), "HF_TOKEN_PATH": str(folder / "token")}
    return kept | of_the_hub | {"HOME": str(folder), "TMPDIR": str(folder)}


def to_wire(completion: Completion) -> dict[str, Any]:
    return {"token_ids": completion.token_ids, "logprobs": completion.logprobs, "finish": int(completion.finish)}


class ProcessEnvironment:
    """Implements ports.environment.Environment by a child."""

    def __init__(self, process: EnvironmentProcess, name: str) -> None:
        self.process, self._name = process, name
        self.prompt = lru_cache(CACHED_PROMPTS)(self._prompt)  # the coordinator asks for the same one several times

    def _prompt(self, index: int) -> str:
        return str(self.process.ask("prompt", self._name, index=index))

    def score(self, index: int, completion: str, *, finished: bool) -> float:
        return float(self.process.ask("score", self._name, index=index, completion=completion, finished=finished))

    def answer(self, index: int) -> str:
        return str(self.process.ask("answer", self._name, index=index))

    def held_out(self, count: int) -> list[ProcessProblem]:
        found = self.process.ask("held_out", self._name, count=count)
        kind = ProcessTurnProblem if isinstance(self, ProcessTurnEnvironment) else ProcessProblem
        return [kind(self.process, self._name, count, number, prompt) for number, prompt in enumerate(found)]


class ProcessTurnEnvironment(ProcessEnvironment):
    """Implements ports.environment.TurnEnvironment by a child."""

    async def play(self, index: int, prompt_token_ids: tuple[int, ...], ask: Ask) -> float:
        return await self.process.play(self._name, ask, index=index, prompt=prompt_token_ids)


@dataclass(frozen=True, slots=True)
class ProcessProblem:
    """Implements ports.environment.HeldOutProblem by a child."""

    process: EnvironmentProcess
    environment: str
    count: int
    """How many were asked for: a process that replaces the one that was asked has to find them again."""
    number: int
    prompt: str

    def is_correct(self, completion: str, *, finished: bool) -> bool:
        return bool(self._ask("is_correct", completion, finished))

    def score(self, completion: str, *, finished: bool) -> float:
        return float(self._ask("score_held_out", completion, finished))

    def _ask(self, method: str, completion: str, finished: bool) -> Any:
        place = {"count": self.count, "number": self.number}
        return self.process.ask(method, self.environment, **place, completion=completion, finished=finished)


class ProcessTurnProblem(ProcessProblem):
    """Implements ports.environment.TurnProblem by a child."""

    async def play(self, prompt_token_ids: tuple[int, ...], ask: Ask) -> float:
        place = {"count": self.count, "number": self.number}
        return await self.process.play(self.environment, ask, **place, prompt=prompt_token_ids)
