"""Rollouts of several turns: played with an engine, and played again with what was recorded.

Who waits for whom: an episode waits for its answers; the desk gathers what is asked while the engine works and asks for all of it
at once; whoever cancels an episode or the desk ends its waits. Worker, validator and evaluation have the same bounds, so they
agree on when an episode has no turn or no room left.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from prime_node.ports.engine import GenerateRequest
from prime_node.ports.environment import Ask, EnvironmentGone
from prime_protocol.rollout import Completion
from prime_protocol.run_spec import RunSpec
from prime_protocol.turns import Turn, turn_seed

log = logging.getLogger(__name__)

T = TypeVar("T")
TokenIds = tuple[int, ...]
Play = Callable[[Ask], Awaitable[float]]
"""One rollout of an environment; its reward."""
OTHERS_S_MAX = 10.0
"""For an episode's other agents to ask for what is recorded, while one asks for what is not."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """How far an episode may go. Example: Bounds(turns_max=4, prompt_tokens_max=120)."""

    turns_max: int
    prompt_tokens_max: int
    """Of one turn: what is left of the context when the longest answer is taken off."""


def bounds_of(spec: RunSpec) -> dict[str, Bounds]:
    """Of each environment, by its name."""
    answer = spec.sampling.completion_tokens_max
    return {one.name: Bounds(one.turns_max, spec.context_tokens_max(one) - answer) for one in spec.environments}


class Desk:
    """Gathers requests into batches of an engine. To be served beside the episodes."""

    def __init__(self, generate: Callable[[list[GenerateRequest]], Awaitable[list[Completion]]]) -> None:
        self._generate = generate
        self._waiting: list[tuple[GenerateRequest, asyncio.Future[Completion]]] = []
        self._news = asyncio.Event()

    async def ask(self, request: GenerateRequest) -> Completion:
        answer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, answer))
        self._news.set()
        return await answer

    async def serve(self) -> None:
        """Until it is cancelled, or the engine fails: then so does this."""
        while True:
            await self._news.wait()
            await asyncio.sleep(0)  # whoever is about to ask may do so
            asked, self._waiting = [one for one in self._waiting if not one[1].done()], []
            self._news.clear()
            if asked:
                completions = await self._generate([request for request, _ in asked])
                for (_, answer), completion in zip(asked, completions, strict=True):
                    if not answer.done():
                        answer.set_result(completion)

    async def serving(self, work: Awaitable[T]) -> T:
        """What the episodes give, while this serves them. Raises what ended either."""
        playing, serving = asyncio.ensure_future(work), asyncio.create_task(self.serve())
        try:
            await asyncio.wait((playing, serving), return_when=asyncio.FIRST_COMPLETED)
            if not playing.done():
                serving.result()
            return playing.result()
        finally:
            playing.cancel()
            serving.cancel()
            await asyncio.gather(playing, serving, return_exceptions=True)


class EpisodeRecorder:
    """The model's side of one episode: asks the engine, and keeps what was asked and answered."""

    def __init__(self, seed: int, bounds: Bounds, ask: Callable[[GenerateRequest], Awaitable[Completion]]) -> None:
        self._seed, self._bounds, self._ask = seed, bounds, ask
        self._turns: list[Turn | None] = []

    @property
    def turns(self) -> list[Turn]:
        """What was answered, in the order in which it was asked for."""
        answered = []
        for turn in self._turns:
            if turn is None:
                break  # the seeds of later turns count on this one
            answered.append(turn)
        return answered

    async def __call__(self, prompt_token_ids: TokenIds) -> Completion | None:
        number = len(self._turns)
        if number >= self._bounds.turns_max or not 1 <= len(prompt_token_ids) <= self._bounds.prompt_tokens_max:
            return None
        self._turns.append(None)
        completion = await self._ask(GenerateRequest(prompt_token_ids, turn_seed(self._seed, number)))
        self._turns[number] = Turn(prompt_token_ids, completion)
        return completion


async def again_alone(play: Callable[[], Awaitable[float]], alone: asyncio.Lock) -> float:
    """The reward of one episode of several. Where a process ends under them, each is played once more, one at a time (`alone` is
    theirs in common), so that the one to blame fails alone. Raises what the environment raises."""
    try:
        return await play()
    except EnvironmentGone as error:
        log.warning("an episode is played again by itself: %s", error)
    async with alone:
        return await play()


class WrongContext(Exception):
    """What was recorded is not what the environment asks for."""


class CutShort(WrongContext):
    """All that was recorded is what the environment asks for, and then it asks for more: it failed where it was played."""


async def replayed(play: Play, turns: Sequence[Turn], bounds: Bounds, *, exact: bool) -> float:
    """The reward of a recorded episode. `exact`: the environment must ask for the recorded prompts, all of them and no other.

    Raises WrongContext, CutShort among them, and whatever the environment raises.
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
            if left:  # recorded answers come at once, so one agent may run ahead of what another has still to ask for
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
        reward = 0.0  # it has no answer to go on with, and that is the recording's fault
    if exact and unknown:
        kind = WrongContext if left else CutShort
        raise kind("it asks for a prompt that is not recorded")
    if exact and left:
        raise WrongContext(f"{len(left)} turns are recorded that it never asks for")
    return reward


async def scored(play: Play, turns: Sequence[Turn], bounds: Bounds, *, exact: bool, scorings: int) -> list[float]:
    """The rewards of so many replays. Raises as `replayed` does."""
    return [await replayed(play, turns, bounds, exact=exact) for _ in range(scorings)]
