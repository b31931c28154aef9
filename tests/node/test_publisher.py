"""The publisher: in order, behind the trainer, no further than it may, and never two weights under one version."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from tests.builder import build_manifest, provenance
from tests.node.batch_coordinator import STRANGER, TRAINER, BatchCoordinator, Fuse, KilledError, make_run
from tests.node.publisher_world import UntrustedRow, make, new_folder, publish, sparse, weights
from tests.time_world import VirtualClock

from prime_node.broadcast.publish.encoder import SpanEncoder, WholeCopy
from prime_node.broadcast.publish.publisher import Publisher
from prime_node.broadcast.publish.spans import SpanRules
from prime_protocol.checkpoint import encode_checkpoint
from prime_protocol.errors import ErrorCode, LocalError, RemoteError
from prime_protocol.weights import root_of


@pytest.fixture
def coordinator() -> BatchCoordinator:
    return BatchCoordinator(make_run(max_steps=20))


@pytest.fixture
async def publisher(coordinator: BatchCoordinator) -> AsyncIterator[Publisher]:
    made = make(coordinator)
    await made.start()
    yield made
    await made.close()


async def test_policies_are_published_in_order_as_one_chain(coordinator: BatchCoordinator) -> None:
    rows: UntrustedRow = []
    publisher = make(coordinator, rows=rows)
    await publisher.start()
    for version in range(5):
        await publisher.submit(version, weights(version), provenance(version))
    await publisher.flush()
    assert publisher.head == 4
    assert [published.policy_version for published in rows] == list(range(5))
    assert coordinator.roots == [root_of(weights(version)) for version in range(5)]
    for version, signed in enumerate(coordinator.manifests):
        assert root_of(coordinator.decode(signed)) == root_of(weights(version))
        assert sorted(rows[version].encodings.values()) == sorted(e.sent_bytes for e in signed.manifest.encodings)
    await publisher.close()


async def test_dates_do_not_decrease_along_the_chain_when_the_clock_is_put_back(coordinator: BatchCoordinator) -> None:
    clock = VirtualClock()
    publisher = Publisher(coordinator, coordinator.run, TRAINER, clock=clock, pending_max=0, folder=new_folder())
    await publisher.start()
    for version in range(3):
        await publisher.submit(version, weights(version), provenance(version))
        await publisher.flush()
        clock.seconds += -100.0 if version == 0 else 300.0
    await publisher.close()
    first, second, third = (signed.manifest.created_at_ms for signed in coordinator.manifests)
    assert first == second < third


@pytest.mark.parametrize("pending_max", [0, 1, 2])
async def test_the_trainer_is_held_up_only_past_the_pending_limit(
    coordinator: BatchCoordinator, pending_max: int
) -> None:
    publisher = make(coordinator, pending_max=pending_max)
    await publisher.start()
    coordinator.gate.clear()
    for version in range(pending_max):
        await publisher.submit(version, weights(version), provenance(version))
    held = asyncio.create_task(publisher.submit(pending_max, weights(pending_max), provenance(pending_max)))
    flushing = asyncio.create_task(publisher.flush())
    await coordinator.until(lambda: bool(coordinator.blobs))
    assert not held.done()
    assert coordinator.manifests == []
    coordinator.gate.set()
    await held
    await flushing
    assert len(coordinator.manifests) == pending_max + 1
    await publisher.close()


async def test_an_absent_coordinator_is_waited_for(coordinator: BatchCoordinator, publisher: Publisher) -> None:
    coordinator.away = 20
    await publisher.submit(0, weights(0), provenance(0))
    await publisher.flush()
    assert coordinator.away == 0
    assert coordinator.roots == [root_of(weights(0))]


async def test_a_fault_surfaces_at_the_next_submit_at_flush_and_at_failed(
    coordinator: BatchCoordinator, publisher: Publisher
) -> None:
    coordinator.fuse = Fuse("put_blob")
    watching = asyncio.create_task(publisher.failed())
    await publisher.submit(0, weights(0), provenance(0))
    with pytest.raises(KilledError):
        await publisher.flush()
    with pytest.raises(KilledError):
        await publisher.submit(1, weights(1), provenance(1))
    with pytest.raises(KilledError):
        await watching
    assert coordinator.manifests == []


async def test_a_trainer_held_up_by_the_limit_is_woken_by_a_fault(coordinator: BatchCoordinator) -> None:
    publisher = make(coordinator, pending_max=0)
    await publisher.start()
    coordinator.fuse = Fuse("before publish")
    with pytest.raises(KilledError):
        await publisher.submit(0, weights(0), provenance(0))
    await publisher.close()


@pytest.mark.parametrize("place", ["put_blob", "before publish", "after publish"])
async def test_after_a_crash_it_continues_from_the_coordinators_head(coordinator: BatchCoordinator, place: str) -> None:
    first = make(coordinator)
    await first.start()
    await first.submit(0, weights(0), provenance(0))
    await first.flush()
    coordinator.fuse = Fuse(place)
    await first.submit(1, weights(1), provenance(1))
    with pytest.raises(KilledError):
        await first.flush()
    await first.close()
    coordinator.fuse = Fuse()

    again = make(coordinator)
    await again.start()
    for version in (0, 1, 2):
        await again.submit(version, weights(version), provenance(version))
    await again.flush()
    assert coordinator.roots == [root_of(weights(version)) for version in (0, 1, 2)]
    await again.close()


async def test_other_weights_under_a_published_version_are_an_error_that_names_both(
    coordinator: BatchCoordinator, publisher: Publisher
) -> None:
    for version in range(3):
        await publisher.submit(version, weights(version), provenance(version))
    await publisher.flush()
    again = make(coordinator)
    await again.start()
    await again.submit(1, weights(1, other=True), provenance(1))
    with pytest.raises(LocalError) as raised:
        await again.flush()
    assert root_of(weights(1)) in str(raised.value)
    assert root_of(weights(1, other=True)) in str(raised.value)
    assert coordinator.roots == [root_of(weights(version)) for version in range(3)]
    await again.close()


async def test_a_gap_is_an_error(coordinator: BatchCoordinator, publisher: Publisher) -> None:
    await publisher.submit(1, weights(1), provenance(1))
    with pytest.raises(LocalError, match="policy 1 cannot follow policy -1"):
        await publisher.flush()
    assert coordinator.blobs == {}


async def test_a_head_that_the_trainer_did_not_sign_is_refused(coordinator: BatchCoordinator) -> None:
    honest = make(coordinator)
    await honest.start()
    await honest.submit(0, weights(0), provenance(0))
    await honest.flush()
    await honest.close()
    forger = Publisher(coordinator, coordinator.run, STRANGER, clock=VirtualClock(), pending_max=0, folder=new_folder())
    await forger.start()
    with pytest.raises(RemoteError) as refused:
        await forger.submit(1, weights(1), provenance(1))
    assert refused.value.code is ErrorCode.WRONG_ROLE
    await forger.close()


async def test_every_key_that_it_is_given_signs(coordinator: BatchCoordinator) -> None:
    publisher = Publisher(
        coordinator,
        coordinator.run,
        TRAINER,
        cosigners=[STRANGER],
        clock=VirtualClock(),
        pending_max=0,
        folder=new_folder(),
    )
    await publisher.start()
    await publisher.submit(0, weights(0), provenance(0))
    await publisher.flush()
    await publisher.close()
    signers = [signature.key_id for signature in coordinator.manifests[0].envelope.signatures]
    assert signers == [TRAINER.key_id, STRANGER.key_id]


async def test_closing_drops_what_is_pending(coordinator: BatchCoordinator, publisher: Publisher) -> None:
    coordinator.gate.clear()
    await publisher.submit(0, weights(0), provenance(0))
    await publisher.close()
    await publisher.close()
    assert coordinator.manifests == []


# Encodings


def bases_of(coordinator: BatchCoordinator, version: int) -> set[int | None]:
    return {encoding.base_version for encoding in coordinator.manifests[version].manifest.encodings}


async def test_policies_are_sent_as_deltas_over_one_four_and_sixteen_steps(coordinator: BatchCoordinator) -> None:
    rows: UntrustedRow = []
    await publish(coordinator, range(18), rows=rows)
    assert [bases_of(coordinator, version) for version in (0, 1, 4, 5, 16)] == [{None}, {0}, {3, 0}, {4}, {15, 12, 0}]
    assert set(rows[16].encodings) == {"delta_1", "delta_4", "delta_16"}
    assert rows[16].sent_bytes == rows[16].encodings["delta_1"]
    assert rows[16].raw_bytes == 1_200
    assert rows[16].ratio > 5
    for version in range(18):
        assert root_of(coordinator.decode(coordinator.manifests[version])) == root_of(sparse(version))


async def test_what_changes_everything_is_sent_as_anchors(coordinator: BatchCoordinator) -> None:
    publisher = make(coordinator)
    await publisher.start()
    for version in range(6):
        await publisher.submit(version, weights(version), provenance(version))
    await publisher.flush()
    await publisher.close()
    assert all(bases_of(coordinator, version) == {None} for version in range(6))


async def test_after_a_restart_policy_0_is_taken_up_and_other_lost_bases_are_left_out(
    coordinator: BatchCoordinator,
) -> None:
    await publish(coordinator, range(15))
    await publish(coordinator, range(14, 18))
    assert bases_of(coordinator, 15) - {None} == {14}
    assert bases_of(coordinator, 16) - {None} == {15, 0}
    assert root_of(coordinator.decode(coordinator.manifests[17])) == root_of(sparse(17))


async def test_without_policy_0_there_are_no_root_deltas(coordinator: BatchCoordinator) -> None:
    await publish(coordinator, range(15))
    anchor = coordinator.manifests[0].manifest.encodings[0]
    kept = coordinator.blobs.pop(anchor.parts[0].digest)
    publisher = make(coordinator)
    await publisher.start()
    coordinator.blobs[anchor.parts[0].digest] = kept
    for version in range(14, 17):
        await publisher.submit(version, sparse(version), provenance(version))
    await publisher.flush()
    await publisher.close()
    assert 0 not in bases_of(coordinator, 16)


async def test_blobs_that_the_coordinator_lost_meanwhile_are_uploaded_again(coordinator: BatchCoordinator) -> None:
    await publish(coordinator, range(2))
    publisher = make(coordinator)
    await publisher.start()
    coordinator.forgets = 1
    for version in (1, 2):
        await publisher.submit(version, sparse(version), provenance(version))
    await publisher.flush()
    await publisher.close()
    assert coordinator.roots[2] == root_of(sparse(2))


async def test_a_coordinator_that_loses_every_blob_is_an_error(coordinator: BatchCoordinator) -> None:
    publisher = make(coordinator)
    await publisher.start()
    coordinator.forgets = 99
    await publisher.submit(0, sparse(0), provenance(0))
    with pytest.raises(RemoteError, match="not here"):
        await publisher.flush()
    await publisher.close()


async def test_the_trainer_holds_one_policy_for_each_span_and_policy_0() -> None:
    encoder = SpanEncoder(SpanRules())
    coordinator = BatchCoordinator(make_run(max_steps=40))
    for version in range(40):
        encoder.encode(version, WholeCopy(sparse(version)), lambda entry, data: None)
        way = encode_checkpoint(sparse(version))
        made = {"policy_version": version, "produced_by": provenance(version)}
        manifest = build_manifest(coordinator.run, None, sparse(version), way, **made)
        encoder.published(manifest, WholeCopy(sparse(version)), head=version)
        assert set(encoder.held) == {0, version, version - version % 4, version - version % 16}
