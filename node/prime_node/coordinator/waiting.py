"""Long polls: a request is held open until there is something to answer, or its time is up.

Who waits for whom: a handler waits for the news of one topic; the state machine's `Woken` effects tell it. News for everyone
wakes all who wait. Work that came up is offered: that wakes whoever waits longest, who passes the offer on to the next behind him
once he has looked, while anything is left. So it wakes no more than there is work for, and those who cannot take it. Nobody can
drop it: who was woken passes it on whether he took something, found nothing for himself, was refused, timed out or was cancelled
meanwhile. Who comes later looks before he waits. Each waiter has a deadline too: a missed wake-up would cost one request, and
wedge nothing.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Callable
from typing import TypeVar

from prime_node.coordinator.state.effects import Topic
from prime_node.ports.clock import Clock

T = TypeVar("T")

Left = Callable[[], bool]
"""Whether anything of what was offered is left."""


class _Line:
    """Who waits for one topic, by numbers that ascend: whoever waits longest has the lowest."""

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._calls: dict[int, asyncio.Future[Left | None]] = {}
        """What wakes them: an offer, or None where the news is for everyone."""
        self._last = 0

    def enter(self) -> int:
        self._last += 1
        self._numbers.append(self._last)
        self._calls[self._last] = asyncio.get_running_loop().create_future()
        return self._last

    def leave(self, number: int) -> None:
        del self._numbers[bisect_right(self._numbers, number) - 1]
        del self._calls[number]

    def call_of(self, number: int) -> asyncio.Future[Left | None]:
        return self._calls[number]

    def call_all(self) -> None:
        for call in self._calls.values():
            if not call.done():
                call.set_result(None)

    def call_behind(self, number: int, is_left: Left) -> None:
        """Where anything is left, the next one who is not on his way to look already."""
        if not is_left():
            return
        for place in range(bisect_right(self._numbers, number), len(self._numbers)):
            call = self._calls[self._numbers[place]]
            if not call.done():
                call.set_result(is_left)
                return

    def pass_on(self, number: int) -> None:
        """Whoever was called looks now, and what he was offered goes on once he has done so."""
        call = self._calls[number]
        if call.done():
            loop = asyncio.get_running_loop()
            self._calls[number] = loop.create_future()
            if (is_left := call.result()) is not None:
                loop.call_soon(self.call_behind, number, is_left)


class Notifications:
    """Wakes those who wait for a topic: all of them, or one after another."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lines = {topic: _Line() for topic in Topic}
        self._closed = False

    def publish(self, topic: Topic) -> None:
        """Wake everyone who waits for it now."""
        self._lines[topic].call_all()

    def offer(self, topic: Topic, is_left: Left) -> None:
        """Wake whoever waits for it longest, then the next, while `is_left`."""
        self._lines[topic].call_behind(0, is_left)

    def close(self) -> None:
        """Wake everyone, and let nobody wait any more: the daemon stops."""
        self._closed = True
        for topic in Topic:
            self.publish(topic)

    async def until(
        self, topic: Topic, look: Callable[[], T], *, is_worth_waiting: Callable[[T], bool], wait_s: float
    ) -> T:
        """What `look` finds: at once, or at the first news after which it is not worth waiting, or when the time is up.

        The caller takes what was offered to him before he next awaits anything: then the offer goes on.
        """
        found = look()
        if wait_s <= 0 or self._closed or not is_worth_waiting(found):
            return found
        line = self._lines[topic]
        number, sleeping = line.enter(), asyncio.ensure_future(self._clock.sleep(wait_s))
        try:
            while True:
                try:
                    await asyncio.wait((line.call_of(number), sleeping), return_when=asyncio.FIRST_COMPLETED)
                finally:
                    line.pass_on(number)
                found = look()
                if sleeping.done() or self._closed or not is_worth_waiting(found):
                    return found
        finally:
            sleeping.cancel()
            line.leave(number)
