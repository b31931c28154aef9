"""The worker's page in a real Chromium: accessible, small, by keyboard, with hostile texts, and closed without a session."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.axe_world import RUN, axe_source
from tests.chromium_world import MISSING, Browser, Tab, chromium_program, running_chromium
from tests.node.memory_coordinator import WorkerWorld
from tests.node.node_page_world import PageClient, shown_worker
from tests.node.worker_world import make_run
from tests.page_world import HOSTILE
from tests.time_world import wait_until

from prime_node.worker.control import ON_REQUEST, Wanted, read_control
from prime_node.worker.recent import FILE, MINUTE_MS, RecentMinutes
from prime_node.worker.worker import Worker
from prime_protocol.identity import SigningKey
from prime_protocol.replies import MachineStanding, Standing

PROGRAM = chromium_program()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.skipif(PROGRAM is None, reason=MISSING),
]
BYTES_MAX, REQUESTS_MAX = 80_000, 15
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


@dataclass
class ShownPage:
    """A worker's page, and a browser."""

    worker: Worker
    client: PageClient
    browser: Browser

    async def open(self, tab: Tab) -> None:
        """Open the page with its present address."""
        found = self.client.address()
        await tab.go(f"{found['address']}#{found['key']}")
        await tab.until("document.querySelector('#c-about')")


def hostile_standing(key: str) -> Standing:
    """Return the standing of a person whose machines have names of strangers."""
    machines = tuple(
        MachineStanding(worker=key, name=name, state=state, accepted=10**9, refused=10**6, tokens=10**12)
        for name, state in zip((HOSTILE[0], HOSTILE[1], HOSTILE[6]), ("generating", "banned", HOSTILE[2]), strict=True)
    )
    person = SigningKey(bytes(32)).key_id
    return Standing(contributor=person, rank=1, contributors=9, tokens=10**12, all_tokens=10**13, machines=machines)


@pytest.fixture
async def shown(tmp_path: Path) -> AsyncIterator[ShownPage]:
    world = WorkerWorld(tmp_path, pinned=make_run(title=HOSTILE[0], description=f"{HOSTILE[1]} {HOSTILE[2]}"))
    last = world.clock.now_ms() // MINUTE_MS
    columns = {name: list(range(300)) for name in RecentMinutes.model_fields if name != "minute"}
    (tmp_path / FILE).write_text(RecentMinutes(minute=list(range(last - 300, last)), **columns).model_dump_json())
    assert PROGRAM is not None
    async with shown_worker(world, name=HOSTILE[3]) as (worker, client), running_chromium(PROGRAM) as browser:
        await worker.session.join()
        worker.session.notice = HOSTILE[4]
        worker.standing = hostile_standing(worker.key.key_id)
        yield ShownPage(worker, client, browser)


async def test_the_page_is_accessible_small_and_fits_a_small_screen(shown: ShownPage) -> None:
    axe = await asyncio.to_thread(axe_source)
    for dark in (False, True):
        shown.worker.activity.paused = ON_REQUEST if dark else ""
        async with shown.browser.tab(width=360, height=740, dark=dark, bypass_policy=True) as tab:
            await shown.open(tab)
            assert tab.num_bytes < BYTES_MAX
            assert len(tab.requested) <= REQUESTS_MAX
            await tab.evaluate(axe)
            assert await tab.evaluate(RUN) == []
            assert await tab.evaluate(OVERFLOW) == 0
            await tab.evaluate("document.querySelector('.actions .risky').click()")
            assert await tab.evaluate(RUN) == []
            assert tab.errors == []


async def test_hostile_texts_are_texts_and_an_address_is_good_for_one_tab(shown: ShownPage) -> None:
    address = shown.client.address()["address"]
    async with shown.browser.tab() as tab:
        await shown.open(tab)
        assert HOSTILE[0] in await tab.evaluate("document.querySelector('h1').textContent")
        assert HOSTILE[4] in await tab.evaluate("document.querySelector('.state .soft').textContent")
        machines = await tab.evaluate("document.querySelector('#c-standing').closest('.card').textContent")
        assert HOSTILE[0] in machines
        assert HOSTILE[1] in machines
        assert "place 1 of 9 contributors, 10.0 % of all tokens" in machines
        assert await tab.evaluate("document.querySelector('#app :is(img, script, iframe)')") is None
        assert await tab.evaluate("location.href") == address, "the key is taken out of the address"
        await tab.call("Page.reload")
        await tab.until("document.querySelector('#c-about')")
        assert tab.errors == []
        assert [url for url in tab.requested if not url.startswith((address, "data:"))] == []
    async with shown.browser.tab(width=390, height=844) as tab:
        await tab.go(address)
        assert "prime-node open" in await tab.until("document.querySelector('#c-closed')?.parentNode.textContent")
        assert await tab.evaluate("document.querySelector('.state')") is None
        await shown.open(tab)


async def test_the_buttons_and_limits_are_reached_by_the_keyboard_alone(shown: ShownPage) -> None:
    async with shown.browser.tab() as tab:
        await shown.open(tab)
        for _ in range(20):
            await tab.press("Tab")
            if await tab.evaluate("document.activeElement.textContent === 'Pause'"):
                break
        await tab.press("Enter")
        await tab.until("document.activeElement.textContent === 'Pause'")
        await asyncio.to_thread(_until_paused, shown.client.folder)
        for _ in range(30):
            await tab.press("Tab")
            if await tab.evaluate("document.activeElement.id === 'l-threads'"):
                break
        await tab.press("9")
        await tab.press("Enter")
        await tab.until("document.querySelector('.save p').textContent.startsWith('Saved')")
        limits = read_control(shown.client.folder).limits
        assert limits is not None
        assert limits.threads == 9
        assert tab.errors == []


def _until_paused(folder: Path) -> None:
    wait_until(lambda: read_control(folder).wanted is Wanted.PAUSE)
