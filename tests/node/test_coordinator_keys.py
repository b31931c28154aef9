"""The coordinator serves and obeys key rings and timestamps: over HTTP, and after a restart."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.node.coordinator_world import (
    ANNA,
    COORDINATOR,
    ROOT,
    TRAINER,
    VALIDATOR,
    World,
    folder_parts,
    make_manifest,
    make_parcel,
    make_run,
    memory_parts,
    refused,
    running,
)
from tests.node.ledger_world import StoppedClock
from tests.node.worker_world import next_ring

from prime_node.adapters.storage.folder_source import FolderSource
from prime_node.broadcast.audit.audit import audit
from prime_node.cli.key_request import known_of
from prime_node.coordinator.api.requests import Caller, require_role
from prime_node.coordinator.assembly import Parts
from prime_node.coordinator.daemon import serve_coordinator
from prime_node.coordinator.state.records import State
from prime_node.coordinator.state.rules import rules_of
from prime_protocol.assignment import Lease
from prime_protocol.envelope import Envelope, PayloadType, open_envelope
from prime_protocol.errors import ErrorCode, LocalError, RemoteError
from prime_protocol.identity import SigningKey
from prime_protocol.key_ring import ChainPoint, KeyChain, Role
from prime_protocol.manifest import sign_manifest
from prime_protocol.requests import ReceiptsRequest
from prime_protocol.run_spec import PinnedRun, open_run_spec
from prime_protocol.timestamp import Timestamp, check_follows, check_fresh, open_timestamp

NEW = SigningKey(b"\x50" * 32)


def clients_run(run: PinnedRun) -> PinnedRun:
    """Open the same join link as another machine does."""
    return open_run_spec(run.envelope, pinned=run.digest)


def ring(world: World, *signers: SigningKey, **keys: Any) -> Envelope:
    """Return the next ring at the world's head."""
    point = None if world.head is None else world.head.point
    return next_ring(world.run.keys, *(signers or (ROOT,)), published=point, **keys)


async def stamp_of(world: World) -> Timestamp:
    run = clients_run(world.run)
    for _, envelope in world.run.keys.rings:
        run.keys.add(envelope)
    return open_timestamp(await world.client(ANNA).timestamp(), run)


async def test_the_timestamp_names_the_head_and_the_ring_and_is_renewed(tmp_path: Path) -> None:
    async with running(memory_parts(make_run(), timestamp_seconds=0.01)) as world:
        first = await stamp_of(world)
        assert (first.head, first.key_ring) == (None, 0)
        check_fresh(first, world.parts.clock.now_ms())
        head = await world.publish()
        second = await stamp_of(world)
        assert second.head == head.point
        await world.client(ANNA).add_key_ring(ring(world))
        assert (await stamp_of(world)).key_ring == 1

        async def renewed() -> bool:
            return (await stamp_of(world)).issued_at_ms > second.issued_at_ms

        await world.until(renewed)


async def test_timestamps_after_a_clock_was_set_back_contradict_none_before(tmp_path: Path) -> None:
    run, clock = make_run(), StoppedClock()
    stamps: list[Timestamp] = []
    async with running(replace(await folder_parts(run, tmp_path), clock=clock)) as world:
        stamps.append(await stamp_of(world))
        clock.ms -= 60_000
        head = await world.publish()
        stamps.append(await stamp_of(world))
        assert await stamp_of(world) == stamps[-1], "its time does not run ahead with each request"
    clock.ms -= 30_000
    async with running(replace(await folder_parts(run, tmp_path), clock=clock)) as world:
        world.head = head
        await world.client(ANNA).add_key_ring(ring(world))
        stamps.append(await stamp_of(world))
    assert [(one.policy_version, one.key_ring) for one in stamps] == [(-1, 0), (0, 0), (0, 1)]
    for earlier, later in pairwise(stamps):
        assert check_follows(later, earlier, clock.ms)
        check_fresh(later, clock.ms)


async def test_a_ring_is_served_to_everyone_and_a_number_beyond_is_not_found(tmp_path: Path) -> None:
    async with running(memory_parts(make_run())) as world:
        good = ring(world)
        for _ in range(2):
            assert (await world.post("/v1/keys", good.to_bytes()))[0] == 204
        assert (await world.client(ANNA).key_ring(1)).payload == good.payload
        for beyond in ("0", "2", "x", "9" * 20):
            status, body, _ = await world.get(f"/v1/keys/{beyond}")
            assert (status, json.loads(body)["code"]) == (404, "not_found")


async def test_what_is_no_ring_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    async with running(memory_parts(make_run())) as world:
        await world.publish()
        await refused(world, ErrorCode.BAD_SIGNATURE, "/v1/keys", ring(world, TRAINER, COORDINATOR).to_bytes())
        await refused(world, ErrorCode.MALFORMED, "/v1/keys", b"{")
        await refused(world, ErrorCode.TOO_LARGE, "/v1/keys", b" " * 10**6)
        other = next_ring(KeyChain("00" * 32, world.run.spec.keys), ROOT)
        await refused(world, ErrorCode.WRONG_RUN, "/v1/keys", other.to_bytes())
        lied = next_ring(world.run.keys, ROOT, published=ChainPoint(policy_version=0, manifest="00" * 32))
        await refused(world, ErrorCode.FORK, "/v1/keys", lied.to_bytes())
        early = next_ring(world.run.keys, ROOT, published=ChainPoint(policy_version=9, manifest="00" * 32))
        await refused(world, ErrorCode.NOT_FOUND, "/v1/keys", early.to_bytes())
        assert world.run.keys.version == 0


async def test_rubbish_in_place_of_rings_shuts_out_strangers_and_not_the_root(tmp_path: Path) -> None:
    async with running(memory_parts(make_run(), faults_per_second=0.1)) as world:
        rubbish = ring(world, ANNA).to_bytes()
        answers = [(await world.post("/v1/keys", rubbish))[0] for _ in range(8)]
        assert answers[0] == 401
        assert answers[-1] == 429
        assert (await world.post("/v1/keys", ring(world).to_bytes()))[0] == 204


async def test_a_ring_cannot_unmake_what_is_published_meanwhile(tmp_path: Path) -> None:
    async with running(memory_parts(make_run())) as world:
        await world.publish()
        planned = ring(world, trainer=(NEW,))
        overlapping = ring(world, trainer=(TRAINER, NEW))
        await world.join(ANNA)
        await world.fill(0)
        await world.publish()
        detail = await refused(world, ErrorCode.CHAIN_BROKEN, "/v1/keys", planned.to_bytes())
        assert "make the key ring again at the head" in detail
        assert (await world.post("/v1/keys", overlapping.to_bytes()))[0] == 204


async def test_a_revoked_trainer_publishes_nothing_and_the_new_one_continues_a_chain_that_verifies(
    tmp_path: Path,
) -> None:
    run = make_run()
    async with running(await folder_parts(run, tmp_path)) as world:
        await world.parts.public.put(b'{"model_type": "test"}')
        first = await world.publish()
        await world.join(ANNA)
        await world.fill(0)
        assert (await world.post("/v1/keys", ring(world, trainer=(NEW,)).to_bytes()))[0] == 204
        after, blobs = make_manifest(run, first, batch=world.batch)
        with pytest.raises(RemoteError) as refusal:
            await world.client(TRAINER).put_blob(blobs[0])
        assert refusal.value.code is ErrorCode.REVOKED
        await refused(world, ErrorCode.REVOKED, "/v1/manifests", after.envelope.to_bytes())
        for blob in blobs:
            await world.client(NEW).put_blob(blob)
        await world.client(NEW).publish(sign_manifest(after.manifest, NEW).envelope)
        assert (await stamp_of(world)).policy_version == 1
    report = await audit(FolderSource(tmp_path / "public"), run.digest, chain=True)
    assert [check.number for check in report.checks if check.passed][:7] == [1, 2, 3, 4, 5, 6, 7]
    assert report.key_ring == 1
    (tmp_path / "public" / "keys" / "0001.json").unlink()
    hidden = await audit(FolderSource(tmp_path / "public"), run.digest, chain=True)
    assert hidden.failure is not None


async def test_where_two_trainers_must_sign_one_alone_publishes_nothing(tmp_path: Path) -> None:
    async with running(memory_parts(make_run())) as world:
        both = next_ring(world.run.keys, ROOT, trainer=(TRAINER, NEW), trainer_threshold=2)
        assert (await world.post("/v1/keys", both.to_bytes()))[0] == 204
        alone, blobs = make_manifest(world.run, None)
        for blob in blobs:
            await world.client(TRAINER).put_blob(blob)
        await refused(world, ErrorCode.BAD_SIGNATURE, "/v1/manifests", alone.envelope.to_bytes())
        with_a_stranger = sign_manifest(alone.manifest, ANNA, TRAINER)
        await refused(world, ErrorCode.BAD_SIGNATURE, "/v1/manifests", with_a_stranger.envelope.to_bytes())
        await refused(
            world, ErrorCode.WRONG_ROLE, "/v1/manifests", sign_manifest(alone.manifest, ANNA).envelope.to_bytes()
        )
        together = sign_manifest(alone.manifest, ANNA, TRAINER, NEW)
        assert (await world.post("/v1/manifests", together.envelope.to_bytes()))[0] == 204


@pytest.mark.parametrize(
    ("caller", "key", "role"),
    [
        (Caller.VALIDATOR, VALIDATOR, "validator"),
        (Caller.READERS, VALIDATOR, "validator"),
        (Caller.TRAINER, TRAINER, "trainer"),
        (Caller.OPERATOR, COORDINATOR, "coordinator"),
    ],
)
def test_a_revoked_key_has_its_role_no_longer(caller: Caller, key: SigningKey, role: str) -> None:
    run = make_run()
    state = State(rules_of(run))
    require_role(key.key_id, caller, run=run, state=state)
    changed: dict[str, Any] = {role: (NEW,)}
    run.keys.add(next_ring(run.keys, ROOT, **changed))
    require_role(NEW.key_id, caller, run=run, state=state)
    with pytest.raises(RemoteError) as refusal:
        require_role(key.key_id, caller, run=run, state=state)
    assert refusal.value.code is ErrorCode.REVOKED
    with pytest.raises(RemoteError) as refusal:
        require_role(ANNA.key_id, caller, run=run, state=state)
    assert refusal.value.code is ErrorCode.WRONG_ROLE


async def test_rings_are_in_force_after_a_restart(tmp_path: Path) -> None:
    run = make_run()
    async with running(await folder_parts(run, tmp_path)) as world:
        await world.publish()
        await world.post("/v1/keys", ring(world, validator=(NEW,)).to_bytes())
    again = clients_run(run)
    async with running(await folder_parts(again, tmp_path)) as world:
        assert (again.keys.version, again.keys.current.validator) == (1, (NEW.key_id,))
        assert (await stamp_of(world)).key_ring == 1


async def test_a_lost_ring_does_not_put_former_keys_back_in_force(tmp_path: Path) -> None:
    """The coordinator started with the revoked keys, and signed timestamps that took its own earlier ones back."""
    run = make_run()
    async with running(await folder_parts(run, tmp_path)) as world:
        await world.publish()
        await world.post("/v1/keys", ring(world, validator=(NEW,)).to_bytes())
    file = tmp_path / "public" / "keys" / "0001.json"
    kept = file.read_bytes()
    file.unlink()
    with pytest.raises(LocalError, match=r"timestamp\.json names key ring 1, but keys/0001\.json is missing"):
        async with running(await folder_parts(clients_run(run), tmp_path)):
            pass
    with pytest.raises(LocalError, match="key ring 1 was in force, and its file is missing"):
        await known_of(str(tmp_path / "public"))  # the root would sign another ring 1
    file.write_bytes(kept)
    assert (await known_of(str(tmp_path / "public"))).run.keys.version == 1
    async with running(await folder_parts(clients_run(run), tmp_path)) as world:
        assert world.run.keys.current.validator == (NEW.key_id,)


async def test_a_coordinator_whose_key_is_revoked_ends_and_its_successor_continues(tmp_path: Path) -> None:
    run = make_run()
    leases: list[Lease] = []
    with pytest.raises(ExceptionGroup) as ended:
        await _serve_until_revoked(await folder_parts(run, tmp_path), leases)
    assert ended.group_contains(LocalError, match="start with the current key")
    with pytest.raises(LocalError, match="start with the current key"):
        await serve_coordinator(await folder_parts(clients_run(run), tmp_path), asyncio.Event())
    successor = clients_run(run)
    async with running(replace(await folder_parts(successor, tmp_path), key=NEW)) as world:
        await world.client(ANNA).upload(make_parcel(leases[1], ANNA))
        assert (await world.judge()).lease == leases[1], "the problems and seeds of an open lease stay what they were"
        receipts = (await world.client(ANNA).receipts(ReceiptsRequest())).receipts
        assert len(receipts) == 2
        for text in receipts:
            successor.keys.verify(open_envelope(text.encode()), PayloadType.RECEIPT, Role.COORDINATOR)


async def _serve_until_revoked(parts: Parts, leases: list[Lease]) -> None:
    """After one upload and one more lease, a ring removes the coordinator's key."""
    async with running(parts, ANNA) as world:
        leases += [await world.lease(ANNA, rollouts_max=2), await world.lease(ANNA, rollouts_max=2)]
        await world.client(ANNA).upload(make_parcel(leases[0], ANNA))
        await world.judge()
        assert (await world.post("/v1/keys", ring(world, coordinator=(NEW,)).to_bytes()))[0] == 204

        async def gone() -> bool:
            try:
                await world.get("/healthz")
            except OSError:
                return True
            return False

        await world.until(gone)
