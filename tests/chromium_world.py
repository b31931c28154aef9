"""A Chromium without a window, driven over its DevTools protocol: sizes, themes, slow networks; bytes, errors, pictures.

Each page has a browser context of its own, so nothing is cached between two pages.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import re
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
MISSING = "Chromium is not installed: sudo apt install chromium (or your system's)"
START_S = 60.0
ANSWER_S = 180.0
"""An answer may wait for a condition in a page: longer than any `until`."""
MESSAGE_BYTES_MAX = 2**26
FLAGS = (
    *(
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
        "--mute-audio",
    ),
    *("--no-first-run", "--disable-extensions", "--disable-background-networking", "--disable-component-update"),
    *("--force-color-profile=srgb", "--font-render-hinting=none", "--enable-precise-memory-info"),
    "--remote-debugging-port=0",
)


def chromium_program() -> str | None:
    """Return the path of an installed Chromium; None if there is none."""
    return next((found for name in PROGRAMS if (found := shutil.which(name))), None)


class BrowserError(Exception):
    """The browser refused a command, or a script in the page failed."""


@dataclass
class Tab:
    """A page in a browser context of its own, and what happened in it."""

    call: Callable[..., Any]
    """Send a command to this page. Example: await tab.call("Page.reload")."""
    errors: list[str] = field(default_factory=list)
    """Errors and warnings of the console, exceptions without a handler, and dialogs."""
    requested: list[str] = field(default_factory=list)
    """Addresses of all requests."""
    num_bytes: int = 0
    """Bytes received, with headers, compressed."""
    loaded: asyncio.Event = field(default_factory=asyncio.Event)

    def happened(self, method: str, event: dict[str, Any]) -> None:
        """Record an event of the page."""
        match method:
            case "Runtime.exceptionThrown":
                details = event["exceptionDetails"]
                self.errors.append(str(details.get("exception", {}).get("description", details["text"])))
            case "Runtime.consoleAPICalled" if event["type"] in ("error", "warning", "assert"):
                self.errors.append(" ".join(str(one.get("value", "")) for one in event["args"]))
            case "Log.entryAdded" if event["entry"]["level"] in ("error", "warning"):
                self.errors.append(f"{event['entry']['text']} {event['entry'].get('url', '')}")
            case "Page.javascriptDialogOpening":
                self.errors.append(f"dialog: {event['message']}")
            case "Network.requestWillBeSent":
                self.requested.append(event["request"]["url"])
            case "Network.loadingFinished":
                self.num_bytes += round(event["encodedDataLength"])
            case "Page.loadEventFired":
                self.loaded.set()

    async def go(self, url: str) -> None:
        """Open an address, and wait until its document is loaded."""
        self.loaded.clear()
        found = await self.call("Page.navigate", url=url)
        if "errorText" in found:
            raise BrowserError(f"{url}: {found['errorText']}")
        if "loaderId" in found:  # another document, not another fragment
            await asyncio.wait_for(self.loaded.wait(), ANSWER_S)

    async def evaluate(self, script: str) -> Any:
        """Return the value of a JavaScript expression; a promise is awaited. Raise BrowserError if it throws."""
        found = await self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in found:
            details = found["exceptionDetails"]
            raise BrowserError(details.get("exception", {}).get("description", details["text"]))
        return found["result"].get("value")

    async def until(self, script: str, *, seconds: float = 20.0) -> Any:
        """Wait until an expression is true, and return it. Raise BrowserError after too long."""
        return await self.evaluate(
            f"new Promise((done, fail) => {{ const end = performance.now() + {1000 * seconds}; const look = () => {{"
            f" let found = null; try {{ found = {script}; }} catch {{}}"
            " if (found) done(found); else if (performance.now() > end) fail(new Error('never: ' + "
            f"{json.dumps(script)})); else setTimeout(look, 25); }}; look(); }})"
        )

    async def press(self, key: str) -> None:
        """Press and release a key. Example: await tab.press("Tab")."""
        text = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
        code = {"Tab": 9, "Enter": 13, "Escape": 27}.get(key, ord(key[0].upper()))
        for kind in ("keyDown", "keyUp"):
            given = {} if kind == "keyUp" else text
            await self.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **given)

    async def slow_down(self, *, bits_per_s: float, latency_ms: float) -> None:
        """Bound the network of this page."""
        rate = bits_per_s / 8
        await self.call(
            "Network.emulateNetworkConditions",
            offline=False,
            latency=latency_ms,
            downloadThroughput=rate,
            uploadThroughput=rate,
        )

    async def picture(self, *, tall: int | None = None) -> bytes:
        """Return a PNG of what is visible, or of the page down to the height `tall`."""
        more: dict[str, Any] = {}
        if tall is not None:
            size = (await self.call("Page.getLayoutMetrics"))["cssContentSize"]
            clip = {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], tall), "scale": 1}
            more = {"captureBeyondViewport": True, "clip": clip}
        return base64.b64decode((await self.call("Page.captureScreenshot", format="png", **more))["data"])


class Browser:
    """A running Chromium."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._tabs: dict[str, Tab] = {}

    async def call(self, method: str, session: str | None = None, /, **parameters: Any) -> Any:
        """Send a command and return its answer. Raise BrowserError."""
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        more = {} if session is None else {"sessionId": session}
        await self._socket.send_json({"id": number, "method": method, "params": parameters, **more})
        found = await asyncio.wait_for(answer, ANSWER_S)
        if "error" in found:
            raise BrowserError(f"{method}: {found['error']['message']}")
        return found["result"]

    async def listen(self) -> None:
        """Distribute answers and events until the browser ends."""
        async for message in self._socket:
            found = json.loads(message.data)
            if "id" in found:
                answer = self._answers.pop(found["id"])
                if not answer.done():
                    answer.set_result(found)
            elif (tab := self._tabs.get(found.get("sessionId", ""))) is not None:
                tab.happened(found["method"], found["params"])
        for answer in self._answers.values():
            answer.cancel()

    @contextlib.asynccontextmanager
    async def tab(
        self, *, width: int = 1280, height: int = 800, dark: bool = False, bypass_policy: bool = False
    ) -> AsyncIterator[Tab]:
        """Open an empty page without motion. `bypass_policy`: scripts of a test run in it whatever the page's policy is."""
        context = (await self.call("Target.createBrowserContext"))["browserContextId"]
        target = (await self.call("Target.createTarget", url="about:blank", browserContextId=context))["targetId"]
        session = (await self.call("Target.attachToTarget", targetId=target, flatten=True))["sessionId"]

        async def call(method: str, **parameters: Any) -> Any:
            return await self.call(method, session, **parameters)

        tab = self._tabs[session] = Tab(call)
        try:
            for domain in ("Page", "Runtime", "Network", "Log", "Performance"):
                await call(f"{domain}.enable")
            if bypass_policy:
                await call("Page.setBypassCSP", enabled=True)
            await call(
                "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
            )
            motion = {"name": "prefers-reduced-motion", "value": "reduce"}
            scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
            await call("Emulation.setEmulatedMedia", features=[motion, scheme])
            yield tab
        finally:
            del self._tabs[session]
            await self.call("Target.disposeBrowserContext", browserContextId=context)


@contextlib.asynccontextmanager
async def running_chromium(program: str, *flags: str) -> AsyncIterator[Browser]:
    """Run a Chromium with an empty profile, and further flags."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            *(program, *FLAGS, *flags, f"--user-data-dir={profile}", "about:blank"),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        assert process.stderr is not None
        try:
            async with asyncio.timeout(START_S):
                while not (found := re.search(rb"listening on (ws://\S+)", line := await process.stderr.readline())):
                    if not line:
                        raise BrowserError(f"{program} ended before it listened")
            draining = asyncio.create_task(process.stderr.read())
            async with aiohttp.ClientSession() as http:
                async with http.ws_connect(found[1].decode(), max_msg_size=MESSAGE_BYTES_MAX) as socket:
                    browser = Browser(socket)
                    listening = asyncio.create_task(browser.listen())
                    yield browser
                    with contextlib.suppress(BrowserError, asyncio.CancelledError):
                        await browser.call("Browser.close")
                listening.cancel()
            draining.cancel()
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGKILL)
            await process.wait()
