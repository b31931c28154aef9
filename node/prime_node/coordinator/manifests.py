"""The published manifests: their files, and the head."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

from prime_node.coordinator.decisions import Decisions
from prime_node.ports.documents import Documents
from prime_protocol.envelope import Envelope, open_envelope
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.manifest import SignedManifest, open_manifest
from prime_protocol.run_spec import PinnedRun

log = logging.getLogger(__name__)


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
