"""Limits on what one joined key, or the keys of one network, can take from the coordinator's HTTP server."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
from tests.node.coordinator_process import REPOSITORY, crash_run
from tests.node.coordinator_world import ANNA, HEARTBEAT, World, make_parcel, make_run, memory_parts
from tests.security.raw_http import Raw, get
from tests.time_world import until

from prime_node.adapters.web.aiohttp_server import AiohttpServer
from prime_node.adapters.web.connection_counts import MEMBER_BURST_S, ConnectionCounts, Entry
from prime_node.coordinator.api.callers import MEMBER_REQUESTS_TIMES, caller_bounds_of
from prime_node.coordinator.config import CoordinatorConfig
from prime_node.ports.web import CallerBounds, Request, Response, Route, Sender
from prime_protocol import limits

MEMBER, ROLE = Sender("member", is_role=False), Sender("trainer", is_role=True)
LARGE = bytes(2**24)


def entered(connection_counts: ConnectionCounts, address: str = "8.8.8.8") -> Entry:
    entry = connection_counts.enter(address)
    assert entry is not None
    return entry


def test_one_members_connections_beyond_its_bound_count_as_strangers() -> None:
    connection_counts = ConnectionCounts(CallerBounds(), lambda: 0.0)
    entries = [entered(connection_counts, f"9.0.{number}.1") for number in range(limits.HTTP_MEMBERS_EACH_MAX + 3)]
    for entry in entries:
        entry.vouch(MEMBER)
    assert (connection_counts.num_members, connection_counts.num_strangers) == (limits.HTTP_MEMBERS_EACH_MAX, 3)
    entries[0].leave()
    entries[-1].vouch(MEMBER)
    assert (connection_counts.num_members, connection_counts.num_strangers) == (limits.HTTP_MEMBERS_EACH_MAX, 2)


def test_many_keys_of_one_network_leave_the_rest_of_the_members_share_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "HTTP_MEMBERS_NETWORK_MAX", 5)
    connection_counts = ConnectionCounts(caller_bounds_of(CoordinatorConfig(connects_per_second=1e9)), lambda: 0.0)
    for number in range(10):
        entered(connection_counts, "8.8.8.8").vouch(Sender(f"key {number}", is_role=False))
    assert (connection_counts.num_members, connection_counts.num_strangers) == (5, 5)
    other = entered(connection_counts, "9.9.9.9")
    other.vouch(MEMBER)
    assert other.sender == MEMBER


def test_members_and_strangers_together_leave_room_for_the_keys_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert limits.HTTP_STRANGERS_MAX + limits.HTTP_MEMBERS_MAX < limits.HTTP_CONNECTIONS_MAX
    monkeypatch.setattr(limits, "HTTP_MEMBERS_MAX", 2)
    connection_counts = ConnectionCounts(CallerBounds(), lambda: 0.0)
    for number in range(4):
        entered(connection_counts).vouch(Sender(f"key {number}", is_role=False))
        entered(connection_counts).vouch(ROLE)
    assert (connection_counts.num_members, connection_counts.num_strangers, connection_counts.num_connections) == (
        2,
        2,
        8,
    )


def test_a_members_unsigned_requests_have_a_rate_and_those_of_the_run_do_not() -> None:
    per_second = 10.0
    bounds = caller_bounds_of(CoordinatorConfig(requests_per_second=per_second / MEMBER_REQUESTS_TIMES))
    connection_counts = ConnectionCounts(bounds, lambda: 1_000.0)
    first, second, other, role = (entered(connection_counts) for _ in range(4))
    first.vouch(MEMBER)
    second.vouch(MEMBER)
    other.vouch(replace(MEMBER, key="other"))
    role.vouch(ROLE)
    burst = round(per_second * MEMBER_BURST_S)
    assert [connection_counts.delay_s(first, "") for _ in range(burst)] == [0.0] * burst
    assert connection_counts.delay_s(second, "") == pytest.approx(1 / per_second), "the same key on another connection"
    assert connection_counts.delay_s(other, "") == 0.0
    assert [connection_counts.delay_s(role, "") for _ in range(2 * burst)] == [0.0] * 2 * burst


@pytest.mark.parametrize(("sender", "is_bounded"), [(MEMBER, True), (ROLE, False)])
async def test_large_answers_to_one_member_are_bounded(
    monkeypatch: pytest.MonkeyPatch, sender: Sender, is_bounded: bool
) -> None:
    monkeypatch.setattr(limits, "MEMBERS_ANSWER_BYTES_EACH_MAX", len(LARGE))

    async def large(request: Request) -> Response:
        request.vouch(sender)
        return Response(LARGE)

    server = AiohttpServer()
    url = f"http://127.0.0.1:{await server.start([Route('GET', '/v1/run', large)], host='127.0.0.1', port=0)}"
    raws = [await Raw.to(url) for _ in range(2)]
    raws[0].stand_still()
    await raws[0].send(get("/v1/run"))
    await until(lambda: not is_bounded or server.answers.num_bytes("answers to member"))
    await raws[1].send(get("/v1/run"))
    assert (await raws[1].line()).startswith(b"HTTP/1.1 503" if is_bounded else b"HTTP/1.1 200")
    for raw in raws:
        raw.close()
    await server.stop(grace_s=0.1)


def test_a_process_that_may_open_few_files_shrinks_every_share() -> None:
    connection_counts = ConnectionCounts(
        CallerBounds(), lambda: 0.0, connections_max=limits.HTTP_CONNECTIONS_MAX // 100
    )
    few = limits.HTTP_STRANGERS_MAX // 100
    entries = [connection_counts.enter("8.8.8.8") for _ in range(few)]
    assert sum(entry is not None for entry in entries) == few // 4, "one network leaves room for others"
    entries += [connection_counts.enter(f"9.9.9.{number}") for number in range(few)]
    assert sum(entry is not None for entry in entries) == few
    for entry in entries:
        if entry is not None:
            entry.vouch(ROLE)
    assert entered(connection_counts).is_inside


async def test_idle_connections_leave_descriptors_for_members_and_the_journal(tmp_path: Path) -> None:
    """A real daemon that may open 200 files, and 300 idle connections of strangers."""
    command = 'ulimit -n 200; exec "$0" -m tests.node.coordinator_process "$1" 0 0'
    process = await asyncio.create_subprocess_exec(
        *("sh", "-c", command, sys.executable, str(tmp_path)),
        cwd=REPOSITORY,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    run = make_run(**crash_run())
    raws: list[Raw] = []
    try:
        url = f"http://127.0.0.1:{int(await asyncio.wait_for(process.stdout.readline(), 60))}"
        async with aiohttp.ClientSession() as session:
            world = World(run, memory_parts(run), url, session)
            await world.learn_epoch()
            await world.publish()
            await world.join(ANNA)
            for _ in range(300):
                try:
                    raws.append(await Raw.to(url))
                except ConnectionError:
                    continue
            await world.client(ANNA).heartbeat(HEARTBEAT)
            lease = await world.lease(ANNA, rollouts_max=2)
            await world.client(ANNA).upload(make_parcel(lease, ANNA))
            for client in world.clients.values():
                await client.close()
    finally:
        process.kill()
        _, errors = await process.communicate()
        for raw in raws:
            raw.close()
    assert "the limit of open files is low" in errors.decode()
    assert "no connection can be accepted" not in errors.decode()
