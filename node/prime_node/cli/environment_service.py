"""The service inside a confined environment process: it answers lines of JSON (adapters/environments/frames.py).

Concurrency: requests arrive one at a time on stdin. Scores are computed at once; episodes run as concurrent tasks, and an
episode waits for the answers that it requested from its host. An episode that blocks its threads delays no other, because there
are more threads than episodes. A process that has lost many threads says so with the reward, and the host replaces it.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import sys
from collections.abc import Callable, Container, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from pathlib import Path
from typing import Any, BinaryIO

from prime_node.cli.wire_environments import build_environments
from prime_node.envs.grants import is_granted
from prime_node.inside import write_inside
from prime_node.ports.environment import (
    GRADED_TOGETHER,
    Environment,
    EnvironmentSilent,
    HeldOutProblem,
    PartedEnvironment,
    PartedTurnEnvironment,
    TurnEnvironment,
    TurnProblem,
)
from prime_protocol.errors import LocalError, PrimeError
from prime_protocol.rollout import Completion, FinishReason
from prime_protocol.run_spec import EnvironmentSpec

LINE_BYTES_MAX = 2**26
THREADS_MAX = 1_024
"""Limit on threads, which are created on demand. Python's default is slightly above the number of processors: that many hanging
graders would keep every other episode of the process from being graded."""
LEFT_BEHIND_MAX = 64
"""Limit on calls of finished episodes that still block a thread. A grader that abandons its thread leaves one behind."""
EPISODE: ContextVar[int | None] = ContextVar("episode", default=None)
"""Episode whose code is running."""


class Host:
    """The host at the other end of the pipes."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[Completion | None]] = {}

    def tell(self, **message: Any) -> None:
        """Write one message to the host."""
        self._out.write(json.dumps(message).encode() + b"\n")
        self._out.flush()

    async def sample(self, episode: int, prompt_token_ids: tuple[int, ...]) -> Completion | None:
        """Ask the host for the model's completion of a prompt; None if the rollout has no turn or room left."""
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        self.tell(ask=number, id=episode, prompt=prompt_token_ids)
        found: Completion | None = await answer
        return found

    def answered(self, number: int, completion: Mapping[str, Any] | None) -> None:
        """Complete a pending request with the host's answer."""
        answer = self._asked.pop(number, None)
        if answer is not None and not answer.done():
            answer.set_result(
                None
                if completion is None
                else Completion(
                    tuple(completion["token_ids"]), tuple(completion["logprobs"]), FinishReason(completion["finish"])
                )
            )


class Threads(ThreadPoolExecutor):
    """Thread pool that tracks unfinished calls and the episode of each."""

    def __init__(self) -> None:
        super().__init__(THREADS_MAX, "episode")
        self._open: dict[Future[Any], int | None] = {}

    def submit(self, call: Callable[..., Any], /, *args: Any, **named: Any) -> Future[Any]:
        """Start a call, recorded under the current episode."""
        future = super().submit(call, *args, **named)
        self._open[future] = EPISODE.get()
        future.add_done_callback(lambda done: self._open.pop(done, None))
        return future

    def left_behind(self, playing: Container[int]) -> int:
        """Return the number of unfinished calls from episodes that are no longer played."""
        return sum(episode is not None and episode not in playing for episode in self._open.copy().values())


class Service:
    """Handler of the host's requests."""

    def __init__(self, host: Host, environments: Mapping[str, Environment], threads: Threads) -> None:
        self._host, self._environments, self._threads = host, environments, threads
        self._held_out: dict[tuple[str, int], list[HeldOutProblem]] = {}
        """Held-out problems by environment and number of problems."""
        self._episodes: dict[int, asyncio.Task[None]] = {}

    def handle(self, message: dict[str, Any]) -> None:
        """Start the work that a message of the host asks for."""
        if "answer" in message:
            self._host.answered(message["answer"], message["completion"])
        elif "cancel" in message:
            if message["cancel"] in self._episodes:
                self._episodes[message["cancel"]].cancel()
        elif message["method"] == "ping":
            self._host.tell(id=message["id"], result=None)
        elif message["method"] == "play":
            episode = asyncio.get_running_loop().create_task(self._play(**message))
            self._episodes[message["id"]] = episode
            episode.add_done_callback(lambda _: self._episodes.pop(message["id"]))
        else:
            number = message.pop("id")
            try:
                self._host.tell(id=number, result=self._answer(**message))
            except Exception as error:  # noqa: BLE001 (the code is not ours; the host gets the error and decides)
                self._host.tell(id=number, **_failure(error))

    def _answer(self, method: str, environment: str, *, together: str, **its: Any) -> Any:
        world = self._environments[environment]
        GRADED_TOGETHER.set(together)
        if method == "prompt":
            return world.prompt(its["index"])
        if method == "answer":
            return world.answer(its["index"])
        if method == "score":
            return world.score(its["index"], its["completion"], finished=its["finished"])
        if method == "parts":
            if not isinstance(world, PartedEnvironment):
                raise ValueError("this environment names no further rewards")
            return dict(world.parts(its["index"], its["completion"], finished=its["finished"]))
        if method == "held_out":
            return [problem.prompt for problem in self._problems(environment, its["count"])]
        problem = self._problems(environment, its["count"])[its["number"]]
        if method == "is_correct":
            return problem.is_correct(its["completion"], finished=its["finished"])
        assert method == "score_held_out"
        return problem.score(its["completion"], finished=its["finished"])

    def _problems(self, environment: str, count: int) -> list[HeldOutProblem]:
        if (environment, count) not in self._held_out:
            self._held_out[environment, count] = list(self._environments[environment].held_out(count))
        return self._held_out[environment, count]

    async def _play(self, id: int, environment: str, prompt: list[int], **its: Any) -> None:  # noqa: A002 (as on the wire)
        async def ask(prompt_token_ids: tuple[int, ...]) -> Completion | None:
            return await self._host.sample(id, prompt_token_ids)

        EPISODE.set(id)
        GRADED_TOGETHER.set(its.pop("together", ""))  # else an episode would inherit the set of an earlier request
        try:
            if "number" in its:
                problem = self._problems(environment, its["count"])[its["number"]]
                assert isinstance(problem, TurnProblem)
                result: Any = await problem.play(tuple(prompt), ask)
            elif "parts" in its:
                parted = self._environments[environment]
                if not isinstance(parted, PartedTurnEnvironment):
                    raise ValueError("this environment names no further rewards")
                result = dict(await parted.play_parts(its["index"], tuple(prompt), ask))
            else:
                world = self._environments[environment]
                assert isinstance(world, TurnEnvironment)
                result = await world.play(its["index"], tuple(prompt), ask)
            is_worn = self._threads.left_behind(self._episodes) >= LEFT_BEHIND_MAX
            self._host.tell(id=id, result=result, **({"worn": True} if is_worn else {}))
        except Exception as error:  # noqa: BLE001 (the same)
            self._host.tell(id=id, **_failure(error))


def _failure(error: Exception) -> dict[str, Any]:
    silent = {"silent": True} if isinstance(error, EnvironmentSilent) else {}
    return {"error": f"{type(error).__name__}: {error}"[:500], **silent}


def kept_model(files: Mapping[str, str], folder: Path) -> Path:
    """Write the run's tokenizer and configuration to a folder of this process."""
    folder.mkdir()
    for name, data in files.items():
        write_inside(folder, name, base64.b64decode(data))
    return folder


async def serve_environments(
    out: BinaryIO, hello: Mapping[str, Any], *, folder: Path, missing: Sequence[str], granted: Sequence[str] | None
) -> None:
    """Serve until the host closes the pipe.

    `missing` lists the parts of this process's sandbox that the system does not enforce, `granted` the environments that the
    machine's settings let use the network: no others are built in a process that has it, whatever a compromised host asks for.
    """
    host = Host(out)
    loop, threads = asyncio.get_running_loop(), Threads()
    loop.set_default_executor(threads)
    lines = asyncio.StreamReader(limit=LINE_BYTES_MAX)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin.buffer)
    try:
        specs = [EnvironmentSpec.model_validate(spec) for spec in hello["environments"]]
        for spec in specs:
            if granted is not None and not is_granted(spec, granted, "unsafe_network"):
                raise LocalError(f"environment {spec.name} may not use the network")
        async with contextlib.AsyncExitStack() as stack:
            environments = build_environments(
                specs,
                kept_model(hello["model"], folder / "model"),
                answers_as_code=hello.get("answers_as_code", ()),
                grade_apart=not hello.get("grade_together", False),
                code=None if hello.get("code") is None else Path(hello["code"]),
            )
            for environment in environments.values():
                if isinstance(environment, contextlib.AbstractAsyncContextManager):
                    await stack.enter_async_context(environment)
            turns = [name for name, each in environments.items() if isinstance(each, TurnEnvironment)]
            host.tell(id=hello["id"], result={"missing": list(missing), "turns": turns})
            service = Service(host, environments, threads)
            while line := await lines.readline():
                service.handle(json.loads(line))
    except PrimeError as error:
        host.tell(id=hello["id"], error=str(error))
