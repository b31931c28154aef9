"""Gateways in front of a coordinator: any of them answers, the coordinator decides, and losing one loses nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import replace

import aiohttp
import pytest
from tests.node import link_world
from tests.node.coordinator_process import crash_run
from tests.node.coordinator_world import (
    ANNA,
    BEN,
    HEARTBEAT,
    TRAINER,
    VALIDATOR,
    World,
    make_parcel,
    make_run,
    memory_parts,
    refused,
    running,
)
from tests.node.crowd_world import Crowd, check_promises
from tests.node.gateway_world import (
    LISTENS,
    SECRET,
    GatewayProcess,
    gateway_parts,
    hearing,
    serving,
    two_gateways,
)
from tests.raw_server_world import raw_server
from tests.security.raw_http import Raw, get
from tests.time_world import VirtualClock, until

from prime_lab.memory_blobs import MemoryBlobs
from prime_node.adapters.link.link_client import LinkClient
from prime_node.adapters.link.link_server import LOG_S, STRANGERS_MAX, LinkServer
from prime_node.adapters.link.sealed_frames import BrokenLink, FrameKind, FrameOpener, FrameSealer, LinkFrame
from prime_node.adapters.web.http_client import HttpClient
from prime_node.cli.wire_gateway import run_of
from prime_node.coordinator.api.callers import Callers
from prime_node.coordinator.gateway.relay import GatewayRelay
from prime_node.coordinator.page.live_feed import VIEWERS_EACH_MAX
from prime_node.ports.web import Importance, Request
from prime_node.ports.writer_link import ForwardedCall
from prime_protocol.digest import digest_of
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.limits import HEADER_ENVELOPE_BYTES_MAX
from prime_protocol.requests import BundleRequest, ReceiptsRequest
from prime_protocol.run_spec import PinnedRun


@contextlib.asynccontextmanager
async def hearing_writer() -> AsyncIterator[tuple[World, LinkServer]]:
    """Run a coordinator that hears gateways."""
    parts, server = hearing(memory_parts(make_run(), **LISTENS))
    async with running(parts) as world:
        yield world, server


def link_to(run: PinnedRun, server: LinkServer) -> LinkClient:
    return LinkClient((("127.0.0.1", server.port),), secret=SECRET, run=run.digest)


def linked(world: World, server: LinkServer) -> contextlib.AbstractAsyncContextManager[LinkClient]:
    """Keep a link to a coordinator."""
    return link_world.linked(server.port, world.run.digest)


async def test_work_leased_at_one_gateway_is_uploaded_at_another_and_a_replay_is_refused_everywhere() -> None:
    async with two_gateways() as (writer, (one, other)):
        other.head = writer.head = await one.publish()
        await one.join(ANNA)
        lease = await one.lease(ANNA)
        parcel = make_parcel(lease, ANNA)
        reply = await other.client(ANNA).upload(parcel)
        assert reply.bundle == digest_of(parcel)
        assert await one.client(ANNA).upload(parcel) == reply
        task = await other.take_task(VALIDATOR)
        assert await one.client(VALIDATOR).bundle(BundleRequest(bundle=task.bundle)) == parcel
        await one.give_verdict(task)
        assert len((await other.client(ANNA).receipts(ReceiptsRequest())).receipts) == 1
        heartbeat = one.signed(HEARTBEAT, ANNA)
        assert (await one.post("/v1/heartbeat", heartbeat))[0] == 200
        for world in (one, other, writer):
            await refused(world, ErrorCode.REPLAYED, "/v1/heartbeat", heartbeat)


async def test_a_gateway_refuses_itself_what_no_key_has_signed() -> None:
    async with two_gateways() as (writer, (one, _)):
        await one.join(ANNA)
        signed = json.loads(one.signed(HEARTBEAT, ANNA))
        signature = signed["signatures"][0]
        signature["sig"] = ("B" if signature["sig"][0] == "A" else "A") + signature["sig"][1:]
        await refused(one, ErrorCode.BAD_SIGNATURE, "/v1/heartbeat", json.dumps(signed).encode())
        await refused(one, ErrorCode.WRONG_TYPE, "/v1/lease", one.signed(HEARTBEAT, ANNA))
        stranger = replace(one, run=make_run(max_steps=7))
        await refused(one, ErrorCode.WRONG_RUN, "/v1/heartbeat", stranger.signed(HEARTBEAT, ANNA))
        await refused(one, ErrorCode.MALFORMED, "/v1/rollouts", b"no parcel")
        text = (await writer.get("/metrics"))[1].decode()
        assert 'endpoint="/v1/heartbeat"' not in text, "the writer was asked"
        await refused(one, ErrorCode.UNKNOWN_WORKER, "/v1/heartbeat", one.signed(HEARTBEAT, VALIDATOR))


async def test_what_only_the_writer_knows_is_the_same_through_a_gateway() -> None:
    async with two_gateways() as (writer, (one, other)):
        await one.publish()
        part = one.head.manifest.encodings[0].parts[0].digest if one.head is not None else ""
        for path in ("/v1/run", "/v1/head", "/v1/manifests/0", "/v1/timestamp", f"/v1/blobs/{part}", "/v1/ledger/0"):
            assert (await other.get(path))[:2] == (await writer.get(path))[:2]
        status, body, headers = await other.get(f"/v1/blobs/{part}", Range="bytes=1-4")
        assert (status, body) == (206, (await writer.get(f"/v1/blobs/{part}"))[1][1:5])
        assert headers["Content-Range"].startswith("bytes 1-4/")
        assert (await other.get("/v1/manifests/9"))[0] == 404
        large = one.client(TRAINER)  # a body that is announced, and counted against the trainer's share
        data = bytes(range(256)) * (12 * HEADER_ENVELOPE_BYTES_MAX // 256)
        assert await writer.parts.public.get(await large.put_blob(data)) == data


async def test_readers_who_wait_for_the_next_policy_are_one_reader_to_the_writer() -> None:
    async with hearing_writer() as (world, server):
        async with linked(world, server) as link:
            relay = GatewayRelay(world.run, link, Callers(proxies=(), trusted=()), world.parts.clock)
            handler = next(route.handler for route in relay.routes() if route.path == "/v1/head")
            asked = Request(params={}, body=b"", headers={"prefer": "wait=20"}, remote="127.0.0.1")
            waiting = [asyncio.ensure_future(handler(asked)) for _ in range(20)]
            await link.ask(ForwardedCall("/healthz"))  # behind them
            head = await world.publish()
            for response in await asyncio.gather(*waiting):
                assert response.body == head.envelope.to_bytes()
        text = (await world.get("/metrics"))[1].decode()
        assert 'prime_requests_total{endpoint="/v1/head",outcome="ok"} 1.0' in text


async def test_viewers_of_the_page_at_a_gateway_are_one_viewer_to_the_writer() -> None:
    async with two_gateways() as (_, (one, _)):
        assert (await one.get("/"))[0] == 200
        version = json.loads((await one.get("/v1/history"))[1])["version"]
        async with contextlib.AsyncExitStack() as stack:
            asked = [one.session.get(f"{one.url}/v1/live?since={version}") for _ in range(3)]
            streams = [await stack.enter_async_context(each) for each in asked]
            for stream in streams:
                assert await stream.content.readuntil(b"\n\n") == b"retry: 3000\n\n"
            await one.join(ANNA)
            async with asyncio.timeout(10.0):
                found = [await stream.content.readuntil(b"\n\n") for stream in streams]
            assert b'"now"' in found[0]
            assert found == found[:1] * 3
            text = (await one.get("/metrics"))[1].decode()
            assert 'prime_requests_total{endpoint="/v1/live",outcome="ok"} 1.0' in text
            old = await stack.enter_async_context(one.session.get(f"{one.url}/v1/live?since=1"))
            await old.content.readuntil(b"\n\n")
            assert await old.content.readuntil(b"\n\n") == b"event: reset\ndata: {}\n\n"
        assert (await one.get("/v1/live?since=x"))[0] == 400


async def test_a_gateway_finds_the_coordinator_that_takes_over() -> None:
    run = make_run()
    first, server = hearing(memory_parts(run, **LISTENS))
    second, other = hearing(replace(memory_parts(run, **LISTENS), store=first.store))
    async with running(second), contextlib.AsyncExitStack() as stack:
        leads = await stack.enter_async_context(contextlib.AsyncExitStack())
        await leads.enter_async_context(running(first))
        url = await stack.enter_async_context(serving(gateway_parts(run, [server.port, other.port])))
        world = World(run, first, url, (stack_session := aiohttp.ClientSession()))
        stack.push_async_callback(stack_session.close)
        await world.learn_epoch()
        epoch = world.epoch
        await leads.aclose()

        async def is_relinked() -> bool:
            status, body, _ = await world.get("/readyz")
            return status == 200 and json.loads(body)["epoch"] != epoch

        await world.until(is_relinked, seconds=10.0)


async def test_gateways_store_bundles_where_they_can_and_only_those_that_the_writer_takes() -> None:
    run = make_run()
    shared = MemoryBlobs()
    parts, server = hearing(replace(memory_parts(run, **LISTENS), bundles=shared))
    async with running(parts, ANNA) as world, contextlib.AsyncExitStack() as stack:
        lease = await world.lease(ANNA)
        parcel = make_parcel(lease, ANNA)
        url = await stack.enter_async_context(serving(gateway_parts(run, [server.port], bundles=shared)))
        at_gateway = World(run, parts, url, world.session)
        stack.push_async_callback(at_gateway.client(ANNA).close)
        unknown = make_parcel(lease, ANNA, lease_id="f" * len(lease.lease_id))
        with pytest.raises(RemoteError) as error:
            await at_gateway.client(ANNA).upload(unknown)
        assert error.value.code is ErrorCode.LEASE_UNKNOWN
        assert [digest async for digest in shared.digests()] == []
        reply = await at_gateway.client(ANNA).upload(parcel)
        assert await shared.get(reply.bundle) == parcel
        task = await world.take_task(VALIDATOR)
        assert task.bundle == reply.bundle


async def test_a_gateway_without_the_secret_is_not_heard() -> None:
    run = make_run()
    parts, server = hearing(memory_parts(run, **LISTENS))
    async with running(parts) as world:
        link = LinkClient((("127.0.0.1", server.port),), secret=b"x" * 32, run=run.digest)
        other = LinkClient((("127.0.0.1", server.port),), secret=parts.gateway_secret, run="a" * 64)
        keeping = [asyncio.ensure_future(each.keep()) for each in (link, other)]
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + b"x" * 100)
        assert (await reader.read()).startswith(b"prime gateway 2\n")
        writer.close()
        for each in (link, other):
            assert not each.linked.is_set()
            with pytest.raises(RemoteError, match="no link"):
                await each.ask(ForwardedCall("/v1/run"))
        for task in keeping:
            task.cancel()
        await asyncio.gather(*keeping, return_exceptions=True)
        assert (await world.get("/healthz"))[0] == 200


async def test_strangers_who_hold_connections_keep_no_gateway_out(caplog: pytest.LogCaptureFixture) -> None:
    run = make_run()
    parts, server = hearing(memory_parts(run, **LISTENS))
    few, began_s = 2 * STRANGERS_MAX, asyncio.get_running_loop().time()

    async def insist() -> None:
        while True:
            with contextlib.suppress(ConnectionError):
                reader, writer = await asyncio.open_connection("127.0.0.1", server.port, local_addr=("127.0.0.9", 0))
                try:
                    await reader.read()
                finally:
                    writer.close()

    async with running(parts) as world:
        held = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(few)]
        assert len(server.links) <= STRANGERS_MAX
        async with linked(world, server):  # of the same address
            insisting = [asyncio.ensure_future(insist()) for _ in range(few)]
            await until(lambda: len(server.links) > STRANGERS_MAX, seconds=10.0)
            async with linked(world, server) as link:
                await link.ask(ForwardedCall("/healthz"))
            for task in insisting:
                task.cancel()
            await asyncio.gather(*insisting, return_exceptions=True)
        for _, writer in held:
            writer.close()
    passed_s = asyncio.get_running_loop().time() - began_s
    assert caplog.text.count("another connection took its place") <= 1 + passed_s / LOG_S


async def test_a_gateway_that_knows_only_the_join_link_gets_the_run_from_the_writer() -> None:
    run = make_run()
    parts, server = hearing(memory_parts(run, **LISTENS))
    async with running(parts):
        link = link_to(run, server)
        assert (await run_of(link, run.digest)).digest == run.digest


async def test_the_writer_hears_of_heartbeats_that_a_gateway_refuses_for_load() -> None:
    """Otherwise it would take their workers for lost."""
    async with hearing_writer() as (world, server), linked(world, server) as link:
        relay = GatewayRelay(world.run, link, Callers(proxies=(), trusted=()), VirtualClock())
        for _ in range(3):
            relay.note_refused(Importance.HEARTBEATS)
        reporting = asyncio.ensure_future(relay.report_refused())
        try:
            await until(lambda: not relay.shed, seconds=10.0)
            await link.ask(ForwardedCall("/healthz"))  # behind it
        finally:
            reporting.cancel()
            await asyncio.wait({reporting})
        text = (await world.get("/metrics"))[1].decode()
        assert 'prime_requests_shed_total{importance="heartbeats"} 3.0' in text


async def test_a_client_signs_again_for_the_next_address_when_a_gateway_dies_before_it_answers() -> None:
    """Before, the same request went to the next address, where the coordinator had seen its nonce already."""
    async with hearing_writer() as (world, _):
        await world.join(ANNA)
        port, num_swallowed = int(world.url.rpartition(":")[2]), 0

        async def swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            """Pass on a request, and end when its answer comes."""
            nonlocal num_swallowed
            there, to = await asyncio.open_connection("127.0.0.1", port)
            try:
                to.write(await reader.readuntil(b"\r\n\r\n"))
                assert (await there.readline()).startswith(b"HTTP/1.1 200")
                num_swallowed += 1
            finally:
                to.close()

        async with raw_server(swallow) as dying:
            client = HttpClient(
                f"http://127.0.0.1:{dying}",
                run=world.run.digest,
                clock=world.parts.clock,
                key=ANNA,
            )
            client.also_at([world.url])
            client.epoch = world.epoch
            async with client:
                await client.heartbeat(HEARTBEAT)
        assert num_swallowed == 1


async def test_a_large_blob_streams_through_a_gateway_and_a_reader_may_leave() -> None:
    async with two_gateways() as (writer, (one, _)):
        data = bytes(range(256)) * (5 * 2**20 // 256)
        path = f"/v1/blobs/{await writer.parts.public.put(data)}"
        assert (await one.get(path))[:2] == (200, data)
        async with one.session.get(one.url + path) as answer:
            assert await answer.content.readexactly(10) == data[:10]
            answer.close()
        assert (await one.get(path))[:2] == (200, data)


async def test_a_viewer_who_leaves_a_gateway_frees_its_place_at_once() -> None:
    """Before, its stream waited for its next piece: up to 15 s, in which its network's other viewers were kept out."""
    async with two_gateways() as (_, (one, _)), contextlib.AsyncExitStack() as viewers:

        async def looks_on() -> bool:
            viewer = await Raw.to(one.url)
            viewers.callback(viewer.close)
            await viewer.send(get("/v1/live"))
            return b" 200 " in await viewer.line()

        assert [await looks_on() for _ in range(VIEWERS_EACH_MAX + 1)] == [True] * VIEWERS_EACH_MAX + [False]
        await viewers.aclose()
        async with asyncio.timeout(10.0):
            while not await looks_on():
                pass


def test_a_frame_that_was_changed_repeated_or_left_out_ends_the_link() -> None:
    sealer = FrameSealer(SECRET)
    frames = [
        sealer.seal(LinkFrame(FrameKind.CALL, number, {"path": "/healthz"}, bytes(number))) for number in range(3)
    ]
    whole = list(FrameOpener(SECRET).feed(b"".join(frames)))
    assert [frame.call for frame in whole] == [0, 1, 2]
    opener, data = FrameOpener(SECRET), b"".join(frames)
    assert [frame for place in range(len(data)) for frame in opener.feed(data[place : place + 1])] == whole
    for sent in (frames[1], 2 * frames[0], frames[0] + frames[2]):
        with pytest.raises(BrokenLink):
            list(FrameOpener(SECRET).feed(sent))
    for place in range(len(frames[0])):  # of a length too: its frame would be waited for while others arrive
        changed = bytearray(frames[0])
        changed[place] ^= 1
        with pytest.raises(BrokenLink):
            list(FrameOpener(SECRET).feed(bytes(changed)))
    with pytest.raises(BrokenLink, match="length"):
        list(FrameOpener(SECRET).feed(b"\xff" * 12))


@pytest.mark.slow
async def test_kill_9_of_a_gateway_under_load_loses_nothing() -> None:
    parts, server = hearing(memory_parts(make_run(**crash_run()), **LISTENS))
    async with running(parts) as world:
        gateways = [await GatewayProcess.start(server.port) for _ in range(2)]
        at_gateways = World(parts.run, parts, gateways[0].url, world.session)
        crowd = Crowd(at_gateways, 1)
        for place, key in enumerate((ANNA, BEN, TRAINER, VALIDATOR)):
            client = at_gateways.client(key)
            client.url = gateways[place % 2].url
            client.also_at([gateway.url for gateway in gateways])
        try:
            async with crowd.working():
                await crowd.progress(3)
                await gateways[0].kill()
                await crowd.progress(6, accepted_min=12)
                await crowd.stop()
                await check_promises(crowd)
        finally:
            for gateway in gateways:
                await gateway.kill()
    await until(lambda: not server.links, seconds=5.0)
