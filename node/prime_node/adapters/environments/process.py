"""Environments in a process of their own: their code sees neither keys nor the run's folder, and cannot take its host down.

Who waits for whom: one thread writes to the child, so that nobody waits for a child that does not read, and one reads its
answers and wakes whoever asked. Problems and scores are asked for synchronously, as the port says, one after another; an
episode is awaited, and what it asks the model for is answered on the loop that awaits it. An episode that is silent for too
long fails alone, if its child still answers, and retires its child: what hangs there, a thread perhaps, cannot be ended without
it. So does an episode at whose end many threads are left behind. The child's other episodes go on, each held to the same bound,
and the last to end ends it. A child that is retired, dies, or does not answer in time is replaced at the next question; whoever
waits for one that is ended gets EnvironmentFailed.

Lines of JSON each way. From us: {"id", "method", "environment", ...} and {"answer", "completion"}; from the child: frames.py.
What it answers is checked: a text, a number of a bounded size, as the question was.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import TimeoutError as Late
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from prime_node.adapters.environments.child import Command, Ended, EnvironmentChild, EnvironmentFailed, new_number
from prime_node.adapters.environments.frames import as_flag, as_reward, as_text, as_texts
from prime_node.ports.environment import Ask, EnvironmentSilent
from prime_protocol.rollout import Completion

log = logging.getLogger(__name__)

T = TypeVar("T")

ANSWER_S_MAX = 60.0
"""One problem or one score; an environment that takes longer has failed."""
SILENCE_S_MAX = 300.0
"""For an episode that neither ends nor asks for anything. Tools and judges may be slow; a hostile answer may hang a grader."""
CACHED_PROMPTS = 4_096
CACHED_CHARS_MAX = 2**16
"""Of one prompt: a longer one is asked for again."""


class _Silent(EnvironmentFailed, EnvironmentSilent):
    """One episode is what failed."""


class EnvironmentProcess:
    """A child that holds some environments. Starts when it is made; `close` ends it, and so does our own end."""

    def __init__(
        self, command: Command, description: Mapping[str, Any], *, silence_s_max: float = SILENCE_S_MAX
    ) -> None:
        """`command`: runs prime_node.cli.environment_process. Raises LocalError with what the child says is wrong."""
        self.silence_s_max = silence_s_max
        self._command = command
        self._description = dict(description)
        self._lock = threading.Lock()
        self._asking = threading.Lock()
        self._child = EnvironmentChild(self._command, self._description)
        self._retired: set[EnvironmentChild] = set()
        self.ready = self._child.ready

    def ask(self, method: str, environment: str, **arguments: Any) -> Any:
        """The result. Raises EnvironmentFailed. Whoever asks from another thread meanwhile waits: its time begins then."""
        with self._asking:
            child = self._started()
            _, answer = child.send(method=method, environment=environment, **arguments)
            try:
                return answer.result(ANSWER_S_MAX)
            except Late:
                child.end()
                raise Ended(f"{method} took longer than {ANSWER_S_MAX:.0f} s") from None

    async def play(self, environment: str, ask: Ask, **arguments: Any) -> float:
        """The reward of one episode. Raises EnvironmentFailed: EnvironmentSilent where the episode hangs, EnvironmentGone where
        the process does. Cancelling it cancels the episode."""
        while not self._is_fit(child := self._child):
            await asyncio.to_thread(self._started)
        number, loop = new_number(), asyncio.get_running_loop()
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
                _, answer = child.send(number, method="play", environment=environment, **arguments)
                return _checked(as_reward, await asyncio.wrap_future(answer))
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

    async def _hear(self, child: EnvironmentChild) -> None:
        """Raises EnvironmentGone where the child answers nobody any more: code that blocks holds up all of its episodes."""
        answer_s_max = min(ANSWER_S_MAX, self.silence_s_max)
        _, answer = child.send(method="ping")
        try:
            await asyncio.wait_for(asyncio.wrap_future(answer), answer_s_max)
        except TimeoutError:
            await asyncio.to_thread(child.end)  # it may take seconds
            raise Ended(f"the environments' process did not answer for {answer_s_max:.0f} s") from None

    @property
    def pid(self) -> int:
        """Of the child at hand."""
        return self._started().pid

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            for child in (self._child, *tuple(self._retired)):
                child.end()

    def _started(self) -> EnvironmentChild:
        with self._lock:
            if not self._is_fit(self._child):
                log.warning("the environments' process is gone or hangs; starting another")
                if self._child not in self._retired:
                    self._child.end()
                self._child = EnvironmentChild(self._command, self._description)
            return self._child

    def _is_fit(self, child: EnvironmentChild) -> bool:
        """Whether it is to be asked anything new."""
        return not child.is_gone and child not in self._retired

    def _end_retired(self, child: EnvironmentChild) -> None:
        with self._asking:  # whoever asked before it was retired still gets an answer
            child.end()
        self._retired.discard(child)


def _checked(check: Callable[[object], T], found: object) -> T:
    """What an environment answered. Raises EnvironmentFailed where it is nothing of the kind."""
    try:
        return check(found)
    except ValueError as error:
        raise EnvironmentFailed(str(error)) from None


class ProcessEnvironment:
    """Implements ports.environment.Environment by a child."""

    def __init__(self, process: EnvironmentProcess, name: str) -> None:
        self.process, self._name = process, name
        self._prompts: dict[int, str] = {}
        """By index; the coordinator asks for the same one several times."""

    def prompt(self, index: int) -> str:
        found = self._prompts.get(index)
        if found is None:
            found = _checked(as_text, self.process.ask("prompt", self._name, index=index))
            if len(found) <= CACHED_CHARS_MAX:
                self._prompts[index] = found
            if len(self._prompts) > CACHED_PROMPTS:
                self._prompts.pop(next(iter(self._prompts)), None)
        return found

    def score(self, index: int, completion: str, *, finished: bool) -> float:
        found = self.process.ask("score", self._name, index=index, completion=completion, finished=finished)
        return _checked(as_reward, found)

    def answer(self, index: int) -> str:
        return _checked(as_text, self.process.ask("answer", self._name, index=index))

    def held_out(self, count: int) -> list[ProcessProblem]:
        found = _checked(partial(as_texts, count=count), self.process.ask("held_out", self._name, count=count))
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
        return _checked(as_flag, self._ask("is_correct", completion, finished))

    def score(self, completion: str, *, finished: bool) -> float:
        return _checked(as_reward, self._ask("score_held_out", completion, finished))

    def _ask(self, method: str, completion: str, finished: bool) -> Any:
        place = {"count": self.count, "number": self.number}
        return self.process.ask(method, self.environment, **place, completion=completion, finished=finished)


class ProcessTurnProblem(ProcessProblem):
    """Implements ports.environment.TurnProblem by a child."""

    async def play(self, prompt_token_ids: tuple[int, ...], ask: Ask) -> float:
        place = {"count": self.count, "number": self.number}
        return await self.process.play(self.environment, ask, **place, prompt=prompt_token_ids)
