"""A link to a peer over HTTP, and the coordinator's dial-back. SPEC.md, section "Peers over HTTP".

A peer answers on the same paths as a coordinator's public half. It may be anyone, so its answers have the same bounds, and
its bytes prove themselves. Connections are kept, so learning of a delta and fetching it needs no handshake.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable, Mapping

import aiohttp

from prime_node.adapters.web.http_answers import Patience, error_of, explained, reason_of
from prime_node.adapters.web.http_client import HttpClient
from prime_node.adapters.web.http_ranges import RangeClient
from prime_node.ports.clock import Clock
from prime_node.ports.transport import Unreachable
from prime_protocol import limits
from prime_protocol.envelope import parse_json
from prime_protocol.errors import ErrorCode, LimitExceeded, RemoteError
from prime_protocol.identity import KeyId
from prime_protocol.limits import Limits
from prime_protocol.peers import PeerUpdate, check_answer

FREE_BYTES, LINES_BYTES_PER_S = 2**12, 2**18
"""Bytes of notifications that are read at once, and a second of more: in chunks of one byte, each megabyte takes a second."""


class HttpPeer(HttpClient):
    """Implementation of ports.swarm.PeerLink."""

    def __init__(
        self, url: str, *, run: str, clock: Clock, bounds: Limits, authorization: Callable[[], str | None]
    ) -> None:
        """Link to the peer at `url`.

        `authorization` returns the header that shows our ticket to this peer; None before we have one.
        """
        super().__init__(
            url,
            run=run,
            clock=clock,
            bounds=bounds,
            connections_max=limits.PEER_HTTP_CONNECTIONS_MAX,
            uses_proxy=False,
        )
        self._authorization = authorization
        self._ranges = RangeClient(url, stall_s=self._stall_s, connections_max=limits.PEER_HTTP_CONNECTIONS_MAX)

    async def close(self) -> None:
        """Close all connections. Idempotent."""
        self._ranges.close()
        await super().close()

    async def prepare(self) -> None:
        """Open a connection for pieces. Raises Unreachable."""
        await self._ranges.prepare()

    async def _get_blob(self, path: str, headers: Mapping[str, str], bytes_max: int) -> tuple[int, bytes]:
        answer = await self._ranges.get(path, {**self._standing_headers(), **headers}, bytes_max=bytes_max)
        if answer.status >= 400:
            raise explained(answer.status, answer.body, answer.headers.get("date"), self._clock)
        if 300 <= answer.status < 400:
            raise RemoteError(ErrorCode.MALFORMED, f"{self.url} redirects; give the address it redirects to")
        return answer.status, answer.body

    def _standing_headers(self) -> Mapping[str, str]:
        shown = self._authorization()
        return {} if shown is None else {"Authorization": shown}

    async def updates(self) -> AsyncIterator[PeerUpdate]:
        """Yield what the peer has: everything first, then changes. Raises RemoteError or Unreachable."""
        try:
            async with asyncio.timeout(self._stall_s):
                answer = await self._connected().get(
                    f"{self.url}/v1/have", headers=dict(self._standing_headers()), allow_redirects=False
                )
            async with answer:
                if answer.status >= 400:
                    async with Patience(self._stall_s, wait_s=0.0) as patience:
                        raise await error_of(answer, patience, self._clock)
                async for line in _lines(answer):
                    yield parse_json(line, PeerUpdate)
        except TimeoutError:
            raise Unreachable(f"{self.url} stopped sending notifications") from None
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, OSError) as error:
            raise Unreachable(f"{self.url}: {reason_of(error)}") from None
        except (aiohttp.ClientError, ValueError) as error:
            raise RemoteError(ErrorCode.MALFORMED, f"{self.url} does not speak HTTP: {str(error)[:200]}") from None
        raise Unreachable(f"{self.url} has closed the connection")

    async def peers(self) -> str:
        """Fetch the signed list of peers. Raises RemoteError or Unreachable."""
        _, body, _ = await self._exchange("GET", "/v1/peers", bytes_max=limits.PEER_LIST_BYTES_MAX)
        try:
            return body.decode()
        except UnicodeDecodeError:
            raise RemoteError(ErrorCode.MALFORMED, "a list of peers must be text") from None


async def _lines(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yield the lines of an endless body, each bounded in length and in time.

    One timer checks at intervals whether anything came: a timer for each line would cost as much as the line.
    """
    loop = asyncio.get_running_loop()
    came_s = loop.time()
    timer: asyncio.TimerHandle | None = None

    def look() -> None:
        nonlocal timer
        if loop.time() - came_s >= limits.PEER_SILENCE_S_MAX:
            answer.close()  # reading then ends with aiohttp.ClientConnectionError
        else:
            timer = loop.call_at(came_s + limits.PEER_SILENCE_S_MAX, look)

    look()
    rest = b""
    try:
        while data := await answer.content.readany():
            came_s = loop.time()
            rest, begin = rest + data, 0
            while (end := rest.find(b"\n", begin)) >= 0:
                yield rest[begin:end]
                begin = end + 1
                if loop.time() - came_s >= limits.PEER_SILENCE_S_MAX:
                    raise TimeoutError  # the receiver takes lines slowly; old ones do not keep a link
            rest = rest[begin:]
            if len(rest) > limits.PEER_UPDATE_BYTES_MAX:
                raise LimitExceeded("PEER_UPDATE_BYTES_MAX", None, limits.PEER_UPDATE_BYTES_MAX)
            if len(data) >= FREE_BYTES:
                await asyncio.sleep(len(data) / LINES_BYTES_PER_S)
    finally:
        if timer is not None:
            timer.cancel()


class HttpDialBack:
    """Implementation of ports.swarm.DialBack. A stranger's server answers, so it reads a plain answer of bounded size alone."""

    def __init__(self, run: str) -> None:
        self._run = run

    async def answers(self, address: str, peer: KeyId) -> bool:
        nonce, asked = secrets.token_hex(16), RangeClient(address, stall_s=limits.DIAL_BACK_S_MAX, connections_max=1)
        with contextlib.closing(asked), contextlib.suppress(RemoteError, Unreachable, TimeoutError):
            async with asyncio.timeout(limits.DIAL_BACK_S_MAX):
                answer = await asked.get("/v1/identity", {"Prime-Nonce": nonce}, bytes_max=limits.PEER_TICKET_BYTES_MAX)
            if answer.status == 200:
                check_answer(answer.body, peer, self._run, nonce)
                return True
        return False

    async def close(self) -> None:
        """Do nothing: each dial-back has a connection of its own."""
