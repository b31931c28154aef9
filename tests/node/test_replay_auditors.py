"""Bundles for a run's auditors: who may read them, where, and for how long."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError
from tests.builder import role_keys
from tests.node.archive_world import RECIPE, offer, replayable
from tests.node.coordinator_process import WrongClock
from tests.node.coordinator_world import (
    ANNA,
    BEN,
    COORDINATOR,
    ROOT,
    TRAINER,
    VALIDATOR,
    World,
    folder_parts,
    make_parcel,
    make_run,
    running,
)
from tests.node.gateway_world import LISTENS, gateway_parts, hearing, serving
from tests.node.worker_world import next_ring

from prime_node.adapters.prometheus_metrics import PrometheusMetrics
from prime_node.adapters.web.aiohttp_server import AiohttpServer
from prime_node.cli.replay_target import ReplayOptions, replay_target
from prime_node.cli.target import open_source
from prime_node.cli.wire_replay import take_bounds
from prime_node.coordinator.new_run import ReplayConfig
from prime_node.envs.settings import EnvironmentSettings
from prime_node.keyfile import load_or_create
from prime_protocol.digest import digest_of
from prime_protocol.envelope import PayloadType, seal
from prime_protocol.errors import ErrorCode, LimitExceeded, LocalError, RemoteError
from prime_protocol.identity import SigningKey
from prime_protocol.limits import Limits
from prime_protocol.replay import BundleAccess
from prime_protocol.requests import BundleRequest
from prime_protocol.run_spec import PinnedRun, open_run_spec

AUDITOR, NEW = SigningKey(b"\x61" * 32), SigningKey(b"\x62" * 32)


def audited_run() -> PinnedRun:
    keys = role_keys(ROOT, COORDINATOR, TRAINER, VALIDATOR).model_copy(update={"auditor": (AUDITOR.key_id,)})
    return replayable(BundleAccess.AUDITORS, keys=keys)


async def code_of(world: World, key: SigningKey, bundle: str) -> ErrorCode | None:
    """Return how a server refuses a bundle to a key; None if it serves the right bytes."""
    try:
        assert digest_of(await world.client(key).bundle(BundleRequest(bundle=bundle))) == bundle
    except RemoteError as error:
        return error.code
    return None


async def test_auditors_alone_read_what_was_trained_on_at_the_coordinator_and_at_gateways(tmp_path: Path) -> None:
    run = audited_run()
    parts, server = hearing(await folder_parts(run, tmp_path, **LISTENS))
    async with running(parts) as world, serving(gateway_parts(run, [server.port])) as url:
        gateway = World(run, parts, url, world.session)
        try:
            await gateway.learn_epoch()
            await world.client(TRAINER).put_blob(RECIPE)
            await offer(world)
            await world.join(ANNA)
            bundle = (await world.fill(0)).groups[0].bundle
            assert await code_of(world, AUDITOR, bundle) is ErrorCode.NOT_FOUND, "its policy is not published yet"
            await offer(world)
            waiting = digest_of(parcel := make_parcel(await world.lease(ANNA), ANNA))
            await world.client(ANNA).upload(parcel)
            for place in (world, gateway):
                assert await code_of(place, AUDITOR, bundle) is None
                assert await code_of(place, AUDITOR, waiting) is ErrorCode.NOT_FOUND, "it is trained on by no policy"
                for stranger in (ANNA, BEN, COORDINATOR):
                    assert await code_of(place, stranger, bundle) is ErrorCode.WRONG_ROLE
                with pytest.raises(RemoteError) as unsigned:
                    await place.client(AUDITOR).blob(bundle)
                assert unsigned.value.code is ErrorCode.NOT_FOUND
            assert not await parts.public.has(bundle)
            assert (await gateway.client(ANNA).public_batch(0, 0)).digest == world.batch
        finally:
            for client in gateway.clients.values():
                await client.close()


async def test_a_key_ring_names_and_revokes_auditors(tmp_path: Path) -> None:
    parts = await folder_parts(audited_run(), tmp_path)
    async with running(parts) as world:
        await offer(world)
        await world.join(ANNA)
        bundle = (await world.fill(0)).groups[0].bundle
        await offer(world)
        assert world.head is not None
        ring = next_ring(world.run.keys, ROOT, auditor=(NEW,), published=world.head.point)
        await world.client(NEW).add_key_ring(ring)
        assert await code_of(world, AUDITOR, bundle) is ErrorCode.REVOKED
        assert await code_of(world, NEW, bundle) is None


async def test_bundles_of_auditors_are_deleted_when_their_days_are_over(tmp_path: Path) -> None:
    parts = await folder_parts(audited_run(), tmp_path)
    async with running(parts) as world:
        await world.client(TRAINER).put_blob(RECIPE)
        await offer(world)
        await world.join(ANNA)
        bundle = (await world.fill(0)).groups[0].bundle
        await offer(world)
        assert await code_of(world, AUDITOR, bundle) is None
    late = await folder_parts(audited_run(), tmp_path)
    late = replace(late, clock=WrongClock(2 * 86_400.0), web=AiohttpServer(), metrics=PrometheusMetrics())
    async with running(late) as world:

        async def is_gone() -> bool:
            return not await late.archived.has(bundle)

        await world.until(is_gone)
        assert await code_of(world, AUDITOR, bundle) is ErrorCode.NOT_FOUND
        assert not list((tmp_path / "archived").glob(f"*/{bundle}"))


def test_an_auditor_of_public_bundles_is_a_mistake() -> None:
    with pytest.raises(ValidationError, match='set bundles = "auditors"'):
        ReplayConfig(auditors=(AUDITOR.key_id,))
    assert ReplayConfig(bundles=BundleAccess.AUDITORS, auditors=(AUDITOR.key_id,)).policy(recipe="0" * 64)


def test_a_run_that_was_made_without_auditors_opens_and_has_none() -> None:
    """Until 27 November 2026 a RunSpec had "none" there. Before, no role could open such a run any more."""
    spec = replayable(BundleAccess.AUDITORS).spec.model_dump_json().replace('"auditors"', '"none"')
    run = open_run_spec(seal(spec.encode(), PayloadType.RUN_SPEC, ROOT), pinned=digest_of(spec.encode()))
    assert run.spec.replay is not None
    assert (run.spec.replay.bundles, run.keys.current.auditor) == (BundleAccess.AUDITORS, ())


async def test_an_auditor_may_name_the_run_apart_from_the_address(tmp_path: Path) -> None:
    """Before, a request to an address without the run's digest was signed for no run, which ended in a traceback."""
    load_or_create(tmp_path / "auditor.key")
    key = tmp_path / "auditor.key"
    with pytest.raises(LocalError, match="--run"):
        await replay_target("http://127.0.0.1:9/", ReplayOptions(key=key), EnvironmentSettings())
    run = audited_run()
    async with running(await folder_parts(run, tmp_path / "run")) as world:
        async with open_source(world.url, key=AUDITOR, run=run.digest) as source:
            with pytest.raises(RemoteError) as caught:
                await source.bundle(BundleRequest(bundle="0" * 64))
        assert caught.value.code is ErrorCode.NOT_FOUND


@pytest.mark.parametrize("is_public", [False, True])
async def test_bundles_larger_than_the_default_bounds_are_read(tmp_path: Path, is_public: bool) -> None:
    """Before, they counted as withheld."""
    run, digest, size = make_run(limits=Limits(rollout_bytes_max=2**27)), "ab" * 32, 2**26 + 2**23
    place = tmp_path / "coordinator" / ("public/blobs" if is_public else "archived") / digest[:2] / digest
    place.parent.mkdir(parents=True)
    place.touch()
    os.truncate(place, size)
    (tmp_path / "coordinator" / "public").mkdir(exist_ok=True)
    (tmp_path / "coordinator" / "public" / "run.json").touch()
    async with open_source(str(tmp_path)) as source:
        with pytest.raises(LimitExceeded):
            await source.bundle(BundleRequest(bundle=digest))
        take_bounds(source, run)
        assert len(await source.bundle(BundleRequest(bundle=digest))) == size
