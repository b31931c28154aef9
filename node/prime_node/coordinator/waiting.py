"""Long polls: a request waits until there is an answer, or its time is up.

A handler waits for the notifications of one topic; the state machine's `Woken` effects send them. A published notification
wakes all waiters. New work is offered instead: the offer wakes the longest waiter. After that one has looked, the offer goes to
the next, while work is left. So an offer wakes only as many waiters as there is work for, plus those that cannot take it. No
waiter can drop an offer: it passes it on whether it took work, found none for itself, was refused, timed out or was cancelled
meanwhile. A later request looks before it waits. Each waiter has a deadline too: a missed wake-up would cost one request and
block nothing.
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
"""Function that returns whether anything of an offer is left."""


class _Line:
    """The waiters of one topic by ascending numbers: the longest waiter has the lowest."""

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._calls: dict[int, asyncio.Future[Left | None]] = {}
        """Wake-up of each waiter: an offer, or None if the notification is for all."""
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
        """If anything is left, wake the next waiter that is not awake already."""
        if not self._numbers or not is_left():
            return
        for place in range(bisect_right(self._numbers, number), len(self._numbers)):
            call = self._calls[self._numbers[place]]
            if not call.done():
                call.set_result(is_left)
                return

    def pass_on(self, number: int) -> None:
        """Renew the future of a waiter that was woken, and pass its offer on once it has looked."""
        call = self._calls[number]
        if call.done():
            loop = asyncio.get_running_loop()
            self._calls[number] = loop.create_future()
            if (is_left := call.result()) is not None:
                loop.call_soon(self.call_behind, number, is_left)


class Notifications:
    """Wake-ups of the waiters of a topic: all at once, or one after another."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lines = {topic: _Line() for topic in Topic}
        self._closed = False

    def publish(self, topic: Topic) -> None:
        """Wake all current waiters of the topic."""
        self._lines[topic].call_all()

    def offer(self, topic: Topic, is_left: Left) -> None:
        """Wake the longest waiter of the topic, then the next, while `is_left`."""
        self._lines[topic].call_behind(0, is_left)

    def close(self) -> None:
        """Wake all waiters, and let none wait any more: the daemon stops."""
        self._closed = True
        for topic in Topic:
            self.publish(topic)

    async def until(
        self, topic: Topic, look: Callable[[], T], *, is_worth_waiting: Callable[[T], bool], wait_s: float
    ) -> T:
        """Return the result of `look` once it is not worth waiting, or when the time is up.

        `look` runs at once and after each notification. The caller must take the offered work before its next await: then the
        next waiter gets the offer.
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
