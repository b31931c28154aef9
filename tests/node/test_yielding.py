"""An upload leaves the line to others: the control on a modelled line, and real connections' figures."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tests.time_world import VirtualClock

from prime_node.adapters.tcp_links import TcpLinks
from prime_node.broadcast.swarm.uplink import Uplink
from prime_node.broadcast.swarm.yielding import Yielding, YieldRules
from prime_node.ports.swarm import LinkReading

CAPACITY = 1_250_000.0
"""10 Mbit/s."""
STEP_S = 0.01
SO_MAX_PACING_RATE = 47


class Line:
    """An uplink with one long queue, and connections that always have more to send. Implementation of UploadLinks."""

    def __init__(self, num_links: int, *, window_bytes: float = 2e5) -> None:
        self.queue = [0.0] * num_links
        """Bytes of each connection that wait at the router."""
        self.acked = [0.0] * num_links
        self.limits = [0.0] * num_links
        self.base_s = [0.02 + 0.01 * link for link in range(num_links)]
        self.far_s = [0.0] * num_links
        """Seconds for which packets wait at the receiver's own downlink."""
        self.smooth_s = list(self.base_s)
        self.window_bytes = window_bytes
        self.shares = [1.0] * num_links
        """What each connection has to send, as a share of that."""
        self.others_bytes_s = 0.0
        self.others = 0.0

    @property
    def queued_s(self) -> float:
        return (sum(self.queue) + self.others) / CAPACITY

    def advance(self) -> None:
        """Let STEP_S pass: all send, and the router forwards in the order of arrival."""
        self.others += self.others_bytes_s * STEP_S
        for link, limit in enumerate(self.limits):
            window = self.window_bytes * self.shares[link]
            room = max(0.0, window - self.queue[link] - self.far_s[link] * CAPACITY / len(self.queue))
            self.queue[link] += min(room, (limit or 4 * CAPACITY) * STEP_S)
        waiting = sum(self.queue) + self.others
        share = min(1.0, CAPACITY * STEP_S / waiting) if waiting else 0.0
        self.others *= 1 - share
        for link, bytes_waiting in enumerate(self.queue):
            self.acked[link] += share * bytes_waiting
            self.queue[link] *= 1 - share
            now_s = self.base_s[link] + self.queued_s + self.far_s[link]
            self.smooth_s[link] += (now_s - self.smooth_s[link]) / 8

    def readings(self) -> list[LinkReading]:
        return [
            LinkReading(
                link,
                self.smooth_s[link],
                self.base_s[link],
                int(self.acked[link]),
                int(self.queue[link] + (self.base_s[link] + self.far_s[link]) * CAPACITY / len(self.queue)),
            )
            for link in range(len(self.queue))
        ]

    def limit(self, link: int, bytes_per_s: float) -> None:
        self.limits[link] = bytes_per_s


def run(line: Line, seconds: float, *, each: Callable[[float], None] = lambda now_s: None) -> list[tuple[float, float]]:
    """Return the queue in seconds and our rate, every 0.1 s."""
    yielding, found = Yielding(), []
    for look in range(int(seconds / 0.1)):
        before = sum(line.acked)
        each(look * 0.1)
        for _ in range(10):
            line.advance()
        for link, bytes_per_s in yielding.look(line.readings(), look * 0.1).items():
            line.limit(link, bytes_per_s)
        found.append((line.queued_s, (sum(line.acked) - before) / 0.1))
    return found


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def test_an_upload_fills_an_unused_line_and_keeps_its_queue_short() -> None:
    full = Line(6)
    for _ in range(1_000):
        full.advance()
    assert full.queued_s > 0.5, "without a limit the queue is long"
    steady = run(Line(6), 30)[50:]
    assert mean([rate for _, rate in steady]) > 0.93 * CAPACITY
    assert mean([queued_s for queued_s, _ in steady]) < 0.04
    assert max(queued_s for queued_s, _ in steady) < 0.1


def test_a_call_gets_what_it_sends_without_a_long_queue() -> None:
    line = Line(6)

    def each(now_s: float) -> None:
        line.others_bytes_s = 0.2 * CAPACITY if now_s >= 10 else 0.0

    steady = run(line, 40, each=each)[150:]
    assert mean([rate for _, rate in steady]) > 0.9 * 0.8 * CAPACITY
    assert mean([queued_s for queued_s, _ in steady]) < 0.05


def test_a_program_that_fills_the_line_gets_nearly_all_of_it_and_then_leaves_it_again() -> None:
    line = Line(6)

    def each(now_s: float) -> None:
        line.others = max(line.others, 0.4 * CAPACITY) if 10 <= now_s < 60 else 0.0

    found = run(line, 90, each=each)
    assert mean([rate for _, rate in found[450:600]]) < 0.1 * CAPACITY
    assert mean([rate for _, rate in found[750:]]) > 0.9 * CAPACITY


def test_the_queue_of_one_receivers_downlink_slows_nothing() -> None:
    line = Line(6)
    line.far_s[0] = 0.3
    assert mean([rate for _, rate in run(line, 30)[50:]]) > 0.9 * CAPACITY


def test_a_connection_gets_what_slow_ones_leave() -> None:
    line = Line(6)
    line.shares = [1.0] + [0.002] * 5
    assert mean([rate for _, rate in run(line, 30)[100:]]) > 0.9 * CAPACITY


def test_the_limits_of_all_connections_together_are_the_lines() -> None:
    """Those below the mean once had the mean on top of what the others had, so that the queue grew after a reduction."""
    yielding = Yielding()
    for look in range(20):
        readings = [LinkReading(link, 0.5, 0.02, 10_000 * (link + 1) * look, 200_000) for link in range(6)]
        limits = yielding.look(readings, 0.1 * look)
    assert sum(limits.values()) == pytest.approx(yielding.limit_bytes_s)
    assert yielding.look([], 2.0) == {}, "all connections have closed"
    assert yielding.limit_bytes_s


def test_some_rate_is_left_however_long_the_queue_is() -> None:
    yielding, rules = Yielding(), YieldRules()
    for look in range(1_000):
        limits = yielding.look([LinkReading(0, 5.0, 0.02, 1_000 * look, 1_000_000)], 0.1 * look)
    assert limits[0] == rules.rate_bytes_s_min


def test_after_a_pause_an_upload_is_as_fast_as_before() -> None:
    line, usual = Line(6), 2e5

    def each(now_s: float) -> None:
        line.window_bytes = 0.0 if 20 <= now_s < 60 else usual / 100 if 60 <= now_s < 100 else usual

    found = run(line, 103, each=each)
    assert mean([rate for _, rate in found[1_001:1_010]]) > 0.7 * CAPACITY


async def test_an_uplink_limits_its_connections_while_it_serves_and_not_before() -> None:
    clock, line = VirtualClock(), Line(6)
    uplink = Uplink(clock=clock, links=line)
    keeping = asyncio.create_task(uplink.leave_room())

    async def passes(seconds: float) -> None:
        for _ in range(int(seconds / STEP_S)):
            await clock.sleep(STEP_S)
            line.advance()

    try:
        await passes(1.0)
        assert not any(line.limits)
        release = await uplink.slot("anna", 1_000, is_member=True)
        await passes(3.0)
        assert all(line.limits)
        assert sum(line.limits) < 3 * CAPACITY
        release()
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)


@contextmanager
def connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        socket.create_connection(listening.getsockname()) as dialled,
    ):
        accepted, _ = listening.accept()
        with accepted:
            yield accepted, dialled


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has these figures")
def test_a_connections_figures_and_limit_are_the_systems() -> None:
    links = TcpLinks()
    with connection() as (sender, receiver):
        links.add(sender)
        sender.sendall(bytes(10_000))
        assert len(receiver.recv(10_000, socket.MSG_WAITALL)) == 10_000
        receiver.sendall(b"y")  # it acknowledges all that came
        assert sender.recv(1) == b"y"
        (found,) = links.readings()
        assert found.acked_bytes >= 10_000
        assert 0 < found.round_trip_s_min <= 1.0
        assert found.unacked_bytes == 0
        links.limit(found.link, 250_000.0)
        assert sender.getsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE) == 250_000
        links.limit(found.link, 0.0)
        unlimited = sender.getsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE)
        assert unlimited % 2**32 == 2**32 - 1
    assert links.readings() == []
    links.limit(found.link, 250_000.0)  # nothing happens


class ClosedMeanwhile(socket.socket):
    """Socket that another thread closes between the look at it and its use."""

    def setsockopt(self, *arguments: Any) -> None:
        self.close()
        super().setsockopt(*arguments)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has these figures")
def test_a_connection_that_closes_while_it_is_limited_is_left_out() -> None:
    links = TcpLinks()
    with connection() as (sender, receiver), ClosedMeanwhile(fileno=sender.detach()) as closing:
        links.add(closing)
        closing.sendall(b"x")
        assert receiver.recv(1) == b"x"
        receiver.sendall(b"y")
        assert closing.recv(1) == b"y"
        (found,) = links.readings()
        links.limit(found.link, 250_000.0)
        assert links.readings() == []


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has these figures")
def test_a_new_connection_has_the_smallest_round_trip_of_its_host() -> None:
    links = TcpLinks()
    with connection() as (one, its_peer), connection() as (other, other_peer):
        for sender, receiver in ((one, its_peer), (other, other_peer)):
            links.add(sender)
            sender.sendall(b"x")
            assert receiver.recv(1) == b"x"
            receiver.sendall(b"y")
            assert sender.recv(1) == b"y"
        first, second = links.readings()
        assert first.round_trip_s_min == second.round_trip_s_min


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has these figures")
def test_what_is_no_tcp_connection_is_left_out() -> None:
    links = TcpLinks()
    one, other = socket.socketpair()
    with one, other, socket.socket() as unconnected:
        links.add(one)
        links.add(unconnected)
        assert links.readings() == []
