"""Memory of a serving peer: a little of each answer, however long the range and slow the reader."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from tests.node.coordinator_world import ANNA, BEN, CONFIG_JSON, COORDINATOR, ROOT, TRAINER, make_run
from tests.node.worker_world import next_ring

from prime_lab.memory_network import MemoryNetwork, MemorySwitch
from prime_node.adapters.system_clock import SystemClock
from prime_node.adapters.web.aiohttp_server import AiohttpServer
from prime_node.adapters.web.http_client import HttpClient
from prime_node.broadcast.swarm.have_set import HaveSet
from prime_node.broadcast.swarm.network_peer import NetworkPeer, serve_over
from prime_node.broadcast.swarm.part_store import PartStore
from prime_node.broadcast.swarm.serving import CHECKED_AGAIN_S, READ_BYTES_MAX, PeerService
from prime_node.broadcast.swarm.uplink import Uplink
from prime_node.ports.transport import Unreachable
from prime_node.ports.web import Request
from prime_protocol import limits
from prime_protocol.digest import digest_of
from prime_protocol.envelope import PayloadType, seal
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.peers import PeerRecord, PeerTicket, authorization

RUN, CLOCK = make_run(), SystemClock()


class SetClock(SystemClock):
    """Clock that shows the time that a test sets."""

    def __init__(self, time_ms: int) -> None:
        self.time_ms = time_ms

    def now_ms(self) -> int:
        return self.time_ms


BLOB = np.random.default_rng(1).bytes(3 * READ_BYTES_MAX + 5)
DIGEST = digest_of(BLOB)


@dataclass
class Serving:
    """One service, and its port."""

    service: PeerService
    parts: PartStore
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@pytest.fixture
async def serving(tmp_path: Path) -> AsyncIterator[Serving]:
    parts = PartStore(tmp_path / "parts", bytes_max=2**30)
    parts.write(DIGEST, BLOB)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / RUN.spec.model_files[0].name).write_bytes(CONFIG_JSON)
    service = PeerService(
        RUN, ANNA, HaveSet(), parts, Uplink(clock=CLOCK), CLOCK, lambda version: None, folder=tmp_path
    )
    server = AiohttpServer()
    port = await server.start(service.routes(), host="127.0.0.1", port=0)
    yield Serving(service, parts, port)
    await server.stop(grace_s=0.0)


def asked(**headers: str) -> Request:
    return Request(params={"digest": DIGEST}, body=b"", headers=headers, remote="127.0.0.1")


async def test_a_strangers_whole_range_is_read_as_it_is_sent(serving: Serving) -> None:
    (blob,) = [route.handler for route in serving.service.routes() if "blobs" in route.path]
    response = await blob(asked())
    assert not isinstance(response.body, bytes)
    sizes = [len(data) async for data in response.body]
    assert sizes == [READ_BYTES_MAX, READ_BYTES_MAX, READ_BYTES_MAX, 5]
    short = await blob(asked(range=f"bytes=1-{READ_BYTES_MAX}"))
    assert short.body == BLOB[1 : READ_BYTES_MAX + 1]


async def test_a_long_range_arrives_whole_and_gives_its_slot_back(serving: Serving) -> None:
    async with HttpClient(serving.url, run=RUN.digest, clock=CLOCK) as client:
        for start, end in ((0, None), (7, len(BLOB) - 3)):
            assert await client.blob(DIGEST, start=start, end=end) == BLOB[start:end]
        assert await client.blob(digest_of(CONFIG_JSON), start=2, end=9) == CONFIG_JSON[2:9]
    assert serving.service.uplink.choker.serving == 0
    assert serving.service.uplink.served_bytes == 2 * len(BLOB) - 10 + 7


async def test_an_amendment_that_trust_has_kept_is_served_and_no_other_file(serving: Serving, tmp_path: Path) -> None:
    kept = tmp_path / "trust" / "calibrations" / "0001.json"
    kept.parent.mkdir(parents=True)
    envelope = seal(b"{}", PayloadType.CALIBRATION, ANNA)
    kept.write_bytes(envelope.to_bytes())
    async with HttpClient(serving.url, run=RUN.digest, clock=CLOCK) as client:
        assert await client.calibration(1) == envelope
    (serve,) = [route.handler for route in serving.service.routes() if "calibrations" in route.path]
    for version in ("2", "0001.json", "../keys/0001", "1" * 9):
        with pytest.raises(RemoteError) as caught:
            await serve(Request(params={"version": version}, body=b"", headers={}, remote="127.0.0.1"))
        assert caught.value.code is ErrorCode.NOT_FOUND


async def test_bytes_in_memory_are_read_without_a_thread(serving: Serving) -> None:
    assert serving.parts.get_cached(DIGEST, 5, 500) in (BLOB[5:500], None)  # None: not reported here
    assert serving.parts.get_cached(DIGEST, len(BLOB) - 5, len(BLOB) + 5) is None
    assert serving.parts.get_cached("0" * 64, 0, 5) is None


async def test_a_body_that_breaks_off_does_not_look_whole(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = serving.parts.get

    def get(digest: str, start: int, end: int) -> bytes | None:
        return honest(digest, start, end) if start < READ_BYTES_MAX else None

    for name in ("get", "get_cached"):
        monkeypatch.setattr(serving.parts, name, get)
    async with HttpClient(serving.url, run=RUN.digest, clock=CLOCK) as client:
        with pytest.raises(Unreachable):
            await client.blob(DIGEST)
    assert serving.service.uplink.choker.serving == 0


async def test_over_libp2p_an_answer_is_held_whole_and_so_bounded(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    switch = MemorySwitch()
    anna, ben = (MemoryNetwork(switch, key.key_id, run=RUN.digest) for key in (ANNA, BEN))
    serve_over(anna, serving.service)
    await anna.start()
    await ben.start()
    record = PeerRecord(peer=ANNA.key_id, addresses=anna.addresses())
    link = NetworkPeer(ben, record, bounds=RUN.spec.limits, authorization=lambda: None)
    assert await link.blob(DIGEST, start=1, end=len(BLOB)) == BLOB[1:]
    monkeypatch.setattr(limits, "PEER_RANGE_BYTES_MAX", 2 * READ_BYTES_MAX)
    with pytest.raises(RemoteError, match="peer_range_bytes_max"):
        await link.blob(DIGEST, start=1, end=len(BLOB))
    assert serving.service.uplink.choker.serving == 0
    await ben.close()
    await anna.close()


async def test_a_ticket_of_replaced_keys_no_longer_counts(tmp_path: Path) -> None:
    run = make_run()
    service = PeerService(
        run, ANNA, HaveSet(), PartStore(tmp_path, bytes_max=1), Uplink(clock=CLOCK), CLOCK, lambda version: None
    )
    ticket = PeerTicket(run=run.digest, peer=BEN.key_id, expires_at_ms=CLOCK.now_ms() + 60_000)
    text = seal(ticket, PayloadType.PEER_TICKET, COORDINATOR).to_bytes().decode()
    request = asked(authorization=authorization(text, ANNA.key_id, run.digest, BEN, now_ms=CLOCK.now_ms()))
    assert service.member(request) == BEN.key_id
    run.keys.add(next_ring(run.keys, ROOT, coordinator=(TRAINER,)))
    with pytest.raises(RemoteError):
        service.member(request)


async def test_an_authorization_ends_soon_after_its_ticket_has_expired(tmp_path: Path) -> None:
    clock = SetClock(1_800_000_000_000)
    service = PeerService(
        RUN, ANNA, HaveSet(), PartStore(tmp_path, bytes_max=1), Uplink(clock=CLOCK), clock, lambda version: None
    )
    ticket = PeerTicket(run=RUN.digest, peer=BEN.key_id, expires_at_ms=clock.time_ms + 10_000)
    text = seal(ticket, PayloadType.PEER_TICKET, COORDINATOR).to_bytes().decode()
    request = asked(authorization=authorization(text, ANNA.key_id, RUN.digest, BEN, now_ms=clock.time_ms))
    assert service.member(request) == BEN.key_id
    clock.time_ms += int(CHECKED_AGAIN_S * 1_000)
    with pytest.raises(RemoteError):
        service.member(request)
