"""Evidence: a copy, in the layout of a published folder, of all that a re-execution read of a source.

So a third party gives the folder to `prime-node replay` or `prime-node evidence verify`, and repeats the step offline.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prime_node.files import write_durably
from prime_node.inside import place
from prime_node.ports.documents import (
    HEAD_NAME,
    RUN_NAME,
    TIMESTAMP_NAME,
    amendment_name,
    batch_name,
    blob_name,
    key_ring_name,
    manifest_name,
)
from prime_node.ports.transport import ReplaySource
from prime_protocol.envelope import Envelope
from prime_protocol.requests import BundleRequest

FINDING = "replay-finding.json"
"""File of what was found, in the folder of the evidence."""


@dataclass
class RecordedSource:
    """Implementation of ports.transport.ReplaySource over another one, of which it keeps every answer in `folder`."""

    source: ReplaySource
    folder: Path
    _written: set[str] = field(default_factory=set)

    async def run_spec(self) -> Envelope:
        """Return and keep the RunSpec."""
        return self._kept(RUN_NAME, await self.source.run_spec())

    async def head(self, *, wait_s: float = 0.0) -> Envelope | None:
        """Return and keep the newest manifest."""
        envelope = await self.source.head(wait_s=wait_s)
        return None if envelope is None else self._kept(HEAD_NAME, envelope)

    async def manifest(self, policy_version: int) -> Envelope:
        """Return and keep a manifest."""
        return self._kept(manifest_name(policy_version), await self.source.manifest(policy_version))

    async def public_batch(self, step: int, part: int) -> Envelope:
        """Return and keep a batch."""
        return self._kept(batch_name(step, part), await self.source.public_batch(step, part))

    async def key_ring(self, version: int) -> Envelope:
        """Return and keep a key ring."""
        return self._kept(key_ring_name(version), await self.source.key_ring(version))

    async def calibration(self, version: int) -> Envelope:
        """Return and keep an amendment of the calibration."""
        return self._kept(amendment_name(version), await self.source.calibration(version))

    async def timestamp(self) -> Envelope:
        """Return and keep the timestamp."""
        return self._kept(TIMESTAMP_NAME, await self.source.timestamp())

    async def blob(self, digest: str, *, start: int = 0, end: int | None = None) -> bytes:
        """Return and keep a blob; a range that does not begin at its first byte is not kept."""
        data = await self.source.blob(digest, start=start, end=end)
        if start == 0:
            self._write(blob_name(digest), data)
        return data

    async def bundle(self, request: BundleRequest) -> bytes:
        """Return and keep a bundle that only auditors may read, where a published folder has public ones."""
        data = await self.source.bundle(request)
        self._write(blob_name(request.bundle), data)
        return data

    def finish(self, fields: Mapping[str, Any]) -> None:
        """Write what was found."""
        write_durably(place(self.folder, FINDING), json.dumps(fields, indent=1).encode())

    def _kept(self, name: str, envelope: Envelope) -> Envelope:
        self._write(name, envelope.to_bytes())
        return envelope

    def _write(self, name: str, data: bytes) -> None:
        if name not in self._written:
            path = place(self.folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            self._written.add(name)
