"""Heartbeats behind a gateway share calls to the writer, and each gets the answer that it would get alone."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest
from tests.node.coordinator_world import ANNA, BEN, HEARTBEAT, VALIDATOR, World, make_run, memory_parts, running
from tests.node.gateway_world import LISTENS, hearing, two_gateways
from tests.node.held_store_world import HeldStore
from tests.node.link_world import linked

from prime_node.adapters.web.aiohttp_server import AiohttpServer
from prime_node.adapters.web.shedding import PRESSURE_MAX
from prime_node.coordinator.api.callers import Callers
from prime_node.coordinator.api.forwarded import BEATS_MAX
from prime_node.coordinator.api.leasing import Leasing
from prime_node.coordinator.gateway.heartbeats import FULL
from prime_node.coordinator.gateway.relay import GatewayRelay
from prime_node.ports.web import Handler, Request, Response, Sender
from prime_node.ports.writer_link import BEATS, ForwardedAnswer, ForwardedCall, WriterLink
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.identity import SigningKey
from prime_protocol.requests import HeartbeatRequest


class Counted(WriterLink):
    """A link that notes the paths of its calls. The writer gets those with heartbeats with changes."""

    def __init__(self, link: WriterLink, **changes: Any) -> None:
        self._link, self._changes = link, changes
        self.paths: list[str] = []

    async def ask(self, call: ForwardedCall) -> ForwardedAnswer:
        """Forward a request."""
        self.paths.append(call.path)
        return await self._link.ask(replace(call, **self._changes) if call.path == BEATS else call)

    async def keep(self) -> None:
        """Do nothing: the link is kept elsewhere."""


def handler_of(world: World, link: WriterLink) -> Handler:
    """Return a gateway's handler of heartbeats."""
    relay = GatewayRelay(world.run, link, Callers(proxies=(), trusted=()), world.parts.clock)
    return next(route.handler for route in relay.routes() if route.path == "/v1/heartbeat")


def asked(world: World, key: SigningKey, vouched: list[Sender | None] | None = None, **changes: object) -> Request:
    found: list[Sender | None] = [] if vouched is None else vouched
    body = world.signed(HEARTBEAT, key, **changes)
    return Request(params={}, body=body, headers={}, remote="127.0.0.1", vouch=found.append)


async def test_each_of_several_heartbeats_in_one_call_gets_its_own_answer() -> None:
    parts, server = hearing(memory_parts(make_run(), **LISTENS))
    async with running(parts) as world, linked(server.port, world.run.digest) as plain:
        await world.join(ANNA, BEN)
        await world.learn_epoch()
        link, vouched = Counted(plain), {name: list[Sender | None]() for name in ("anna", "again", "ben", "stranger")}
        handle, request = handler_of(world, link), asked(world, ANNA, vouched["anna"])
        answers = await asyncio.gather(
            handle(request),
            handle(replace(request, vouch=vouched["again"].append)),
            handle(asked(world, BEN, vouched["ben"])),
            handle(asked(world, VALIDATOR, vouched["stranger"])),
            handle(asked(world, ANNA, epoch="0" * 32)),
            handle(asked(world, BEN, issued_at_ms=1)),
            return_exceptions=True,
        )
        assert link.paths == [BEATS]
        good = [answer for answer in answers if isinstance(answer, Response)]
        assert [json.loads(answer.body)["step"] for answer in good if isinstance(answer.body, bytes)] == [0, 0]
        refused = [answer.code for answer in answers if isinstance(answer, RemoteError)]
        assert refused == [ErrorCode.REPLAYED, ErrorCode.UNKNOWN_WORKER, ErrorCode.WRONG_EPOCH, ErrorCode.EXPIRED]
        assert isinstance(answers[4], RemoteError)
        assert answers[4].epoch == world.epoch
        assert vouched == {
            "anna": [Sender(ANNA.key_id, is_role=False)],
            "again": [None],
            "ben": [Sender(BEN.key_id, is_role=False)],
            "stranger": [None],
        }
        text = (await world.get("/metrics"))[1].decode()
        assert 'prime_requests_total{endpoint="/v1/heartbeat",outcome="ok"} 2.0' in text
        assert 'prime_requests_total{endpoint="/v1/heartbeat",outcome="replayed"} 1.0' in text


@pytest.mark.parametrize(
    ("fault", "code"), [(OSError(5, "a bad sector"), ErrorCode.UNAVAILABLE), (KeyError("a bug"), ErrorCode.INTERNAL)]
)
async def test_a_fault_of_one_heartbeat_fails_no_other_of_its_call(
    fault: Exception, code: ErrorCode, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, one that the writer failed on was the answer to up to eight workers, and to all when they asked again."""
    answer = Leasing.answer_heartbeat

    def faulty(self: Leasing, signer: str, request: HeartbeatRequest) -> Response:
        if signer == BEN.key_id:
            raise fault
        return answer(self, signer, request)

    monkeypatch.setattr(Leasing, "answer_heartbeat", faulty)
    parts, server = hearing(memory_parts(make_run(), **LISTENS))
    async with running(parts) as world, linked(server.port, world.run.digest) as plain:
        await world.join(ANNA, BEN)
        await world.learn_epoch()
        link = Counted(plain)
        handle = handler_of(world, link)
        asking = (handle(asked(world, key)) for key in (ANNA, BEN, ANNA))
        answers = await asyncio.gather(*asking, return_exceptions=True)
        assert [isinstance(found, Response) for found in answers] == [True, False, True]
        assert isinstance(answers[1], RemoteError)
        assert (answers[1].code, link.paths) == (code, [BEATS])
        assert "a bug" not in answers[1].detail
        assert "/v1/heartbeat from 127.0.0.1" in caplog.text
        text = world.parts.metrics.exposition()[0].decode()
        assert f'prime_requests_total{{endpoint="/v1/heartbeat",outcome="{code}"}} 1.0' in text


async def test_many_heartbeats_are_few_calls_and_one_alone_is_answered_soon() -> None:
    parts, server = hearing(memory_parts(make_run(), **LISTENS, requests_per_second=1e9))
    async with running(parts) as world, linked(server.port, world.run.digest) as plain:
        await world.join(ANNA)
        await world.learn_epoch()
        link = Counted(plain)
        handle = handler_of(world, link)
        await asyncio.gather(*(handle(asked(world, ANNA)) for _ in range(2 * FULL + 1)))
        assert link.paths == [BEATS] * 3
        leaving = asyncio.ensure_future(handle(asked(world, ANNA)))
        staying = asyncio.ensure_future(handle(asked(world, ANNA)))
        await asyncio.sleep(0)
        leaving.cancel()  # its caller has left: the others are answered
        assert isinstance(await staying, Response)


@pytest.mark.parametrize("changes", [{"path": "nowhere"}, {"body": b'[["a","",{}]]'}], ids=["call", "payload"])
async def test_a_writer_of_an_earlier_release_gets_heartbeats_one_by_one(changes: dict[str, Any]) -> None:
    """Before, such a writer, after a return to that release, took all workers behind newer gateways for lost."""
    parts, server = hearing(memory_parts(make_run(), **LISTENS))
    async with running(parts) as world, linked(server.port, world.run.digest) as plain:
        await world.join(ANNA)
        await world.learn_epoch()
        link = Counted(plain, **changes)
        handle = handler_of(world, link)
        answers = await asyncio.gather(
            handle(asked(world, ANNA)), handle(asked(world, ANNA)), handle(asked(world, BEN)), return_exceptions=True
        )
        assert [isinstance(answer, Response) for answer in answers] == [True, True, False]
        assert isinstance(answers[2], RemoteError)
        assert answers[2].code is ErrorCode.UNKNOWN_WORKER
        assert link.paths == [BEATS, *["/v1/heartbeat"] * 3]


async def test_a_heartbeat_is_a_sign_of_life_through_any_gateway_and_is_refused_again_at_each() -> None:
    async with two_gateways() as (writer, (one, other)):
        await one.join(ANNA)
        signed = one.signed(HEARTBEAT, ANNA)
        answers = await asyncio.gather(*(world.post("/v1/heartbeat", signed) for world in (one, other, one, other)))
        assert sorted(status for status, _ in answers) == [200, 409, 409, 409]
        (row,) = (await writer.status())["workers"]
        assert (row["state"], row["policy_version"]) == ("idle", -1)


async def test_no_heartbeat_is_answered_before_what_it_may_show_is_durable() -> None:
    store, (parts, server) = HeldStore(), hearing(memory_parts(make_run(), **LISTENS))
    async with running(replace(parts, store=store), ANNA) as world, linked(server.port, parts.run.digest) as link:
        handle = handler_of(world, link)
        store.may_write.clear()
        store.is_asked.clear()
        leasing = asyncio.create_task(world.lease(ANNA))
        await store.is_asked.wait()
        beat = asyncio.ensure_future(handle(asked(world, ANNA)))
        done, _ = await asyncio.wait({beat}, timeout=0.2)
        assert not done, "an answer left before an event was written"
        store.may_write.set()
        await leasing
        assert isinstance(await beat, Response)


async def test_an_overloaded_writer_refuses_heartbeats_one_by_one() -> None:
    web, (parts, server) = AiohttpServer(), hearing(memory_parts(make_run(), **LISTENS, lag_ms_max=50.0))
    async with running(replace(parts, web=web)) as world, linked(server.port, parts.run.digest) as link:
        await world.join(ANNA)
        await world.learn_epoch()
        assert web.shedding is not None
        web.shedding.pressure = PRESSURE_MAX
        handle = handler_of(world, link)
        answers = await asyncio.gather(*(handle(asked(world, ANNA)) for _ in range(FULL)), return_exceptions=True)
        refused = [answer for answer in answers if isinstance(answer, RemoteError)]
        assert {(error.code, error.retry_after_s) for error in refused} == {(ErrorCode.UNAVAILABLE, 5.0)}
        text = world.parts.metrics.exposition()[0].decode()
        assert f'prime_requests_shed_total{{importance="heartbeats"}} {len(refused)}.0' in text


def test_a_full_call_is_one_that_the_writer_takes() -> None:
    assert FULL <= BEATS_MAX
