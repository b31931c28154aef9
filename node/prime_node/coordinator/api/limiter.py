"""Rate limits, as two kinds of token buckets, and the places of those that read the store.

- by key, after a signature is verified: one worker cannot crowd out the others;
- by network address, for faulty requests and new keys: strangers at an address that sends faulty requests are refused
  before they cost a signature check. Active workers and the run's keys are exempt, because they may share the address
  (requests.py).

With a bucket by an unverified key, anyone could use up another key's tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
from collections.abc import AsyncIterator
from functools import lru_cache
from weakref import WeakValueDictionary

from prime_node.ports.web import Sender
from prime_protocol.addresses import parse_ip
from prime_protocol.errors import ErrorCode, RemoteError

BUCKETS_MAX = 65_536
"""Buckets kept of each kind; the least recently used one is dropped first. About 10 MB."""
PLACE_S_MAX = 2.0
"""Wait for a place to read the store, and the time after which one that got none may ask again."""


class Buckets:
    """Token buckets by name. A bucket that does not exist is full."""

    def __init__(self, *, per_second: float, burst: float) -> None:
        self._per_second = per_second
        self._burst = burst
        self._levels: dict[str, tuple[float, float]] = {}  # name -> (tokens, at), least recently used first

    def charge(self, name: str, now_s: float) -> None:
        """Take a token; the level does not fall below zero."""
        self._take(name, self._level(name, now_s), now_s)

    def require(self, name: str, now_s: float) -> float:
        """Return the tokens. Raise RemoteError(TOO_MANY_REQUESTS) if none is left."""
        level = self._level(name, now_s)
        if level < 1.0:
            retry_after_s = round((1.0 - level) / self._per_second, 3)
            raise RemoteError(ErrorCode.TOO_MANY_REQUESTS, "slow down", retry_after_s=retry_after_s)
        return level

    def spend(self, name: str, now_s: float) -> None:
        """Take a token. Raise RemoteError(TOO_MANY_REQUESTS) if none is left."""
        self._take(name, self.require(name, now_s), now_s)

    def _take(self, name: str, level: float, now_s: float) -> None:
        self._levels.pop(name, None)
        self._levels[name] = (max(0.0, level - 1.0), now_s)
        if len(self._levels) > BUCKETS_MAX:
            del self._levels[next(iter(self._levels))]

    def _level(self, name: str, now_s: float) -> float:
        tokens, at_s = self._levels.get(name, (self._burst, now_s))
        return min(self._burst, tokens + (now_s - at_s) * self._per_second)


class AddressBuckets(Buckets):
    """Token buckets by IP address; all addresses of an IPv6 /64, which one host may have, share a bucket."""

    def _take(self, name: str, level: float, now_s: float) -> None:
        super()._take(_host_of(name), level, now_s)

    def _level(self, name: str, now_s: float) -> float:
        return super()._level(_host_of(name), now_s)


@lru_cache(4_096)
def _host_of(address: str) -> str:
    found = parse_ip(address)
    if found is None or found.version == 4:
        return address
    return str(ipaddress.ip_network((found, 64), strict=False))


class Limiter:
    """The two kinds of buckets."""

    def __init__(self, *, requests_per_second: float, faults_per_second: float) -> None:
        self.by_key = Buckets(per_second=requests_per_second, burst=10 * requests_per_second)
        self.by_address = AddressBuckets(per_second=faults_per_second, burst=50 * faults_per_second)


class StoreReads:
    """Places to read the store: one for strangers, one for members. A store has one more, for the coordinator itself.

    Members take turns: one member's further reads wait for its first and delay no other's.
    """

    def __init__(self) -> None:
        self._places = {is_member: asyncio.Semaphore() for is_member in (False, True)}
        self._of_each = WeakValueDictionary[str, asyncio.Semaphore]()

    @contextlib.asynccontextmanager
    async def place(self, sender: Sender | None) -> AsyncIterator[None]:
        """Hold a place of this sender's kind; None is a stranger. Raise RemoteError(UNAVAILABLE) if none is free in time."""
        own = self._of_each.setdefault("" if sender is None else sender.key, asyncio.Semaphore())
        async with contextlib.AsyncExitStack() as held:
            try:
                async with asyncio.timeout(PLACE_S_MAX):
                    await held.enter_async_context(own)
                    await held.enter_async_context(self._places[sender is not None])
            except TimeoutError:
                raise RemoteError(ErrorCode.UNAVAILABLE, "too many read here now", retry_after_s=PLACE_S_MAX) from None
            yield
