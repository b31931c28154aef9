"""Publishing is atomic, invalid publications are refused, and deletion always leaves an update path to the head."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.node.coordinator_process import WrongClock
from tests.node.coordinator_world import (
    ANNA,
    TRAINER,
    World,
    folder_parts,
    make_manifest,
    make_policy,
    make_run,
    memory_parts,
    running,
)

from prime_lab.memory_blobs import MemoryBlobs
from prime_node.broadcast.routes import UpdateRoute, search
from prime_node.coordinator.assembly import PUBLIC_AGE_S, open_coordinator
from prime_node.coordinator.manifests import kept_encodings
from prime_node.coordinator.state import events as ev
from prime_node.coordinator.state import invariants
from prime_node.coordinator.state.records import Publication, State
from prime_node.coordinator.state.rules import rules_of
from prime_node.coordinator.state.tick import tick
from prime_protocol.checkpoint import EncodedCheckpoint, encode_checkpoint
from prime_protocol.chunk_index import pack_index
from prime_protocol.digest import digest_of
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.manifest import BasePolicy, PartEntry, SignedManifest
from prime_protocol.requests import BatchRequest

if TYPE_CHECKING:
    from _collections_abc import dict_items

RUN = make_run(async_level=0)


def delta(version: int, base: SignedManifest) -> EncodedCheckpoint:
    """Return make_manifest's policy with an earlier one as its predecessor."""
    named = BasePolicy(policy_version=base.manifest.policy_version, state_root=base.manifest.state_root)
    return encode_checkpoint(make_policy(version), (named, make_policy(base.manifest.policy_version)))


async def offer(world: World, encoded: list[EncodedCheckpoint], **changes: object) -> SignedManifest:
    """Upload the blobs, then publish a manifest over them."""
    signed, _ = make_manifest(
        world.run, world.head, batch=world.batch, encodings=tuple(one.encoding for one in encoded), **changes
    )
    client = world.client(TRAINER)
    for blob in (blob for one in encoded for blob in one.blobs):
        await client.put_blob(blob)
    await client.publish(signed.envelope)
    world.head = signed
    return signed


# Refusals


async def refused(world: World, encoded: list[EncodedCheckpoint], code: ErrorCode, **changes: object) -> str:
    head = world.head
    with pytest.raises(RemoteError) as caught:
        await offer(world, encoded, **changes)
    assert caught.value.code is code
    assert world.head is head
    assert (await world.status())["head"] == (-1 if head is None else head.manifest.policy_version)
    return caught.value.detail


async def test_a_manifest_without_all_its_blobs_is_refused() -> None:
    async with running(memory_parts(RUN)) as world:
        signed, blobs = make_manifest(RUN, None)
        for missing in range(len(blobs)):
            for number, blob in enumerate(blobs):
                await (
                    world.client(TRAINER).put_blob(blob)
                    if number != missing
                    else world.parts.public.delete(digest_of(blob))
                )
            with pytest.raises(RemoteError) as caught:
                await world.client(TRAINER).publish(signed.envelope)
            assert caught.value.code is ErrorCode.NOT_FOUND
        assert (await world.status())["head"] == -1


async def test_a_trainer_that_claims_to_be_durable_past_the_head_still_has_to_name_the_given_batch() -> None:
    async with running(memory_parts(make_run(async_level=1)), ANNA) as world:
        await world.fill(0)
        await world.client(TRAINER).batch(BatchRequest(step=1, durable_step=1))
        made_up, blobs = make_manifest(world.run, world.head, batch=digest_of(b"made up"))
        for blob in blobs:
            await world.client(TRAINER).put_blob(blob)
        with pytest.raises(RemoteError, match="names another batch"):
            await world.client(TRAINER).publish(made_up.envelope)
        await world.publish()


async def test_an_index_with_false_data_is_refused() -> None:
    async with running(memory_parts(RUN)) as world:
        honest = encode_checkpoint(make_policy(0))
        for rows in ([], [(len(honest.parts[0]), 63, digest_of(honest.parts[0]))], [(1, 64, digest_of(b""))]):
            index = pack_index(rows)
            entry = PartEntry(digest=digest_of(index), size=len(index))
            lied = EncodedCheckpoint(honest.encoding.model_copy(update={"index": entry}), index, honest.parts)
            assert "do not end" in await refused(world, [lied], ErrorCode.CHAIN_BROKEN)
        await offer(world, [honest])


async def test_a_delta_against_other_weights_than_were_published_is_refused() -> None:
    async with running(memory_parts(RUN)) as world:
        first = await offer(world, [encode_checkpoint(make_policy(0))])
        await world.join(ANNA)
        await world.fill(0)
        honest = delta(1, first)
        wrong = BasePolicy(policy_version=0, state_root=digest_of(b"other"))
        lied = EncodedCheckpoint(honest.encoding.model_copy(update={"base": wrong}), honest.index, honest.parts)
        assert "another state root" in await refused(world, [lied], ErrorCode.CHAIN_BROKEN)
        await offer(world, [honest])


# Atomic


class FailingDocuments:
    """Published documents whose disk fails at one write, before or after it is done."""

    def __init__(self, inner: object, name: str, *, done: bool) -> None:
        self._inner, self._name, self._done = inner, name, done
        self.armed = False

    async def write(self, name: str, data: bytes) -> None:
        fails = self.armed and name.startswith(self._name)
        if fails and not self._done:
            raise OSError("the disk is full")
        await self._inner.write(name, data)  # type: ignore[attr-defined]
        if fails:
            raise OSError("the power is gone")

    async def read(self, name: str, *, start: int = 0, end: int | None = None) -> bytes:
        return await self._inner.read(name, start=start, end=end)  # type: ignore[attr-defined]

    async def size(self, name: str) -> int:
        return await self._inner.size(name)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["manifests/", "head.json"])
@pytest.mark.parametrize("done", [False, True], ids=["before", "after"])
async def test_a_failure_between_any_two_writes_leaves_the_old_head_or_the_new(
    tmp_path: Path, name: str, *, done: bool
) -> None:
    whole = await folder_parts(RUN, tmp_path)
    failing = FailingDocuments(whole.published, name, done=done)
    async with running(replace(whole, published=failing)) as world:
        first = await offer(world, [encode_checkpoint(make_policy(0))])
        await world.join(ANNA)
        await world.fill(0)
        failing.armed = True
        encoded = [delta(1, first)]
        with pytest.raises(RemoteError):
            await offer(world, encoded)
        batch = world.batch
    again = await folder_parts(RUN, tmp_path)
    async with running(again) as world:
        head = await world.client(TRAINER).head()
        assert head is not None
        shown = [first.digest, make_manifest(RUN, first, batch=batch, encodings=(encoded[0].encoding,))[0].digest]
        assert head.digest in shown
        assert await world.client(TRAINER).manifest(shown.index(head.digest)) == head
        world.head, world.batch = first, batch
        second = await offer(world, encoded)
        assert (await world.client(TRAINER).head()) == second.envelope


# Retention


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[UpdateRoute, ...]]:
    """Generate the publications of an arbitrary trainer: always an update path from nothing, otherwise anything."""
    history: list[tuple[UpdateRoute, ...]] = [(UpdateRoute(None, 50),)]
    for version in range(1, draw(st.integers(2, 30))):
        bases = draw(
            st.sets(st.sampled_from([None, version - 1, max(0, version - 4), max(0, version - 16), 0]), min_size=1)
        )
        history.append(tuple(UpdateRoute(base, draw(st.integers(1, 60))) for base in bases))
    return history


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(history=histories(), kept=st.integers(1, 6), async_level=st.integers(0, 3))
def test_whatever_is_forgotten_a_way_to_the_head_stays(
    history: list[tuple[UpdateRoute, ...]], kept: int, async_level: int
) -> None:
    state = State(rules_of(make_run(async_level=async_level, max_steps=100)))
    for version, routes in enumerate(history):
        known = {number: publication.routes for number, publication in state.published.items()}
        if search(version, {**known, version: routes}) is None:
            routes = (*routes, UpdateRoute(None, 50))  # the coordinator refuses the other one
        tick(state, ev.ManifestPublished(version, f"{version:064d}", routes), 0)
        names = {(number, route.base_version) for number, it in state.published.items() for route in it.routes}
        stays = kept_encodings(state, kept)
        tick(state, ev.EncodingsForgotten(tuple(sorted(names - stays, key=str))), 0)
        invariants.check_update_paths(state)
        assert state.published[version].routes == routes
        assert any(route.base_version is None for route in state.published[0].routes)


async def test_bytes_that_a_kept_encoding_shares_are_not_deleted() -> None:
    """A step without a gradient changes nothing, and its delta has the same bytes as the previous one."""
    parts = memory_parts(make_run(async_level=0), checkpoints_kept=1)
    async with running(parts) as world:
        published = [await offer(world, [encode_checkpoint(make_policy(0))])]
        await world.join(ANNA)
        for step in range(6):
            await world.fill(step)
            previous = published[-1].manifest
            base = BasePolicy(policy_version=step, state_root=previous.state_root)
            same = encode_checkpoint(make_policy(0), (base, make_policy(0)))
            changes = {"tensors": previous.tensors, "state_root": previous.state_root}
            published.append(await offer(world, [encode_checkpoint(make_policy(0)), same], **changes))
        deltas = [signed.manifest.encoding(signed.manifest.policy_version - 1) for signed in published[1:]]
        assert len({one.parts for one in deltas if one is not None}) == 1, "all share one part"
        await world.until_status("policies_kept", 3)
        assert isinstance(parts.public, MemoryBlobs)
        for signed in published[-2:]:
            for blob in signed.manifest.blobs:
                assert await parts.public.has(blob.digest)


async def test_old_policies_are_forgotten_when_their_bytes_exceed_the_budget(tmp_path: Path) -> None:
    size = sum(len(blob) for blob in encode_checkpoint(make_policy(0)).blobs)
    run = make_run(async_level=0)
    parts = await folder_parts(run, tmp_path, public_gib_max=4.5 * size / 2**30)
    async with running(parts, ANNA) as world:
        for step in range(6):
            await world.fill(step)
            await world.publish()

        async def fits() -> bool:  # how many stay depends on how many were published between two ticks
            kept = [digest async for digest in parts.public.digests()]
            return int((await world.status())["policies_kept"]) <= 4 and len(kept) < 2 * 6

        await world.until(fits)
        assert (tmp_path / "public" / "manifests" / "00000006.json").exists()
    again = await folder_parts(run, tmp_path, public_gib_max=4.5 * size / 2**30)
    (tmp_path / "public" / "manifests" / "00000005.json").write_bytes(b"rotten")
    async with running(again) as world:
        assert (await world.status())["head"] == 6, "a damaged old manifest only keeps old parts from being deleted"


async def test_deletions_that_a_crash_cut_short_are_finished_at_the_next_start(tmp_path: Path) -> None:
    run = make_run(async_level=0)
    parts = await folder_parts(run, tmp_path, checkpoints_kept=1)
    async with running(parts) as world:
        await world.publish()
        orphan = await world.client(TRAINER).put_blob(b"left behind")
        assert await parts.public.has(orphan)
    for later_s, is_kept in ((0.9 * PUBLIC_AGE_S, True), (1.1 * PUBLIC_AGE_S, False)):
        again = await folder_parts(run, tmp_path, checkpoints_kept=1)
        async with running(replace(again, clock=WrongClock(later_s))) as world:
            assert await again.public.has(orphan) is is_kept, "its trainer may have signed its manifest, and be away"
            assert await world.client(TRAINER).head() is not None


class CountedReads(dict[int, Publication]):
    """The published policies, with the number of times that all were read."""

    num_reads = 0

    def items(self) -> dict_items[int, Publication]:
        self.num_reads += 1
        return super().items()


@pytest.mark.parametrize("setting", [{}, {"checkpoints_kept": 1}, {"public_gib_max": 1e-9}])
async def test_a_tick_without_a_change_does_not_read_all_policies(setting: dict[str, float]) -> None:
    coordinator = await open_coordinator(memory_parts(RUN, **setting))
    state = coordinator.decisions.state
    state.published = published = CountedReads()
    for version in range(2):
        tick(state, ev.ManifestPublished(version, f"{version:064d}", (UpdateRoute(None, 50),)), 0)
        before = published.num_reads
        await coordinator.retention.forget_old_encodings()
        after = published.num_reads
        assert after > before, "a new policy may need more room"
        for _ in range(3):
            await coordinator.retention.forget_old_encodings()
        assert published.num_reads == after


def test_an_unreachable_policy_is_no_state() -> None:
    state = State(rules_of(RUN))
    tick(state, ev.ManifestPublished(0, "0" * 64, (UpdateRoute(None, 1),)), 0)
    tick(state, ev.EncodingsForgotten(((0, None),)), 0)
    with pytest.raises(AssertionError, match="no update path leads to policy 0"):
        invariants.check_update_paths(state)


async def test_a_policy_without_an_update_path_is_refused() -> None:
    parts = memory_parts(make_run(async_level=0), checkpoints_kept=1)
    async with running(parts) as world:
        published = [await world.publish()]
        await world.join(ANNA)
        for step in range(4):
            await world.fill(step)
            published.append(await world.publish())
        await world.until_status("policies_kept", 3)
        await world.fill(4)
        await refused(world, [delta(5, published[1])], ErrorCode.CHAIN_BROKEN)
