"""One laptop holds as many connections as its network may have, and asks nothing or waits: others of the network are served."""

from __future__ import annotations

import asyncio

import pytest
from tests.node.coordinator_world import ANNA, BEN, HEARTBEAT, make_run, memory_parts, running
from tests.security.raw_http import Raw, ask, barrier, get, post

from prime_node.adapters.web.connection_counts import ConnectionCounts, Entry
from prime_node.adapters.web.http_client import HttpClient
from prime_node.ports.web import CallerBounds, Sender
from prime_protocol import limits
from prime_protocol.body_claim import REQUEST_HEADER

SHARE = 8
MEMBER = Sender(ANNA.key_id, is_role=False)


@pytest.mark.parametrize("sent", [b"", b"GET /he"], ids=["nothing", "half a header"])
async def test_a_network_full_of_idle_connections_keeps_no_member_out(
    monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    """Before, a member of that network whose connection had ended was reset, and so were newcomers."""
    async with running(memory_parts(make_run()), ANNA) as world:
        monkeypatch.setattr(limits, "HTTP_STRANGERS_EACH_MAX", SHARE)
        raws = []
        for _ in range(3 * SHARE):
            raws.append(await Raw.to(world.url))
            await raws[-1].send(sent)
        again = HttpClient(world.url, run=world.run.digest, clock=world.parts.clock, key=ANNA)
        await again.heartbeat(HEARTBEAT)
        await again.close()
        await world.join(BEN)
        assert await raws[0].is_cut()
        for raw in raws:
            raw.close()


@pytest.mark.parametrize(
    "asked", [get("/healthz"), get("/v1/head", "If-None-Match: {tag}", "Prefer: wait=30")], ids=["answered", "held"]
)
async def test_a_network_full_of_waiting_connections_keeps_no_member_out(
    monkeypatch: pytest.MonkeyPatch, asked: bytes
) -> None:
    """Before, a network's connections that waited, for an answer or after one, kept its members and newcomers out."""
    async with running(memory_parts(make_run())) as world:
        signed = await world.publish()
        await world.join(ANNA)
        monkeypatch.setattr(limits, "HTTP_STRANGERS_EACH_MAX", SHARE)
        raws: list[Raw] = []

        async def fill() -> None:
            for _ in range(3 * SHARE):
                raws.append(await Raw.to(world.url))
                await raws[-1].send(asked.replace(b"{tag}", f'"{signed.digest}"'.encode()))
                await barrier(world.url)

        await fill()
        member = await Raw.to(world.url)
        for _ in range(2):
            signed_request = world.signed(HEARTBEAT, ANNA).decode()
            await member.send(post("/v1/heartbeat", 0, f"{REQUEST_HEADER}: {signed_request}"))
            assert (await member.answer()).status == 200, "a member's connection is not replaced"
            await fill()
        await world.join(BEN)
        for raw in (*raws, member):
            raw.close()


async def test_an_answer_in_transfer_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(memory_parts(make_run())) as world:
        monkeypatch.setattr(limits, "HTTP_STRANGERS_EACH_MAX", SHARE)
        viewers: list[Raw] = []
        for _ in range(SHARE):
            viewers.append(await Raw.to(world.url))
            await viewers[-1].send(get("/v1/live"))
            assert b" 200 " in await viewers[-1].line()
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await ask(world.url, get("/healthz"))
        for viewer in viewers:
            assert await viewer.line()
            viewer.close()


class Ended:
    """Connections that were ended, in order."""

    def __init__(self, connection_counts: ConnectionCounts) -> None:
        self.names: list[str] = []
        self._counts = connection_counts

    def idle(self, name: str) -> Entry:
        entry = self._counts.enter("8.8.8.8")
        assert entry is not None
        self._counts.has_not_asked(entry, lambda: self.names.append(name))
        return entry


def full(connection_counts: ConnectionCounts) -> tuple[Ended, list[Entry]]:
    """Fill one network with idle connections."""
    ended = Ended(connection_counts)
    return ended, [ended.idle(f"connection {number}") for number in range(limits.HTTP_STRANGERS_EACH_MAX)]


def test_only_connections_without_a_request_are_replaced_and_the_oldest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HTTP_STRANGERS_EACH_MAX", 4)
    connection_counts = ConnectionCounts(CallerBounds(), lambda: 0.0)
    ended, (asking, second, third, fourth) = full(connection_counts)
    connection_counts.asks(asking)
    assert connection_counts.enter("9.9.9.9") is not None
    assert ended.names == [], "another network replaces nothing of it"
    ended.idle("connection 4")
    assert ended.names == ["connection 1"]
    assert [entry.is_inside for entry in (asking, second, third, fourth)] == [True, False, True, True]
    for entry in (third, fourth):
        connection_counts.asks(entry)
    ended.idle("connection 5")
    assert ended.names == ["connection 1", "connection 4"]
    assert connection_counts.num_strangers == 5


def test_the_longest_waiting_connection_is_replaced_once_all_have_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HTTP_STRANGERS_EACH_MAX", 4)
    connection_counts = ConnectionCounts(CallerBounds(), lambda: 0.0)
    ended, (first, second, third, fourth) = full(connection_counts)
    for name, entry in (("second", second), ("first", first), ("third", third)):
        connection_counts.asks(entry)
        connection_counts.waits(entry, lambda name=name: ended.names.append(name))
    fifth = ended.idle("connection 4")
    assert ended.names == ["connection 3"], "one that has brought no request comes first"
    connection_counts.asks(fifth)
    connection_counts.moves(second)
    ended.idle("connection 5")
    assert ended.names == ["connection 3", "first"]
    third.vouch(MEMBER)
    assert not fourth.is_inside
    assert connection_counts.enter("8.8.8.8") is not None, "a member's connection counts for its key alone"


def test_connections_that_ask_are_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HTTP_STRANGERS_EACH_MAX", 4)
    connection_counts = ConnectionCounts(CallerBounds(), lambda: 0.0)
    ended, entries = full(connection_counts)
    for entry in entries:
        connection_counts.asks(entry)
    assert connection_counts.enter("8.8.8.8") is None
    assert ended.names == []


def test_replacing_counts_against_the_rate_of_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HTTP_STRANGERS_EACH_MAX", 4)
    connection_counts = ConnectionCounts(CallerBounds(connects_per_second=1.0), lambda: 0.0)
    ended, _ = full(connection_counts)
    assert sum(connection_counts.enter("8.8.8.8") is not None for _ in range(100)) < 4
    assert len(ended.names) < 4
