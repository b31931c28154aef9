"""An accepted bundle whose bytes the coordinator's disk changed or lost: its groups are leased again and the run continues."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.node.coordinator_world import ANNA, TRAINER, World, folder_parts, make_parcel, make_run, running
from tests.node.rotten_world import be_bad_sector

from prime_node.adapters.system_clock import SystemClock
from prime_node.training_data.feed import Feed
from prime_protocol.envelope import Envelope
from prime_protocol.replies import NotYet
from prime_protocol.requests import BatchRequest
from prime_protocol.run_spec import PinnedRun


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a flipped bit": flip,
    "a cut": cut,
    "a deletion": Path.unlink,
    "an emptied file": lambda path: path.write_bytes(b""),
}


async def accept_all(world: World) -> list[str]:
    """Fill the open slots of one step. Return the bundles."""
    bundles = []
    for _ in range(world.run.spec.groups_per_step):
        lease = await world.lease(ANNA, rollouts_max=world.run.spec.rollouts_per_group)
        await world.client(ANNA).upload(make_parcel(lease, ANNA))
        bundles.append((await world.judge()).bundle)
    return bundles


def one_step() -> PinnedRun:
    return make_run(async_level=0)


@pytest.mark.parametrize("damage", DAMAGES)
async def test_a_damaged_bundle_is_noticed_before_a_batch_takes_it_and_its_groups_are_leased_again(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(await folder_parts(one_step(), tmp_path), ANNA) as world:
        bundles = await accept_all(world)
        DAMAGES[damage](tmp_path / "bundles" / bundles[1][:2] / bundles[1])
        answer = await world.client(TRAINER).batch(BatchRequest(step=0, durable_step=0))
        assert isinstance(answer, NotYet)
        assert f"bundle {bundles[1]} is damaged" in caplog.text
        batch = await world.fill(0)
        assert len(batch.groups) == world.run.spec.groups_per_step
        assert bundles[1] not in {group.bundle for group in batch.groups}
        assert {bundles[0], *bundles[2:]} < {group.bundle for group in batch.groups}


async def test_a_bundle_on_a_bad_sector_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(await folder_parts(one_step(), tmp_path), ANNA) as world:
        bundles = await accept_all(world)
        bad = tmp_path / "bundles" / bundles[1][:2] / bundles[1]
        be_bad_sector(monkeypatch, bad)
        assert isinstance(await world.client(TRAINER).batch(BatchRequest(step=0, durable_step=0)), NotYet)
        batch = await world.fill(0)
        assert bundles[1] not in {group.bundle for group in batch.groups}


async def test_what_was_dropped_stays_dropped_over_a_restart(tmp_path: Path) -> None:
    async with running(await folder_parts(one_step(), tmp_path), ANNA) as world:
        bundles = await accept_all(world)
        flip(tmp_path / "bundles" / bundles[0][:2] / bundles[0])
        assert isinstance(await world.client(TRAINER).batch(BatchRequest(step=0, durable_step=0)), NotYet)
        head = world.head
    async with running(await folder_parts(one_step(), tmp_path)) as world:
        world.head = head
        assert isinstance(await world.client(TRAINER).batch(BatchRequest(step=0, durable_step=0)), NotYet)
        assert bundles[0] not in {group.bundle for group in (await world.fill(0)).groups}


async def test_an_undamaged_batch_is_given_at_the_first_request(tmp_path: Path) -> None:
    async with running(await folder_parts(one_step(), tmp_path), ANNA) as world:
        await accept_all(world)
        assert isinstance(await world.client(TRAINER).batch(BatchRequest(step=0, durable_step=0)), Envelope)


async def bundle_of_each_slot(world: World) -> dict[int, str]:
    """Have the batch of step 0 chosen, of a bundle for each group."""
    await world.join(ANNA)
    await world.publish()
    await accept_all(world)
    batch = await world.fill(0)
    return {group.slot: group.bundle for group in batch.groups}


async def slots_trained(world: World) -> set[int]:
    """Return the slots of step 0 that a trainer gets over HTTP."""
    feed = Feed(world.client(TRAINER), world.run, clock=SystemClock())
    try:
        return {group.slot for group in (await feed.take(0, durable_step=0)).groups}
    finally:
        await feed.close()


@pytest.mark.parametrize("damage", DAMAGES)
async def test_a_bundle_that_is_damaged_after_a_batch_took_it_costs_its_groups_and_not_the_run(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The client refused the bytes of a flipped bit, so that the trainer ended at each start."""
    async with running(await folder_parts(one_step(), tmp_path)) as world:
        bundles = await bundle_of_each_slot(world)
        DAMAGES[damage](tmp_path / "bundles" / bundles[1][:2] / bundles[1])
        assert await slots_trained(world) == bundles.keys() - {1}
    assert "step 0 trains without slot 1" in caplog.text


async def test_a_bundle_of_a_batch_on_a_bad_sector_costs_its_groups_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(await folder_parts(one_step(), tmp_path)) as world:
        bundles = await bundle_of_each_slot(world)
        be_bad_sector(monkeypatch, tmp_path / "bundles" / bundles[1][:2] / bundles[1])
        assert await slots_trained(world) == bundles.keys() - {1}
