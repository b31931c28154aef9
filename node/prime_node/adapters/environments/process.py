"""Environments in a separate process: their code sees neither keys nor the run's folder, and cannot crash its host.

Concurrency: one thread writes to the child, so a child that does not read blocks no caller; another reads its answers and wakes
the callers. Problems and scores are synchronous, as the port requires, one after another. An episode is awaited, and its
requests to the model are answered on the awaiting loop.

An episode that is silent for too long fails alone, if its child still answers, and retires its child: a hanging thread, for
example, cannot be ended without its process. So does one that leaves many threads behind. The child's other
episodes continue with the same time limit, and the last one to end ends the child. A child that is retired, dies, or does not
answer in time is replaced at the next request; pending requests to an ended child fail with EnvironmentFailed.

Lines of JSON each way. To the child: {"id", "method", "environment", ...} and {"answer", "completion"}; from the child:
frames.py. Its answers are checked against the request: a text, or a number of bounded size.
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

from prime_node.adapters.environments.child import (
    Command,
    Ended,
    EnvironmentChild,
    EnvironmentFailed,
    Hung,
    new_number,
)
from prime_node.adapters.environments.frames import as_flag, as_parts, as_reward, as_text, as_texts
from prime_node.patience import first_of
from prime_node.ports.environment import GRADED_TOGETHER, Ask
from prime_protocol.rollout import Completion

log = logging.getLogger(__name__)

T = TypeVar("T")

ANSWER_S_MAX = 60.0
"""Time limit of one problem or one score, after which the environment has failed."""
SILENCE_S_MAX = 300.0
"""Limit on the silence of an episode. Tools and judges may be slow; a hostile answer may hang a grader."""
CACHED_PROMPTS = 4_096
CACHED_CHARS_MAX = 2**16
"""Limit on the length of a cached prompt: a longer one is requested again."""


class EnvironmentProcess:
    """A child process with some environments. It starts with the constructor, and ends at `close` or with this process."""

    def __init__(
        self, command: Command, description: Mapping[str, Any], *, silence_s_max: float = SILENCE_S_MAX
    ) -> None:
        """Start the child with `command`, which runs prime_node.cli.environment_process.

        Raises LocalError with the child's error.
        """
        self.silence_s_max = silence_s_max
        self._command = command
        self._description = dict(description)
        self._lock = threading.Lock()
        self._asking = threading.Lock()
        self.child = EnvironmentChild(self._command, self._description)
        self._retired: set[EnvironmentChild] = set()
        self.ready = self.child.ready

    def ask(self, method: str, environment: str, **arguments: Any) -> Any:
        """Request a result. Raises EnvironmentFailed. Calls from other threads wait, and their time limit begins afterwards."""
        with self._asking:
            child = self._started()
            _, answer = child.send(method=method, environment=environment, together=GRADED_TOGETHER.get(), **arguments)
            try:
                return answer.result(ANSWER_S_MAX)
            except Late:
                child.end()
                raise Ended(f"{method} took longer than {ANSWER_S_MAX:.0f} s") from None

    async def play(self, environment: str, ask: Ask, check: Callable[[object], T], **arguments: Any) -> T:
        """Play one episode and return its result, which `check` has checked.

        Cancelling it cancels the episode, and so does an error of `ask`, which is raised. Raises EnvironmentFailed:
        EnvironmentSilent if the episode hangs, EnvironmentGone if the process does.
        """
        while not self._is_fit(child := self.child):
            await asyncio.to_thread(self._started)
        number, loop = new_number(), asyncio.get_running_loop()
        failed: asyncio.Future[None] = loop.create_future()
        open_asks = 0

        async def answered(prompt: tuple[int, ...]) -> Completion | None:
            """Ask the model. The episode's time limit is paused meanwhile, however long it takes."""
            nonlocal open_asks
            open_asks += 1
            silence.reschedule(None)
            try:
                return await ask(prompt)
            except Exception as error:
                if not failed.done():
                    failed.set_exception(error)
                    child.tell(cancel=number)
                raise
            finally:
                open_asks -= 1
                if number in child.asks and not open_asks:
                    silence.reschedule(loop.time() + self.silence_s_max)

        try:
            async with asyncio.timeout(self.silence_s_max) as silence:
                child.asks[number] = (loop, answered)
                together = GRADED_TOGETHER.get()
                _, answer = child.send(number, method="play", environment=environment, together=together, **arguments)
                played = asyncio.wrap_future(answer)
                await first_of(played, failed)
                return _checked(check, played.result())
        except TimeoutError:
            if not silence.expired():  # it is the model's
                raise
            self._retired.add(child)
            child.tell(cancel=number)
            await self._hear(child)
            raise Hung(f"an episode did nothing for {self.silence_s_max:.0f} s") from None
        except asyncio.CancelledError:
            child.tell(cancel=number)
            raise
        finally:
            child.asks.pop(number, None)
            if child.is_worn:
                self._retired.add(child)
            if child in self._retired and not child.asks:
                loop.run_in_executor(None, self._end_retired, child)  # not awaited

    async def _hear(self, child: EnvironmentChild) -> None:
        """Check that the child still answers: blocking code stops all its episodes. Raises EnvironmentGone if it does not."""
        answer_s_max = min(ANSWER_S_MAX, self.silence_s_max)
        _, answer = child.send(method="ping")
        try:
            await asyncio.wait_for(asyncio.wrap_future(answer), answer_s_max)
        except TimeoutError:
            await asyncio.to_thread(child.end)  # may take seconds
            raise Ended(f"the environment process did not answer for {answer_s_max:.0f} s") from None

    @property
    def pid(self) -> int:
        """Process id of the current child."""
        return self._started().pid

    def close(self) -> None:
        """End all children. Idempotent."""
        with self._lock:
            for child in (self.child, *tuple(self._retired)):
                child.end()

    def _started(self) -> EnvironmentChild:
        with self._lock:
            if not self._is_fit(self.child):
                log.warning("the environment process has exited or hangs; starting another")
                if self.child not in self._retired:
                    self.child.end()
                self.child = EnvironmentChild(self._command, self._description)
            return self.child

    def _is_fit(self, child: EnvironmentChild) -> bool:
        """Return whether the child may get new requests."""
        return not child.is_gone and child not in self._retired

    def _end_retired(self, child: EnvironmentChild) -> None:
        with self._asking:  # requests made before it was retired still get an answer
            child.end()
        self._retired.discard(child)


def _checked(check: Callable[[object], T], found: object) -> T:
    """Check an environment's answer. Raises EnvironmentFailed if it is invalid."""
    try:
        return check(found)
    except ValueError as error:
        raise EnvironmentFailed(str(error)) from None


class ProcessEnvironment:
    """Implementation of ports.environment.Environment by a child."""

    def __init__(self, process: EnvironmentProcess, name: str) -> None:
        self.process, self._name = process, name
        self._prompts: dict[int, str] = {}
        """Prompts by index; the coordinator requests the same one several times."""

    def prompt(self, index: int) -> str:
        """Return a training problem's text, cached if it is short."""
        found = self._prompts.get(index)
        if found is None:
            found = _checked(as_text, self.process.ask("prompt", self._name, index=index))
            if len(found) <= CACHED_CHARS_MAX:
                self._prompts[index] = found
            if len(self._prompts) > CACHED_PROMPTS:
                self._prompts.pop(next(iter(self._prompts)), None)
        return found

    def score(self, index: int, completion: str, *, finished: bool) -> float:
        """Return the reward of a completion. Raises EnvironmentFailed."""
        found = self.process.ask("score", self._name, index=index, completion=completion, finished=finished)
        return _checked(as_reward, found)

    def parts(self, index: int, completion: str, *, finished: bool) -> Mapping[str, float]:
        """Return the further rewards of a completion by name. Raises EnvironmentFailed."""
        found = self.process.ask("parts", self._name, index=index, completion=completion, finished=finished)
        return _checked(as_parts, found)

    def answer(self, index: int) -> str:
        """Return the reference answer of a training problem."""
        return _checked(as_text, self.process.ask("answer", self._name, index=index))

    def held_out(self, count: int) -> list[ProcessProblem]:
        found = _checked(partial(as_texts, count=count), self.process.ask("held_out", self._name, count=count))
        kind = ProcessTurnProblem if isinstance(self, ProcessTurnEnvironment) else ProcessProblem
        return [kind(self.process, self._name, count, number, prompt) for number, prompt in enumerate(found)]


class ProcessTurnEnvironment(ProcessEnvironment):
    """Implementation of ports.environment.PartedTurnEnvironment by a child."""

    async def play(self, index: int, prompt_token_ids: tuple[int, ...], ask: Ask) -> float:
        return await self.process.play(self._name, ask, as_reward, index=index, prompt=prompt_token_ids)

    async def play_parts(self, index: int, prompt_token_ids: tuple[int, ...], ask: Ask) -> Mapping[str, float]:
        return await self.process.play(self._name, ask, as_parts, index=index, prompt=prompt_token_ids, parts=True)


@dataclass(frozen=True, slots=True)
class ProcessProblem:
    """Implementation of ports.environment.HeldOutProblem by a child."""

    process: EnvironmentProcess
    environment: str
    count: int
    """Number of problems requested: a replacement process needs it to find them again."""
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
    """Implementation of ports.environment.TurnProblem by a child."""

    async def play(self, prompt_token_ids: tuple[int, ...], ask: Ask) -> float:
        """Play one evaluation episode and return its reward."""
        place = {"count": self.count, "number": self.number}
        return await self.process.play(self.environment, ask, as_reward, **place, prompt=prompt_token_ids)
