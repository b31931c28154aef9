"""Which encodings are kept, and deleting the others.

A policy may be needed by whoever holds a lease for it, by a worker that joins now, by one that was away, and as the base of a
delta. So the newest policies keep everything; older ones keep what the cheapest ways from nothing to those lead over; and the
anchor of policy 0 stays: it is what a whole run is compared with, and what root deltas are taken against.

Invariant (invariants.py checks it): from nothing a way leads to every policy that a lease may name. A publication whose base has
a way has one itself, and forgetting leaves the ways that are in use alone.
"""

from __future__ import annotations

import logging

from prime_node.broadcast.follow.paths import search
from prime_node.coordinator.api.publishing import read_manifest
from prime_node.coordinator.core import Core
from prime_node.coordinator.state import events as ev
from prime_node.coordinator.state.records import State
from prime_node.coordinator.state.scheduler import oldest_policy_needed
from prime_protocol.envelope import parse_json
from prime_protocol.manifest import Manifest

log = logging.getLogger(__name__)

Name = tuple[int, int | None]
"""An encoding: its policy and its base, None for an anchor."""


def kept_encodings(state: State, checkpoints_kept: int) -> set[Name]:
    """Encodings whose bytes must stay."""
    newest = max(checkpoints_kept, state.rules.async_level + 2, state.head + 1 - oldest_policy_needed(state))
    routes = {version: publication.routes for version, publication in state.published.items()}
    kept: set[Name] = {(0, None)}
    for version in state.published:
        if version > state.head - newest:
            kept |= {(version, route.base_version) for route in routes[version]}
            way = search(version, routes).path
            assert way is not None, f"no way leads to policy {version}"
            kept |= {(hop.policy_version, hop.route.base_version) for hop in way.hops}
    return kept


async def forget_old_encodings(core: Core) -> None:
    """Delete the blobs that only forgotten encodings use. The fact comes first: then no reader is sent to missing bytes."""
    limit = core.config.checkpoints_kept
    if limit is None or core.state.head < 0 or not _forgettable(core.state, limit):
        return
    async with core.blobs_turn:
        forgotten = _forgettable(core.state, limit)
        core.decide(ev.EncodingsForgotten(tuple(sorted(forgotten, key=str))))
        await core.journal.synced()
        needed = await _needed(core)
        for digest in await _blobs(core, forgotten) - needed:
            await core.public.delete(digest)
    log.info("deleted the bytes of %d old encodings", len(forgotten))


async def sweep_blobs(core: Core) -> None:
    """After a restart: delete what an interrupted deletion left. A publication that is under way is uploaded again."""
    if core.config.checkpoints_kept is None or core.state.head < 0:
        return
    needed = await _needed(core)
    for digest in [digest async for digest in core.public.digests() if digest not in needed]:
        await core.public.delete(digest)


def _known(state: State) -> set[Name]:
    return {(version, route.base_version) for version, it in state.published.items() for route in it.routes}


def _forgettable(state: State, checkpoints_kept: int) -> set[Name]:
    return _known(state) - kept_encodings(state, checkpoints_kept)


async def _needed(core: Core) -> set[str]:
    """Digests of the blobs that must stay. An older encoding may share one with a newer: both name it by digest."""
    return await _blobs(core, _known(core.state)) | {file.digest for file in core.run.spec.model_files}


async def _blobs(core: Core, names: set[Name]) -> set[str]:
    """Digests of everything that these encodings consist of."""
    found = set()
    for version in {version for version, _ in names}:
        manifest = parse_json((await read_manifest(core, version)).payload, Manifest)
        chosen = (encoding for encoding in manifest.encodings if (version, encoding.base_version) in names)
        found |= {blob.digest for encoding in chosen for blob in encoding.blobs}
    return found
