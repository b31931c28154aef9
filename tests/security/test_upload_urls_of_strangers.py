"""A coordinator that names a URL for a direct upload directs no worker into the network around it, nor to its own machine."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
from aiohttp import web
from tests.builder import build_header, build_lease
from tests.node.http_server import RUN, client_of, served
from tests.node.worker_world import WORKER
from tests.raw_server_world import raw_server
from tests.time_world import VirtualClock

from prime_node.adapters.web.direct_upload import may_receive, put_directly
from prime_node.adapters.web.http_client import WHOLE_S, HttpClient
from prime_node.ports.transport import Unreachable
from prime_protocol.assignment import GroupAssignment, Problem
from prime_protocol.digest import digest_of
from prime_protocol.envelope import PayloadType
from prime_protocol.errors import ErrorCode
from prime_protocol.parcel import pack_parcel
from prime_protocol.replies import ErrorBody, UploadReply, UploadUrl

BODY = b"rollouts" * 100
INTERNET, HERE = ["8.8.8.8"], ["127.0.0.1"]
GROUP = GroupAssignment(slot=0, problem=Problem(environment="letters", index=0), prompt_token_ids=(1,), seeds=(0,))
PARCEL = pack_parcel(
    build_header(build_lease(RUN, WORKER, [GROUP]), BODY, len(BODY)), BODY, PayloadType.ROLLOUT, WORKER
)


@dataclass
class Trap:
    """A service on this machine that takes a PUT on any path."""

    port: int = 0
    status: int = 200
    location: str = ""
    taken: list[bytes] = field(default_factory=list)

    async def take(self, request: web.Request) -> web.Response:
        self.taken.append(await request.read())
        return web.Response(status=self.status, headers={"Location": self.location} if self.location else {})


@contextlib.asynccontextmanager
async def trap() -> AsyncIterator[Trap]:
    made, app = Trap(), web.Application()
    app.router.add_put("/{path:.*}", made.take)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        made.port = runner.addresses[0][1]
        yield made
    finally:
        await runner.cleanup()


async def put(url: str, near: list[str], *, needs_tls: bool = False) -> None:
    sha256 = hashlib.sha256(BODY).digest()
    await put_directly(url, BODY, sha256, near=near, needs_tls=needs_tls, stall_s=20.0)


async def test_no_spelling_of_a_private_address_gets_a_body(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = [
        "127.0.0.1",
        "localhost",
        "[::ffff:127.0.0.1]",
        "2130706433",
        "127.1",
        "0x7f.1",
        "0177.0.0.1",
        "127.0.0.1.",
    ]
    real = "aiohttp.resolver.ThreadedResolver.resolve"

    async def resolve(self: object, host: str, port: int = 0, family: object = None) -> list[dict[str, object]]:
        entry = {"hostname": host, "host": "127.0.0.1", "port": port, "proto": 6, "flags": 0}
        return [{**entry, "family": socket.AF_INET}]

    async with trap() as service:
        for host in hosts:
            with pytest.raises(Unreachable):
                await put(f"http://{host}:{service.port}/latest/api/token", INTERNET)
        monkeypatch.setattr(real, resolve)
        with pytest.raises(Unreachable):
            await put(f"http://bucket.example.org:{service.port}/name", INTERNET)
        assert service.taken == []
        await put(f"http://bucket.example.org:{service.port}/name", HERE)  # the coordinator's own machine
        await put(f"http://127.0.0.1:{service.port}/name", HERE)
        assert service.taken == [BODY, BODY]


def test_a_body_goes_to_a_public_address_or_to_the_coordinators_own_alone() -> None:
    for address, near, may in (
        ("1.1.1.1", INTERNET, True),
        ("1.1.1.1", ["10.0.0.8"], True),
        ("2606:4700::1", INTERNET, True),
        ("10.0.0.8", ["10.0.0.8"], True),
        ("10.0.0.9", ["10.0.0.8"], False),  # a neighbour of the coordinator, whose paths it must not choose
        ("10.0.0.8", ["10.0.0.8", "8.8.8.8"], False),  # the name leads elsewhere now and then (DNS rebinding)
        ("127.0.0.1", INTERNET, False),
        ("127.0.0.1", [], False),
        ("192.168.0.1", INTERNET, False),
        ("100.64.0.1", INTERNET, False),
        ("169.254.169.254", ["169.254.169.254"], False),
        ("fd00:ec2::254", ["fd00:ec2::254"], False),
        ("168.63.129.16", INTERNET, False),
        ("64:ff9b::7f00:1", INTERNET, False),
        ("::ffff:10.0.0.9", INTERNET, False),
        ("224.0.0.1", INTERNET, False),
        ("0.0.0.0", ["0.0.0.0"], False),
        ("not an address", INTERNET, False),
    ):
        assert may_receive(address, near) is may, (address, near)


async def test_a_body_follows_no_redirect_and_no_proxy_and_leaves_no_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    async with trap() as bucket, trap() as elsewhere:
        bucket.status, bucket.location = 307, f"http://127.0.0.1:{elsewhere.port}/other"
        with pytest.raises(Unreachable, match="307"):
            await put(f"http://127.0.0.1:{bucket.port}/name", HERE)
        with pytest.raises(Unreachable, match="TLS"):
            await put(f"http://127.0.0.1:{elsewhere.port}/name", HERE, needs_tls=True)
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{elsewhere.port}")
        with pytest.raises(Unreachable, match="proxy"):
            await put("http://bucket.example.org/name", INTERNET)
        assert (len(bucket.taken), elsewhere.taken) == (1, [])


ANSWERS = (
    b"",
    b"garbage\r\n\r\n",
    b"HTTP/1.1 99999 x\r\n\r\n",
    b"HTTP/1.1 403 X-Signature\r\nContent-Length: 0\r\n\r\n",
)
UNUSABLE = ("http://[::::]/", "http://[1.2]/", "http://127.0.0.1:99999/", "http://-/", "http://a..b/")


async def test_no_error_of_a_direct_upload_holds_its_url_nor_ends_the_worker() -> None:
    """Before, three answers put the signature into an error, and an address in false brackets raised ValueError."""
    answers = list(ANSWERS)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answers.pop(0))
        writer.close()

    async with raw_server(answer) as port:
        for url in (*(f"http://127.0.0.1:{port}/" for _ in ANSWERS), *UNUSABLE):
            named = UploadUrl(url=f"{url}name?X-Amz-Signature=s3cret").url
            with pytest.raises(Unreachable) as refused:
                await put(named, HERE)
            assert "s3cret" not in str(refused.value), url
    assert answers == []


async def test_a_worker_that_is_directed_elsewhere_sends_the_bundle_to_the_coordinator() -> None:
    """And asks for no URL for a while, so that a run cannot make its workers send each body twice."""
    reply = UploadReply(bundle=digest_of(PARCEL))
    clock = VirtualClock()
    async with served() as coordinator, HttpClient(coordinator.url, run=RUN.digest, clock=clock, key=WORKER) as client:

        async def answer(request: web.Request) -> web.Response:
            is_asked = request.path == "/v1/upload_url"
            told = UploadUrl(url="http://169.254.169.254/latest/api/token") if is_asked else reply
            return web.Response(body=told.model_dump_json())

        coordinator.answer = answer
        client.direct_bytes_min = 1
        for _ in range(2):
            assert await client.upload(PARCEL) == reply
        clock.seconds += WHOLE_S
        await client.upload(PARCEL)
        asked, whole = "/v1/upload_url", "/v1/rollouts"
        assert [path for _, path, _ in coordinator.seen] == [asked, whole, whole, asked, whole]
        assert {body for _, path, body in coordinator.seen if path == whole} == {PARCEL}


@pytest.mark.parametrize(
    ("status", "answer"),
    [
        (503, ErrorBody(code=ErrorCode.UNAVAILABLE, detail="busy", retry_after_s=1.0).model_dump_json()),
        (500, ErrorBody(code=ErrorCode.INTERNAL, detail="it failed").model_dump_json()),
        (404, "<html>a proxy that passes only what it knows</html>"),
        (200, '{"url": "ftp://bucket.example.org/name"}'),
    ],
)
async def test_a_worker_that_gets_no_url_sends_the_bundle_to_the_coordinator(status: int, answer: str) -> None:
    """Before, it asked for the URL again and again, and the bundle did not arrive."""
    reply = UploadReply(bundle=digest_of(PARCEL))
    async with served() as coordinator, client_of(coordinator) as client:

        async def answered(request: web.Request) -> web.Response:
            if request.path == "/v1/upload_url":
                return web.Response(body=answer, status=status)
            return web.Response(body=reply.model_dump_json())

        coordinator.answer = answered
        client.direct_bytes_min = 1
        assert await client.upload(PARCEL) == reply
        assert [body for _, path, body in coordinator.seen if path == "/v1/rollouts"] == [PARCEL]
