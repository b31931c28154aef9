"""Retention of encodings: which are kept, and deletion of the others.

A policy may be needed by a worker that holds a lease for it, that joins now, or that was away, and as the base of a delta. So
the newest policies keep everything. Older ones keep the encodings on the cheapest update paths from nothing to the newest. The
anchor of policy 0 stays: a whole run is compared with it, and root deltas have it as base.

Invariant (invariants.py checks it): an update path leads from nothing to every policy that a lease may name. A publication
whose base has a path has one itself, and deletion does not change the paths in use.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from prime_node.broadcast.routes import search
from prime_node.coordinator.decisions import Decisions
from prime_node.coordinator.manifests import PublishedManifests
from prime_node.coordinator.state import events as ev
from prime_node.coordinator.state.records import State
from prime_node.coordinator.state.retained import oldest_policy_needed
from prime_node.ports.blobs import Blobs
from prime_protocol.envelope import parse_json
from prime_protocol.manifest import Manifest
from prime_protocol.run_spec import PinnedRun

log = logging.getLogger(__name__)

Name = tuple[int, int | None]
"""Name of an encoding: its policy and its base, None for an anchor."""


def kept_encodings(state: State, checkpoints_kept: int) -> set[Name]:
    """Return the encodings whose bytes must stay."""
    newest = max(checkpoints_kept, state.rules.async_level + 2, state.head + 1 - oldest_policy_needed(state))
    routes = {version: publication.routes for version, publication in state.published.items()}
    kept: set[Name] = {(0, None)}
    for version in state.published:
        if version > state.head - newest:
            kept |= {(version, route.base_version) for route in routes[version]}
            way = search(version, routes).path
            assert way is not None, f"no update path leads to policy {version}"
            kept |= {(hop.policy_version, hop.route.base_version) for hop in way.hops}
    return kept


@dataclass(slots=True)
class Retention:
    """Deletion of the bytes of old encodings."""

    run: PinnedRun
    checkpoints_kept: int | None
    decisions: Decisions
    public: Blobs
    manifests: PublishedManifests

    async def forget_old_encodings(self) -> None:
        """Delete the blobs that only forgotten encodings use. The event comes first: no reader looks for missing bytes."""
        limit = self.checkpoints_kept
        if limit is None or self.decisions.state.head < 0 or not _forgettable(self.decisions.state, limit):
            return
        async with self.manifests.turn:
            forgotten = _forgettable(self.decisions.state, limit)
            self.decisions.decide(ev.EncodingsForgotten(tuple(sorted(forgotten, key=str))))
            await self.decisions.synced()
            needed = await self._needed()
            for digest in await self._blobs(forgotten) - needed:
                await self.public.delete(digest)
        log.info("deleted the parts of %d old encodings", len(forgotten))

    async def sweep_blobs(self) -> None:
        """Delete what an interrupted deletion left, after a restart. The trainer uploads an interrupted publication again."""
        if self.checkpoints_kept is None or self.decisions.state.head < 0:
            return
        needed = await self._needed()
        for digest in [digest async for digest in self.public.digests() if digest not in needed]:
            await self.public.delete(digest)

    async def _needed(self) -> set[str]:
        """Return the digests of the blobs that must stay. An older encoding may share a blob with a newer one."""
        return await self._blobs(_known(self.decisions.state)) | {file.digest for file in self.run.spec.model_files}

    async def _blobs(self, names: set[Name]) -> set[str]:
        """Return the digests of all blobs of these encodings."""
        found = set()
        for version in {version for version, _ in names}:
            manifest = parse_json((await self.manifests.read(version)).payload, Manifest)
            chosen = (encoding for encoding in manifest.encodings if (version, encoding.base_version) in names)
            found |= {blob.digest for encoding in chosen for blob in encoding.blobs}
        return found


def _known(state: State) -> set[Name]:
    return {(version, route.base_version) for version, it in state.published.items() for route in it.routes}


def _forgettable(state: State, checkpoints_kept: int) -> set[Name]:
    return _known(state) - kept_encodings(state, checkpoints_kept)
