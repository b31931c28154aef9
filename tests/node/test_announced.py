"""A trainer remembers its announcements, so a restored coordinator cannot make it fork its own run."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.builder import provenance
from tests.node.batch_coordinator import BatchCoordinator, make_run
from tests.node.publisher_world import make, publish, weights

from prime_protocol.errors import LocalError


@pytest.fixture
def coordinator() -> BatchCoordinator:
    return BatchCoordinator(make_run(max_steps=20))


async def test_a_coordinator_that_lost_policies_is_not_followed_into_a_fork(
    coordinator: BatchCoordinator, tmp_path: Path
) -> None:
    await publish(coordinator, range(4), folder=tmp_path)
    older = coordinator.manifests[:2]
    newest = coordinator.manifests[-1]
    coordinator.manifests[:] = older
    with pytest.raises(LocalError, match="newest policy is 1, but this trainer has announced policy 3"):
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


async def test_a_trainer_killed_before_it_noted_its_last_policy_continues(
    coordinator: BatchCoordinator, tmp_path: Path
) -> None:
    await publish(coordinator, range(2), folder=tmp_path)
    before = (tmp_path / "announced.json").read_bytes()
    await publish(coordinator, range(2, 3), folder=tmp_path)
    (tmp_path / "announced.json").write_bytes(before)
    await publish(coordinator, range(3, 4), folder=tmp_path)
    assert len(coordinator.manifests) == 4


async def test_a_damaged_note_of_what_was_announced_is_named(coordinator: BatchCoordinator, tmp_path: Path) -> None:
    (tmp_path / "announced.json").write_bytes(b"{")
    with pytest.raises(LocalError, match=r"announced\.json is damaged"):
        await make(coordinator, folder=tmp_path).start()
