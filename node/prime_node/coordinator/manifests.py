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
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from prime_node.broadcast.routes import search
from prime_node.coordinator.decisions import Decisions
from prime_node.coordinator.state import events as ev
from prime_node.coordinator.state.batches import oldest_policy_needed
from prime_node.coordinator.state.records import State
from prime_node.ports.blobs import Blobs
from prime_node.ports.documents import HEAD_NAME, Documents, manifest_name
from prime_protocol.envelope import Envelope, open_envelope, parse_json
from prime_protocol.errors import ErrorCode, LocalError, RemoteError
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
                return await self._read(manifest_name(policy_version), policy_version)
            except KeyError:
                log.error("%s is missing in the published folder", manifest_name(policy_version))
            except RemoteError as error:
                log.error(
                    "%s is damaged: %s; put back that file of a copy or a mirror", manifest_name(policy_version), error
                )
        raise RemoteError(ErrorCode.NOT_FOUND, f"policy {policy_version} is not published; the newest is {newest}")

    async def write(self, signed: SignedManifest) -> None:
        """Write a manifest's file, before it is published."""
        await self.published.write(manifest_name(signed.manifest.policy_version), signed.envelope.to_bytes())

    async def write_head(self) -> None:
        """Rewrite head.json, which names the newest policy to mirrors."""
        if self.head is not None:
            await self.published.write(HEAD_NAME, self.head.envelope.to_bytes())

    async def restore_head(self) -> None:
        """Read the head from its file after a restart, and rewrite head.json. Either file heals the other.

        Raise LocalError if both are damaged.
        """
        newest = self.decisions.state.head
        if newest < 0:
            return
        for name in (manifest_name(newest), HEAD_NAME):
            try:
                self.head = open_manifest(await self._read(name, newest), self.run)
            except (KeyError, RemoteError) as error:
                log.warning("%s is damaged or missing: %s", name, error)
                continue
            await self.write(self.head)
            await self.write_head()
            return
        raise LocalError(
            f"{manifest_name(newest)} and {HEAD_NAME} of the published folder are damaged: put back one of them from a copy or "
            "a mirror"
        )

    async def _read(self, name: str, policy_version: int) -> Envelope:
        """Return a manifest from its file. Raise KeyError, and RemoteError if it is not the published one."""
        envelope = open_envelope(await self.published.read(name))
        known = self.decisions.state.published.get(policy_version)
        if known is not None and envelope.digest != known.digest:
            raise RemoteError(
                ErrorCode.DIGEST_MISMATCH, f"its digest is {envelope.digest[:12]}, not {known.digest[:12]}"
            )
        return envelope


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
    public_bytes_max: float
    """Bytes of encodings above which fewer policies are kept."""
    decisions: Decisions
    public: Blobs
    manifests: PublishedManifests
    replayable: Callable[[], Awaitable[set[str]]]
    """Function that returns the blobs that must stay for re-execution."""
    _settled: tuple[int, int] | None = None
    """Head and oldest needed policy with which there was nothing to forget. While both stay, there is nothing either."""

    async def forget_old_encodings(self) -> None:
        """Delete the blobs that only forgotten encodings use. The event comes first: no reader looks for missing bytes.

        Cheap while nothing has changed: the daemon calls it at each tick, and a run may have 10,000 policies.
        """
        state = self.decisions.state
        if state.head < 0 or (now := (state.head, oldest_policy_needed(state))) == self._settled:
            return
        limit = self._limit()
        if limit is None or not _forgettable(state, limit):
            self._settled = now
            return
        async with self.manifests.turn:
            forgotten = _forgettable(self.decisions.state, limit)
            self.decisions.decide(ev.EncodingsForgotten(tuple(sorted(forgotten, key=str))))
            await self.decisions.synced()
            try:
                unneeded = await self._blobs(forgotten) - await self._needed()
            except (RemoteError, OSError) as error:
                log.error("the parts of %d old encodings stay: %s", len(forgotten), error)
                return
            for digest in unneeded:
                if not self.decisions.may_answer():  # the next leader may need it again
                    log.warning("parts of %d old encodings stay for now: the term is over", len(forgotten))
                    return
                try:
                    await self.public.delete(digest)
                except OSError as error:
                    log.warning("part %s stays for now: %s", digest[:12], error)
        log.info("deleted the parts of %d old encodings", len(forgotten))

    async def sweep_blobs(self, *, before_ms: int) -> None:
        """Delete what interrupted deletions and publications left before a time. Younger blobs may await their manifest."""
        state = self.decisions.state
        if state.head < 0 or (self.checkpoints_kept is None and len(state.published) > state.head):
            return  # nothing was ever deleted
        try:
            needed = await self._needed()
            found = self.public.digests(before_ms=before_ms)
            if not (unneeded := {digest async for digest in found if digest not in needed}):
                return
            async with self.manifests.turn:  # a manifest that was published meanwhile may need some of them
                for digest in unneeded - await self._needed():
                    if not self.decisions.may_answer():
                        return
                    await self.public.delete(digest)
        except (RemoteError, OSError) as error:
            log.error("parts that nothing refers to stay for now: %s", error)

    def _limit(self) -> int | None:
        """Return how many newest policies are kept: those of the setting, or fewer if their encodings have too many bytes."""
        state = self.decisions.state
        if _bytes_of(state, _known(state)) <= self.public_bytes_max:
            return self.checkpoints_kept
        limit = min(self.checkpoints_kept or len(state.published), len(state.published))
        while limit > 1 and _bytes_of(state, kept_encodings(state, limit)) > self.public_bytes_max:
            limit //= 2
        return limit

    async def _needed(self) -> set[str]:
        """Return the digests of the blobs that must stay. An older encoding may share a blob with a newer one."""
        model_files = {file.digest for file in self.run.spec.model_files}
        return await self._blobs(_known(self.decisions.state)) | model_files | await self.replayable()

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


def _bytes_of(state: State, names: set[Name]) -> int:
    """Return the bytes of encodings; a blob that two share counts twice."""
    routes = ((version, route) for version, it in state.published.items() for route in it.routes)
    return sum(route.sent_bytes for version, route in routes if (version, route.base_version) in names)


def _forgettable(state: State, checkpoints_kept: int) -> set[Name]:
    return _known(state) - kept_encodings(state, checkpoints_kept)
