"""The trainer as the first seeder: it keeps and serves what it publishes, so that the coordinator need not.

A decorator of the port to the coordinator that keeps a copy of each upload. It announces a policy to its peers once the
coordinator has taken the manifest, or does not answer. The manifest proves itself, so the swarm need not wait for the
coordinator. seed_store.py decides what is kept.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from prime_node.broadcast.seed.seed_store import SeedStore
from prime_node.broadcast.swarm.have_set import HaveSet
from prime_node.broadcast.swarm.part_store import PartStore
from prime_node.ports.transport import PublishPort, Unreachable
from prime_protocol.envelope import Envelope
from prime_protocol.errors import RemoteError
from prime_protocol.manifest import open_manifest
from prime_protocol.run_spec import PinnedRun

log = logging.getLogger(__name__)


class Seeding:
    """Implementation of ports.transport.PublishPort."""

    def __init__(
        self,
        port: PublishPort,
        run: PinnedRun,
        parts: PartStore,
        have_set: HaveSet,
        *,
        folder: Path,
    ) -> None:
        """Wrap `port`. `folder` survives restarts."""
        self._port = port
        self._run = run
        self._parts = parts
        self.have_set = have_set
        self.seed_store = SeedStore(parts, have_set, folder / "manifests")

    async def restore(self) -> None:
        """Serve again what was published before this process began."""
        try:
            await self.seed_store.restore(self._run)
        except OSError as error:
            log.warning("earlier policies are not seeded: %s", error)

    async def put_blob(self, data: bytes, *, seeded: bool = True) -> str:
        """Upload a blob, and keep it on disk if it is `seeded`. Raises RemoteError or Unreachable."""
        digest = await self._port.put_blob(data)
        if seeded:
            await self._on_disk(digest, data)
        return digest

    async def publish(self, manifest: Envelope) -> None:
        """Publish a manifest and seed its policy. Raises RemoteError or Unreachable."""
        signed = open_manifest(manifest, self._run)
        for encoding in signed.manifest.encodings:
            # First, so that workers that see the policy find it here.
            await self.seed_store.announce(signed.manifest, encoding)
        try:
            await self._port.publish(manifest)
        except (RemoteError, Unreachable) as error:
            if isinstance(error, Unreachable) or error.is_transient:
                self.seed_store.put(signed)
            raise
        self.seed_store.put(signed)

    async def _on_disk(self, digest: str, data: bytes) -> None:
        """Write a blob to disk. A full disk costs the seeder, not the run."""
        try:
            await asyncio.to_thread(self._parts.write, digest, data)
        except OSError as error:
            log.warning("blob %s is not seeded: %s", digest[:12], error)

    # Answers of the coordinator

    async def run_spec(self) -> Envelope:
        """Fetch the RunSpec from the coordinator."""
        return await self._port.run_spec()

    async def head(self, *, wait_s: float = 0.0) -> Envelope | None:
        """Fetch the newest manifest from the coordinator."""
        return await self._port.head(wait_s=wait_s)

    async def manifest(self, policy_version: int) -> Envelope:
        """Fetch a manifest from the coordinator."""
        return await self._port.manifest(policy_version)

    async def blob(self, digest: str, *, start: int = 0, end: int | None = None) -> bytes:
        """Return bytes [start, end) of a blob, from disk if they are there."""
        size = self._parts.size(digest)
        here = None if size is None else await asyncio.to_thread(self._parts.get, digest, start, end or size)
        if here is not None and len(here) == (end or size or 0) - start:  # it may have been cut short
            return here
        return await self._port.blob(digest, start=start, end=end)
