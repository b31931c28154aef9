"""What strangers take from the coordinator's page costs its members little memory and time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.node.coordinator_world import make_run, memory_parts, running
from tests.security.raw_http import Raw, ask, get

from prime_lab.memory_blobs import MemoryDocuments
from prime_node.coordinator.api.page import DOSSIER_PIECE_BYTES
from prime_node.coordinator.assembly import open_coordinator
from prime_node.coordinator.page.live_feed import FRAMES_KEPT, VIEWERS_EACH_MAX
from prime_protocol.errors import ErrorCode

NAME = f"ban-{'a' * 44}-1.jsonl"
DOSSIER = bytes(range(256)) * 2**14
READERS = 8


class CountedDocuments(MemoryDocuments):
    """Documents that record how many bytes each read returned."""

    def __init__(self) -> None:
        super().__init__()
        self.readings: list[int] = []

    async def read(self, name: str, *, start: int = 0, end: int | None = None) -> bytes:
        data = await super().read(name, start=start, end=end)
        if name == NAME:
            self.readings.append(len(data))
        return data


async def test_a_dossier_is_read_only_as_fast_as_it_is_taken() -> None:
    """Before, each request read all of it: 64 sockets that reset at once held 1.4 GiB of a dossier of 60 MiB."""
    private = CountedDocuments()
    await private.write(NAME, DOSSIER)
    async with running(replace(memory_parts(make_run()), private=private)) as world:
        path = f"/v1/evidence/{NAME}"
        raw = await Raw.to(world.url)
        for _ in range(READERS):
            await raw.send(get(path).replace(b"GET", b"HEAD"))
            assert b"200" in await raw.line()
            while await raw.line() != b"\r\n":
                pass
        raw.close()
        assert private.readings == []
        assert (await ask(world.url, get(path))).body == DOSSIER
        assert max(private.readings) == DOSSIER_PIECE_BYTES


async def test_a_viewer_that_reads_too_slowly_is_told_to_begin_again() -> None:
    """Before, it missed the frames that had been dropped meanwhile, and showed wrong values from then on."""
    coordinator = await open_coordinator(memory_parts(make_run()))
    feed = coordinator.feed
    frames = feed.frames(feed.document()["version"])
    assert (await anext(frames)).startswith(b"retry:")
    for number in range(FRAMES_KEPT + 1):
        coordinator.history.record(kind="check", step=number)
        version = feed.document()["version"]
    assert await anext(frames) == b"event: reset\ndata: {}\n\n"
    coordinator.history.record(kind="check", step=FRAMES_KEPT + 1)
    feed.document()
    assert (await anext(frames)).startswith(f"id: {version + 1}\n".encode())
    await frames.aclose()  # type: ignore[attr-defined]


@pytest.mark.parametrize("path", ["/v1/live?since=x", "/v1/live?since=-1", "/v1/live?since=" + "9" * 16])
async def test_a_viewer_whose_request_is_refused_takes_no_place(path: str) -> None:
    """Before, sixteen such requests kept all viewers of their network out until the coordinator's restart."""
    async with running(memory_parts(make_run())) as world:
        for _ in range(VIEWERS_EACH_MAX):
            assert (await ask(world.url, get(path))).code == ErrorCode.MALFORMED
        raw = await Raw.to(world.url)
        await raw.send(get("/v1/live"))
        assert b" 200 " in await raw.line()
        raw.close()
