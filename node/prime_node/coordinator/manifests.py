"""The published manifests: their files, the head, and which of their encodings stay.

A policy may be needed by a worker that holds a lease for it, that joins now, or that was away, and as the base of a delta. So
the newest policies keep everything. Older ones keep the encodings on the cheapest update paths from nothing to the newest. The
anchor of policy 0 stays: a whole run is compared with it, and root deltas have it as base.

Invariant (invariants.py checks it): an update path leads from nothing to every policy that a lease may name. A publication
whose base has a path has one itself, and deletion does not change the paths in use.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

from prime_node.broadcast.routes import search
from prime_node.coordinator.decisions import Decisions
from prime_node.coordinator.state import events as ev
from prime_node.coordinator.state.batches import oldest_policy_needed
from prime_node.coordinator.state.records import State
from prime_node.ports.blobs import Blobs
from prime_node.ports.documents import Documents
from prime_protocol.envelope import Envelope, open_envelope, parse_json
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.manifest import Manifest, SignedManifest, open_manifest
from prime_protocol.run_spec import PinnedRun

log = logging.getLogger(__name__)

Name = tuple[int, int | None]
"""Name of an encoding: its policy and its base, None for an anchor."""


@dataclass(slots=True)
class PublishedManifests:
    """The manifests of all published policies, as documents that mirrors copy."""

    run: PinnedRun
    decisions: Decisions
    published: Documents
    head: SignedManifest | None = None
    """Newest published manifest."""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Lock held while a publication's blobs are checked and while blobs are deleted, so that checked blobs stay.

    Also held while a key ring is accepted, so that no manifest comes between."""

    async def read(self, policy_version: int) -> Envelope:
        """Return a published manifest. Raise RemoteError(NOT_FOUND)."""
        # A file may exist before its event if the daemon was killed between the two; it is not published then.
        newest = self.decisions.state.head
        if policy_version <= newest:
            try:
                return open_envelope(await self.published.read(manifest_name(policy_version)))
            except KeyError:
                log.error("%s is missing in the published folder", manifest_name(policy_version))
        raise RemoteError(ErrorCode.NOT_FOUND, f"policy {policy_version} is not published; the newest is {newest}")

    async def write(self, signed: SignedManifest) -> None:
        """Write a manifest's file, before it is published."""
        await self.published.write(manifest_name(signed.manifest.policy_version), signed.envelope.to_bytes())

    async def write_head(self) -> None:
        """Rewrite head.json, which names the newest policy to mirrors."""
        if self.head is not None:
            await self.published.write("head.json", self.head.envelope.to_bytes())

    async def restore_head(self) -> None:
        """Read the head from its file after a restart, and rewrite head.json."""
        newest = self.decisions.state.head
        if newest >= 0:
            self.head = open_manifest(await self.read(newest), self.run)
            await self.write_head()


def manifest_name(policy_version: int) -> str:
    """Return the name of a manifest's file."""
    return f"manifests/{policy_version:08d}.json"


def kept_encodings(state: State, checkpoints_kept: int) -> set[Name]:
    """Return the encodings whose bytes must stay."""
    newest = max(checkpoints_kept, state.rules.async_level + 2, state.head + 1 - oldest_policy_needed(state))
    routes = {version: publication.routes for version, publication in state.published.items()}
    kept: set[Name] = {(0, None)}
    for version in state.published:
        if version > state.head - newest:
            kept |= {(version, route.base_version) for route in routes[version]}
            way = search(version, routes)
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
