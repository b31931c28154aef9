"""Accept connections and bound them by their sender, before anything is allocated for them.

A flood of connections costs its receiver most if each becomes a transport, a parser and a task. So the listening socket is
read here, and a connection beyond its network's share is reset at once, which takes about ten microseconds. A connection
begins as a stranger's. When a request on it has been verified (`Entry.vouch`), it counts as its key's: a member's within the
bounds of its key and its network, a key of the run's roles without a bound.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import resource
import socket
import struct
from collections.abc import Callable
from functools import lru_cache

from prime_node.adapters.web.shares import Turns
from prime_node.ports.web import CallerBounds, Response, Sender
from prime_protocol import limits
from prime_protocol.errors import ErrorCode, RemoteError

log = logging.getLogger(__name__)

BODY_GRACE_S = 20.0
BODY_BYTES_PER_S_MIN = 16 * 2**10
"""Speed at which a body may be sent after the grace. Only a modem is slower."""
BACKLOG = 1_024
"""Connections that the system queues until they are accepted."""
WORK_AT_ONCE, WORK_OF_ACCEPTING = 32, 16
"""Work units of one wake-up, and of one accepted connection.

A wake-up resets 32 connections at most, or accepts 2, so that waiting answers get their turn.
"""
RESET_AT_CLOSE, FINISH_AT_CLOSE = struct.pack("ii", 1, 0), struct.pack("ii", 0, 0)
"""Values of SO_LINGER. With the first, nothing of a closed connection remains in the system's tables."""
LOCAL_CALLER = "127.0.0.1"
"""Address that callers on a Unix socket count as."""
PAUSE_S = 1.0
"""Seconds for which the listener pauses when the system has no descriptor left."""
STRANGERS_SHARE = 0.2
"""Share of the server's time for strangers' requests."""
BURST_S = 0.05
"""Seconds of strangers' unused time that they may use later."""
COST_S_FIRST = 0.002
"""Processor time in seconds that a stranger's request is expected to take before any was measured."""
REQUEST_S, CONNECTION_S, BARE_CONNECTION_S = 0.0003, 0.0007, 0.0004
"""Processor time in seconds that no meter sees: of a request, of a new connection, and of a connection that sends nothing.

In the system and in the loop. Measured on a busy machine of two cores, in Python's own loop: 0.3 ms, 0.6 ms more on a
connection of its own, and 0.4 ms of a connection that is opened and closed.
"""
DEBT_S_MAX = 2.0
"""Queue of strangers' requests in seconds. More are refused at once, so that a flood is over soon after its end."""
COSTS_REMEMBERED = 32
"""Number of requests in the moving average of their costs."""
ADDRESSES_REMEMBERED = 4_096
"""Addresses whose network is cached."""
MEMBER_BURST_S = 10.0
"""Seconds' worth of its rate that a member's key may use at once."""
DESCRIPTORS_KEPT = 512
"""Descriptors for the rest of the process: the journal, blobs, links to peers. Half of all if fewer than 1,024 may be open."""
UNSENT_BYTES_MAX = 2**17
"""Bytes of an answer in the system's buffers before its first packet is sent.

If the client withdraws they are lost, and its slot would be returned with the piece unsent.
"""


class Entry:
    """One connection, and the share it counts against."""

    __slots__ = ("_counts", "address", "has_asked", "is_inside", "is_proxy", "network", "paid_s", "sender", "spent_s")

    def __init__(self, connection_counts: ConnectionCounts, address: str, *, network: str, is_proxy: bool) -> None:
        self._counts = connection_counts
        self.address, self.network, self.is_proxy = address, network, is_proxy
        self.is_inside = True
        self.has_asked = False
        """Whether a request on it was counted as a stranger's."""
        self.sender: Sender | None = None
        """Key of the last request, if that was verified and its bounds have room; None for a stranger."""
        self.paid_s: float | None = None
        """Processor time in seconds that the request in progress has paid for in advance; None if it does not count."""
        self.spent_s = 0.0
        """Processor time in seconds that it has used."""

    def vouch(self, sender: Sender | None) -> None:
        """Record the verified sender of a request. A proxy's connections carry many senders, and stay as they are."""
        if self.is_inside and not self.is_proxy and self.sender != sender:
            self._counts.count(self, -1)
            self.sender = sender if sender is not None and self._counts.has_room(self, sender) else None
            self._counts.count(self, +1)
            if self.sender is not None:
                self._counts.moves(self)

    def leave(self) -> None:
        """Stop counting the connection. Idempotent."""
        if self.is_inside:
            self._counts.asks(self)
            self._counts.count(self, -1)
            self.is_inside = False


class ConnectionCounts:
    """Counters of one server's connections and requests, by network and key.

    `connections_max` is what the process can hold; below HTTP_CONNECTIONS_MAX the shares of strangers and members shrink with
    it.
    """

    def __init__(
        self, bounds: CallerBounds, now: Callable[[], float], *, connections_max: int = limits.HTTP_CONNECTIONS_MAX
    ) -> None:
        self.bounds = bounds
        self.num_connections = self.num_strangers = self.num_members = 0
        self._now = now
        self._scale = min(1.0, connections_max / limits.HTTP_CONNECTIONS_MAX)
        self._strangers_of: dict[str, int] = {}
        """Connections by network."""
        self._members_of: dict[str, int] = {}
        """Connections by network or key."""
        self._silent_of: dict[str, dict[Entry, Callable[[], None]]] = {}
        """Connections that have brought no request yet, by network, oldest first, with the functions that end them."""
        self._waiting_of: dict[str, dict[Entry, Callable[[], None]]] = {}
        """The same for connections that wait between two requests, or for an answer of which nothing was sent."""
        self._connects = _turns(bounds.connects_per_second, burst_s=5.0)
        self._requests = _turns(bounds.requests_per_second, burst_s=0.25)
        self._member_requests = _turns(bounds.member_requests_per_second, burst_s=MEMBER_BURST_S)
        self._cost_s, self._lane_s = COST_S_FIRST, 0.0
        # Parsing an address costs more than the rest of a refused connection.
        self._place_of = lru_cache(ADDRESSES_REMEMBERED)(
            lambda address: (bounds.network_of(address, ""), bounds.is_proxy(address))
        )

    def enter(self, address: str) -> Entry | None:
        """Count a new connection and return it; None if it is refused.

        If its network has no room left, it replaces the network's oldest connection that has brought no request, or else the one
        that has waited longest. So an attacker that only holds connections does not keep others out.
        """
        if self.num_connections >= self._scaled(limits.HTTP_CONNECTIONS_MAX):
            return None
        network, is_proxy = self._place_of(address)
        if not is_proxy:
            if self.num_strangers >= self._scaled(limits.HTTP_STRANGERS_MAX):
                return None
            is_full = self._strangers_of.get(network, 0) >= self._each_max()
            replaceable = self._silent_of.get(network) or self._waiting_of.get(network)
            if is_full and not replaceable:
                return None
            if self._connects is not None and not self._connects.try_take(network, self._now()):
                return None
            if is_full and replaceable:
                oldest, end = next(iter(replaceable.items()))
                oldest.leave()
                end()
        entry = Entry(self, address, network=network, is_proxy=is_proxy)
        self.count(entry, +1)
        return entry

    def has_not_asked(self, entry: Entry, end: Callable[[], None]) -> None:
        """Record that a new connection has brought no request yet, and the function that ends it."""
        if entry.is_inside and not entry.is_proxy:
            self._silent_of.setdefault(entry.network, {})[entry] = end

    def asks(self, entry: Entry) -> None:
        """Record that a connection has brought a request, or has ended. Idempotent."""
        _forget(self._silent_of, entry)
        self.moves(entry)

    def waits(self, entry: Entry, end: Callable[[], None]) -> None:
        """Record that nothing moves on a stranger's connection from now on, and the function that ends it."""
        if entry.is_inside and not entry.is_proxy and entry.sender is None:
            self._waiting_of.setdefault(entry.network, {})[entry] = end

    def moves(self, entry: Entry) -> None:
        """Record that a body or an answer is in transfer on a connection, or that it has ended. Idempotent."""
        _forget(self._waiting_of, entry)

    def has_room(self, entry: Entry, sender: Sender) -> bool:
        """Return whether a connection may count as this key's."""
        return sender.is_role or (
            self.num_members < self._scaled(limits.HTTP_MEMBERS_MAX)
            and self._members_of.get(entry.network, 0) < limits.HTTP_MEMBERS_NETWORK_MAX
            and self._members_of.get(sender.key, 0) < limits.HTTP_MEMBERS_EACH_MAX
        )

    def count(self, entry: Entry, change: int) -> None:
        """Add a connection or remove it."""
        self.num_connections += change
        if entry.is_proxy:
            return
        if entry.sender is None:
            self.num_strangers += change
            _add(self._strangers_of, entry.network, change)
        elif not entry.sender.is_role:
            self.num_members += change
            _add(self._members_of, entry.network, change)
            _add(self._members_of, entry.sender.key, change)

    def delay_s(self, entry: Entry, forwarded: str) -> float:
        """Return how long a request waits before it is read, in seconds.

        Role keys do not wait; a member waits for its own rate. Strangers wait for their network's turn, and then for each
        other. They begin only as often as fits into their share of the processor time, by what the last ones have taken
        (`spent`). Raises RemoteError(UNAVAILABLE) beyond DEBT_S_MAX.
        """
        entry.paid_s, entry.spent_s = None, 0.0
        if entry.sender is not None:
            if entry.sender.is_role or self._member_requests is None:
                return 0.0
            return self._member_requests.take(entry.sender.key, self._now())
        if self._requests is None:
            return 0.0
        network = self.bounds.network_of(entry.address, forwarded) if entry.is_proxy else entry.network
        now_s = self._now()
        turn_s = now_s + self._requests.take(network, now_s)
        lane_s = max(self._lane_s, now_s - BURST_S)
        if lane_s - now_s > DEBT_S_MAX:
            raise RemoteError(ErrorCode.UNAVAILABLE, "too many requests of strangers at once", retry_after_s=DEBT_S_MAX)
        self._lane_s = lane_s + self._cost_s / STRANGERS_SHARE
        entry.paid_s = self._cost_s
        self.spent(entry, REQUEST_S if entry.has_asked else REQUEST_S + CONNECTION_S)
        entry.has_asked = True
        return max(turn_s, lane_s) - now_s

    def spent(self, entry: Entry, seconds: float) -> None:
        """Count processor time of the request in progress, if it began as a stranger's.

        What it has not paid for in advance delays the next ones. It counts as it is used: so a long download that leaves time
        for others delays no request.
        """
        if entry.paid_s is None:
            return
        unpaid_s = min(seconds, max(0.0, entry.spent_s + seconds - entry.paid_s))
        entry.spent_s += seconds
        if unpaid_s > 0.0:
            self._lane_s = max(self._lane_s, self._now() - BURST_S) + unpaid_s / STRANGERS_SHARE

    def answered(self, entry: Entry) -> None:
        """Return what a request has paid too much, and remember what it took for the next ones."""
        if entry.paid_s is not None:
            self._lane_s -= max(0.0, entry.paid_s - entry.spent_s) / STRANGERS_SHARE
            self._cost_s += (entry.spent_s - self._cost_s) / COSTS_REMEMBERED
            entry.paid_s = None

    def unread(self, entry: Entry, *, is_bare: bool = False) -> None:
        """Count the processor time of a stranger's connection or request that ended before its turn. The debt stays bounded.

        `is_bare` says that the connection brought no byte.
        """
        if entry.sender is None and entry.paid_s is None and self._requests is not None:
            cost_s = BARE_CONNECTION_S if is_bare else REQUEST_S if entry.has_asked else REQUEST_S + CONNECTION_S
            now_s = self._now()
            lane_s = max(self._lane_s, now_s - BURST_S)
            self._lane_s = max(lane_s, min(lane_s + cost_s / STRANGERS_SHARE, now_s + DEBT_S_MAX))
            entry.has_asked = True

    def _each_max(self) -> int:
        return min(limits.HTTP_STRANGERS_EACH_MAX, max(1, self._scaled(limits.HTTP_STRANGERS_MAX) // 4))

    def _scaled(self, bound: int) -> int:
        return max(1, int(self._scale * bound))


class Listener:
    """Listener on one host and port. `connect` makes the protocol of an accepted connection."""

    def __init__(
        self,
        connection_counts: ConnectionCounts,
        connect: Callable[[Entry], asyncio.Protocol],
        on_socket: Callable[[socket.socket], None],
    ) -> None:
        """Create it. `on_socket` gets the socket of each connection."""
        self._counts, self._connect, self._on_socket = connection_counts, connect, on_socket
        self._loop = asyncio.get_running_loop()
        self._sockets: list[socket.socket] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False

    async def open(self, host: str, port: int) -> int:
        """Listen, and return the port. Raises OSError."""
        found = await self._loop.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        try:
            for family, _, _, _, address in dict.fromkeys(found):
                self._sockets.append(_listening(family, address))
        except OSError:
            self.close()
            raise
        for listening in self._sockets:
            self._loop.add_reader(listening.fileno(), self._ready, listening)
        bound: int = self._sockets[0].getsockname()[1]
        return bound

    def open_on(self, bound: socket.socket) -> None:
        """Listen on a socket that is bound already, for example to a path. Raises OSError."""
        bound.listen(BACKLOG)
        bound.setblocking(False)
        self._sockets.append(bound)
        self._loop.add_reader(bound.fileno(), self._ready, bound)

    def close(self) -> None:
        """Accept no more connections. Idempotent."""
        self._is_closed = True
        for listening in self._sockets:
            self._loop.remove_reader(listening.fileno())
            listening.close()
        self._sockets = []

    def _ready(self, listening: socket.socket) -> None:
        work = WORK_AT_ONCE
        while work > 0:
            try:
                accepted, address = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                log.error("no connection can be accepted for %.0f s: %s", PAUSE_S, error.strerror)
                self._loop.remove_reader(listening.fileno())
                self._loop.call_later(PAUSE_S, self._resume, listening)
                return
            entry = self._counts.enter(str(address[0]) if isinstance(address, tuple) else LOCAL_CALLER)
            if entry is None:
                work -= 1
                accepted.close()
                continue
            work -= WORK_OF_ACCEPTING
            accepted.setblocking(False)
            accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, FINISH_AT_CLOSE)
            task = self._loop.create_task(self._take(entry, accepted))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _resume(self, listening: socket.socket) -> None:
        if not self._is_closed:
            self._loop.add_reader(listening.fileno(), self._ready, listening)

    async def _take(self, entry: Entry, accepted: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: self._connect(entry), accepted)
            self._on_socket(accepted)
        except OSError:  # the client has disconnected already
            entry.leave()
            accepted.close()


def _listening(family: int, address: tuple[object, ...]) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_AT_CLOSE)  # accepted sockets inherit it
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        option = getattr(socket, "TCP_NOTSENT_LOWAT", None)
        if option is not None:  # Linux and macOS; accepted sockets inherit it
            with contextlib.suppress(OSError):  # it only saves bytes
                made.setsockopt(socket.IPPROTO_TCP, option, UNSENT_BYTES_MAX)
        made.bind(address)
        made.listen(BACKLOG)
        made.setblocking(False)
    except OSError:
        made.close()
        raise
    return made


def connections_max() -> int:
    """Return how many connections this process can hold, by its limit of open files."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed == resource.RLIM_INFINITY:
        return limits.HTTP_CONNECTIONS_MAX
    return min(limits.HTTP_CONNECTIONS_MAX, allowed - min(DESCRIPTORS_KEPT, allowed // 2))


def _add(counts: dict[str, int], name: str, change: int) -> None:
    counts[name] = counts.get(name, 0) + change
    if not counts[name]:
        del counts[name]


def _forget(places: dict[str, dict[Entry, Callable[[], None]]], entry: Entry) -> None:
    of_network = places.get(entry.network)
    if of_network is not None and of_network.pop(entry, None) is not None and not of_network:
        del places[entry.network]


def _turns(per_second: float, *, burst_s: float) -> Turns | None:
    return None if math.isinf(per_second) else Turns(per_second=per_second, burst=max(1.0, burst_s * per_second))


def send_s_max(response: Response) -> float:
    """Return the seconds that a body of known length may take; an iterator's length is in its headers."""
    num_bytes = len(response.body) if isinstance(response.body, bytes) else int(response.headers["Content-Length"])
    return BODY_GRACE_S + num_bytes / BODY_BYTES_PER_S_MIN
