"""TCP between the coroutines of one virtual loop, over wires that delay, break and garble what they carry.

A wire leads from a host to a port. While it is cut, bytes wait, as those of TCP do, and neither end learns of it. An end that is
closed tells the other one, unless its machine has lost its power.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

PIECE_BYTES_MIN = 64
"""Length from which a write may arrive in two pieces."""
BUFFER_BYTES = 2**16


def _always() -> bool:
    return True


class EndHost(Protocol):
    """What has one end of a connection."""

    @property
    def may_act(self) -> asyncio.Event:
        """Return the event that is cleared while it is stopped: nothing leaves it, and it reads nothing."""
        ...


@dataclass
class Wire:
    """The way between a host and a port."""

    delay_s: float = 0.02
    """Longest time between a write and its arrival."""
    num_garbled: int = 0
    """Number of the next writes that arrive with a changed byte, or twice."""
    passes: tuple[asyncio.Event, asyncio.Event] = field(default_factory=lambda: (_set(), _set()))
    """Cleared while nothing passes towards the port, or back."""


class VirtualTcp:
    """All ports, wires and connections."""

    def __init__(self, seed: object) -> None:
        self._seed = seed
        self._ports: dict[int, _Listening] = {}
        self._wires: dict[tuple[str, int], Wire] = {}
        self._hosts: dict[str, EndHost] = {}
        self._ends: list[_End] = []
        self._num_connections = 0

    def wire(self, host: str, port: int) -> Wire:
        """Return the way from a host to a port."""
        return self._wires.setdefault((host, port), Wire())

    def place(self, host: str, machine: EndHost) -> None:
        """Let connections to this host name be those of a machine. The name is that of the caller: each has its own."""
        self._hosts[host] = machine

    def listen(
        self, port: int, machine: EndHost, factory: Callable[[], Any], may_send: Callable[[], bool] = _always
    ) -> None:
        """Take connections at a port. What was held while the machine was stopped leaves it only if it `may_send`."""
        self._ports[port] = _Listening(machine, factory, may_send)

    def end(self, machine: EndHost, *, is_silent: bool) -> None:
        """End the ports and connections of a machine; the others learn of it unless `is_silent`."""
        for port in [port for port, listening in self._ports.items() if listening.machine is machine]:
            del self._ports[port]
        for end in [end for end in self._ends if end.machine is machine]:
            end.vanish(is_silent=is_silent)

    def num_open(self, machine: EndHost) -> int:
        """Return the number of connections of a machine."""
        return sum(end.machine is machine for end in self._ends)

    async def connect(self, factory: Callable[[], Any], host: str, port: int) -> tuple[asyncio.Transport, Any]:
        """Open a connection. Raises ConnectionRefusedError."""
        wire, machine = self.wire(host, port), self._hosts[host]
        self._num_connections += 1
        drawn = random.Random(f"{self._seed} {host} {port} {self._num_connections}")
        for passes in wire.passes:
            await passes.wait()
            await asyncio.sleep(drawn.uniform(0.0, wire.delay_s))
        await machine.may_act.wait()
        if (listening := self._ports.get(port)) is None:
            raise ConnectionRefusedError(f"nothing listens at {host}:{port}")
        near = _End(self._ends, factory(), machine, wire, 0, drawn, _always)
        far = _End(self._ends, listening.factory(), listening.machine, wire, 1, drawn, listening.may_send)
        near.begin(far)
        far.begin(near)
        return near, near.get_protocol()


@dataclass(frozen=True, slots=True)
class _Listening:
    machine: EndHost
    factory: Callable[[], Any]
    may_send: Callable[[], bool]


_CLOSE, _RESET = object(), object()


class _End(asyncio.Transport):
    """One end of a connection."""

    def __init__(
        self,
        ends: list[_End],
        protocol: Any,
        machine: EndHost,
        wire: Wire,
        direction: int,
        drawn: random.Random,
        may_send: Callable[[], bool],
    ) -> None:
        super().__init__({"peername": ("127.0.0.1", 1)})
        self.machine = machine
        self._ends, self._protocol, self._wire, self._drawn = ends, protocol, wire, drawn
        self._passes, self._may_send = wire.passes[direction], may_send
        self._loop = asyncio.get_running_loop()
        self._leaving: deque[bytes | object] = deque()
        self._unsent, self._high, self._is_paused = 0, BUFFER_BYTES, False
        self._arrived: deque[bytes] = deque()
        self._reads, self._is_closing, self._is_over = True, False, False
        self._other: _End | None = None
        self._carrying: asyncio.Task[None] | None = None

    def begin(self, other: _End) -> None:
        """Connect it."""
        self._other = other
        self._ends.append(self)
        self._protocol.connection_made(self)

    def vanish(self, *, is_silent: bool) -> None:
        """End with its process."""
        if not is_silent:
            self._leave(_RESET)
        elif self._carrying is not None:
            self._carrying.cancel()
        self._end(ConnectionResetError("its process has ended"))

    # Called by the protocols

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._is_closing or not data:
            return
        self._unsent += len(data)
        self._leave(bytes(data))
        if self._unsent > self._high and not self._is_paused:
            self._is_paused = True
            self._protocol.pause_writing()

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            self._leave(_CLOSE)
            self._loop.call_soon(self._end, None)

    def abort(self) -> None:
        if not self._is_over:
            self._is_closing = True
            self._leave(_RESET)
            self._loop.call_soon(self._end, None)

    def is_closing(self) -> bool:
        return self._is_closing

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = BUFFER_BYTES if high is None else high

    def get_write_buffer_size(self) -> int:
        return self._unsent

    def pause_reading(self) -> None:
        self._reads = False

    def resume_reading(self) -> None:
        self._reads = True
        self._read()

    def get_protocol(self) -> Any:
        return self._protocol

    # Internals

    def _leave(self, what: bytes | object) -> None:
        self._leaving.append(what)
        if self._carrying is None:
            self._carrying = self._loop.create_task(self._carry())

    async def _carry(self) -> None:
        """Bring what leaves this end to the other one."""
        assert self._other is not None
        while self._leaving:
            await asyncio.sleep(self._drawn.uniform(0.0, self._wire.delay_s))
            was_stopped = not self.machine.may_act.is_set()
            await self.machine.may_act.wait()
            if was_stopped and not self._may_send():
                self._leaving.clear()
                self._leaving.append(_RESET)
                self._end(ConnectionResetError("nothing may be sent any more"))
            await self._passes.wait()
            await self._other.machine.may_act.wait()
            what = self._leaving.popleft()
            if not isinstance(what, bytes):
                self._other.hear_end(None if what is _CLOSE else ConnectionResetError("the other end was reset"))
                break
            self._unsent -= len(what)
            for piece in self._changed(what):
                self._other.hear(piece)
            if self._is_paused and self._unsent <= self._high // 4 and not self._is_over:
                self._is_paused = False
                self._protocol.resume_writing()
        self._carrying = None

    def _changed(self, data: bytes) -> list[bytes]:
        """Return the pieces in which a write arrives."""
        if self._wire.num_garbled:
            self._wire.num_garbled -= 1
            place = self._drawn.randrange(len(data))
            return self._drawn.choice(
                ([data, data], [data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]], [data[:place]])
            )
        if len(data) >= PIECE_BYTES_MIN and self._drawn.random() < 0.2:
            place = self._drawn.randrange(len(data))
            return [data[:place], data[place:]]
        return [data]

    def hear(self, data: bytes) -> None:
        """Take bytes of the other end."""
        if data and not self._is_over:
            self._arrived.append(data)
            self._read()

    def hear_end(self, error: Exception | None) -> None:
        """Take the end of the connection."""
        if self._is_over:
            return
        if error is None:
            self._protocol.eof_received()
        self._is_closing = True
        self._end(error)

    def _read(self) -> None:
        while self._reads and self._arrived and not self._is_closing:
            self._protocol.data_received(self._arrived.popleft())

    def _end(self, error: Exception | None) -> None:
        if not self._is_over:
            self._is_closing = self._is_over = True
            self._ends.remove(self)
            self._protocol.connection_lost(error)


def _set() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event
