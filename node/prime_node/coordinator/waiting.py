"""Long polls: a request is held open until there is something to answer, or its time is up.

Who waits for whom: a handler waits for the news of one topic; the state machine's `Woken` effects publish it. Each waiter
also has a deadline, so a missed wake-up costs one request and wedges nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from prime_node.coordinator.state.effects import Topic
from prime_node.ports.clock import Clock

T = TypeVar("T")


class News:
    """One wake-up call for each topic."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._next = {topic: asyncio.Event() for topic in Topic}
        self._closed = False

    def publish(self, topic: Topic) -> None:
        """Wake everyone who waits for it now."""
        self._next[topic].set()
        self._next[topic] = asyncio.Event()

    def close(self) -> None:
        """Wake everyone, and let nobody wait any more: the daemon stops."""
        self._closed = True
        for topic in Topic:
            self.publish(topic)

    async def until(
        self, topic: Topic, look: Callable[[], T], *, is_worth_waiting: Callable[[T], bool], wait_s: float
    ) -> T:
        """What `look` finds: at once, or at the first news after which it is not worth waiting, or when the time is up."""
        deadline_s = self._clock.monotonic_s() + wait_s
        while True:
            news = self._next[topic]
            found = look()
            left_s = deadline_s - self._clock.monotonic_s()
            if left_s <= 0 or self._closed or not is_worth_waiting(found):
                return found
            tasks = [asyncio.ensure_future(news.wait()), asyncio.ensure_future(self._clock.sleep(left_s))]
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
