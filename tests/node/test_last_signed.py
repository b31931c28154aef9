"""A trainer remembers what it signed last, so neither a kill nor a restored coordinator makes it fork its own run."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.builder import build_manifest, provenance
from tests.node.batch_coordinator import STRANGER, TRAINER, BatchCoordinator, Fuse, KilledError, make_run
from tests.node.publisher_world import make, publish, sparse, weights
from tests.time_world import VirtualClock

from prime_node.broadcast.publish.last_signed import LastSigned
from prime_node.broadcast.publish.publisher import Publisher
from prime_protocol.checkpoint import encode_checkpoint
from prime_protocol.envelope import Envelope
from prime_protocol.errors import ErrorCode, LocalError, RemoteError
from prime_protocol.manifest import sign_manifest
from prime_protocol.weights import root_of


class HeardCoordinator(BatchCoordinator):
    """A coordinator, and every manifest that was sent to it: what peers may have."""

    def __init__(self) -> None:
        super().__init__(make_run(max_steps=20))
        self.sent: list[Envelope] = []
        self.refuses: RemoteError | None = None

    async def publish(self, manifest: Envelope) -> None:
        self.sent.append(manifest)
        if self.refuses is not None:
            raise self.refuses
        await super().publish(manifest)


@pytest.fixture
def coordinator() -> HeardCoordinator:
    return HeardCoordinator()


async def killed_at_its_fourth_policy(coordinator: HeardCoordinator, folder: Path) -> Publisher:
    """Publish policies 0 to 2, kill the trainer before the coordinator takes policy 3, and return the next one, a day later."""
    await publish(coordinator, range(3), folder=folder)
    coordinator.fuse = Fuse("before publish")
    with pytest.raises(KilledError):
        await publish(coordinator, range(3, 4), folder=folder)
    coordinator.fuse = Fuse()
    assert [len(coordinator.manifests), len(coordinator.sent)] == [3, 4]
    clock = VirtualClock()
    clock.seconds += 86_400.0
    return Publisher(coordinator, coordinator.run, TRAINER, clock=clock, pending_max=2, folder=folder)


async def test_a_manifest_without_an_answer_is_sent_again_as_it_was_signed(
    coordinator: HeardCoordinator, tmp_path: Path
) -> None:
    again = await killed_at_its_fourth_policy(coordinator, tmp_path)
    await again.start()
    assert again.head == 3, "the checkpoint of that policy can be resumed from"
    for version in (2, 3, 4):
        await again.submit(version, sparse(version), provenance(version))
    await again.flush()
    await again.close()
    assert coordinator.manifests[3].digest == coordinator.sent[3].digest
    assert coordinator.roots == [root_of(sparse(version)) for version in range(5)]


async def test_a_manifest_whose_blobs_are_lost_is_sent_again_once_they_are_computed(
    coordinator: HeardCoordinator, tmp_path: Path
) -> None:
    again = await killed_at_its_fourth_policy(coordinator, tmp_path)
    coordinator.forgets = 1
    await again.start()
    assert again.head == 2
    await again.submit(3, sparse(3), provenance(3))
    await again.flush()
    await again.close()
    assert coordinator.manifests[3].digest == coordinator.sent[3].digest


async def with_a_delta_cut_off(coordinator: HeardCoordinator, folder: Path, fuse: Fuse) -> Publisher:
    """Kill a trainer that publishes policy 3 as a delta; return the next one, which resumes at policy 3, without the base."""
    await publish(coordinator, range(len(coordinator.manifests), 3), folder=folder)
    first = make(coordinator, folder=folder)
    await first.start()
    await first.submit(2, sparse(2), provenance(2))
    await first.flush()
    coordinator.fuse = fuse
    await first.submit(3, sparse(3), provenance(3))
    with pytest.raises(KilledError):
        await first.flush()
    await first.close()
    coordinator.fuse = Fuse()
    again = make(coordinator, folder=folder)
    await again.start()
    await again.submit(3, sparse(3), provenance(3))
    return again


@pytest.mark.parametrize("blob", [1, 2])
async def test_a_kill_before_all_blobs_are_uploaded_leaves_no_manifest_that_nobody_can_complete(
    coordinator: HeardCoordinator, tmp_path: Path, blob: int
) -> None:
    again = await with_a_delta_cut_off(coordinator, tmp_path, Fuse("put_blob", blob))
    await again.flush()
    await again.close()
    assert [len(coordinator.manifests), len(coordinator.sent)] == [4, 4]


async def test_lost_bytes_of_a_manifest_signed_before_are_named(coordinator: HeardCoordinator, tmp_path: Path) -> None:
    await publish(coordinator, range(3), folder=tmp_path)
    there = set(coordinator.blobs)

    class Swept(Fuse):
        def passes(self, place: str) -> None:
            if place == "before publish":
                coordinator.blobs = {digest: blob for digest, blob in coordinator.blobs.items() if digest in there}
            super().passes(place)

    again = await with_a_delta_cut_off(coordinator, tmp_path, Swept("before publish"))
    with pytest.raises(LocalError, match=r"policy 3 was signed .* bytes of it are lost: .* delete signed\.json"):
        await again.flush()
    await again.close()


async def test_other_weights_than_those_signed_before_are_never_signed(
    coordinator: HeardCoordinator, tmp_path: Path
) -> None:
    again = await killed_at_its_fourth_policy(coordinator, tmp_path)
    coordinator.forgets = 1
    await again.start()
    await again.submit(3, weights(3), provenance(3))
    with pytest.raises(LocalError, match=f"policy 3 is published with state root {root_of(sparse(3))}"):
        await again.flush()
    await again.close()
    assert len({envelope.digest for envelope in coordinator.sent}) == 4


async def test_a_coordinator_that_refuses_the_manifest_stops_the_trainer(
    coordinator: HeardCoordinator, tmp_path: Path
) -> None:
    again = await killed_at_its_fourth_policy(coordinator, tmp_path)
    coordinator.refuses = RemoteError(ErrorCode.CHAIN_BROKEN, "it names another batch")
    with pytest.raises(LocalError, match=r"policy 3, which this trainer has signed .* is refused: .*another batch"):
        await again.start()


async def test_a_manifest_whose_key_was_replaced_is_void(coordinator: HeardCoordinator, tmp_path: Path) -> None:
    await publish(coordinator, range(3), folder=tmp_path)
    encoded = encode_checkpoint(sparse(3))
    manifest = build_manifest(coordinator.run, coordinator.manifests[-1], sparse(3), encoded)
    forged = sign_manifest(manifest, STRANGER)
    LastSigned(tmp_path).note(forged)
    await publish(coordinator, range(3, 4), folder=tmp_path)
    assert forged.digest not in {envelope.digest for envelope in coordinator.sent}
    assert len(coordinator.manifests) == 4


async def test_a_coordinator_that_lost_policies_is_not_followed_into_a_fork(
    coordinator: BatchCoordinator, tmp_path: Path
) -> None:
    await publish(coordinator, range(4), folder=tmp_path)
    older = coordinator.manifests[:2]
    newest = coordinator.manifests[-1]
    coordinator.manifests[:] = older
    with pytest.raises(LocalError, match="newest policy is 1, but this trainer has signed policy 3"):
        await make(coordinator, folder=tmp_path).start()
    assert coordinator.manifests == older
    coordinator.manifests[:] = []
    with pytest.raises(LocalError, match="would sign a second policy 0"):
        await make(coordinator, folder=tmp_path).start()
    coordinator.manifests[:] = [*older, newest]  # a newer copy was found
    await publish(coordinator, range(4, 5), folder=tmp_path)
    assert coordinator.manifests[-1].manifest.policy_version == 4


async def test_a_coordinator_with_another_history_is_not_followed(
    coordinator: BatchCoordinator, tmp_path: Path
) -> None:
    await publish(coordinator, range(2), folder=tmp_path)
    other = BatchCoordinator(coordinator.run)
    await publish(other, range(1))
    publisher = make(other)
    await publisher.start()
    await publisher.submit(1, weights(7), provenance(1))
    await publisher.flush()
    await publisher.close()
    with pytest.raises(LocalError, match="a fork"):
        await make(other, folder=tmp_path).start()


async def test_a_trainer_with_an_older_copy_of_its_folder_continues(
    coordinator: BatchCoordinator, tmp_path: Path
) -> None:
    await publish(coordinator, range(2), folder=tmp_path)
    before = (tmp_path / "signed.json").read_bytes()
    await publish(coordinator, range(2, 3), folder=tmp_path)
    (tmp_path / "signed.json").write_bytes(before)
    await publish(coordinator, range(3, 4), folder=tmp_path)
    assert len(coordinator.manifests) == 4


async def test_a_damaged_note_of_what_was_signed_is_named(coordinator: BatchCoordinator, tmp_path: Path) -> None:
    (tmp_path / "signed.json").write_bytes(b"{")
    with pytest.raises(LocalError, match=r"signed\.json is damaged"):
        await make(coordinator, folder=tmp_path).start()
