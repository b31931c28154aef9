"""A seeder's store: the newest policies, and the cheapest update paths to them from nothing, for newcomers.

The manifests of what is kept are stored next to the parts, so a restarted seeder announces what it announced before.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from prime_node.broadcast.routes import UpdateRoute, search
from prime_node.broadcast.swarm.have_set import HaveSet, HeldEncoding
from prime_node.broadcast.swarm.part_store import PartStore
from prime_node.broadcast.swarm.piece_sets import span
from prime_node.files import replace
from prime_node.inside import place, read_regular
from prime_protocol import limits
from prime_protocol.chunk_index import open_index
from prime_protocol.envelope import Envelope, open_envelope
from prime_protocol.errors import RemoteError
from prime_protocol.manifest import Encoding, Manifest, SignedManifest, open_manifest
from prime_protocol.pieces import cut_pieces
from prime_protocol.run_spec import PinnedRun

log = logging.getLogger(__name__)

POLICIES_KEPT = 8

Name = tuple[int, int | None]
"""Name of an encoding: its policy, and its base or None for an anchor."""


class SeedStore:
    """The seed store. Used from the event loop only.

    Invariant: what is announced is on disk, and what is dropped was withdrawn before.
    """

    def __init__(self, parts: PartStore, have_set: HaveSet, folder: Path) -> None:
        """Open a store; `folder` is for manifests. Raises OSError."""
        self._parts = parts
        self._have_set = have_set
        self._folder = folder
        self._signed: dict[int, SignedManifest] = {}
        self._here: dict[Name, Encoding] = {}
        self.newest = -1
        """Newest policy of which all encodings are here."""
        folder.mkdir(parents=True, exist_ok=True)

    async def restore(self, run: PinnedRun) -> None:
        """Announce again what was kept before this process began, as far as its bytes are still right."""
        for path in sorted(self._folder.iterdir()):
            try:
                signed = open_manifest(open_envelope(await asyncio.to_thread(read_regular, path)), run)
            except (RemoteError, OSError) as error:
                log.warning("%s: %s", path, error)
                continue
            encodings = signed.manifest.encodings
            whole = [one for one in encodings if await asyncio.to_thread(self._parts.are_sound, one.blobs)]
            for encoding in whole:
                await self.announce(signed.manifest, encoding)
                self.add(signed, encoding)
            if len(whole) == len(encodings):
                self._is_whole(signed)

    async def announce(self, manifest: Manifest, encoding: Encoding) -> None:
        """Announce an encoding to peers, if all of it is on disk."""
        index = await asyncio.to_thread(self._parts.read, encoding.index)
        if index is None or not all(self._parts.has(part.digest) for part in encoding.parts):
            return
        try:
            pieces = cut_pieces(encoding, open_index(index, encoding, manifest.tensors))
        except RemoteError as error:
            log.error("manifest %d: %s", manifest.policy_version, error)
            return
        self._have_set.add(HeldEncoding(encoding, pieces, span(0, len(pieces))))

    def manifest_at_hand(self, policy_version: int) -> Envelope | None:
        """Return the manifest of a policy of which something is kept, else None."""
        kept = self._signed.get(policy_version)
        return None if kept is None else kept.envelope

    def has(self, policy_version: int, base_version: int | None) -> bool:
        """Return whether an encoding is kept."""
        return (policy_version, base_version) in self._here

    def add(self, signed: SignedManifest, encoding: Encoding) -> None:
        """Record one stored encoding: a step on the update path to a policy that `put` will add."""
        version = signed.manifest.policy_version
        self._signed[version] = signed
        self._here[version, encoding.base_version] = encoding

    def put(self, signed: SignedManifest) -> None:
        """Record a policy whose encodings are all stored. Drop what is too old."""
        for encoding in signed.manifest.encodings:
            self.add(signed, encoding)
        kept = self._worth_keeping()
        self._here = {name: encoding for name, encoding in self._here.items() if name in kept}
        self._signed = {version: one for version, one in self._signed.items() if any(v == version for v, _ in kept)}
        self._write_down()
        digests = {blob.digest for encoding in self._here.values() for blob in encoding.blobs}
        self._is_whole(signed)
        self._have_set.keep_only(digests)
        self._parts.keep_only(digests)

    async def check(self) -> None:
        """Compare every stored byte with its digest, and forget what is damaged. Raises OSError."""
        for encoding in [*self._here.values()]:
            await asyncio.to_thread(self._parts.are_sound, encoding.blobs)

    def forget_lost(self) -> None:
        """Forget the encodings whose parts were found damaged or removed, so that the newest policy's are stored again."""
        for name, encoding in [*self._here.items()]:
            if not all(self._parts.has(blob.digest) for blob in encoding.blobs):
                del self._here[name]
                self._have_set.remove(encoding.index.digest)
                self.newest = -1 if name[0] == self.newest else self.newest

    def _is_whole(self, signed: SignedManifest) -> None:
        self.newest = max(self.newest, signed.manifest.policy_version)
        self._have_set.advance_head(self.newest)

    def _write_down(self) -> None:
        """Write the manifests to disk. A full disk costs only what a restart would find."""
        names = {f"{version:0{len(str(limits.STEP_MAX))}}.json": one for version, one in self._signed.items()}
        try:
            there = {path.name for path in self._folder.iterdir()}
            for name in there - names.keys():
                (self._folder / name).unlink()
            for name in names.keys() - there:
                replace(place(self._folder, name), names[name].envelope.to_bytes())
        except OSError as error:
            log.warning("%s: %s", self._folder, error)

    def _worth_keeping(self) -> set[Name]:
        routes: dict[int, list[UpdateRoute]] = {version: [] for version in self._signed}
        for (version, base_version), encoding in self._here.items():
            routes[version].append(UpdateRoute(base_version, encoding.sent_bytes))
        newest = sorted(routes)[-POLICIES_KEPT:]
        kept = {name for name in self._here if name[0] in newest}
        for version in newest:
            way = search(version, routes)
            kept |= set() if way is None else {(hop.policy_version, hop.route.base_version) for hop in way.hops}
        return kept
