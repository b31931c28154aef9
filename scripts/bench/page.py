"""The coordinator's page in a real Chromium: bytes and times of its first load, cost of its viewers, accessibility, safety.

    python scripts/bench/page.py [--quick] [--json] [--workers 10000] [--viewers 100]

The coordinator is a process of its own (page_server.py) with a recorded history, many workers and 2,000 changes a second. The
cost of viewers is its processor time and memory with them, less those without. Without Chromium nothing is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gzip
import json
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2]))

import aiohttp
from checks import Check, Output, at_most
from page_server import PageServer, page_server
from processes import processor_s, resident_bytes
from tests.axe_world import RUN, axe_source
from tests.chromium_world import MISSING, Browser, Tab, chromium_program, running_chromium
from tests.page_world import HOSTILE, VIEWS

SLOW_BITS_PER_S, SLOW_LATENCY_MS = 1.6e6, 150.0
DRAWN = "document.querySelector('.plot svg') && Math.round(performance.now())"
PAINT = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
SCROLL = """(async () => { const box = document.querySelector('.vs'), most = box.scrollHeight - box.clientHeight, took = [];
 let last = performance.now(); for (let i = 0; i < 120; i++) { box.scrollTop = most * ((i * 37) % 120) / 120;
 await new Promise(requestAnimationFrame); const now = performance.now(); took.push(now - last); last = now; }
 return took.sort((a, b) => a - b)[114]; })()"""
ROSTER_ROWS = "document.querySelectorAll('.win .wrow .mono').length"


def address(server: PageServer, view: str = "run") -> str:
    return server.url + ("/" if view == "run" else f"/?view={view}")


async def first_load(browser: Browser, server: PageServer, rounds: int, *, slow: bool) -> list[tuple[float, ...]]:
    """Return bytes, requests, milliseconds to the first paint and to the first chart, of each load without a cache."""
    found: list[tuple[float, ...]] = []
    for _ in range(rounds):
        async with browser.tab() as tab:
            if slow:
                await tab.slow_down(bits_per_s=SLOW_BITS_PER_S, latency_ms=SLOW_LATENCY_MS)
            await tab.go(address(server))
            drawn = await tab.until(DRAWN)
            await asyncio.sleep(0.5)  # the stream of changes is a request too
            num_requests = sum(url.startswith(server.url) for url in tab.requested)
            found.append((tab.num_bytes, num_requests, await tab.evaluate(PAINT), drawn))
    return found


async def settled(tab: Tab, server: PageServer, view: str) -> None:
    await tab.go(address(server, view))
    await tab.until("document.querySelector('main .card')")
    if view == "workers":
        await tab.until(f"{ROSTER_ROWS} > 0")
    await asyncio.sleep(0.3)


async def looks(browser: Browser, server: PageServer, *, quick: bool) -> tuple[list[str], float, list[str], list[str]]:
    """Return violations of axe, the largest overflow, errors, and foreign requests of every view."""
    axe = await asyncio.to_thread(axe_source)
    violations, errors, foreign, overflow = [], [], [], 0.0
    sizes = [(360, 740, True), (1280, 800, False)]
    if not quick:
        sizes += [(360, 740, False), (1280, 800, True), (390, 844, True), (1920, 1080, False)]
    for width, height, dark in sizes:
        for view in VIEWS:
            where = f"{view} {width} {'dark' if dark else 'light'}"
            async with browser.tab(width=width, height=height, dark=dark) as tab:
                await settled(tab, server, view)
                overflow = max(overflow, await tab.evaluate(OVERFLOW))
                errors += [f"{where}: {one}" for one in tab.errors]
                foreign += [url for url in tab.requested if not url.startswith((server.url, "data:", "about:"))]
            async with browser.tab(width=width, height=height, dark=dark, bypass_policy=True) as tab:
                await settled(tab, server, view)
                await tab.evaluate(axe)
                violations += [f"{where}: {one}" for one in await tab.evaluate(RUN)]
    return violations, overflow, errors, foreign


async def table(browser: Browser, server: PageServer) -> tuple[float, list[str]]:
    """Return the 95th percentile of a frame while the table is scrolled at random, and what hostile names have done."""
    async with browser.tab() as tab:
        await settled(tab, server, "workers")
        p95_ms = await tab.evaluate(SCROLL)
        done = []
        for name in ("alert", "gnp", "DROP", "algo"):
            await tab.evaluate(
                f"(() => {{ const find = document.querySelector('#filter'); find.value = '{name}';"
                " find.dispatchEvent(new Event('input', {bubbles: true})); })()"
            )
            shown = await tab.evaluate(
                "[...document.querySelectorAll('.win .wrow:not([hidden]) bdi')].map(one => one.textContent)"
            )
            done += [] if any(name in one for one in shown) else [f"{name} is not found among {shown}"]
            done += [one for one in shown if "\u202e" in one or "\u036b\u0343\u036a" in one]
        done += await tab.evaluate("[...document.querySelectorAll('.win img, .win script')].map(one => one.outerHTML)")
        return p95_ms, done + tab.errors


async def wrong_digest_warns(browser: Browser, server: PageServer) -> bool:
    async with browser.tab() as tab:
        await tab.go(f"{server.url}/#{'0' * 64}")
        warned = await tab.until("document.querySelector('.note.bad')?.textContent")
    async with browser.tab() as tab:
        await tab.go(f"{server.url}/#{server.digest}")
        await tab.until(DRAWN)
        return "another run" in warned and not await tab.evaluate("document.querySelector('.note.bad')")


class Viewers:
    """Viewers of the live changes, each from a network of its own."""

    def __init__(self) -> None:
        self.num_bytes = 0

    async def watch(self, server: PageServer, number: int, since: int) -> None:
        port = int(server.url.rpartition(":")[2])
        here = (f"127.0.{number % 250 + 1}.1", 0)
        reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=here)
        writer.write(f"GET /v1/live?since={since} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode())
        try:
            while data := await reader.read(2**16):
                self.num_bytes += len(data)
        finally:
            writer.close()


async def cost(server: PageServer, num_viewers: int, seconds: float) -> dict[str, float]:
    """Return the share of a core, memory and bytes per viewer and second."""
    async with aiohttp.ClientSession() as http, http.get(f"{server.url}/v1/history") as answer:
        version = (await answer.json())["version"]
    viewers = Viewers()
    tasks = [asyncio.create_task(viewers.watch(server, number, version)) for number in range(num_viewers)]
    await asyncio.sleep(3.0)
    viewers.num_bytes, began_s, busy_s = 0, time.monotonic(), processor_s(server.process)
    ticks = server.ask("ticks")
    await asyncio.sleep(seconds)
    passed_s = time.monotonic() - began_s
    found = {
        "share": (processor_s(server.process) - busy_s) / passed_s,
        "memory": resident_bytes(server.process),
        "bytes": viewers.num_bytes / passed_s / max(1, num_viewers),
        "ticks": server.ask("ticks") - ticks,
    }
    for task in tasks:
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.gather(*tasks, return_exceptions=True)
    return found


async def roster_bytes(server: PageServer, pause_s: float) -> tuple[int, int]:
    """Return the compressed bytes of the whole roster, and of its changes after a pause."""
    headers = {"Accept-Encoding": "gzip"}
    async with aiohttp.ClientSession(auto_decompress=False) as http:

        async def size(since: int) -> tuple[int, int]:
            async with http.get(f"{server.url}/v1/roster?since={since}", headers=headers) as answer:
                body = await answer.read()
                return len(body), json.loads(gzip.decompress(body))["version"]

        whole, version = await size(0)
        await asyncio.sleep(pause_s)
        return whole, (await size(version))[0]


async def measure(options: argparse.Namespace, program: str) -> list[Check]:
    quick, seconds = options.quick, 8.0 if options.quick else 20.0
    checks: list[Check] = []
    with page_server(options.workers) as server:
        server.ask("changes")
        alone = await cost(server, 0, seconds)
        looked = await cost(server, options.viewers, seconds)
        whole, change = await roster_bytes(server, 15.0)
        name = f"{options.viewers} viewers of {options.workers:,} workers"
        checks += [
            at_most("looks at the run in seconds without a viewer", alone["ticks"], 0),
            at_most(f"percent of a core for {name}", 100 * (looked["share"] - alone["share"]), 3),
            at_most(f"MB of memory for {name}", (looked["memory"] - alone["memory"]) / 1e6, 10),
            at_most("kB a second for a viewer, run view", looked["bytes"] / 1e3, 8),
            at_most("kB a second for a viewer, workers view (roster)", change / 15e3, 8),
        ]
        print(f"alone {alone}, looked at {looked}, roster {whole} then {change} bytes", file=sys.stderr)
        async with running_chromium(program) as browser:
            p95_ms, hostile = await table(browser, server)
            server.ask("still")
            rounds = 3 if quick else 7
            fast = await first_load(browser, server, rounds, slow=False)
            slow = await first_load(browser, server, rounds, slow=True)
            violations, overflow, errors, foreign = await looks(browser, server, quick=quick)
            warns = await wrong_digest_warns(browser, server)
    for one in (*violations, *errors, *foreign, *hostile):
        print(one, file=sys.stderr)

    def middle(rows: list[tuple[float, ...]], place: int) -> float:
        return statistics.median(row[place] for row in rows)

    return [
        *checks,
        at_most("kB of the first load", middle(fast, 0) / 1e3, 80),
        at_most("requests of the first load", middle(fast, 1), 15),
        at_most("seconds to the first paint", middle(fast, 2) / 1e3, 0.5),
        at_most("seconds to the first chart at 1.6 Mbit/s", middle(slow, 3) / 1e3, 1.5),
        at_most(f"ms of a frame while {options.workers:,} rows are scrolled, 95 of 100", p95_ms, 50),
        at_most("violations of axe", len(violations), 0),
        at_most("pixels of horizontal overflow", overflow, 0),
        at_most("errors in the console", len(errors), 0),
        at_most("foreign requests", len(foreign), 0),
        at_most(f"effects of {len(HOSTILE)} hostile names", len(hostile), 0),
        at_most("wrong digests without a warning", int(not warns), 0),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, two sizes")
    parser.add_argument("--json", action="store_true", help="print the checks as JSON on stdout, and nothing else")
    parser.add_argument("--workers", type=int, default=10_000)
    parser.add_argument("--viewers", type=int, default=100)
    options = parser.parse_args()
    output = Output(as_json=options.json)
    program = chromium_program()
    if program is None:
        print(f"Nothing is measured. {MISSING}", file=sys.stderr)
        return output.finish([])
    return output.finish(asyncio.run(measure(options, program)))


if __name__ == "__main__":
    sys.exit(main())
