"""A worker in memory with its page on a real loopback port, and a client that asks as a browser does."""

from __future__ import annotations

import contextlib
import json
import webbrowser
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.node.memory_coordinator import WorkerWorld
from tests.security.raw_http import Answer, ask

from prime_node.cli.wire_node import PAGE_FILE, node_page
from prime_node.ports.engine import Engine
from prime_node.worker.worker import Worker


def opened_addresses(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace this machine's browser; return the list of the addresses that it is given from now on."""
    opened: list[str] = []

    class Browser(webbrowser.BaseBrowser):
        def open(self, url: str, new: int = 0, autoraise: bool = True) -> bool:
            opened.append(url)
            return True

    monkeypatch.setattr(webbrowser, "get", Browser)
    return opened


@dataclass
class PageClient:
    """A browser's requests to a page."""

    folder: Path
    session: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    """Headers instead of a browser's, or in addition; an empty value leaves a header out."""

    def address(self) -> dict[str, str]:
        """Return the page's address and the key of its next session."""
        found: dict[str, str] = json.loads((self.folder / PAGE_FILE).read_text())
        return found

    async def call(self, method: str, path: str, body: Any = None, **changes: str) -> Answer:
        """Send a request; `changes` are headers by names with underscores."""
        url = self.address()["address"].rstrip("/")
        data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Host": url.removeprefix("http://"), "Sec-Fetch-Site": "same-origin"}
        if method == "POST":
            headers |= {"Origin": url, "Content-Length": str(len(data))}
        if self.session:
            headers["Authorization"] = f"Bearer {self.session}"
        headers |= self.headers | {name.replace("_", "-"): value for name, value in changes.items()}
        lines = [f"{name}: {value}" for name, value in headers.items() if value]
        head = "\r\n".join([f"{method} {path} HTTP/1.1", *lines, "\r\n"])
        return await ask(url, head.encode("latin-1") + data)

    async def begin(self) -> None:
        """Begin a session with the present key."""
        answer = await self.call("POST", "/v1/session", {"key": self.address()["key"]})
        assert answer.status == 200, answer.body
        self.session = json.loads(answer.body)["session"]

    async def node(self, since: int = 0) -> dict[str, Any]:
        """Return the page's document."""
        answer = await self.call("GET", f"/v1/node?since={since}")
        assert answer.status == 200, answer.body
        found: dict[str, Any] = json.loads(answer.body)
        return found

    async def order(self, **change: Any) -> Answer:
        """Order something."""
        return await self.call("POST", "/v1/control", change)


@contextlib.asynccontextmanager
async def shown_worker(
    world: WorkerWorld, engine: Engine | None = None, **settings: Any
) -> AsyncIterator[tuple[Worker, PageClient]]:
    """Make a worker and serve its page; the caller runs the worker."""
    worker = world.worker(engine, **settings)
    link = f"http://127.0.0.1:9/#{worker.run.digest}"
    try:
        async with node_page(worker, link):
            yield worker, PageClient(world.folder)
    finally:
        worker.lock.release()
