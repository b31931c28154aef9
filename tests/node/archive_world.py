"""A coordinator whose run promises re-execution, a trainer that publishes what it must, and recorded runs."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

from tests.node.coordinator_world import TRAINER, World, make_manifest, make_run

from prime_protocol.digest import digest_of
from prime_protocol.manifest import PartEntry, Provenance
from prime_protocol.replay import BundleAccess, ReplayPolicy
from prime_protocol.run_spec import PinnedRun
from prime_protocol.training_state import TrainingState, TrainingTensor

RECIPE = b"{}"
PART = b"\0" * 8
RECORDED = Path(__file__).parent / "recorded"
"""Folder of runs that earlier code left in the middle of a step (test_upgrade.py)."""


def unpacked(archive: Path, folder: Path) -> dict[str, object]:
    """Unpack a recording, and return what it says of itself."""
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="data")
    found: dict[str, object] = json.loads((folder / "recorded.json").read_text(encoding="utf-8"))
    return found


def replayable(bundles: BundleAccess = BundleAccess.PUBLIC, *, bytes_max: int = 0, **changes: object) -> PinnedRun:
    policy = ReplayPolicy(
        recipe=digest_of(RECIPE), state_every=2, state_days=3.0, bundle_days=1.0, bundles=bundles, bytes_max=bytes_max
    )
    return make_run(async_level=0, replay=policy, **changes)


def state_of(run: PinnedRun, version: int) -> bytes:
    tensor = TrainingTensor(name="model.w", dtype="fp32", shape=(2,))
    parts = (PartEntry(digest=digest_of(PART), size=len(PART)),)
    state = TrainingState(run=run.digest, policy_version=version, progress="{}", tensors=(tensor,), parts=parts)
    return state.model_dump_json().encode()


async def offer(world: World, *, with_state: bool = True, **changes: object) -> None:
    """Publish the next policy with its commitments."""
    version = 0 if world.head is None else world.head.manifest.policy_version + 1
    index = state_of(world.run, version)
    made = Provenance(
        step=version - 1,
        optimizer_steps=version,
        batch=world.batch,
        software="test",
        lr=1e-6 if version else None,
        lr_multiplier=1.0,
        numerics="test/cpu",
        training_state=digest_of(index) if version % 2 == 0 else None,
    ).model_copy(update=changes)
    now_ms = world.parts.clock.now_ms()
    signed, blobs = make_manifest(world.run, world.head, produced_by=made, created_at_ms=now_ms)
    for blob in (*blobs, *((PART, index) if with_state else ())):
        await world.client(TRAINER).put_blob(blob)
    await world.client(TRAINER).publish(signed.envelope)
    world.head = signed
