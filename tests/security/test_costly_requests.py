"""A request's cost to its receiver stays in proportion to the request."""

from __future__ import annotations

import gc
import time
import tracemalloc
from pathlib import Path

import pytest
from tests.node.coordinator_world import ANNA, HEARTBEAT, make_parcel, make_run, memory_parts, running
from tests.security.raw_http import ask, claim, post
from tests.time_world import VirtualClock

from prime_node.adapters.models.regex_cost import regex_fault
from prime_node.adapters.web.request_head import read_request_head
from prime_node.broadcast.swarm.uplink import PACE_BYTES, DataCap, Uplink
from prime_protocol import limits
from prime_protocol.digest import digest_of
from prime_protocol.errors import RemoteError


def processor_s(action: object) -> float:
    began = time.process_time()
    action()  # type: ignore[operator]
    return time.process_time() - began


@pytest.mark.parametrize("space", [b" ", b"\t", b" \t"])
def test_spaces_before_a_bad_byte_of_a_header_are_read_once(space: bytes) -> None:
    """Trying all ways to divide them would take seconds: a hundred headers must take less than one such header did."""
    line = b"X:" + space * (limits.HTTP_HEADER_BYTES_MAX // len(space) - 40) + b"\x01"
    head = b"GET / HTTP/1.1\r\nHost: x\r\n" + line + b"\r\n\r\n"

    def read() -> None:
        for _ in range(100):
            with pytest.raises(RemoteError, match="not well formed"):
                read_request_head(head)

    assert processor_s(read) < 1.0


def test_classes_without_an_end_are_refused_at_once() -> None:
    pattern = "[" * limits.TOKENIZER_REGEX_CHARS_MAX
    assert regex_fault(pattern) == "has an unterminated character class"
    assert processor_s(lambda: [regex_fault(pattern) for _ in range(20)]) < 1.0


async def test_a_recorded_announcement_uses_up_nothing_of_its_signers_rate() -> None:
    async with running(memory_parts(make_run(), requests_per_second=2.0), ANNA) as world:
        parcel = make_parcel(await world.lease(ANNA), ANNA)
        head = post("/v1/rollouts", len(parcel), await claim(world, ANNA, parcel))
        assert (await ask(world.url, head + parcel)).status == 200
        for _ in range(30):
            assert (await ask(world.url, head)).code == "replayed"
        await world.client(ANNA).heartbeat(HEARTBEAT)


async def test_the_leases_that_a_heartbeat_names_are_not_remembered() -> None:
    """Replies that most workers get are cached. One with 1,024 unknown leases takes 200 kB, and no other heartbeat gets it."""
    async with running(memory_parts(make_run())) as world:
        await world.join(ANNA)
        client = world.client(ANNA)
        tracemalloc.start()
        try:
            held = []
            for number in range(12):
                named = tuple(digest_of(f"{number} {place}".encode()) for place in range(1_024))
                reply = await client.heartbeat(HEARTBEAT.model_copy(update={"holding": named}))
                assert reply.cancelled == named
                del named, reply
                gc.collect()
                held.append(tracemalloc.get_traced_memory()[0])
        finally:
            tracemalloc.stop()
    assert held[-1] - held[1] < 2**20, held


async def test_an_answer_that_is_not_read_counts_only_its_first_piece_against_the_cap(tmp_path: Path) -> None:
    clock = VirtualClock()
    cap = DataCap(2**40, days=30, file=tmp_path / "cap", clock=clock)
    uplink = Uplink(clock=clock, cap=cap)
    give_back = await uplink.slot("anna", 64 * PACE_BYTES, is_member=True)
    give_back()
    assert cap.used_bytes == PACE_BYTES
