"""A gateway whose writer falls silent, and no connection ends: it follows the next one at once. Timeouts are minutes here."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from pathlib import Path

import aiohttp
import pytest
from tests.node.coordinator_process import crash_run
from tests.node.coordinator_world import (
    ANNA,
    BEN,
    HEARTBEAT,
    TRAINER,
    VALIDATOR,
    World,
    make_run,
    memory_parts,
    running,
)
from tests.node.crowd_world import Crowd, check_promises
from tests.node.gateway_world import LISTENS, SECRET, gateway_parts, hearing, serving
from tests.node.link_world import BODY_BYTES_MAX, RUN, answering
from tests.node.silent_line_world import silent_line
from tests.node.standby_world import pair_for_gateways
from tests.time_world import until

from prime_lab.free_ports import free_ports
from prime_lab.postgres_server import PostgresServer
from prime_lab.s3_server import BUCKET, S3Server
from prime_node.adapters.link import link_client
from prime_node.adapters.link.link_client import LinkClient
from prime_node.adapters.link.link_server import LinkServer
from prime_node.adapters.web import http_exchange
from prime_node.adapters.web.http_client import HttpClient
from prime_node.cli.wire_store import open_blobs
from prime_node.ports.web import Response
from prime_node.ports.writer_link import ForwardedAnswer, ForwardedCall
from prime_protocol.errors import RemoteError

LONG_S = 300.0


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no timeout of the link help."""
    for name in ("CONNECT_S_MAX", "SILENT_S_MAX"):
        monkeypatch.setattr(link_client, name, LONG_S)


async def never(call: ForwardedCall) -> ForwardedAnswer:
    await asyncio.Event().wait()
    raise AssertionError


async def second(call: ForwardedCall) -> ForwardedAnswer:
    return ForwardedAnswer(Response(b"the second"))


@pytest.mark.timeout(60)
async def test_a_gateway_leaves_a_silent_writer_as_soon_as_another_one_answers_and_never_before() -> None:
    """Before, requests waited for three seconds, and then for five more at each address whose machine did not answer."""
    async with contextlib.AsyncExitStack() as stack:
        ports = [await stack.enter_async_context(answering(each)) for each in (never, second)]
        lines = [await stack.enter_async_context(silent_line(port)) for port in ports]
        lines[1].fall_silent()
        link = LinkClient([("127.0.0.1", line.port) for line in lines], secret=SECRET, run=RUN)
        keeping = asyncio.ensure_future(link.keep())
        await link.linked.wait()
        asking = asyncio.ensure_future(link.ask(ForwardedCall("/v1/head")))
        lines[0].fall_silent()
        await asyncio.wait({asking}, timeout=2 * link_client.SUSPECT_S)
        assert not asking.done(), "no other writer answers: this one may be busy"
        lines[0].be_heard()
        await asyncio.wait({asking}, timeout=link_client.SUSPECT_S)
        assert not asking.done(), "it is heard again"
        lines[0].fall_silent()
        lines[1].be_heard()
        with pytest.raises(RemoteError, match="no link to the coordinator"):
            await asking
        await link.linked.wait()
        assert (await link.ask(ForwardedCall("/v1/head"))).response.body == b"the second"
        keeping.cancel()
        await asyncio.wait({keeping})


@pytest.mark.timeout(60)
async def test_a_gateway_that_starts_waits_for_no_machine_that_does_not_answer() -> None:
    async with answering(never) as one, silent_line(one) as line, answering(second) as two:
        line.fall_silent()
        link = LinkClient([("127.0.0.1", port) for port in (line.port, two)], secret=SECRET, run=RUN)
        keeping = asyncio.ensure_future(link.keep())
        await link.linked.wait()
        assert (await link.ask(ForwardedCall("/v1/head"))).response.body == b"the second"
        keeping.cancel()
        await asyncio.wait({keeping})


@pytest.mark.parametrize("follows", [False, True])
@pytest.mark.timeout(60)
async def test_a_gateway_that_is_stopped_as_a_writer_answers_keeps_no_connection(
    monkeypatch: pytest.MonkeyPatch, follows: bool
) -> None:
    """Before, it kept that connection, until the writer cut it after five seconds."""
    for name in ("ALIVE_S", "SUSPECT_S"):
        monkeypatch.setattr(link_client, name, 0.05)
    [port] = free_ports(1)
    for turns in range(30):
        async with answering(never) as one, silent_line(one) as line:
            server, addresses = LinkServer(), [line.port, port] if follows else [port]
            link = LinkClient([("127.0.0.1", each) for each in addresses], secret=SECRET, run=RUN)
            keeping = asyncio.ensure_future(link.keep())
            if follows:
                await link.linked.wait()
                line.fall_silent()
            await server.start(
                second,
                address=("127.0.0.1", port),
                secret=SECRET,
                run=RUN,
                body_bytes_max=BODY_BYTES_MAX,
                may_send=None,
            )
            while not server.links:  # noqa: ASYNC110 - of this turn of the loop and the next ones, each is tried
                await asyncio.sleep(0)
            for _ in range(turns):
                await asyncio.sleep(0)
            keeping.cancel()
            await asyncio.wait({keeping})
            await until(lambda server=server: not server.links, seconds=1.0)
            await server.stop()


@pytest.mark.timeout(60)
async def test_a_client_leaves_a_gateway_that_is_cut_off_from_the_leader_or_from_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parts, server = hearing(memory_parts(make_run(), **LISTENS))
    async with contextlib.AsyncExitStack() as stack:
        world = await stack.enter_async_context(running(parts, ANNA))
        line = await stack.enter_async_context(silent_line(server.port))
        one, other = [
            await stack.enter_async_context(serving(gateway_parts(world.run, [port])))
            for port in (line.port, server.port)
        ]
        near = await stack.enter_async_context(silent_line(int(one.rpartition(":")[2])))
        client = HttpClient(
            f"http://127.0.0.1:{near.port}", run=world.run.digest, clock=parts.clock, key=ANNA, stall_s=LONG_S
        )
        client.also_at([other])
        await stack.enter_async_context(client)
        await client.heartbeat(HEARTBEAT)
        monkeypatch.setattr(link_client, "SILENT_S_MAX", 2.0)
        line.fall_silent()
        await client.heartbeat(HEARTBEAT)
        assert client.url == other
        line.be_heard()

        async def is_linked() -> bool:
            return (await world.session.get(f"{one}/readyz")).status == 200

        await world.until(is_linked)
        again = HttpClient(f"http://127.0.0.1:{near.port}", run=world.run.digest, clock=parts.clock, key=ANNA)
        again.also_at([other])
        await stack.enter_async_context(again)
        monkeypatch.setattr(http_exchange, "ELSEWHERE_STALL_S", 0.5)
        near.fall_silent()
        await again.heartbeat(HEARTBEAT)
        assert again.url == other
        near.be_heard()


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_work_continues_at_a_gateway_whose_leader_is_stopped_and_nothing_counts_twice(
    tmp_path: Path, postgres: PostgresServer, s3: S3Server
) -> None:
    run, blobs = make_run(**crash_run()), f"s3://{BUCKET}/{tmp_path.name}"
    pair = pair_for_gateways(tmp_path, blobs, postgres, s3)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(pair.kill)
        await pair.start(0)
        await pair.start(1)
        session = await stack.enter_async_context(aiohttp.ClientSession())
        stopped = await pair.leader(session)
        bundles, public = [await open_blobs(blobs, run, Path(name)) for name in ("bundles", "blobs")]
        gateway = gateway_parts(run, pair.link_ports, bundles=bundles, public=public, blobs=blobs)
        world = World(run, memory_parts(run), await stack.enter_async_context(serving(gateway)), session)
        for key in (ANNA, BEN, VALIDATOR, TRAINER):
            stack.push_async_callback(world.client(key).close)
        crowd = Crowd(world, 1)
        async with crowd.working():
            await crowd.progress(3)
            pair.daemons[stopped].send(signal.SIGSTOP)
            await crowd.progress(3)
            assert await pair.is_ready(session, 1 - stopped)
            pair.daemons[stopped].send(signal.SIGCONT)
            await pair.daemons[stopped].wait()
            await crowd.progress(1)
            await crowd.stop()
            await check_promises(crowd)
