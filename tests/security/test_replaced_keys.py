"""A replaced key has no role any more: not at a seeder that has run for long, nor for an audit that learns of its ring late."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.node.coordinator_world import ROOT, TRAINER
from tests.node.swarm_world import CORA, LOCAL, ended, swarm
from tests.node.table_engine import table_weights
from tests.node.trust_world import make_source, make_trust, rotate
from tests.node.worker_world import COORDINATOR, MemorySource, next_ring
from tests.node.worker_world import ROOT as OTHER_ROOT
from tests.node.worker_world import make_run as make_other_run
from tests.time_world import VirtualClock, until

from prime_node.adapters.system_clock import SystemClock
from prime_node.adapters.web.http_client import HttpClient
from prime_node.broadcast.audit.audit import audit
from prime_node.broadcast.follow import trust
from prime_node.cli import wire, wire_swarm
from prime_node.worker.config import WorkerConfig
from prime_protocol.envelope import Envelope, PayloadType, open_envelope, seal
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.identity import SigningKey
from prime_protocol.key_ring import Role
from prime_protocol.timestamp import Timestamp

NEW = SigningKey(b"\x52" * 32)


async def test_a_seeder_learns_of_key_rings_while_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, it read them at its start alone: it followed a thief's policies, and refused those of the new key."""
    monkeypatch.setattr(trust, "POLL_S_MAX", 0.1)
    monkeypatch.setattr(trust, "POLL_S_MIN", 0.1)
    async with swarm(tmp_path) as made:
        digest, folder = made.world.run.digest, tmp_path / "seed"
        client = await made.stack.enter_async_context(
            HttpClient(made.world.url, run=digest, clock=SystemClock(), key=CORA, bounds=made.world.run.spec.limits)
        )
        run = await wire.pinned_run(client, digest, folder)
        settings = WorkerConfig(swarm=LOCAL, poll_seconds=0.05)
        mirror, _ = await made.stack.enter_async_context(wire_swarm.seeder(run, CORA, client, folder, settings))
        made.stack.push_async_callback(ended, asyncio.create_task(mirror.follow()))
        await made.publish()
        await until(lambda: mirror.seed_store.newest == 0)
        assert made.head is not None
        ring = next_ring(run.keys, ROOT, published=made.head.point, trainer=(NEW,))
        await client.add_key_ring(ring)
        await until(lambda: run.keys.version == 1)
        assert run.keys.is_revoked(TRAINER.key_id, Role.TRAINER)
        assert (folder / "trust" / "keys" / "0001.json").exists()


class LateRings(MemorySource):
    """Source that shows a key ring only after its timestamp."""

    has_stamped = False

    async def timestamp(self) -> Envelope:
        self.has_stamped = True
        return await super().timestamp()

    async def key_ring(self, version: int) -> Envelope:
        if not self.has_stamped:
            raise RemoteError(ErrorCode.NOT_FOUND, "no such key ring")
        return await super().key_ring(version)


async def test_an_audit_takes_no_timestamp_of_a_key_that_a_later_ring_replaced() -> None:
    """Before, a thief of the former key could date a frozen copy as new, under the number of the newest ring."""
    source = LateRings(make_other_run())
    source.publish(table_weights(0))
    ring = next_ring(source.run.keys, OTHER_ROOT, published=source.signed(0).point, coordinator=(NEW,))
    source.key_rings.append(ring)
    now_ms = source.now_ms()
    stamp = Timestamp(
        run=source.run.digest,
        head=source.signed(0).point,
        key_ring=1,
        issued_at_ms=now_ms,
        expires_at_ms=now_ms + 60_000,
    )
    source.shown_timestamp = seal(stamp, PayloadType.TIMESTAMP, COORDINATOR)
    report = await audit(source, source.run.digest, now_ms=now_ms)
    assert report.failure is not None
    assert (report.failure.number, "key ring 1" in report.failure.detail) == (9, True)
    source.shown_timestamp = seal(stamp, PayloadType.TIMESTAMP, NEW)
    assert (await audit(source, source.run.digest, now_ms=now_ms)).passed


async def test_two_key_rings_of_one_version_are_kept_as_evidence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Before, the second one was never looked at: a thief of a former root could split a run without a trace."""
    clock = VirtualClock()
    one, other = make_source(clock), make_source(clock)
    first, second = rotate(one, coordinator=(NEW,)), rotate(other, trainer=(NEW,))
    one.shown_timestamp = one.timestamp_of(one.shown_head, key=NEW)
    follower = make_trust(tmp_path, clock, one, other)
    (tmp_path / "evidence").mkdir()
    for number in range(20):  # a thief of a coordinator's key has filled the room for timestamps
        (tmp_path / "evidence" / f"timestamp-{number}.json").touch()
    await follower.refresh()
    kept = {open_envelope(path.read_bytes()).payload for path in (tmp_path / "evidence").glob("key-ring-*.json")}
    assert kept == {first.payload, second.payload}
    assert "the root contradicts itself (the run's root has signed two key rings 1" in caplog.text
    await follower.refresh()
    assert len(list((tmp_path / "evidence").iterdir())) == 22


async def test_a_key_ring_that_the_root_has_not_signed_is_no_evidence(tmp_path: Path) -> None:
    clock = VirtualClock()
    one, other = make_source(clock), make_source(clock)
    rotate(one, trainer=(NEW,))
    other.key_rings.append(next_ring(other.run.keys, NEW, published=other.signed(0).point, root=(NEW,)))
    follower = make_trust(tmp_path, clock, one, other)
    await follower.refresh()
    assert not (tmp_path / "evidence").exists()
    assert follower.fault() == ""
