"""Notice that vLLM's processes have ended while a call waits for them.

vLLM raises EngineDeadError for generation. Its calls of worker methods never end instead (vLLM 0.32, `call_utility_async`).
So while a call waits, the client's own flag is read a few times a second.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import NoReturn, TypeVar

from vllm.exceptions import VLLMClientError
from vllm.v1.engine.exceptions import EngineDeadError

from prime_node.patience import first_of
from prime_node.ports.engine import EngineDied, EngineFault, EngineMismatch

T = TypeVar("T")

LOOK_S = 0.5
"""Time between two looks at the flag."""
STARTS_MAX = 5
"""Starts of vLLM in a row without one answer between them."""


class EngineWatch:
    """Calls of a vLLM engine, and its starts since the last answer. `is_dead` asks vLLM's client."""

    def __init__(self, is_dead: Callable[[], bool]) -> None:
        self._is_dead = is_dead
        self._starts = 0

    def begin(self) -> None:
        """Count a start. Raises EngineFault if another one is not expected to help."""
        if self._starts >= STARTS_MAX:
            raise EngineFault(
                f"vLLM was started {self._starts} times, and its processes ended each time before they had answered once; its "
                "own messages are above. Is memory short (see dmesg)? Lower cpu_cache_gib, gpu_memory_share or sequences_max, "
                "or use --engine transformers"
            )
        self._starts += 1

    def answered(self) -> None:
        """Record that the engine did its work."""
        self._starts = 0

    async def call(self, work: Awaitable[T]) -> T:
        """Await `work`. Raises EngineDied, also where vLLM would never answer, and EngineMismatch for what it refuses."""
        working = asyncio.ensure_future(work)
        try:
            await first_of(working, self._look())
            return working.result()
        except EngineDeadError as error:
            raise _died() from error
        except VLLMClientError as error:  # a run's own limits allow what its model does not
            raise EngineMismatch(f"vLLM refuses a request: {error}") from error

    async def _look(self) -> NoReturn:
        while True:
            if self._is_dead():
                raise _died()
            await asyncio.sleep(LOOK_S)


def _died() -> EngineDied:
    return EngineDied(
        "vLLM's processes ended while they computed; its own messages are above. The next load starts them again"
    )
