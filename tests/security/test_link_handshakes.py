"""A machine between a gateway and its writer, or in the place of one, gets neither a link nor a proof from the handshake."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable

import pytest
from tests.node.gateway_world import SECRET
from tests.node.link_world import RUN, answering, linked
from tests.raw_server_world import raw_server

from prime_node.adapters.link.link_client import LinkClient
from prime_node.adapters.link.sealed_frames import MAGIC, NONCE_BYTES, PROOF_BYTES, proof
from prime_node.ports.web import Response
from prime_node.ports.writer_link import ForwardedAnswer, ForwardedCall

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
PROVEN = NONCE_BYTES + PROOF_BYTES


async def links_to(serve: Serve, done: asyncio.Event) -> bool:
    """Return whether a gateway takes a server for its writer, once that one is done."""
    async with raw_server(serve) as port:
        link = LinkClient([("127.0.0.1", port)], secret=SECRET, run=RUN)
        keeping = asyncio.ensure_future(link.keep())
        await done.wait()
        await asyncio.wait({asyncio.ensure_future(link.linked.wait())}, timeout=0.5)
        keeping.cancel()
        await asyncio.wait({keeping})
        return link.linked.is_set()


@pytest.mark.parametrize(
    "kind", ["the gateway's own proof", "one of an older handshake", "one of another run", "nothing"]
)
async def test_a_gateway_takes_no_server_for_its_writer_that_does_not_know_the_secret(kind: str) -> None:
    done, older = asyncio.Event(), list[bytes]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonce = bytes(NONCE_BYTES)  # always the same
        writer.write(MAGIC + nonce)
        sent = await reader.readexactly(PROVEN)
        mine, given = sent[:NONCE_BYTES], sent[NONCE_BYTES:]
        older.append(proof(SECRET, "writer", nonce + mine, RUN))
        answers = {
            "the gateway's own proof": given,
            "one of an older handshake": older[0] if len(older) > 1 else secrets.token_bytes(PROOF_BYTES),
            "one of another run": proof(SECRET, "writer", nonce + mine, "b" * 64),
            "nothing": b"",
        }
        writer.write(answers[kind])
        if len(older) > 1:
            done.set()
        if answers[kind]:
            assert await reader.read() == b"", "frames for a writer that has proved nothing"

    async with asyncio.timeout(30.0):
        assert not await links_to(serve, done)


@pytest.mark.parametrize("greeting", [b"prime gateway 1\n", b"prime gateway 3\n", b"prime gateway 2\r", bytes(16)])
async def test_another_release_of_the_link_gets_no_proof(greeting: bytes) -> None:
    done, seen = asyncio.Event(), list[bytes]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting + secrets.token_bytes(NONCE_BYTES))
        seen.append(await reader.read())
        done.set()

    async with asyncio.timeout(30.0):
        assert not await links_to(serve, done)
    assert set(seen) == {b""}


async def test_what_a_gateway_sent_once_is_nothing_to_a_writer_later() -> None:
    asked, recorded = list[ForwardedCall](), bytearray()

    async def answer(call: ForwardedCall) -> ForwardedAnswer:
        asked.append(call)
        return ForwardedAnswer(Response(b"done"))

    async with answering(answer) as port, asyncio.timeout(30.0):

        async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there, back = await asyncio.open_connection("127.0.0.1", port)

            async def downwards() -> None:
                while data := await there.read(2**16):
                    writer.write(data)

            task = asyncio.ensure_future(downwards())
            try:
                while data := await reader.read(2**16):
                    recorded.extend(data)
                    back.write(data)
            finally:
                task.cancel()
                back.close()

        async with raw_server(listen) as between, linked(between) as link:
            await link.ask(ForwardedCall("/v1/operate", body=b"an order"))
        assert len(asked) == 1
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(recorded)
        answered = await reader.read()
        assert answered[: len(MAGIC)] == MAGIC
        assert len(answered) <= len(MAGIC) + NONCE_BYTES
        writer.close()
        assert len(asked) == 1
