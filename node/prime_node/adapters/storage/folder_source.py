"""A published directory as a checkpoint source, so that everything can be verified offline.

    run.json                      the signed RunSpec
    head.json                     the newest manifest's envelope; no file before the first
    manifests/00000041.json       every manifest's envelope
    batches/00000040-0000.json    every batch's envelope behind them, in a run that can be re-executed
    keys/0001.json                every key ring's envelope
    calibrations/0001.json        the envelope of every amendment of the calibration
    timestamp.json                the coordinator's statement of which of them are the newest
    blobs/ab/abcd...              parts, model files, bundles and training states by digest

The coordinator writes this layout (adapters/storage/folder_blobs.py); a copy of it on any disk or web server is a
mirror. Nothing in it is trusted: readers check signatures and digests.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from prime_node.inside import open_regular, place
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
from prime_node.ports.transport import Unreachable
from prime_protocol import limits
from prime_protocol.digest import is_digest
from prime_protocol.envelope import Envelope, open_envelope
from prime_protocol.errors import ErrorCode, LimitExceeded, RemoteError
from prime_protocol.limits import Limits
from prime_protocol.parcel import PARCEL_OVERHEAD_BYTES_MAX
from prime_protocol.requests import BundleRequest


class FolderSource:
    """Implementation of ports.transport.ReplaySource. Read-only; a file that is replaced is read whole."""

    def __init__(self, folder: Path, *, archived: Path | None = None) -> None:
        """`archived` is the coordinator's folder of the bundles that only auditors may read."""
        self.folder, self._archived = folder, archived
        self.bounds = Limits()

    async def run_spec(self) -> Envelope:
        """Read the RunSpec."""
        return await self._envelope(RUN_NAME)

    async def head(self, *, wait_s: float = 0.0) -> Envelope | None:  # a folder has no changes to wait for
        try:
            return await self._envelope(HEAD_NAME)
        except RemoteError as error:
            if error.code is ErrorCode.NOT_FOUND and self.folder.is_dir():
                return None
            raise

    async def manifest(self, policy_version: int) -> Envelope:
        """Read a manifest."""
        return await self._envelope(manifest_name(policy_version))

    async def public_batch(self, step: int, part: int) -> Envelope:
        """Read the batch behind a published policy."""
        return await self._envelope(batch_name(step, part), limits.WORK_BYTES_MAX)

    async def key_ring(self, version: int) -> Envelope:
        """Read a key ring."""
        return await self._envelope(key_ring_name(version))

    async def calibration(self, version: int) -> Envelope:
        """Read an amendment of the calibration."""
        return await self._envelope(amendment_name(version))

    async def timestamp(self) -> Envelope:
        """Read the timestamp."""
        return await self._envelope(TIMESTAMP_NAME)

    async def blob(self, digest: str, *, start: int = 0, end: int | None = None) -> bytes:
        if not is_digest(digest):
            raise RemoteError(ErrorCode.NOT_FOUND, f"not a digest: {digest[:80]!r}")
        name, bytes_max = blob_name(digest), self.bounds.blob_bytes_max
        return await asyncio.to_thread(self._read, self.folder, name, bytes_max, start, end)

    async def bundle(self, request: BundleRequest) -> bytes:
        """Return a bundle that only auditors may read: of the coordinator's folder, or of evidence, which has it as a blob."""
        digest = request.bundle
        if self._archived is None or not await asyncio.to_thread(
            place(self._archived, f"{digest[:2]}/{digest}").exists
        ):
            return await self.blob(digest)
        bytes_max = self.bounds.rollout_bytes_max + PARCEL_OVERHEAD_BYTES_MAX
        return await asyncio.to_thread(self._read, self._archived, f"{digest[:2]}/{digest}", bytes_max, 0, None)

    async def _envelope(self, name: str, bytes_max: int = limits.ENVELOPE_BYTES_MAX) -> Envelope:
        data = await asyncio.to_thread(self._read, self.folder, name, bytes_max, 0, None)
        return open_envelope(data, bytes_max=bytes_max)

    def _read(self, folder: Path, name: str, bytes_max: int, start: int, end: int | None) -> bytes:
        try:
            with os.fdopen(open_regular(place(folder, name), os.O_RDONLY), "rb") as file:
                size = file.seek(0, 2)
                stop = size if end is None else end
                if not 0 <= start <= stop <= size:
                    raise RemoteError(
                        ErrorCode.BAD_RANGE, f"{name} has {size} bytes, but the request is for {start} to {stop}"
                    )
                if stop - start > bytes_max:
                    raise LimitExceeded("bytes_max", stop - start, bytes_max)
                file.seek(start)
                return file.read(stop - start)
        except FileNotFoundError:
            raise RemoteError(ErrorCode.NOT_FOUND, f"{folder} does not contain {name}") from None
        except OSError as error:
            raise Unreachable(f"{folder}: {name}: {error.strerror}") from None
