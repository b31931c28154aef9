"""Look-ups of names in threads of their own, so that a name server that does not answer delays only those that need the name.

`getaddrinfo` cannot be interrupted, and waits for a silent name server for up to a minute. A few such calls in the loop's own
threads would stop all other work there, and a process that ends would wait for them.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from concurrent.futures import Future
from typing import Any, cast

from aiohttp.resolver import ThreadedResolver

from prime_protocol.addresses import parse_ip

WAIT_S_MAX = 8.0
"""Wait for a look-up. Longer than a machine waits for its first name server before it asks its second one, which is 5 s."""
KEPT_S = 60.0
"""Time for which the result of a look-up is kept that took longer. Clients ask again within patience.PAUSE_S_MAX."""
LOOKUPS_MAX = 64
"""Look-ups of one process at the same time."""

Addresses = list[tuple[Any, ...]]
Question = tuple[Any, ...]
"""Arguments of `getaddrinfo`."""


class NameLookups:
    """The look-ups of a process: one at a time for each question."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[Question, Future[Addresses]] = {}
        self._late: dict[Question, tuple[float, Future[Addresses]]] = {}
        """Result of each look-up that took too long, and the time until which it is kept."""

    async def getaddrinfo(self, host: str, port: int, **asked: int) -> Addresses:
        """Return what socket.getaddrinfo returns. Raises socket.gaierror, also if there is no answer within WAIT_S_MAX.

        `asked` may have `family`, `type` and `flags`.
        """
        question = (host, port, asked.get("family", 0), asked.get("type", 0), 0, asked.get("flags", 0))
        waiting = asyncio.wrap_future(self._begun(question))
        try:
            await asyncio.wait({waiting}, timeout=WAIT_S_MAX)
            if waiting.done():
                return waiting.result()
        finally:
            waiting.cancel()  # not the look-up, which has begun
        raise socket.gaierror(socket.EAI_AGAIN, "no name server has answered yet")

    async def getnameinfo(self, address: Any, flags: int = 0) -> tuple[str, str]:
        """Return an address as text, which asks no name server."""
        return await asyncio.get_running_loop().getnameinfo(address, flags)

    def _begun(self, question: Question) -> Future[Addresses]:
        """Return the look-up of a question, begun unless there is one."""
        now_s = time.monotonic()
        with self._lock:
            self._late = {asked: late for asked, late in self._late.items() if now_s < late[0]}
            if question in self._late:
                return self._late[question][1]
            if question in self._running:
                return self._running[question]
            if len(self._running) >= LOOKUPS_MAX:
                raise socket.gaierror(socket.EAI_AGAIN, "too many names are looked up at the same time")
            found = Future[Addresses]()
            found.set_running_or_notify_cancel()
            try:
                threading.Thread(target=self._look_up, args=(question, found), daemon=True).start()
            except RuntimeError as error:
                raise socket.gaierror(socket.EAI_AGAIN, str(error)) from None
            self._running[question] = found
        return found

    def _look_up(self, question: Question, found: Future[Addresses]) -> None:
        begun_s, error = time.monotonic(), None
        addresses: Addresses = []
        try:
            addresses = cast("Addresses", socket.getaddrinfo(*question))
        except Exception as failed:  # noqa: BLE001 (it belongs to those that wait)
            error = failed
        with self._lock:  # before the waiters wake: one that asks again begins a new look-up
            del self._running[question]
            now_s = time.monotonic()
            if error is None and now_s - begun_s > WAIT_S_MAX:
                self._late[question] = (now_s + KEPT_S, found)
        if error is None:
            found.set_result(addresses)
        else:
            found.set_exception(error)


_OF_THIS_PROCESS = NameLookups()


class PatientResolver(ThreadedResolver):
    """A resolver of aiohttp's connections that uses these look-ups."""

    def __init__(self) -> None:
        super().__init__(cast("asyncio.AbstractEventLoop", _OF_THIS_PROCESS))


class _PatientConnections(asyncio.AbstractEventLoop):
    """What a loop does otherwise: it uses these look-ups where a connection has a name."""

    async def create_connection(  # type: ignore[override]  # which lists each option
        self, factory: Any, host: Any = None, port: Any = None, **options: Any
    ) -> Any:
        """Connect to the first address that takes the connection. Raises OSError."""
        connect = super().create_connection
        if host is None or parse_ip(host) is not None:
            return await connect(factory, host, port, **options)
        if options.get("ssl"):
            options.setdefault("server_hostname", host)
        fault = OSError(f"{host} has no address")
        asked = {name: options[name] for name in ("family", "flags") if options.get(name)}
        for *_, address in await _OF_THIS_PROCESS.getaddrinfo(host, port, type=socket.SOCK_STREAM, **asked):
            try:
                return await connect(factory, _with_zone(*address), port, **options)
            except OSError as error:
                fault = error
        raise fault


def _with_zone(host: str, port: int, flow: int = 0, zone: int = 0) -> str:
    """Return the host of a socket's address as text. A link-local one is none without its zone, such as fe80::1%2."""
    return f"{host}%{zone}" if zone and "%" not in host else host


def patient_loop() -> asyncio.AbstractEventLoop:
    """Return a loop for a thread of this process whose connections use these look-ups: uvloop's if that is installed."""
    try:
        import uvloop
    except ImportError:
        kind: type[asyncio.AbstractEventLoop] = asyncio.SelectorEventLoop
    else:
        kind = uvloop.Loop
    made: asyncio.AbstractEventLoop = type("PatientLoop", (_PatientConnections, kind), {})()
    return made
