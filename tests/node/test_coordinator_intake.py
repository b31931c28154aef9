"""Durability before answers, restarts, and the small components that requests pass through."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest
from tests.node.coordinator_process import WrongClock
from tests.node.coordinator_world import (
    ANNA,
    BEN,
    COORDINATOR,
    TRAINER,
    Bytes,
    Letters,
    folder_parts,
    make_manifest,
    make_parcel,
    make_run,
    memory_parts,
    running,
)
from tests.node.held_store_world import HeldStore

from prime_lab.memory_blobs import MemoryBlobs
from prime_lab.memory_store import MemoryStore
from prime_node.adapters.system_clock import SystemClock
from prime_node.broadcast.routes import UpdateRoute
from prime_node.coordinator.api.limiter import Buckets
from prime_node.coordinator.api.nonces import MEMORY_S, Nonces
from prime_node.coordinator.api.receipts import receipt_signer
from prime_node.coordinator.assignments import Assigner, secret_of
from prime_node.coordinator.check_queue import CheckQueue
from prime_node.coordinator.journal import open_journal
from prime_node.coordinator.manifests import kept_encodings
from prime_node.coordinator.presence import Presence
from prime_node.coordinator.state import events as ev
from prime_node.coordinator.state.records import LeaseRecord, Publication, State
from prime_node.coordinator.state.rules import rules_of
from prime_node.coordinator.state_follower import restore_state
from prime_node.ports.web import parse_range
from prime_protocol import limits
from prime_protocol.errors import ErrorCode, LocalError, RemoteError, TransientFault
from prime_protocol.requests import ReceiptsRequest
from prime_protocol.run_spec import EnvironmentSpec
from prime_protocol.verdict import Verdict


async def test_an_upload_that_cannot_be_stored_may_be_repeated(tmp_path: Path) -> None:
    async with running(await folder_parts(make_run(), tmp_path), ANNA) as world:
        parcel = make_parcel(await world.lease(ANNA), ANNA)
        bundles, aside = tmp_path / "bundles", tmp_path / "aside"
        bundles.rename(aside)
        bundles.write_text("no folder")
        with pytest.raises(RemoteError, match="the coordinator's storage failed") as failed:
            await world.client(ANNA).upload(parcel)
        assert failed.value.code is ErrorCode.UNAVAILABLE
        assert failed.value.is_transient
        bundles.unlink()
        aside.rename(bundles)
        assert (await world.client(ANNA).upload(parcel)).bundle


async def test_no_upload_is_acknowledged_before_it_is_durable() -> None:
    store = HeldStore()
    async with running(dataclasses.replace(memory_parts(make_run()), store=store), ANNA) as world:
        parcel = make_parcel(await world.lease(ANNA), ANNA)
        store.may_write.clear()
        upload = asyncio.create_task(world.client(ANNA).upload(parcel))
        again = asyncio.create_task(world.client(ANNA).upload(parcel))
        listed = asyncio.create_task(world.client(ANNA).receipts(ReceiptsRequest()))
        done, _ = await asyncio.wait({upload, again, listed}, timeout=0.2)
        assert not done, "an answer left before its event was written"
        store.may_write.set()
        assert (await upload) == (await again)
        assert len((await listed).receipts) == 1


async def test_when_the_disk_fails_no_request_is_answered_and_the_daemon_ends() -> None:
    store = HeldStore()

    async def lose_the_disk() -> None:
        async with running(dataclasses.replace(memory_parts(make_run()), store=store)) as world:
            await world.publish()
            store.broken = True
            with pytest.raises(RemoteError) as refused:
                await world.join(ANNA)
            assert refused.value.code is ErrorCode.UNAVAILABLE

    with pytest.raises(ExceptionGroup) as caught:
        await lose_the_disk()
    assert caught.group_contains(OSError, match="No space left")


async def test_an_event_that_cannot_be_applied_ends_the_journal_and_is_not_in_the_log() -> None:
    store, run = MemoryStore(), make_run()
    journal = await open_journal(
        store,
        await restore_state(store, rules_of(run)),
        clock=SystemClock(),
        sign_receipt=receipt_signer(run, COORDINATOR, assigner()),
        snapshot_events=100,
    )
    writer = asyncio.create_task(journal.write(lambda bundles: None))
    journal.record(ev.DrainSet())
    await journal.synced()
    with pytest.raises(KeyError):
        journal.record(ev.WorkersLost(("nobody",)))
    with pytest.raises(RemoteError) as caught:
        journal.record(ev.DrainSet())
    assert caught.value.code is ErrorCode.UNAVAILABLE
    with pytest.raises(RemoteError):
        await journal.synced()
    with pytest.raises(TransientFault, match="state may be wrong"):
        await writer
    assert [logged.number async for logged in store.events(after=0)] == [1]


async def test_a_restart_resumes_where_it_stopped(tmp_path: Path) -> None:
    run = make_run()
    async with running(await folder_parts(run, tmp_path, snapshot_events=3), ANNA, BEN) as world:
        held = await world.lease(ANNA)
        waiting = make_parcel(await world.lease(BEN), BEN)
        await world.client(BEN).upload(waiting)
        before = await world.status()
        head = world.head
    async with running(await folder_parts(run, tmp_path, snapshot_events=3)) as world:
        world.head = head
        after = await world.status()
        for name in ("head", "steps", "open_leases", "pending_bundles", "rollouts", "bytes_published"):
            assert after[name] == before[name]
        assert (await world.client(BEN).upload(waiting)).verdict is None
        await world.judge()  # the bundle waits for a validator again
        assert (await world.client(BEN).upload(waiting)).verdict == Verdict.accept()
        assert (await world.client(ANNA).upload(make_parcel(held, ANNA))).verdict is None


async def test_bytes_without_an_event_are_swept_away_at_a_start_once_no_upload_can_need_them() -> None:
    parts = memory_parts(make_run())
    orphan = await parts.bundles.put(b"uploaded, but the daemon died before it wrote the event")
    public = await parts.public.put(b"a part whose manifest is on its way")
    soon_s = parts.run.spec.lease_seconds + limits.REQUEST_AGE_S_MAX
    for clock in (parts.clock, WrongClock(soon_s - 30.0)):
        async with running(dataclasses.replace(parts, clock=clock)):
            assert await parts.bundles.has(orphan), "another process may be about to record it"
            assert await parts.public.has(public)
    async with running(dataclasses.replace(parts, clock=WrongClock(soon_s + 30.0)), ANNA) as world:
        reply = await world.client(ANNA).upload(make_parcel(await world.lease(ANNA), ANNA))
    assert not await parts.bundles.has(orphan)
    assert await parts.bundles.has(reply.bundle)


async def test_bundles_are_deleted_once_the_trainer_is_durable() -> None:
    parts = memory_parts(make_run())
    async with running(parts, ANNA) as world:
        batch = await world.fill(0)
        await world.publish()
        await world.fill(1)
        assert isinstance(parts.bundles, MemoryBlobs)

        async def is_deleted() -> bool:
            return not await parts.bundles.has(batch.groups[0].bundle)

        await world.until(is_deleted)
        with pytest.raises(RemoteError) as caught:
            await world.fill(0)
        assert caught.value.code is ErrorCode.NOT_FOUND


async def test_old_checkpoints_are_deleted_as_set(tmp_path: Path) -> None:
    parts = memory_parts(make_run(async_level=0), checkpoints_kept=2)
    async with running(parts) as world:
        manifests = [await world.publish()]
        await world.join(ANNA)
        for step in range(4):
            await world.fill(step)
            manifests.append(await world.publish())
        await world.until_status("policies_kept", 3)

        async def is_deleted() -> bool:
            return not await parts.public.has(manifests[2].manifest.encodings[0].parts[0].digest)

        await world.until(is_deleted)
        kept = [await parts.public.has(manifest.manifest.encodings[0].parts[0].digest) for manifest in manifests]
        assert kept == [True, False, False, True, True]
        assert (await world.client(TRAINER).manifest(1)).digest == manifests[1].digest, "manifests stay"


def test_what_a_delta_needs_is_kept() -> None:
    state = State(rules_of(make_run(async_level=0)), head=9)
    state.published = {
        version: Publication("", (UpdateRoute(None if version in (0, 5) else version - 1, 1),)) for version in range(10)
    }
    assert kept_encodings(state, 2) == {(0, None), (5, None), (6, 5), (7, 6), (8, 7), (9, 8)}


async def test_the_store_of_another_run_is_refused(tmp_path: Path) -> None:
    async with running(await folder_parts(make_run(), tmp_path)) as world:
        await world.join(ANNA)
    with pytest.raises(LocalError, match="belongs to another run"):
        async with running(await folder_parts(make_run(name="other"), tmp_path)):
            pass


async def test_a_manifest_written_before_a_crash_is_not_published_without_its_event() -> None:
    parts = memory_parts(make_run())
    manifest, _ = make_manifest(parts.run, None)
    await parts.published.write("manifests/00000000.json", manifest.envelope.to_bytes())
    async with running(parts) as world:
        assert (await world.get("/v1/manifests/0"))[0] == 404
        assert (await world.get("/v1/head"))[0] == 204


def assigner(**changes: object) -> Assigner:
    run = make_run(**changes)
    environments = {environment.name: Letters() for environment in run.spec.environments}
    return Assigner(run, secret=secret_of(COORDINATOR), environments=environments, tokenizer=Bytes())


def test_no_step_has_a_problem_twice() -> None:
    work = assigner(groups_per_step=48)
    for step in range(20):
        problems = {work.problem(slot)[0] for slot in range(48 * step, 48 * step + 48)}
        assert len(problems) == 48


def test_environments_share_the_slots_by_weight() -> None:
    environments = (EnvironmentSpec(name="one", id="x", weight=1.0), EnvironmentSpec(name="three", id="x", weight=3.0))
    work = assigner(environments=environments, groups_per_step=8, max_steps=500)
    drawn = [work.problem(slot)[0].environment for slot in range(4_000)]
    assert 0.72 < drawn.count("three") / len(drawn) < 0.78


def test_seeds_depend_on_policy_problem_and_slot() -> None:
    work = assigner()
    problem, other = work.problem(0)[0], work.problem(1)[0]
    lease = LeaseRecord("lease", "anna", 0, 0, "a" * 64, (0,), (0,), 0, 1)
    seeds = {
        work.seeds(problem, 0, lease),
        work.seeds(problem, 0, dataclasses.replace(lease, policy_digest="b" * 64)),
        work.seeds(problem, 1, lease),
        work.seeds(other, 0, lease),
    }
    assert len(seeds) == 4
    assert all(0 <= seed < 2**63 for group in seeds for seed in group)


def test_an_environment_whose_prompts_never_fit_is_the_operators_fault() -> None:
    with pytest.raises(LocalError, match="prompt_tokens_max"):
        assigner(limits=limits.Limits(prompt_tokens_max=3)).problem(0)


def test_a_nonce_is_remembered_for_twice_the_window() -> None:
    nonces = Nonces(nonces_max=1_000)
    for age_s in (0.0, MEMORY_S - 1, MEMORY_S):
        memory = Nonces(nonces_max=1_000)
        memory.spend("anna", "n", 1_000.0)
        with pytest.raises(RemoteError) as caught:
            memory.spend("anna", "n", 1_000.0 + age_s)
        assert caught.value.code is ErrorCode.REPLAYED
    memory.spend("anna", "late", 1_000.0 + MEMORY_S)
    for age_s in (1.0, MEMORY_S):  # the generation that held it is the older one by now
        with pytest.raises(RemoteError, match="received before"):
            memory.spend("anna", "late", 1_000.0 + MEMORY_S + age_s)
    nonces.spend("anna", "n", 0.0)
    nonces.spend("ben", "n", 0.0)
    nonces.spend("anna", "n", 3 * MEMORY_S)


def test_a_full_memory_of_nonces_refuses_rather_than_forgets() -> None:
    nonces = Nonces(nonces_max=2)
    nonces.spend("anna", "1", 0.0)
    nonces.spend("ben", "2", 0.0)
    with pytest.raises(RemoteError) as caught:
        nonces.spend("anna", "3", 0.0)
    assert caught.value.code is ErrorCode.UNAVAILABLE
    with pytest.raises(RemoteError) as caught:
        nonces.spend("anna", "1", 0.0)
    assert caught.value.code is ErrorCode.REPLAYED


def test_a_bucket_fills_up_again() -> None:
    buckets = Buckets(per_second=2.0, burst=3.0)
    for _ in range(3):
        buckets.require("a", 10.0)
        buckets.charge("a", 10.0)
    with pytest.raises(RemoteError) as caught:
        buckets.require("a", 10.0)
    assert caught.value.retry_after_s == 0.5
    buckets.require("a", 10.5)
    buckets.require("b", 10.0)


def test_a_check_goes_to_the_validator_that_holds_its_policy_and_back_when_it_is_overdue() -> None:
    queue = CheckQueue(check_s=100.0, attempts_max=2)
    for bundle, policy_version in (("a", 1), ("b", 2), ("c", 2)):
        queue.add(bundle, policy_version)
    assert queue.take((2,), 0) == "b"
    assert queue.take((), 0) == "a"
    assert queue.overdue(99) == []
    assert queue.overdue(100) == []
    assert queue.take((2,), 200) == "b", "overdue bundles come first"
    assert queue.overdue(300) == ["b"], "after two attempts it is given up"
    queue.settled(["a", "b", "c"])
    assert queue.take((), 400) is None


def test_a_worker_is_silent_after_four_missed_heartbeats_counted_from_the_first_look() -> None:
    presence = Presence(heartbeat_s=1.0)
    assert presence.silent(["anna"], 100.0) == ()
    assert presence.silent(["anna"], 104.0) == ()
    assert presence.silent(["anna"], 104.1) == ("anna",)
    presence.heard("anna", 104.0)
    assert presence.silent(["anna"], 104.1) == ()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("bytes=0-9", (0, 10)),
        ("bytes=90-", (90, 100)),
        ("bytes=-10", (90, 100)),
        ("bytes=95-200", (95, 100)),
        ("bytes=-900", (0, 100)),
    ],
)
def test_a_range_of_rfc_9110_is_understood(text: str, expected: tuple[int, int]) -> None:
    assert parse_range(text, 100) == expected
