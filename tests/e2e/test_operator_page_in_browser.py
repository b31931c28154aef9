"""The operator's page in a real Chromium: orders by hand and by keyboard, an invitation, other widths and colours."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.axe_world import RUN, axe_source
from tests.chromium_world import MISSING, Browser, Tab, chromium_program, running_chromium
from tests.node.coordinator_world import ANNA, BEN, World, make_run, memory_parts, running
from tests.node.operator_world import run_dir_of

from prime_node.cli.operate_page.serving import serve_page
from prime_node.cli.operator import Operator

PROGRAM = chromium_program()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.skipif(PROGRAM is None, reason=MISSING),
]
REBOUND = "rebound.example"
"""A stranger's name, which resolves to this machine."""
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


@dataclass
class Desk:
    """A coordinator, its operator's page, and a browser."""

    world: World
    browser: Browser
    lines: asyncio.Queue[str]
    """What the command has printed."""

    async def address(self) -> str:
        """Return the next address that is good once."""
        while not (found := re.findall(r"http://\S+/#\S+", await self.lines.get())):
            pass
        return found[0]


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    assert PROGRAM is not None
    lines, stop = asyncio.Queue[str](), asyncio.Event()
    async with (
        running(memory_parts(make_run(title="Sums <b>of</b> two")), ANNA, BEN) as world,
        running_chromium(PROGRAM, f"--host-resolver-rules=MAP {REBOUND} 127.0.0.1") as browser,
    ):
        operator = Operator.of(run_dir_of(world, tmp_path).path)
        serving = asyncio.create_task(serve_page(operator, stop, port=0, socket=None, shown=lines.put_nowait))
        try:
            yield Desk(world, browser, lines)
        finally:
            stop.set()
            await serving


async def press(tab: Tab, label: str) -> None:
    """Press the button with this text or label, once there is one."""
    find = f"[...document.querySelectorAll('button')].find(one => (one.ariaLabel ?? one.textContent) === {label!r})"
    await tab.until(f"({find}) && (({find}).click(), true)")


async def test_the_operator_pauses_bans_and_invites_and_nothing_of_it_stays_in_the_address(desk: Desk) -> None:
    world = desk.world
    async with desk.browser.tab() as tab:
        await tab.go(await desk.address())
        await tab.until("document.querySelector('h1').textContent === 'Operate Sums <b>of</b> two'")
        assert await tab.evaluate("location.hash") == ""
        await press(tab, "Pause")
        await tab.until("document.activeElement.id === 'reason'")
        for letter in "moving":
            await tab.press(letter)
        await tab.press("Enter")
        await tab.until("document.querySelector('.pill').textContent === 'paused'")
        assert (await world.status())["pause_reason"] == "moving"
        await press(tab, "Resume")
        await tab.until("document.querySelector('.pill').textContent === 'running'")
        await press(tab, f"Ban node {BEN.key_id[-4:]}")
        await tab.until("document.querySelector('dialog[open]')")
        await tab.press("Escape")
        await tab.until("!document.querySelector('dialog')")
        assert not await tab.evaluate("document.querySelector('td.bad')"), "a question that is left changes nothing"
        await press(tab, f"Ban node {BEN.key_id[-4:]}")
        await tab.press("Enter")
        await tab.until("document.querySelector('td.bad')?.textContent.includes('by the operator')")
        await press(tab, "Make a link")
        link = await tab.until("document.querySelector('.invited code')?.textContent")
        assert link.startswith(f"prime-node join {world.url}/#{world.run.digest}.")
        assert await tab.evaluate("document.querySelector('.invited svg path').getAttribute('d').length") > 1_000
        await tab.evaluate("location.reload()")
        await tab.until("document.querySelector('td.bad')")  # the session lasts as long as the tab
        assert tab.errors == []
        own = await tab.evaluate("location.origin")
        assert [url for url in tab.requested if not url.startswith((own, "data:"))] == []


HOSTILE = """(async own => {
  const order = JSON.stringify({action: "drain"}), seen = [];
  const attempts = [
    ["POST", {}], ["POST", {headers: {"Content-Type": "text/plain"}}],
    ["POST", {headers: {Authorization: "Bearer SESSION"}}], ["GET", {headers: {Authorization: "Bearer SESSION"}}],
    ["POST", {mode: "no-cors", credentials: "include"}], ["GET", {mode: "no-cors"}],
  ];
  for (const [method, more] of attempts) for (const path of ["/v1/order", "/v1/invite", "/v1/session", "/v1/view", "/"]) {
    const body = method === "POST" ? order : undefined;
    try { seen.push(await (await fetch(own + path, {method, body, ...more})).text()); } catch { }
  }
  for (const type of ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"]) {
    const form = document.createElement("form");
    Object.assign(form, {method: "POST", action: own + "/v1/order", enctype: type, target: "inside"});
    form.append(Object.assign(document.createElement("input"), {name: '{"action": "drain", "reason": "', value: '"}'}));
    const frame = Object.assign(document.createElement("iframe"), {name: "inside"});
    document.body.append(frame, form);
    const shown = new Promise(done => frame.onload = done);
    form.submit();
    await shown;
    try { seen.push(frame.contentDocument.body.textContent); } catch { }
    frame.remove();
  }
  return seen.join("");
})"""


async def test_another_page_in_the_operator_s_browser_reads_and_orders_nothing(desk: Desk) -> None:
    """It has another port of this machine, so a browser takes it for the same site, and even knows the session."""
    address = await desk.address()
    async with desk.browser.tab() as tab, desk.browser.tab(bypass_policy=True) as hostile:
        await tab.go(address)
        session = await tab.until("sessionStorage.getItem('session')")
        await hostile.go(desk.world.url)
        script = HOSTILE.replace("SESSION", session)
        assert await hostile.evaluate(f"{script}({address.partition('/#')[0]!r})") == ""
        assert not (await desk.world.status())["draining"]
        await press(tab, "Drain")
        await tab.until("document.querySelector('dialog[open]')")
        await tab.press("Enter")
        await tab.until("document.querySelector('.pill').textContent === 'draining'")


async def test_a_site_whose_name_is_rebound_to_this_machine_reads_and_orders_nothing(desk: Desk) -> None:
    """The browser takes the page for the site's own: neither its origin nor a preflight protects it."""
    address = await desk.address()
    port = address.partition("/#")[0].rpartition(":")[2]
    async with desk.browser.tab() as tab, desk.browser.tab(bypass_policy=True) as hostile:
        await tab.go(address)
        session = await tab.until("sessionStorage.getItem('session')")
        await hostile.go(f"http://{REBOUND}:{port}/")
        own = f"http://{REBOUND}:{port}"
        assert await hostile.evaluate("location.origin") == own
        seen = await hostile.evaluate(f"{HOSTILE.replace('SESSION', session)}({own!r})")
        assert seen, "the site reads the refusals"
        assert not [word for word in ("title", "workers", "prime-node join", "<script") if word in seen]
        assert not (await desk.world.status())["draining"]


async def test_no_other_page_can_frame_the_operator_s(desk: Desk) -> None:
    own = (await desk.address()).partition("/#")[0]
    frame = "Object.assign(document.createElement('iframe'), {src: %r, onload: done})"
    async with desk.browser.tab(bypass_policy=True) as hostile:
        await hostile.go(desk.world.url)
        await hostile.evaluate(f"new Promise(done => document.body.append({frame % (own + '/')}))")
        framed = [url for url in hostile.requested if url.startswith(own)]
        assert framed == [f"{own}/"], "none of the page's scripts ran"


async def test_the_page_is_accessible_and_fits_a_small_screen(desk: Desk) -> None:
    axe = await asyncio.to_thread(axe_source)
    for dark in (False, True):
        async with desk.browser.tab(width=360, height=740, dark=dark, bypass_policy=True) as tab:
            await tab.go(await desk.address())
            await press(tab, "Make a link")
            await tab.until("document.querySelector('.invited')")
            await press(tab, "Drain")
            await tab.evaluate(axe)
            assert await tab.evaluate(RUN) == []
            await tab.press("Escape")
            assert (await tab.evaluate(RUN), await tab.evaluate(OVERFLOW)) == ([], 0)
            assert tab.errors == []
