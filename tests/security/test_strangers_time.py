"""The cost of strangers' requests is measured and bounded: all of them together get a share of the server's processor time."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import replace

import pytest
from tests.security.raw_http import ask, get

from prime_node.adapters.web.aiohttp_server import AiohttpServer
from prime_node.adapters.web.connection_counts import DEBT_S_MAX, REQUEST_S, STRANGERS_SHARE, ConnectionCounts
from prime_node.adapters.web.metered import Meter
from prime_node.coordinator.api.callers import caller_bounds_of
from prime_node.coordinator.config import CoordinatorConfig
from prime_node.ports.web import CallerBounds, Request, Response, Route, Sender
from prime_protocol.errors import RemoteError


def bounds() -> CallerBounds:
    """Return the default bounds without those by network."""
    found = caller_bounds_of(CoordinatorConfig.model_validate({"public_requests_per_second": 1e9}))
    return replace(found, connects_per_second=math.inf)


@pytest.mark.parametrize("cost_s", [0.0005, 0.002, 0.01, 0.1])
def test_all_strangers_together_get_a_share_of_the_processor_time_whatever_a_request_costs(cost_s: float) -> None:
    """Before, a request counted 2 ms at most, so that pages of the ledger took all of the server's time."""
    now_s = 1_000.0
    connection_counts = ConnectionCounts(bounds(), lambda: now_s)
    entry = connection_counts.enter("9.9.9.9")
    assert entry is not None
    used_s = 0.0
    while now_s < 1_020.0:
        try:
            now_s += connection_counts.delay_s(entry, "")
        except RemoteError:
            now_s += DEBT_S_MAX
            continue
        for _ in range(4):  # as it is used
            now_s += cost_s / 4
            connection_counts.spent(entry, cost_s / 4)
        connection_counts.answered(entry)
        used_s += cost_s + REQUEST_S
    assert used_s == pytest.approx(STRANGERS_SHARE * 20.0, rel=0.1, abs=2 * cost_s)


def test_a_request_that_begins_as_a_strangers_counts_however_it_ends() -> None:
    connection_counts = ConnectionCounts(bounds(), lambda: 1_000.0)
    entry, other = connection_counts.enter("9.9.9.9"), connection_counts.enter("8.8.8.8")
    assert entry is not None
    assert other is not None
    connection_counts.delay_s(entry, "")
    entry.vouch(Sender("a member", is_role=False))
    connection_counts.spent(entry, 1.0)
    connection_counts.answered(entry)
    with pytest.raises(RemoteError, match="too many requests of strangers"):
        connection_counts.delay_s(other, "")


async def spin(request: Request) -> Response:
    """Take more processor time than strangers may owe."""
    until_s = time.thread_time() + 1.2 * STRANGERS_SHARE * DEBT_S_MAX
    while time.thread_time() < until_s:
        pass
    return Response(b"{}")


async def test_strangers_are_refused_while_they_owe_processor_time() -> None:
    server = AiohttpServer()
    port = await server.start([Route("GET", "/spin", spin)], host="127.0.0.1", port=0, bounds=bounds())
    url = f"http://127.0.0.1:{port}"
    try:
        assert (await ask(url, get("/spin"))).status == 200
        assert (await ask(url, get("/spin"))).status == 503
    finally:
        await server.stop(grace_s=0.1)


async def healthy(request: Request) -> Response:
    return Response(b"{}")


async def test_requests_that_are_refused_before_their_turn_count_too() -> None:
    server = AiohttpServer()
    port = await server.start([Route("GET", "/", healthy)], host="127.0.0.1", port=0, bounds=bounds())
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(10):
            await asyncio.gather(*(ask(url, b"GET  / HTTP/1.1\r\n\r\n") for _ in range(60)))
        began_s = time.monotonic()
        assert (await ask(url, get("/"))).status == 200
        assert time.monotonic() - began_s > DEBT_S_MAX / 4, "it waited for what the others had used"
    finally:
        await server.stop(grace_s=0.1)


def test_refused_requests_owe_a_bounded_time() -> None:
    now_s = 1_000.0
    connection_counts = ConnectionCounts(bounds(), lambda: now_s)
    for _ in range(10_000):
        entry = connection_counts.enter("9.9.9.9")
        assert entry is not None
        connection_counts.unread(entry)
        entry.leave()
    other = connection_counts.enter("8.8.8.8")
    assert other is not None
    assert DEBT_S_MAX / 2 < connection_counts.delay_s(other, "") <= DEBT_S_MAX


async def test_connections_that_send_nothing_owe_what_they_cost() -> None:
    """Before, each was charged as much as a request, so 200 a second kept all other strangers out."""
    server = AiohttpServer()
    port = await server.start([Route("GET", "/", healthy)], host="127.0.0.1", port=0, bounds=bounds())
    try:
        for _ in range(400):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.close()
            await writer.wait_closed()
        began_s = time.monotonic()
        assert (await ask(f"http://127.0.0.1:{port}", get("/"))).status == 200
        assert time.monotonic() - began_s < DEBT_S_MAX / 2
    finally:
        await server.stop(grace_s=0.1)


def test_a_connection_that_sends_nothing_owes_less_than_half_of_a_refused_request() -> None:
    owed_s = []
    for is_bare in (True, False):
        connection_counts = ConnectionCounts(bounds(), lambda: 1_000.0)
        for _ in range(100):
            entry = connection_counts.enter("9.9.9.9")
            assert entry is not None
            connection_counts.unread(entry, is_bare=is_bare)
            entry.leave()
        other = connection_counts.enter("8.8.8.8")
        assert other is not None
        owed_s.append(connection_counts.delay_s(other, ""))
    assert 0 < owed_s[0] < owed_s[1] / 2


async def test_a_meter_counts_the_steps_of_a_coroutine_and_passes_on_what_happens() -> None:
    parts: list[float] = []
    meter, waited = Meter(parts.append), asyncio.Event()

    async def work(fails: bool) -> int:
        try:
            await waited.wait()
        except asyncio.CancelledError:
            return 7
        if fails:
            raise ValueError("passed on")
        return 5

    task = asyncio.create_task(meter.run(work(False)))
    await asyncio.sleep(0)
    task.cancel()
    assert await task == 7, "the coroutine may catch what is thrown"
    waited.set()
    assert await meter.run(work(False)) == 5
    with pytest.raises(ValueError, match="passed on"):
        await meter.run(work(True))
    assert len(parts) == 4
    assert all(part >= 0.0 for part in parts)
