"""Receipts of pending bundles: made when their worker asks, once, and in its list like all others."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest
from tests.node.coordinator_world import (
    ANNA,
    COORDINATOR,
    VALIDATOR,
    World,
    folder_parts,
    make_parcel,
    make_run,
    memory_parts,
    running,
)
from tests.node.held_store_world import HeldStore

from prime_node.adapters.system_clock import SystemClock
from prime_node.coordinator.api.receipts import receipt_signer
from prime_node.coordinator.assignments import Assigner
from prime_node.coordinator.journal import open_journal
from prime_node.coordinator.state import endings
from prime_node.coordinator.state import events as ev
from prime_node.coordinator.state.rules import rules_of
from prime_node.coordinator.state_follower import restore_state
from prime_protocol.envelope import PayloadType, open_envelope, parse_json
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.requests import ReceiptsRequest
from prime_protocol.verdict import BundleStatus, Receipt


async def read(world: World, after: int = 0) -> tuple[list[Receipt], int]:
    """ANNA's receipts after a cursor, verified, and the next cursor."""
    listed = await world.client(ANNA).receipts(ReceiptsRequest(after=after))
    found = [open_envelope(text.encode()) for text in listed.receipts]
    return [parse_json(one.verify(PayloadType.RECEIPT, trusted=(COORDINATOR.key_id,)), Receipt) for one in found], (
        listed.next
    )


async def upload(world: World) -> str:
    return (await world.client(ANNA).upload(make_parcel(await world.lease(ANNA), ANNA))).bundle


async def test_a_pending_receipt_is_signed_when_its_worker_asks_and_once() -> None:
    """Before, each upload signed and stored one, and its verdict replaced most of them before anyone had asked."""
    store = HeldStore()
    async with running(dataclasses.replace(memory_parts(make_run()), store=store)) as world:
        await world.publish()
        await world.join(ANNA)
        first = await upload(world)
        assert await store.receipt(first) is None
        (receipt,), cursor = await read(world)
        assert (receipt.bundle, receipt.status) == (first, BundleStatus.PENDING)
        assert await read(world, cursor) == ([], cursor)
        second = await upload(world)
        (receipt,), cursor = await read(world, cursor)
        assert receipt.bundle == second
        await world.judge()
        (settled,), cursor = await read(world, cursor)
        assert (settled.bundle, settled.status) == (first, BundleStatus.ACCEPTED)
        assert {one.bundle: one.status for one in (await read(world))[0]} == {
            first: BundleStatus.ACCEPTED,
            second: BundleStatus.PENDING,
        }


async def test_requests_side_by_side_sign_a_pending_receipt_once() -> None:
    """Before, each of them signed and stored all receipts again."""
    store = HeldStore()
    async with running(dataclasses.replace(memory_parts(make_run()), store=store)) as world:
        await world.publish()
        await world.join(ANNA)
        bundle = await upload(world)
        store.may_write.clear()
        asking = [asyncio.create_task(read(world)) for _ in range(8)]
        assert not (await asyncio.wait(asking, timeout=0.5))[0]
        store.may_write.set()
        found = await asyncio.gather(*asking)
        assert found == [found[0]] * len(asking)
        (receipt,), cursor = await read(world)
        assert (receipt.bundle, cursor) == (bundle, 1)
        assert store.stored == [bundle]


async def test_a_restart_makes_no_second_receipt_of_a_pending_bundle_and_the_missing_one(tmp_path: Path) -> None:
    run = make_run()
    async with running(await folder_parts(run, tmp_path)) as world:
        await world.publish()
        await world.join(ANNA)
        first = await upload(world)
        asked, cursor = await read(world)
        second = await upload(world)
    async with running(await folder_parts(run, tmp_path)) as world:
        await world.learn_epoch()
        (other,), _ = await read(world, cursor)
        assert (other.bundle, other.status) == (second, BundleStatus.PENDING)
        assert (await read(world))[0] == [*asked, other]
        assert asked[0].bundle == first


async def test_a_pending_receipt_is_shown_once_it_is_stored() -> None:
    store = HeldStore()
    async with running(dataclasses.replace(memory_parts(make_run()), store=store)) as world:
        await world.publish()
        await world.join(ANNA)
        bundle = await upload(world)
        store.may_write.clear()
        listed = asyncio.create_task(read(world))
        assert not (await asyncio.wait({listed}, timeout=0.2))[0], "a receipt was shown before it was stored"
        store.may_write.set()
        (receipt,), _ = await listed
        assert receipt.bundle == bundle


async def test_a_verdict_that_is_sent_again_while_the_first_is_written_is_known() -> None:
    """No pending receipt tells any more that there was such a bundle."""
    store = HeldStore()
    async with running(dataclasses.replace(memory_parts(make_run()), store=store)) as world:
        await world.publish()
        await world.join(ANNA)
        await upload(world)
        task = await world.take_task(VALIDATOR)
        store.may_write.clear()
        verdicts = [asyncio.create_task(world.give_verdict(task)) for _ in range(2)]
        assert not (await asyncio.wait(verdicts, timeout=0.2))[0]
        store.may_write.set()
        await asyncio.gather(*verdicts)


async def test_a_bundle_whose_lease_is_forgotten_while_its_verdict_is_written_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before, its upload was answered as if its lease had never been, since no pending receipt was there."""
    monkeypatch.setattr(endings, "LEASES_REMEMBERED_MAX", 1)
    store = HeldStore()
    async with running(dataclasses.replace(memory_parts(make_run()), store=store)) as world:
        await world.publish()
        await world.join(ANNA)
        parcels = [make_parcel(await world.lease(ANNA), ANNA) for _ in range(2)]
        for parcel in parcels:
            await world.client(ANNA).upload(parcel)
        tasks = [await world.take_task(VALIDATOR) for _ in parcels]
        store.may_write.clear()
        verdicts = [asyncio.create_task(world.give_verdict(task)) for task in tasks]
        assert not (await asyncio.wait(verdicts, timeout=0.2))[0]
        again = [asyncio.create_task(world.client(ANNA).upload(parcel)) for parcel in parcels]
        await asyncio.wait(again, timeout=0.2)
        store.may_write.set()
        await asyncio.gather(*verdicts)
        for reply in await asyncio.gather(*again):
            assert reply.verdict is not None
            assert reply.verdict.accepted


async def test_a_receipt_that_is_made_during_the_last_write_is_stored_before_the_journal_ends() -> None:
    """Before, its handler would have waited without end."""
    store = HeldStore()
    async with running(dataclasses.replace(memory_parts(make_run()), store=store)) as world:
        await world.publish()
        await world.join(ANNA)
        bundle = await upload(world)
        _, state = await restore_state(store, rules_of(world.run))
    journal = await open_journal(
        store,
        await restore_state(store, rules_of(world.run)),
        clock=SystemClock(),
        sign_receipt=receipt_signer(
            world.run, COORDINATOR, Assigner(world.run, secret=b"", environments={}, tokenizer=None)
        ),
        snapshot_events=100,
    )
    writer = asyncio.create_task(journal.write(lambda bundles: None))
    store.may_write.clear()
    journal.record(ev.DrainSet())
    for _ in range(8):  # turns of the loop, until the write has begun
        await asyncio.sleep(0)
    noted = asyncio.create_task(journal.note_pending([state.bundles[bundle]]))
    await asyncio.sleep(0)
    journal.close()
    store.may_write.set()
    async with asyncio.timeout(10.0):
        await noted
        await writer
    assert await store.receipt(bundle) is not None


async def test_no_receipt_is_promised_after_the_disk_has_failed() -> None:
    store = HeldStore()

    async def lose_the_disk() -> None:
        async with running(dataclasses.replace(memory_parts(make_run()), store=store)) as world:
            await world.publish()
            await world.join(ANNA)
            await upload(world)
            store.broken = True
            with pytest.raises(RemoteError) as refused:
                await read(world)
            assert refused.value.code is ErrorCode.UNAVAILABLE

    with pytest.raises(ExceptionGroup) as caught:
        await lose_the_disk()
    assert caught.group_contains(OSError, match="No space left")
