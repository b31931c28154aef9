"""TCP connections as Linux measures and paces them: TCP_INFO and SO_MAX_PACING_RATE, neither of which needs a privilege."""

from __future__ import annotations

import itertools
import socket
import struct
import sys
import weakref
from typing import Any, NamedTuple

from prime_node.ports.swarm import LinkReading

TCP_ESTABLISHED = 1
SO_MAX_PACING_RATE = 47
UNLIMITED = 2**32 - 1
"""Pacing rate that is no limit, and round-trip time that was never measured."""
INFO = struct.Struct("=16xI4xI40xI48xQ20xI")
"""TCP_INFO up to the smallest round-trip time, which Linux reports since 4.6: the fields of _Values."""
CHANGE_MIN = 0.03
"""Smallest change of a limit that is passed to the system, as a share."""


class _Values(NamedTuple):
    segment_bytes: int
    unacked: int
    """Segments."""
    round_trip_us: int
    acked_bytes: int
    smallest_us: int


class TcpLinks:
    """Implementation of UploadLinks. Sockets may be added from any thread."""

    def __init__(self) -> None:
        self._names = itertools.count()
        self._sockets: dict[int, weakref.ref[Any]] = {}
        self._hosts: dict[int, str] = {}
        self._limits: dict[int, float] = {}

    @staticmethod
    def are_measured() -> bool:
        """Return whether this system has what is needed."""
        return sys.platform == "linux"

    def add(self, made: Any) -> None:
        """Add a connected socket, if it is one of TCP. Its owner closes it."""
        if made.family not in (socket.AF_INET, socket.AF_INET6):
            return
        try:
            host = str(made.getpeername()[0])
        except OSError:  # it has ended already
            return
        link = next(self._names)
        self._hosts[link] = host
        self._sockets[link] = weakref.ref(made)

    def readings(self) -> list[LinkReading]:
        """Return a reading of each open connection that has measured a round trip.

        The smallest one is that of all open connections to the same host: one that was made while packets queued has seen none.
        """
        found = [(link, values) for link in list(self._sockets) if (values := self._values(link)) is not None]
        smallest_us: dict[str, int] = {}
        for link, values in found:
            host = self._hosts[link]
            smallest_us[host] = min(values.smallest_us, smallest_us.get(host, values.smallest_us))
        return [
            LinkReading(
                link,
                values.round_trip_us / 1e6,
                smallest_us[self._hosts[link]] / 1e6,
                values.acked_bytes,
                values.unacked * values.segment_bytes,
            )
            for link, values in found
        ]

    def limit(self, link: int, bytes_per_s: float) -> None:
        """Send at most this fast on a connection, without bursts; 0 lifts the limit. One that is closed is left alone."""
        before = self._limits.get(link, 0.0)
        if abs(bytes_per_s - before) <= CHANGE_MIN * before:
            return
        made = self._socket(link)
        if made is None:
            return
        rate = min(UNLIMITED, int(bytes_per_s)) if bytes_per_s else UNLIMITED
        try:
            made.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, struct.pack("=I", rate))
        except OSError:  # another thread has closed it since
            self._forget(link)
        else:
            self._limits[link] = bytes_per_s

    def _values(self, link: int) -> _Values | None:
        made = self._socket(link)
        try:
            info = b"" if made is None else made.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, INFO.size)
        except OSError:  # it is no TCP connection
            self._forget(link)
            return None
        if len(info) < INFO.size or info[0] != TCP_ESTABLISHED:
            return None
        values = _Values(*INFO.unpack_from(info))
        return values if values.round_trip_us and values.smallest_us != UNLIMITED else None

    def _socket(self, link: int) -> Any | None:
        held = self._sockets.get(link)
        made = None if held is None else held()
        if made is None or made.fileno() < 0:
            self._forget(link)
            return None
        return made

    def _forget(self, link: int) -> None:
        self._sockets.pop(link, None)
        self._hosts.pop(link, None)
        self._limits.pop(link, None)
