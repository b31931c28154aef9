"""The coordinator's page in a real Chromium: a recorded history, live changes, hostile names, a wrong link, the keyboard."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from urllib.parse import quote

import pytest
from tests.axe_world import RUN, axe_source
from tests.chromium_world import MISSING, Browser, BrowserError, Tab, chromium_program, running_chromium
from tests.node.coordinator_world import (
    ANNA,
    BEN,
    ENGINE,
    HEARTBEAT,
    ROOT,
    TRAINER,
    World,
    make_run,
    memory_parts,
    running,
)
from tests.page_world import HOSTILE, VIEWS, recorded_history

from prime_protocol.identity import SigningKey
from prime_protocol.requests import AdminRequest, BatchRequest, JoinRequest
from prime_protocol.telemetry import DownloadReport, HeldOutFigures, Interval

PROGRAM = chromium_program()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.skipif(PROGRAM is None, reason=MISSING),
]
STEPS = 60
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


@dataclass
class Page:
    """A coordinator with a recorded history, and a browser."""

    world: World
    browser: Browser

    def address(self, view: str = "run", digest: str = "") -> str:
        query = "" if view == "run" else f"?view={view}"
        return f"{self.world.url}/{query}{'#' + digest if digest else ''}"

    def assert_undisturbed(self, tab: Tab) -> None:
        """Check that nothing went wrong in a page, and that it asked only its own coordinator."""
        assert tab.errors == []
        assert [url for url in tab.requested if not url.startswith((self.world.url, "data:"))] == []


FETCHING = HEARTBEAT.model_copy(
    update={"downloads": DownloadReport(peer_bytes=75, operator_bytes=25, links=3, done_bytes=30, all_bytes=100)}
)


@pytest.fixture
async def page() -> AsyncIterator[Page]:
    run = make_run(title="Sums <b>of</b> two", description="Learns to add.", max_steps=400, heartbeat_seconds=60.0)
    parts = memory_parts(run)
    history = recorded_history(STEPS, {ANNA.key_id: 4_132, BEN.key_id: 2_098}, now_ms=time.time_ns() // 1_000_000)
    await parts.private.write("history.json", history)
    assert PROGRAM is not None
    async with running(parts, ANNA, BEN) as world, running_chromium(PROGRAM) as browser:
        yield Page(world, browser)


async def test_a_visitor_sees_the_recorded_run_and_then_what_happens(page: Page) -> None:
    world = page.world
    async with page.browser.tab() as tab:
        await tab.go(page.address(digest=world.run.digest))
        await tab.until("document.querySelector('h1').textContent === 'Sums <b>of</b> two'")
        label = "document.querySelector('.plot.tall')?.getAttribute('aria-label')"
        assert "held-out accuracy" in await tab.until(label)
        assert await tab.evaluate("document.querySelector('.note.bad')") is None
        await tab.until("[...document.querySelectorAll('.pill')].some(pill => pill.textContent === 'live')")
        await world.fill(0)
        await world.publish()
        await tab.until("document.title.includes('step 1 of 400')")
        figures = HeldOutFigures(policy_version=STEPS + 1, sampled=Interval(mean=0.875, low=0.8, high=0.95))
        await world.client(TRAINER).batch(BatchRequest(step=1, durable_step=0, held_out=figures))
        await tab.until("document.querySelector('.tiles .big').textContent === '87.5 %'")
        await world.client(ROOT).admin(AdminRequest(action="ban", worker=BEN.key_id, reason="<img src=x>"))
        await tab.until("document.querySelector('.events .bad')?.textContent.includes('<img src=x>')")
        page.assert_undisturbed(tab)


async def test_hostile_names_are_texts_and_a_worker_is_found_among_them(page: Page) -> None:
    world = page.world
    for number, name in enumerate(HOSTILE):
        request = JoinRequest(name=name, software="1", engine=ENGINE, rollouts_max=64)
        await world.client(SigningKey(bytes([101 + number]) * 32)).join(request)
    async with page.browser.tab(width=390, height=844, dark=True) as tab:
        await tab.go(page.address("workers"))
        rows = "document.querySelectorAll('.win .wrow:not([hidden])')"
        await tab.until(f"{rows}.length === {len(HOSTILE) + 2}")
        names = await tab.evaluate(f"[...{rows}].map(row => row.querySelector('bdi').textContent)")
        assert HOSTILE[0] in names
        assert await tab.evaluate("document.querySelector('.win :is(img, script, a)')") is None
        await tab.press("/")
        for letter in "drop":
            await tab.press(letter)
        await tab.until(f"{rows}.length === 1")
        assert "DROP TABLE" in await tab.evaluate(f"{rows}[0].textContent")
        page.assert_undisturbed(tab)


async def test_no_part_of_an_address_becomes_a_view_markup_or_a_command(page: Page) -> None:
    cases = {
        "__proto__": "<img src=x onerror=alert(1)>",
        "constructor": "$(touch /tmp/x)",
        "toString": "`id`",
        "<b>": "x y",
        "RUN": ";id",
        "run ": "a" * 9_000,
    }
    for view, more in cases.items():
        async with page.browser.tab() as tab:
            await tab.go(f"{page.world.url}/?view={quote(view)}#{page.world.run.digest}.{more}")
            await tab.until("document.querySelector('nav [aria-current]')?.dataset.view === 'run'")
            await tab.evaluate("document.querySelector('nav [data-view=join]').click()")
            commands = "[...document.querySelectorAll('.cmd code')].map(one => one.textContent)"
            found = await tab.until(f"({commands}).length === 3 && {commands}")
            assert all(re.fullmatch(r"prime-node [a-z]+ http://[0-9.:]+/#[0-9a-f]{64}", one) for one in found), found
            assert await tab.evaluate("document.querySelector('main :is(img, script, b)')") is None
            page.assert_undisturbed(tab)


async def test_a_script_that_got_into_the_page_makes_no_markup_no_code_and_no_request_elsewhere(page: Page) -> None:
    """Scripts of the browser's tools stand for one: the page's policy binds what they do."""
    async with page.browser.tab() as tab:
        await tab.go(page.address())
        for script in (
            "document.body.innerHTML = '<img src=x>'",
            "document.write('<p>')",
            "setTimeout('document.title = 1')",
            "document.createElement('script').src = 'data:,'",
            "trustedTypes.createPolicy('p', {createHTML: text => text})",
            "fetch('http://127.0.0.1:1/')",
        ):
            with pytest.raises(BrowserError, match=r"Trusted|unsafe-eval|Content Security Policy|Failed to fetch"):
                await tab.evaluate(script)
        refusals = " ".join(tab.errors)
        assert "Content Security Policy" in refusals
        assert "ERR_CONNECTION_REFUSED" not in refusals, "the request left the page"


async def test_every_view_is_accessible_and_fits_a_small_screen(page: Page) -> None:
    axe = await asyncio.to_thread(axe_source)
    await page.world.client(ROOT).admin(AdminRequest(action="ban", worker=BEN.key_id, reason="other weights"))
    await page.world.client(ANNA).heartbeat(FETCHING)
    for dark in (False, True):
        async with page.browser.tab(width=360, height=740, dark=dark, bypass_policy=True) as tab:
            for view in VIEWS:
                await tab.go(page.address(view))
                await tab.until(f"document.querySelector('nav [aria-current]')?.dataset.view === '{view}'")
                await tab.until("document.querySelector('main .card')")
                await tab.evaluate(axe)
                assert (view, await tab.evaluate(RUN)) == (view, [])
                assert (view, await tab.evaluate(OVERFLOW)) == (view, 0)
            page.assert_undisturbed(tab)


async def test_the_swarm_shows_downloads_in_progress_and_the_share_of_the_operators_machines(page: Page) -> None:
    async with page.browser.tab() as tab:
        await tab.go(page.address("swarm"))
        await tab.until(
            "document.querySelector('#c-came')?.closest('.card').textContent.includes('Nothing is reported yet')"
        )
        await page.world.client(ANNA).heartbeat(FETCHING)
        shown = await tab.until(
            "document.querySelector('#c-fetching').closest('.card').querySelector('dl')?.textContent"
        )
        assert shown == f"node {ANNA.key_id[-4:]}30 %"
        assert "the operator's machines\n25.0 %" in await tab.evaluate(
            "document.querySelector('#c-came').closest('.card').innerText"
        )
        page.assert_undisturbed(tab)


async def test_a_link_to_another_run_warns(page: Page) -> None:
    async with page.browser.tab() as tab:
        await tab.go(page.address(digest="0" * 64))
        assert "names another run" in await tab.until("document.querySelector('.note.bad')?.textContent")
        await tab.go(page.address(digest=page.world.run.digest))
        await tab.until("!document.querySelector('.note.bad')")


async def test_the_views_are_reached_by_the_keyboard_alone(page: Page) -> None:
    async with page.browser.tab() as tab:
        await tab.go(page.address())
        await tab.until("document.querySelector('nav a')")
        for _ in range(len(VIEWS)):
            await tab.press("Tab")
            if await tab.evaluate("document.activeElement.dataset.view === 'checks'"):
                break
        await tab.press("Enter")
        await tab.until("document.querySelector('#c-bans')")
        assert await tab.evaluate("location.search") == "?view=checks"
        await tab.evaluate("history.back()")
        await tab.until("document.querySelector('#c-learning')")
        page.assert_undisturbed(tab)
