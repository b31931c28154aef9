"""Parts of a simulated coordinator: its clock, its disk, its server, cheap signatures, and a check after each event."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any, TypeVar

from prime_lab.memory_blobs import MemoryBlobs, MemoryDocuments
from prime_lab.memory_store import MemoryStore
from prime_lab.virtual_tcp import VirtualTcp
from prime_node.adapters.system_clock import SystemClock
from prime_node.coordinator import journal
from prime_node.coordinator.state.invariants import check_invariants
from prime_node.ports.leadership import TermLost
from prime_node.ports.store import LoggedEvent, Segment, StoredReceipt
from prime_node.ports.web import CallerBounds, Route, Sender
from prime_protocol.digest import digest_of
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.identity import PublicKey, SigningKey

T = TypeVar("T")
BEGIN_MS = 1_763_690_000_000


class SkewedClock(SystemClock):
    """Clock of one machine on the loop's virtual time, whose wall time may be wrong."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def now_ms(self) -> int:
        return BEGIN_MS + round(1_000 * (asyncio.get_running_loop().time() + self.ahead_s))

    def monotonic_s(self) -> float:
        return asyncio.get_running_loop().time()


class NamedDocuments(MemoryDocuments):
    """Documents whose names are known."""

    def __init__(self) -> None:
        super().__init__()
        self.names = set[str]()

    async def write(self, name: str, data: bytes) -> None:
        self.names.add(name)
        await super().write(name, data)


class Disk:
    """The storage of a run, which survives each process."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.bundles, self.public = MemoryBlobs(), MemoryBlobs()
        self.private, self.published = NamedDocuments(), NamedDocuments()
        self.rotten = set[str]()
        """Bundles with a flipped bit."""
        self.stored = set[str]()
        """Digests of the bundles that were ever on the disk, whole."""
        self.stored_ms: dict[str, int] = {}
        """Time at which each blob was stored, by the clock of its process."""
        self.epoch = 0
        """Number of the present leader's term."""

    async def rows(self) -> Counter[str]:
        """Return the number of rows, blobs and documents."""
        store, counted = self.store, Counter[str]()
        counted["events"] = len([one async for one in store.events(after=0)])
        counted["receipts"] = len((await store.receipts_of(None, after=0, limit=10**9, chars_max=10**12))[0])
        counted["ledger"] = await store.ledger_length()
        for name, blobs in (("bundles", self.bundles), ("public", self.public)):
            counted[name] = len([one async for one in blobs.digests()])
        counted["stored dates"] = len(self.stored_ms)
        for name, documents in (("private", self.private), ("published", self.published)):
            counted[name] = len(documents.names)
        return counted


class SimulatedProcess:
    """One process of a coordinator: what it sends to the storage arrives late, or not after its crash."""

    def __init__(self, disk: Disk, drawn: random.Random, clock: SkewedClock) -> None:
        self.disk, self.drawn, self.clock = disk, drawn, clock
        self.slow = 1.0
        self.has_crashed = False
        self.may_act: asyncio.Event = asyncio.Event()
        """Cleared while the process is stopped: nothing leaves it."""
        self.may_act.set()
        self.epoch: int | None = None
        """Term in which it writes; None without a standby."""

    def end(self) -> None:
        """Crash: what it does from here on has no effect."""
        self.has_crashed = True
        self.may_act.set()

    async def write(self, call: Callable[[], Awaitable[T]]) -> T:
        """Write to the storage. A process that crashes meanwhile never learns whether the write took place."""
        await self.may_act.wait()
        await asyncio.shield(asyncio.sleep(self.slow * self.drawn.uniform(0.0, 0.02)))
        if self.has_crashed and self.drawn.random() < 0.5:
            raise OSError("this process has crashed")
        if self.epoch is not None and self.epoch != self.disk.epoch:
            raise TermLost("another coordinator has taken over")
        result = await call()
        if self.has_crashed:
            raise OSError("this process has crashed")
        return result


class _Seen:
    """Something on the disk as one process sees it."""

    def __init__(self, process: SimulatedProcess, shared: Any) -> None:
        self.process, self.shared = process, shared

    def __getattr__(self, name: str) -> Any:
        return getattr(self.shared, name)


class ProcessStore(_Seen):
    """The store (ports.store.Store)."""

    async def append(
        self, events: Sequence[LoggedEvent], receipts: Sequence[StoredReceipt] = (), ledger: Sequence[str] = ()
    ) -> None:
        await self.process.write(lambda: self.shared.append(events, receipts, ledger))

    async def save_snapshot(
        self, number: int, payload: str, segment: Segment | None = None, *, kept_from: int = 0
    ) -> None:
        await self.process.write(lambda: self.shared.save_snapshot(number, payload, segment, kept_from=kept_from))

    async def close(self) -> None:
        """Leave the store open for the next process."""


class ProcessDocuments(_Seen):
    """Documents (ports.documents.Documents)."""

    async def write(self, name: str, data: bytes) -> None:
        await self.process.write(lambda: self.shared.write(name, data))


class ProcessBlobs(_Seen):
    """Blobs (ports.blobs.Blobs). They may rot, and are dated by the machine's clock."""

    async def put(self, data: bytes, *, digest: str | None = None) -> str:
        async def store() -> str:
            stored: str = await self.shared.put(data, digest=digest)
            self.process.disk.stored_ms[stored] = self.process.clock.now_ms()
            self.process.disk.rotten.discard(stored)
            if self.shared is self.process.disk.bundles and digest_of(data) == stored:
                self.process.disk.stored.add(stored)
            return stored

        return await self.process.write(store)

    async def delete(self, digest: str) -> None:
        await self.shared.delete(digest)
        self.process.disk.stored_ms.pop(digest, None)

    async def get(self, digest: str, *, start: int = 0, end: int | None = None) -> bytes:
        data: bytes = await self.shared.get(digest, start=start, end=end)
        return data[:-1] + b"?" if digest in self.process.disk.rotten else data

    async def digests(self, *, before_ms: int | None = None) -> AsyncIterator[str]:
        async for digest in self.shared.digests():
            if before_ms is None or self.process.disk.stored_ms[digest] < before_ms:
                yield digest


class SimulatedServer:
    """Web server (ports.web.WebServer) whose callers are in the same process."""

    def __init__(self) -> None:
        self.routes: dict[tuple[str, str], Route] = {}
        self.may_send: Callable[[], bool] | None = None
        self.answering = dict[asyncio.Future[Any], None]()

    async def start(
        self,
        routes: Sequence[Route],
        *,
        host: str,
        port: int,
        bounds: CallerBounds | None = None,
        bound: socket.socket | None = None,
        may_send: Callable[[], bool] | None = None,
    ) -> int:
        self.routes, self.may_send = {(route.method, route.path): route for route in routes}, may_send
        return 1

    def overload(self, path: str, sender: Callable[[], Sender | None]) -> RemoteError | None:
        return None

    def cut_waiting(self, within_s: float) -> None:
        for answering in self.answering:
            answering.cancel()

    async def stop(self, *, grace_s: float) -> None:
        self.end()

    def end(self) -> None:
        """Listen no longer, and break all connections."""
        self.routes = {}
        for answering in self.answering:
            answering.cancel()


class NoMetrics:
    """Metrics (ports.metrics.Metrics) that are not kept."""

    def declare(self, *anything: Any, **named: Any) -> None:
        """Take any call."""

    add = set = observe = declare

    def exposition(self) -> tuple[bytes, str]:
        return b"", "text/plain"


@contextlib.contextmanager
def checked_after_each_event() -> Iterator[None]:
    """Check all invariants of the state after each event that the journal applies."""
    apply = vars(journal)["tick"]

    def checked(state: Any, event: Any, at_ms: int) -> Any:
        effects = apply(state, event, at_ms)
        check_invariants(state)
        return effects

    with replaced(journal, tick=checked):
        yield


@contextlib.contextmanager
def hashes_as_signatures() -> Iterator[None]:
    """Let a keyed hash be the signature: Ed25519 is a third of a seed's time, and no fault concerns it."""

    def sign(self: SigningKey, message: bytes) -> bytes:
        return hashlib.blake2b(message, key=self.public.raw).digest()

    def verify(self: PublicKey, signature: bytes, message: bytes) -> None:
        if signature != hashlib.blake2b(message, key=self.raw).digest():
            raise RemoteError(ErrorCode.BAD_SIGNATURE, f"signature does not verify under {self.key_id}")

    with replaced(SigningKey, sign=sign), replaced(PublicKey, verify=verify):
        yield


@contextlib.contextmanager
def replaced(owner: Any, **made: Any) -> Iterator[None]:
    """Replace attributes for a while."""
    before = {name: vars(owner)[name] for name in made}
    for name, value in made.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


class ServedMachine:
    """One process of a simulated run, which a service starts again whenever it ends."""

    def __init__(self, disk: Disk, drawn: random.Random, tcp: VirtualTcp | None) -> None:
        self._disk, self._drawn, self._tcp = disk, drawn, tcp
        self.clock = SkewedClock()
        self.down_until_s = 0.0
        self._daemon: asyncio.Task[None] | None = None
        self._begin()

    def _begin(self) -> None:
        self.process, self.web = SimulatedProcess(self._disk, self._drawn, self.clock), SimulatedServer()

    async def keep(self) -> None:
        """Serve until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(max(0.0, self.down_until_s - loop.time()))
            self._begin()
            await self._serve()
            await asyncio.sleep(0.5)

    async def _serve(self) -> None:
        """Serve until the daemon ends."""
        raise NotImplementedError

    def crash(self, down_s: float, *, is_silent: bool = False) -> None:
        """End the daemon at once: nothing that it does from here on reaches the disk.

        The other side of a link learns of it unless `is_silent`: a machine without power.
        """
        self.down_until_s = max(self.down_until_s, asyncio.get_running_loop().time() + down_s)
        self.process.end()
        self.web.end()
        if self._tcp is not None:
            self._tcp.end(self.process, is_silent=is_silent)
        if self._daemon is not None:
            self._daemon.cancel()
