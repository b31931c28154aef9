"""The swarm over the peer network: the same answers as over HTTP, also for peers that HTTP does not reach."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.node.coordinator_world import ANNA, BEN, COORDINATOR, make_manifest, make_run

from prime_lab.memory_network import MemoryNetwork, MemorySwitch
from prime_node.adapters.system_clock import SystemClock
from prime_node.broadcast.swarm.have_set import HaveSet, HeldEncoding
from prime_node.broadcast.swarm.network_peer import NetworkPeer, serve_over
from prime_node.broadcast.swarm.part_store import PartStore
from prime_node.broadcast.swarm.piece_sets import span
from prime_node.broadcast.swarm.serving import PeerService
from prime_node.broadcast.swarm.uplink import Uplink
from prime_protocol.chunk_index import open_index
from prime_protocol.envelope import PayloadType, seal
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.peers import PeerRecord, PeerTicket, authorization
from prime_protocol.pieces import cut_pieces

RUN, CLOCK = make_run(), SystemClock()
SIGNED, BLOBS = make_manifest(RUN, None)
[ENCODING] = SIGNED.manifest.encodings


@contextlib.asynccontextmanager
async def linked(folder: Path, *, shows_ticket: bool = True) -> AsyncIterator[tuple[NetworkPeer, PeerService]]:
    """Give a peer BEN that is linked to ANNA, which serves policy 0."""
    switch = MemorySwitch()
    anna, ben = (MemoryNetwork(switch, key.key_id, run=RUN.digest) for key in (ANNA, BEN))
    parts, have_set = PartStore(folder, bytes_max=2**30), HaveSet()
    for entry, blob in zip(ENCODING.blobs, BLOBS, strict=True):
        parts.write(entry.digest, blob)
    service = PeerService(
        RUN,
        ANNA,
        have_set,
        parts,
        Uplink(clock=CLOCK),
        CLOCK,
        lambda version: SIGNED.envelope if version == 0 else None,
    )
    serve_over(anna, service)
    await anna.start()
    await ben.start()
    ticket = PeerTicket(run=RUN.digest, peer=BEN.key_id, expires_at_ms=CLOCK.now_ms() + 60_000)
    text = seal(ticket, PayloadType.PEER_TICKET, COORDINATOR).to_bytes().decode()
    shown = authorization(text, ANNA.key_id, RUN.digest, BEN, now_ms=CLOCK.now_ms()) if shows_ticket else None
    record = PeerRecord(peer=ANNA.key_id, addresses=anna.addresses() or ("/ip4/127.0.0.1/tcp/9",))
    link = NetworkPeer(ben, record, bounds=RUN.spec.limits, authorization=lambda: shown)
    await ben.connect(link.address)
    try:
        yield link, service
    finally:
        await anna.close()
        await ben.close()


async def test_a_policy_is_read_over_the_network_as_over_http(tmp_path: Path) -> None:
    async with linked(tmp_path) as (link, service):
        assert (await link.run_spec()).digest == RUN.digest
        assert await link.head() is None
        service.have_set.advance_head(0)
        head = await link.head()
        assert head is not None
        assert head.digest == SIGNED.digest
        assert (await link.manifest(0)).digest == SIGNED.digest
        for entry, blob in zip(ENCODING.blobs, BLOBS, strict=True):
            assert await link.blob(entry.digest, start=0, end=entry.size) == blob
            assert await link.blob(entry.digest, start=1, end=5) == blob[1:5]
            assert await link.blob(entry.digest) == blob
        assert service.uplink.served_bytes > 0


async def test_news_come_when_there_are_some(tmp_path: Path) -> None:
    pieces = cut_pieces(ENCODING, open_index(BLOBS[0], ENCODING, SIGNED.manifest.tensors))
    async with linked(tmp_path) as (link, service):
        updates = link.updates()
        assert (await anext(updates)).pieces == {}
        service.have_set.add(HeldEncoding(ENCODING, pieces, span(0, len(pieces))))
        assert (await anext(updates)).pieces == {ENCODING.index.digest: ((0, len(pieces)),)}
        service.have_set.advance_head(0)
        assert (await anext(updates)).head == 0


class Hurried(SystemClock):
    """Clock that does not pause."""

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)


async def test_news_of_what_a_listener_has_wait_for_a_piece_that_he_lacks(tmp_path: Path) -> None:
    pieces = 2 * cut_pieces(ENCODING, open_index(BLOBS[0], ENCODING, SIGNED.manifest.tensors))
    name, last = ENCODING.index.digest, len(pieces) - 1
    async with linked(tmp_path) as (_, service):
        service.clock = Hurried()
        service.heard_of = lambda peer: {name: span(0, last)} if peer == BEN.key_id else {}
        cursor = service.have_set.updates(0).cursor
        for_ben, for_others = (asyncio.create_task(service.fresh(who, cursor, -1)) for who in (BEN.key_id, "others"))
        service.have_set.add(HeldEncoding(ENCODING, pieces, 1))
        assert (await for_others).pieces == {name: 1}
        assert not for_ben.done()
        service.have_set.came(name, last)
        assert (await for_ben).pieces == {name: 1 | 1 << last}


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("/v1/manifests/7", ErrorCode.NOT_FOUND),
        ("/v1/blobs/" + "0" * 64, ErrorCode.NOT_FOUND),
        ("/etc", ErrorCode.NOT_FOUND),
    ],
)
async def test_what_is_not_there_is_said_so(tmp_path: Path, path: str, code: ErrorCode) -> None:
    async with linked(tmp_path) as (link, _):
        with pytest.raises(RemoteError) as caught:
            await link.ask(path, 1_000)
        assert caught.value.code is code


async def test_strangers_hear_what_is_here_and_not_who_is_there(tmp_path: Path) -> None:
    async with linked(tmp_path, shows_ticket=False) as (link, service):
        service.have_set.advance_head(0)
        assert (await anext(link.updates())).head == 0
        with pytest.raises(RemoteError) as caught:
            await link.peers()
        assert caught.value.code is ErrorCode.BAD_SIGNATURE


async def test_strangers_who_listen_are_bounded_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prime_protocol.limits.PEER_STRANGERS_LISTENING_MAX", 1)
    async with linked(tmp_path, shows_ticket=False) as (link, service):
        first, second = link.updates(), link.updates()
        await anext(first)
        await anext(second)
        waiting = asyncio.ensure_future(anext(first))
        await asyncio.sleep(0)
        while not service.listeners:  # noqa: ASYNC110 - the request is on its way, without an event
            await asyncio.sleep(0)
        with pytest.raises(RemoteError) as caught:
            await anext(second)
        assert caught.value.code is ErrorCode.UNAVAILABLE
        service.have_set.advance_head(0)
        assert (await waiting).head == 0
        assert not service.listeners
