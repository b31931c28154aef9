"""Answers without end, to a coordinator that dials a stranger back and to a client: bounded work, however fast they come."""

from __future__ import annotations

import asyncio
import contextlib
import tracemalloc
from collections.abc import AsyncIterator

import pytest
from tests.node.coordinator_world import ANNA, COORDINATOR, make_run
from tests.node.http_server import LEASE, client_of, served
from tests.raw_server_world import raw_server

from prime_node.adapters.system_clock import SystemClock
from prime_node.adapters.web import http_peer
from prime_node.adapters.web.http_client import HttpClient
from prime_node.adapters.web.http_peer import HttpDialBack, HttpPeer
from prime_node.worker.generating import open_lease
from prime_protocol import limits
from prime_protocol.assignment import GroupAssignment, Lease, Problem
from prime_protocol.digest import digest_of
from prime_protocol.envelope import PayloadType, open_envelope, seal
from prime_protocol.errors import ErrorCode, LimitExceeded, RemoteError
from prime_protocol.limits import Limits
from prime_protocol.peers import PeerUpdate

RUN = make_run()
LONG_S, ENOUGH_S = 300.0, 60.0
"""Time for which a client would listen; and much more than it needs."""
ENDLESS = {
    "interim answers": (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 400),
    "header lines": (b"HTTP/1.1 200 OK\r\n", b"X: y\r\n" * 400),
    "trailers": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n", b"X: y\r\n" * 400),
}


@contextlib.asynccontextmanager
async def pouring(first: bytes, rest: bytes) -> AsyncIterator[str]:
    """Answer each request with `first`, and then with `rest` again and again; yield the URL."""

    async def pour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(first)
        while True:
            writer.write(rest)
            await writer.drain()

    async with raw_server(pour) as port:
        yield f"http://127.0.0.1:{port}"


@pytest.mark.parametrize("name", ENDLESS)
async def test_a_dial_back_reads_a_short_answer_and_no_more(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, a stranger's interim answers took the coordinator's event loop for five seconds a dial-back, 16 at once."""
    monkeypatch.setattr(limits, "DIAL_BACK_S_MAX", LONG_S)
    async with pouring(*ENDLESS[name]) as url, asyncio.timeout(ENOUGH_S):
        assert not await HttpDialBack(RUN.digest).answers(url, ANNA.key_id)


@pytest.mark.parametrize("name", ENDLESS)
async def test_no_client_reads_an_answer_without_end(name: str) -> None:
    """Before, a peer or mirror took all of a machine's event loop for half a minute, again and again."""
    async with (
        pouring(*ENDLESS[name]) as url,
        HttpClient(url, run=RUN.digest, clock=SystemClock(), stall_s=LONG_S) as client,
        asyncio.timeout(ENOUGH_S),
    ):
        with pytest.raises(RemoteError):
            await client.head()


@pytest.mark.parametrize(("chunk_bytes", "is_read"), [(1, False), (16, False), (256, True)])
async def test_a_body_in_tiny_chunks_is_not_read(chunk_bytes: int, is_read: bool) -> None:
    """Before, a mirror's chunks of one byte took 0.8 s of a downloader's processor for each megabyte of the answer."""
    chunk = b"%x\r\n%b\r\n" % (chunk_bytes, b"x" * chunk_bytes)
    first = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + 2**14 * chunk + b"0\r\n\r\n"

    async def answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(first)
        await writer.drain()

    async with (
        raw_server(answered) as port,
        HttpClient(f"http://127.0.0.1:{port}", run=RUN.digest, clock=SystemClock()) as client,
    ):
        reading = client.blob(digest_of(b"x" * 2**14 * chunk_bytes))
        if is_read:
            assert len(await reading) == 2**14 * chunk_bytes
        else:
            with pytest.raises(RemoteError, match="tiny chunks"):
                await reading


@pytest.mark.timeout(60)
async def test_answers_without_a_body_are_read_again_and_again() -> None:
    async with (
        pouring(b"", b"HTTP/1.1 204 No Content\r\n\r\n") as url,
        HttpClient(url, run=RUN.digest, clock=SystemClock()) as client,
    ):
        assert [await client.unsigned("/v1/status", bytes_max=9) for _ in range(3)] == 3 * [(b"", {})]


async def test_a_peer_s_notifications_are_read_only_so_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, lines that were padded and sent in chunks of one byte took a core, at five megabytes a second."""
    monkeypatch.setattr(http_peer, "LINES_BYTES_PER_S", 2**22)
    line = PeerUpdate(cursor=1, head=1).model_dump_json().encode().ljust(2**16) + b"\n"
    begin = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    loop = asyncio.get_running_loop()
    async with pouring(begin, b"%x\r\n%b\r\n" % (len(line), line)) as url:
        peer = HttpPeer(url, run=RUN.digest, clock=SystemClock(), bounds=Limits(), authorization=lambda: None)
        updates, began_s = peer.updates(), loop.time()
        for _ in range(40):  # as many as the buffer holds, twice
            await anext(updates)
        assert loop.time() - began_s >= 20 * len(line) / 2**22
        await peer.close()


@pytest.mark.parametrize("filling", [b"[],", b'{"":0},', b"99,"])
def test_an_envelope_takes_no_more_memory_than_a_few_times_its_bytes(filling: bytes) -> None:
    """Before, four megabytes of any source became more than a hundred in memory."""
    data = b'{"payload":[' + filling * (limits.ENVELOPE_BYTES_MAX // len(filling) - 10) + b"0]}"
    tracemalloc.start()
    try:
        with pytest.raises(LimitExceeded):
            open_envelope(data)
        assert tracemalloc.get_traced_memory()[1] < len(data)
    finally:
        tracemalloc.stop()


async def test_the_reason_for_a_wait_is_short() -> None:
    async with served() as server, client_of(server) as client:
        server.says(b" " * limits.ERROR_BODY_BYTES_MAX + b'{"reason":"wait","retry_after_s":1.0}', status=202)
        with pytest.raises(RemoteError) as caught:
            await client.lease(LEASE)
        assert caught.value.code is ErrorCode.UNAVAILABLE


def test_a_lease_is_no_longer_than_what_was_asked_for() -> None:
    """Before, a coordinator could sign 64 MiB that became gigabytes in its worker."""
    asked = LEASE.model_copy(update={"rollouts_max": 1})
    lease = Lease(
        run=RUN.digest,
        lease_id=digest_of(b"lease"),
        worker=ANNA.key_id,
        step=asked.policy_version,
        policy_version=asked.policy_version,
        policy_digest=asked.policy_digest,
        groups=(
            GroupAssignment(slot=0, problem=Problem(environment="letters", index=0), prompt_token_ids=(1,), seeds=(1,)),
        ),
        sampling=RUN.spec.sampling,
        issued_at_ms=0,
        expires_at_ms=1,
    )
    payload = lease.model_dump_json().encode()
    for padding, is_too_long in ((0, False), (20 * RUN.spec.limits.prompt_tokens_max, True)):
        signed = seal(payload + b" " * padding, PayloadType.LEASE, COORDINATOR)
        with pytest.raises(LimitExceeded) if is_too_long else contextlib.nullcontext():
            open_lease(signed, asked, run=RUN, worker=ANNA.key_id)
