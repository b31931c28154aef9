"""Multi-turn rollouts: played with an engine, and replayed with recorded answers.

Concurrency: an episode waits for its answers. The batching queue gathers requests while the engine works and then sends
all of them as one batch. Cancelling an episode or the queue ends its waits. Worker, validator and evaluation have the
same bounds, so they agree on when an episode has no turn or no room left.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from prime_node.patience import cancel_all
from prime_node.ports.engine import GenerateRequest
from prime_node.ports.environment import Ask, EnvironmentGone
from prime_protocol.rollout import Completion
from prime_protocol.run_spec import RunSpec
from prime_protocol.turns import Turn, turn_seed

log = logging.getLogger(__name__)

T = TypeVar("T")
TokenIds = tuple[int, ...]
Play = Callable[[Ask], Awaitable[float]]
"""Function that plays one rollout of an environment and returns its reward."""
OTHERS_S_MAX = 10.0
"""Seconds for which one agent's unrecorded request waits for the episode's other agents to send recorded ones."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of an episode. Example: Bounds(turns_max=4, prompt_tokens_max=120)."""

    turns_max: int
    prompt_tokens_max: int
    """Prompt tokens of one turn: the context without the longest answer."""


def bounds_of(spec: RunSpec) -> dict[str, Bounds]:
    """Return each environment's bounds, by name."""
    answer = spec.sampling.completion_tokens_max
    return {one.name: Bounds(one.turns_max, spec.context_tokens_max(one) - answer) for one in spec.environments}


class BatchingQueue:
    """A batching queue: it gathers requests into batches of an engine. Run it concurrently with the episodes."""

    def __init__(self, generate: Callable[[list[GenerateRequest]], Awaitable[list[Completion]]]) -> None:
        self._generate = generate
        self._waiting: list[tuple[GenerateRequest, asyncio.Future[Completion]]] = []
        self._arrivals = asyncio.Event()

    async def ask(self, request: GenerateRequest) -> Completion:
        """Queue a request and return its completion."""
        answer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, answer))
        self._arrivals.set()
        return await answer

    async def serve(self) -> None:
        """Run until cancelled, or until the engine fails; its error is raised."""
        while True:
            await self._arrivals.wait()
            await asyncio.sleep(0)  # let other tasks add their requests
            asked, self._waiting = [one for one in self._waiting if not one[1].done()], []
            self._arrivals.clear()
            if asked:
                completions = await self._generate([request for request, _ in asked])
                for (_, answer), completion in zip(asked, completions, strict=True):
                    if not answer.done():
                        answer.set_result(completion)

    async def serving(self, work: Awaitable[T]) -> T:
        """Serve requests while `work` runs, and return its result. Raises the error that ended either."""
        playing, serving = asyncio.ensure_future(work), asyncio.create_task(self.serve())
        try:
            await asyncio.wait((playing, serving), return_when=asyncio.FIRST_COMPLETED)
            if not playing.done():
                serving.result()
            return playing.result()
        finally:
            await cancel_all(playing, serving)


class EpisodeRecorder:
    """The model's side of one episode: it sends requests to the engine and records requests and answers."""

    def __init__(self, seed: int, bounds: Bounds, ask: Callable[[GenerateRequest], Awaitable[Completion]]) -> None:
        self._seed, self._bounds, self._ask = seed, bounds, ask
        self._turns: list[Turn | None] = []

    @property
    def turns(self) -> list[Turn]:
        """Return the answered turns, in the order of their requests."""
        answered = []
        for turn in self._turns:
            if turn is None:
                break  # the seeds of later turns depend on this one
            answered.append(turn)
        return answered

    async def __call__(self, prompt_token_ids: TokenIds) -> Completion | None:
        """Send a request for the next turn and record it; return None if no turn or no room is left."""
        number = len(self._turns)
        if number >= self._bounds.turns_max or not 1 <= len(prompt_token_ids) <= self._bounds.prompt_tokens_max:
            return None
        self._turns.append(None)
        completion = await self._ask(GenerateRequest(prompt_token_ids, turn_seed(self._seed, number)))
        self._turns[number] = Turn(prompt_token_ids, completion)
        return completion


async def again_alone(play: Callable[[], Awaitable[float]], alone: asyncio.Lock) -> float:
    """Play one of several concurrent episodes and return its reward.

    If a process exits, each of its episodes is played once more, one at a time (they share `alone`), so that only the
    faulty one fails. Raises whatever the environment raises.
    """
    try:
        return await play()
    except EnvironmentGone as error:
        log.warning("replaying an interrupted episode, one at a time: %s", error)
    async with alone:
        return await play()


class WrongContext(Exception):
    """The recorded turns are not what the environment asks for."""


class CutShort(WrongContext):
    """The recorded turns match the environment, but it asks for more. The environment failed where they were recorded."""


async def replayed(play: Play, turns: Sequence[Turn], bounds: Bounds, *, exact: bool) -> float:
    """Replay a recorded episode and return its reward.

    `exact`: the environment must ask for the recorded prompts, all of them and no others. Raises WrongContext,
    including CutShort, and whatever the environment raises.
    """
    left, num_asked, unknown = list(turns), 0, False
    all_asked = asyncio.Event()

    async def ask(prompt_token_ids: TokenIds) -> Completion | None:
        nonlocal num_asked, unknown
        if num_asked >= bounds.turns_max or not 1 <= len(prompt_token_ids) <= bounds.prompt_tokens_max:
            return None
        num_asked += 1
        matching = (turn for turn in left if not exact or turn.prompt_token_ids == prompt_token_ids)
        turn = next(matching, None)
        if turn is None:
            unknown = exact
            if left:  # recorded answers come at once, so one agent may run ahead of another
                with suppress(TimeoutError):
                    await asyncio.wait_for(all_asked.wait(), OTHERS_S_MAX)
            return None
        left.remove(turn)
        if not left:
            all_asked.set()
        return turn.completion

    try:
        reward = await play(ask)
    except Exception:
        if not unknown:
            raise
        reward = 0.0  # it fails for lack of an answer, which is the recording's fault
    if exact and unknown:
        kind = WrongContext if left else CutShort
        raise kind("the environment asks for a prompt that is not recorded")
    if exact and left:
        raise WrongContext(f"{len(left)} recorded turns were never requested by the environment")
    return reward


async def scored(play: Play, turns: Sequence[Turn], bounds: Bounds, *, exact: bool, scorings: int) -> list[float]:
    """Return the rewards of `scorings` replays. Raises as `replayed` does."""
    return [await replayed(play, turns, bounds, exact=exact) for _ in range(scorings)]
