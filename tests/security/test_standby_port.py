"""The port of a standby: it shows nothing of the run and reads no body, behind the walls of a leader's."""

from __future__ import annotations

import asyncio
import dataclasses

from tests.node.coordinator_world import make_run, memory_parts
from tests.security.raw_http import Raw, ask, post

from prime_node.coordinator.standby import Succession
from prime_protocol.errors import ErrorCode


class Waiting:
    """Leadership (ports.leadership.Leadership) that never begins."""

    is_leading = False

    def may_answer(self) -> bool:
        return False

    async def catch_up(self) -> None: ...

    async def led(self) -> None:
        await asyncio.Event().wait()

    async def lost(self) -> None:
        await asyncio.Event().wait()


REQUESTS = {
    "GET / HTTP/1.1\r\nHost: 127.0.0.1": ErrorCode.UNAVAILABLE,
    "GET /v1/status HTTP/1.1\r\nHost: 127.0.0.1": ErrorCode.UNAVAILABLE,
    "GET /v1/ledger/0 HTTP/1.1\r\nHost: 127.0.0.1": ErrorCode.UNAVAILABLE,
    "GET /metrics HTTP/1.1\r\nHost: 127.0.0.1": ErrorCode.UNAVAILABLE,
    "GET /../keys/coordinator.key HTTP/1.1\r\nHost: 127.0.0.1": ErrorCode.UNAVAILABLE,
    "POST /v1/admin HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 0": ErrorCode.UNAVAILABLE,
    "GET / HTTP/1.1\r\nHost: rebound.example": ErrorCode.MALFORMED,
    "POST /v1/rollouts HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked": ErrorCode.MALFORMED,
    "GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000000000000": ErrorCode.TOO_LARGE,
}


async def test_a_standby_tells_strangers_nothing_and_reads_none_of_their_bodies() -> None:
    parts = dataclasses.replace(memory_parts(make_run()), leadership=Waiting())
    parts = dataclasses.replace(parts, config=parts.config.model_copy(update={"standby": True}))
    port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    standing = asyncio.ensure_future(Succession(parts, port.set_result).lead(stop))
    try:
        url = f"http://127.0.0.1:{await port}"
        for request, code in REQUESTS.items():
            assert (await ask(url, f"{request}\r\n\r\n".encode())).code == code, request
        endless = await Raw.to(url)
        await endless.send(post("/v1/rollouts", 10**12) + bytes(2**16))
        assert (await endless.answer()).code == ErrorCode.UNAVAILABLE
        assert await endless.is_cut(), "what follows is not read"
        endless.close()
    finally:
        stop.set()
        assert await standing is False
