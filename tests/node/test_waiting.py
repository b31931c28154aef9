"""Tasks that wait for work wake in turn, one for each piece of work, and no notification is lost."""

from __future__ import annotations

import asyncio
import random

import pytest

from prime_node.adapters.system_clock import SystemClock
from prime_node.coordinator.state.effects import Topic
from prime_node.coordinator.waiting import Notifications


class Office:
    """Work that is offered to numbered workers; those in `picky` reject it."""

    def __init__(self) -> None:
        self.news = Notifications(SystemClock())
        self.work = 0
        self.picky: set[int] = set()
        self.looked: list[int] = []
        self.taken: list[int] = []
        self.tasks: dict[int, asyncio.Task[None]] = {}

    async def open(self, num_workers: int) -> None:
        for number in range(num_workers):
            await self.enter(number)
        self.looked.clear()

    async def enter(self, number: int) -> None:
        self.tasks[number] = asyncio.create_task(self._work(number))
        await settle()

    def offer(self, pieces: int) -> None:
        self.work += pieces
        self.news.offer(Topic.LEASE, lambda: self.work > 0)

    async def close(self) -> None:
        self.news.close()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)

    async def _work(self, number: int) -> None:
        def look() -> bool:
            self.looked.append(number)
            return self.work > 0 and number not in self.picky

        if await self.news.until(Topic.LEASE, look, is_worth_waiting=lambda found: not found, wait_s=60.0):
            self.work -= 1
            self.taken.append(number)


async def settle() -> None:
    for _ in range(400):
        await asyncio.sleep(0)


async def test_a_piece_of_work_wakes_only_the_task_that_waits_longest() -> None:
    office = Office()
    await office.open(50)
    office.offer(1)
    await settle()
    assert (office.taken, office.looked) == ([0], [0])
    await office.close()


async def test_one_offer_wakes_as_many_as_there_is_work_for() -> None:
    office = Office()
    await office.open(50)
    office.offer(3)
    await settle()
    assert (office.taken, office.looked) == ([0, 1, 2], [0, 1, 2])
    await office.close()


async def test_a_task_that_can_take_nothing_passes_it_on_and_keeps_its_place() -> None:
    office = Office()
    office.picky = set(range(20))
    await office.open(50)
    office.offer(1)
    await settle()
    assert office.taken == [20]
    office.picky = set()
    office.offer(1)
    await settle()
    assert office.taken == [20, 0]
    await office.close()


@pytest.mark.parametrize("cancelled", [(0,), (0, 1), (1, 0)])
async def test_a_task_that_is_cancelled_as_it_wakes_passes_it_on(cancelled: tuple[int, ...]) -> None:
    office = Office()
    await office.open(5)
    office.offer(1)
    for number in cancelled:
        office.tasks[number].cancel()
    await settle()
    assert office.taken == [len(cancelled)]
    await office.close()


async def test_a_task_that_is_refused_as_it_wakes_passes_it_on() -> None:
    office = Office()
    is_banned = False

    def look() -> bool:
        if is_banned:
            raise PermissionError
        return False

    banned = asyncio.create_task(
        office.news.until(Topic.LEASE, look, is_worth_waiting=lambda found: not found, wait_s=60.0)
    )
    await settle()
    await office.open(3)
    is_banned = True
    office.offer(1)
    await settle()
    assert isinstance(banned.exception(), PermissionError)
    assert office.taken == [0]
    await office.close()


async def test_news_for_everyone_wakes_all() -> None:
    office = Office()
    await office.open(20)
    office.news.publish(Topic.LEASE)
    await settle()
    assert office.looked == list(range(20))
    await office.close()


@pytest.mark.parametrize("seed", range(10))
async def test_no_work_is_left_while_a_task_waits_that_would_take_it(seed: int) -> None:
    office, rng = Office(), random.Random(seed)
    await office.open(10)
    for number in range(10, 60):
        office.picky = {one for one in range(60) if rng.random() < 0.3}
        for _ in range(1 + rng.randrange(3)):  # what a worker can take has changed: that is news as well
            office.offer(rng.randrange(3))
        if rng.random() < 0.2:
            office.news.publish(Topic.LEASE)
        waiting = [one for one, task in office.tasks.items() if not task.done()]
        for one in rng.sample(waiting, min(len(waiting), rng.randrange(3))):
            office.tasks[one].cancel()
        await office.enter(number)
        await settle()
        able = [one for one, task in office.tasks.items() if not task.done() and one not in office.picky]
        assert office.work == 0 or not able, f"seed {seed}: {able} wait beside {office.work} pieces of work"
    await office.close()
