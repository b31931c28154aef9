"""A server that gets more requests than it can answer refuses the least important ones and loses no work."""

from __future__ import annotations

import random
import re

import pytest
from tests.node.coordinator_world import ANNA, HEARTBEAT, VALIDATOR, World, make_parcel, make_run, memory_parts, running
from tests.security.raw_http import Raw

from prime_node.adapters.web.aiohttp_server import AiohttpServer
from prime_node.adapters.web.request_head import read_request_head
from prime_node.adapters.web.shedding import BEGINS, LET_THROUGH, RETRY_S, SLACK, Shedding
from prime_node.coordinator.presence import HEARTBEATS_MISSED_MAX, Presence
from prime_node.patience import PAUSE_S_MAX, Backoff
from prime_node.ports.web import CallerBounds, Importance, Request, Response, Route, Sender
from prime_protocol.body_claim import REQUEST_HEADER
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.requests import CheckRequest, UploadUrlRequest

LAG_S_MAX = 0.01
MEMBER, ROLE = Sender("a member", is_role=False), Sender("the trainer", is_role=True)
KINDS = [kind for kind in Importance if kind is not Importance.ALWAYS]


async def answer(request: Request) -> Response:
    return Response(b"{}")


ROUTES = [Route("POST", f"/{kind.name}", answer, importance=kind) for kind in Importance]


def refused_shares(shedding: Shedding) -> dict[str, float]:
    """Return the refused share of a member's requests by kind, of a stranger's, and of the trainer's."""

    def share(path: str, sender: Sender | None) -> float:
        head = read_request_head(f"POST {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        return sum(shedding.refusal(head, sender) is not None for _ in range(160)) / 160

    found = {kind.name: share(f"/{kind.name}", MEMBER) for kind in Importance if kind > Importance.STRANGERS}
    return found | {"STRANGERS": share("/ALWAYS2", None), "role": share("/HEARTBEATS", ROLE)}


def test_strangers_are_refused_first_then_heartbeats_then_work_and_each_gets_through_now_and_then() -> None:
    shedding, shares = Shedding(ROUTES, CallerBounds(lag_s_max=LAG_S_MAX)), []
    for _ in range(100):
        shedding.note(1.5 * LAG_S_MAX)
        shares.append(refused_shares(shedding))
    begins = [next(at for at, share in enumerate(shares) if share[kind.name]) for kind in KINDS]
    assert begins == sorted(begins)
    assert len(set(begins)) == len(KINDS)
    assert all(not share["NEW_WORK"] or share["HEARTBEATS"] > 0.9 for share in shares)
    assert shares[-1] == {kind.name: pytest.approx(1 - 1 / LET_THROUGH, abs=0.01) for kind in KINDS} | {
        "ALWAYS": 0.0,
        "role": 0.0,
    }
    for _ in range(5_000):
        shedding.note(0.0)
    assert set(refused_shares(shedding).values()) == {0.0}


async def test_a_visitor_of_an_overloaded_coordinator_gets_the_whole_page_and_a_flood_of_its_files_is_refused() -> None:
    """Before, a visitor got a document without its style or scripts, or the text of an error."""
    async with running(memory_parts(make_run(), lag_ms_max=1_000 * LAG_S_MAX)) as world:
        overload(world, 2.0)
        status, document, _ = await world.get("/?view=ledger")
        files = re.findall(r"/page/[0-9a-z.-]+", document.decode())
        assert len(files) > 1
        found = [status, *[(await world.get(path))[0] for path in files]]
        assert set(found) == {200}
        flood = [(await world.get(files[0]))[0] for _ in range(400)]
        assert flood.count(503) > 100
        assert (await world.get("/v1/history"))[0] == 503


def test_one_long_pause_is_no_overload() -> None:
    shedding = Shedding(ROUTES, CallerBounds(lag_s_max=LAG_S_MAX))
    for number in range(99):
        shedding.note(10.0 if number % 3 == 0 else 0.0)
    assert set(refused_shares(shedding).values()) == {0.0}


def test_a_refused_heartbeat_makes_no_worker_silent() -> None:
    """Before, a worker was lost that was still waiting after its last refusal, with its lease."""
    presence, due_s = Presence(heartbeat_s=1.0), 103.0 + PAUSE_S_MAX + HEARTBEATS_MISSED_MAX
    presence.heard("anna", 100.0)
    presence.excuse(103.0)
    backoff, refusal = Backoff(), RemoteError(ErrorCode.UNAVAILABLE, "busy", retry_after_s=5.0)
    assert all(103.0 + backoff.next_s(refusal) < due_s for _ in range(50))
    assert presence.silent(["anna"], due_s) == ()
    assert presence.silent(["anna"], due_s + 0.1) == ("anna",)


def test_clients_wait_as_long_as_they_are_asked_to_and_do_not_return_together() -> None:
    error = RemoteError(ErrorCode.UNAVAILABLE, "busy", retry_after_s=5.0)
    pauses_s = [Backoff(random.Random(seed)).next_s(error) for seed in range(50)]
    assert min(pauses_s) >= 5.0
    assert max(pauses_s) - min(pauses_s) > 1.0


def overload(world: World, pressure: float) -> None:
    """Put a coordinator under a pressure, which stays: without requests its loop would be found in time again."""
    assert isinstance(world.parts.web, AiohttpServer)
    shedding = world.parts.web.shedding
    assert shedding is not None
    shedding.stop()
    while shedding.pressure < pressure:
        shedding.note(1.1 * LAG_S_MAX)


def beat(world: World) -> bytes:
    """Return a member's heartbeat, as it is sent."""
    sent = world.signed(HEARTBEAT, ANNA).decode()
    return f"POST /v1/heartbeat HTTP/1.1\r\nHost: localhost\r\n{REQUEST_HEADER}: {sent}\r\n\r\n".encode()


async def test_an_overloaded_coordinator_refuses_heartbeats_and_takes_work() -> None:
    """Before, a flood of heartbeats made all requests wait, and nothing was refused."""
    async with running(memory_parts(make_run(heartbeat_seconds=0.2), lag_ms_max=1_000 * LAG_S_MAX), ANNA) as world:
        lease = await world.lease(ANNA)
        raw = await Raw.to(world.url)
        await raw.send(beat(world))
        assert (await raw.answer()).status == 200
        overload(world, SLACK)
        statuses = []
        for _ in range(2 * LET_THROUGH):  # all on one connection
            await raw.send(beat(world))
            found = await raw.answer()
            statuses.append(found.status)
            if found.status == 503:
                assert found.code == ErrorCode.UNAVAILABLE
                assert int(found.headers["retry-after"]) == RETRY_S[Importance.HEARTBEATS]
        assert statuses.count(200) == 2
        assert (await world.get("/healthz"))[0] == 200
        reply = await world.client(ANNA).upload(make_parcel(lease, ANNA))  # its heartbeats are overdue, its lease holds
        assert reply.verdict is None
        await world.client(VALIDATOR).check(CheckRequest(policy_versions=()))
        metrics = [await world.get("/metrics") for _ in range(LET_THROUGH)]
        assert {status for status, _, _ in metrics} == {200, 503}
        text = next(body for status, body, _ in metrics if status == 200).decode()
        assert f'prime_requests_shed_total{{importance="heartbeats"}} {statuses.count(503)}' in text
        raw.close()


async def test_a_url_for_an_upload_is_refused_no_earlier_than_the_upload() -> None:
    """Before, each finished bundle of a MiB or more waited until new work was given again, though uploads were taken."""
    async with running(memory_parts(make_run(), lag_ms_max=1_000 * LAG_S_MAX), ANNA) as world:
        await world.learn_epoch()
        overload(world, BEGINS[Importance.FINISHED_WORK] - 0.1)  # requests for work are refused
        asked = UploadUrlRequest(lease_id="0" * 64, body_bytes=1, body_sha256="0" * 64)
        for _ in range(LET_THROUGH):
            sent = {REQUEST_HEADER: world.signed(asked, ANNA).decode()}
            assert (await world.post("/v1/upload_url", b"", **sent))[0] == 404


async def test_a_member_on_a_new_connection_is_no_stranger_to_an_overloaded_coordinator() -> None:
    async with running(memory_parts(make_run(), lag_ms_max=1_000 * LAG_S_MAX), ANNA) as world:
        overload(world, Importance.HEARTBEATS)  # all strangers are refused, and heartbeats not yet
        for _ in range(LET_THROUGH):
            raw = await Raw.to(world.url)
            await raw.send(beat(world))
            assert (await raw.answer()).status == 200
            raw.close()


async def test_a_strangers_refused_requests_excuse_no_worker_and_head_is_no_answer_ahead() -> None:
    """Before, a stranger's path kept all leases of workers that had gone, and the body after HEAD was read as the next answer."""
    seen = list[Importance]()
    server = AiohttpServer()
    routes = [Route("POST", "/v1/heartbeat", answer, importance=Importance.HEARTBEATS)]
    port = await server.start(
        routes,
        host="127.0.0.1",
        port=0,
        bounds=CallerBounds(lag_s_max=LAG_S_MAX, refused=lambda kind, count: seen.append(kind)),
    )
    try:
        assert server.shedding is not None
        server.shedding.stop()
        for _ in range(100):
            server.shedding.note(1.0)
        raw = await Raw.to(f"http://127.0.0.1:{port}")
        for _ in range(2):  # one is let through
            await raw.send(b"POST /v1/heartbeat HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await raw.answer()
        assert seen == [Importance.STRANGERS]
        await raw.send(b"HEAD /v1/heartbeat HTTP/1.1\r\nHost: localhost\r\n\r\n")
        found = await raw.answer()
        assert (found.status, found.headers["connection"]) == (503, "close")
        raw.close()
    finally:
        await server.stop(grace_s=0.1)


async def test_an_upload_that_is_refused_for_load_is_refused_before_its_body() -> None:
    server = AiohttpServer()
    routes = [Route("POST", "/v1/rollouts", answer, 2**20, importance=Importance.FINISHED_WORK)]
    port = await server.start(routes, host="127.0.0.1", port=0, bounds=CallerBounds(lag_s_max=LAG_S_MAX))
    try:
        assert server.shedding is not None
        server.shedding.stop()
        for _ in range(100):
            server.shedding.note(1.0)
        raw = await Raw.to(f"http://127.0.0.1:{port}")
        await raw.send(b"POST /v1/rollouts HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert (await raw.answer()).status == 200  # the one that is let through
        await raw.send(b"POST /v1/rollouts HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n")
        found = await raw.answer()
        assert (found.status, found.headers["connection"]) == (503, "close")
        assert "retry-after" in found.headers
        raw.close()
    finally:
        await server.stop(grace_s=0.1)
