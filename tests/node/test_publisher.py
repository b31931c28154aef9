"""The publisher: in order, behind the trainer, no further than it may, and never two weights under one version."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest
from tests.node.trainer_world import (
    STRANGER,
    TRAINER,
    BatchCoordinator,
    Fuse,
    JumpClock,
    KilledError,
    make_run,
    provenance,
)

from prime_node.broadcast.publisher import Published, Publisher
from prime_protocol.errors import ErrorCode, LocalError, PeerError
from prime_protocol.weights import Weights, WeightTensor, root_of

Told = list[Published]


def weights(version: int, *, other: bool = False) -> Weights:
    numbers = np.random.default_rng([version, other]).integers(0, 2**16, 600, dtype=np.uint16)
    return {"layer": WeightTensor("bf16", (20, 30), numbers)}


@pytest.fixture
def coordinator() -> BatchCoordinator:
    return BatchCoordinator(make_run(max_steps=20))


@pytest.fixture
async def publisher(coordinator: BatchCoordinator) -> AsyncIterator[Publisher]:
    made = make(coordinator)
    await made.start()
    yield made
    await made.close()


def make(coordinator: BatchCoordinator, *, pending_max: int = 2, told: Told | None = None) -> Publisher:
    on_published = (lambda published: None) if told is None else told.append
    return Publisher(
        coordinator, coordinator.run, TRAINER, clock=JumpClock(), pending_max=pending_max, on_published=on_published
    )


async def test_policies_are_published_in_order_as_one_chain(coordinator: BatchCoordinator) -> None:
    told: Told = []
    publisher = make(coordinator, told=told)
    await publisher.start()
    for version in range(5):
        await publisher.submit(version, weights(version), provenance(version))
    await publisher.flush()
    assert publisher.head == 4
    assert [published.policy_version for published in told] == list(range(5))
    assert coordinator.roots == [root_of(weights(version)) for version in range(5)]
    for version, signed in enumerate(coordinator.manifests):
        assert root_of(coordinator.decode(signed)) == root_of(weights(version))
        assert sorted(told[version].encodings.values()) == sorted(e.sent_bytes for e in signed.manifest.encodings)
    await publisher.close()


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
    forger = Publisher(coordinator, coordinator.run, STRANGER, clock=JumpClock(), pending_max=0)
    await forger.start()
    with pytest.raises(PeerError) as refused:
        await forger.submit(1, weights(1), provenance(1))
    assert refused.value.code is ErrorCode.BAD_SIGNATURE
    await forger.close()


async def test_closing_drops_what_is_pending(coordinator: BatchCoordinator, publisher: Publisher) -> None:
    coordinator.gate.clear()
    await publisher.submit(0, weights(0), provenance(0))
    await publisher.close()
    await publisher.close()
    assert coordinator.manifests == []
