"""The coordinator's page in a browser, and the public history behind it.

Nothing here needs a key or changes the run. All of it counts as strangers' requests (adapters/web/connection_counts.py).
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

from prime_node.coordinator.api.cached_response import CachedResponse
from prime_node.coordinator.api.callers import Callers
from prime_node.coordinator.page.live_feed import LiveFeed, LiveFrames
from prime_node.coordinator.page.roster import Roster
from prime_node.pages.assets import PAGE_HEADERS, file_answer, index_answer, zipped, zipped_answer
from prime_node.ports.clock import Clock
from prime_node.ports.documents import Documents
from prime_node.ports.web import Request, Response
from prime_protocol.errors import ErrorCode, RemoteError

PACKAGE = "prime_node.coordinator.page"
"""Package whose folder `assets` has the page's files."""
ROSTER_S = 5.0
"""Seconds between two looks at all workers. Between them, an answer that was made before costs nothing."""
ROSTER_LEVEL = 4
DOSSIER_PIECE_BYTES = 2**18
"""Bytes of a dossier that are read and sent at once."""
_NUMBER = re.compile(r"[0-9]{1,15}")
_DOSSIER = re.compile(r"ban-[0-9A-Za-z]{1,80}-[0-9]{1,15}\.jsonl")


class PagePages:
    """Answers for browsers: the page, its files, the history, and live changes."""

    def __init__(self, feed: LiveFeed, private: Documents, callers: Callers, clock: Clock) -> None:
        self.feed = feed
        self._private, self._callers, self._clock = private, callers, clock
        self._document = CachedResponse(lambda: zipped(_json(self.feed.document()), ROSTER_LEVEL), clock)
        self._making: asyncio.Lock = asyncio.Lock()
        self._roster, self._roster_until_s = Roster(feed.page), 0.0
        self._rosters: dict[int, bytes] = {}
        """Answers by the version that they begin with; 0: the whole."""

    async def index(self, request: Request) -> Response:
        """Return the page."""
        return index_answer(request, PACKAGE)

    async def file(self, request: Request) -> Response:
        """Return one of the page's files."""
        return file_answer(request, PACKAGE)

    async def history(self, request: Request) -> Response:
        """Return all that the page shows first."""
        return zipped_answer(request, self._document.get())

    async def events(self, request: Request) -> Response:
        """Return recent events with numbers above `since`."""
        history = self.feed.page.history
        found = {"newest": history.number, "events": history.events(_since(request))}
        return zipped_answer(request, zipped(_json(found), ROSTER_LEVEL))

    async def roster(self, request: Request) -> Response:
        """Return a row for each worker, or what has changed since a version. Compression takes long, so a thread does it."""
        since = _since(request)
        async with self._making:
            now_s = self._clock.monotonic_s()
            if now_s >= self._roster_until_s:
                self._roster.look()
                self._rosters.clear()
                self._roster_until_s = now_s + ROSTER_S
            place = since if self._roster.knows(since) else 0
            if place not in self._rosters:
                found = self._roster.since(place)
                self._rosters[place] = await asyncio.to_thread(lambda: zipped(_json(found), ROSTER_LEVEL))
            return zipped_answer(request, self._rosters[place])

    async def evidence(self, request: Request) -> Response:
        """Return the dossier of a ban, which `prime-node evidence verify` checks."""
        name = request.params["name"]
        if _DOSSIER.fullmatch(name) is None:
            raise RemoteError(ErrorCode.NOT_FOUND, "no dossier has this name")
        try:
            num_bytes = await self._private.size(name)
        except KeyError:
            raise RemoteError(ErrorCode.NOT_FOUND, "this dossier does not exist, or is not written yet") from None
        headers = {
            "Content-Disposition": f'attachment; filename="{name}"',
            "X-Content-Type-Options": "nosniff",
            "Content-Length": str(num_bytes),
        }
        return Response(self._pieces(name, num_bytes), content_type="application/jsonl", headers=headers)

    async def live(self, request: Request) -> Response:
        """Return the live changes after the version `since` as server-sent events."""
        return live_answer(self.feed, live_since(request), self._callers.network_of(request.remote))

    async def _pieces(self, name: str, num_bytes: int) -> AsyncIterator[bytes]:
        """Read a dossier as fast as its reader takes it: it may be large, and anyone may ask for it."""
        for start in range(0, num_bytes, DOSSIER_PIECE_BYTES):
            yield await self._private.read(name, start=start, end=min(num_bytes, start + DOSSIER_PIECE_BYTES))


def live_since(request: Request) -> int:
    """Return the version after which a viewer asks. Raise RemoteError(MALFORMED)."""
    return _since(request, request.headers.get("last-event-id"))


def live_answer(feed: LiveFrames, since: int, network: str) -> Response:
    """Return the stream of one more viewer. Raise RemoteError(UNAVAILABLE) if there are too many."""
    if not feed.has_room(network):
        raise RemoteError(
            ErrorCode.UNAVAILABLE, "too many viewers; the page asks from time to time instead", retry_after_s=15.0
        )
    feed.enter(network)  # nothing after it raises: a viewer that never leaves would keep its place
    return Response(
        feed.frames(since),
        content_type="text/event-stream",
        headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no", **PAGE_HEADERS},
        after=lambda: feed.leave(network),
    )


def _since(request: Request, last: str | None = None) -> int:
    """Return the number after which a caller asks. Raise RemoteError(MALFORMED)."""
    asked = last if last is not None else request.query.get("since", "0")
    if _NUMBER.fullmatch(asked) is None:
        raise RemoteError(ErrorCode.MALFORMED, "`since` is a number of at most 15 digits")
    return int(asked)


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
