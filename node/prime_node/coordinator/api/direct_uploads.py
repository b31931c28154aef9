"""Direct uploads: a worker puts the body of a bundle into the bucket itself, and sends only the signed header to /v1/rollouts.

The object is named by the lease, so a lease has at most one, of at most the size that its bundle may have. The service may
enforce less than the URL binds, and others may write in the bucket. So nothing is taken from the object's being there: its size
is compared before it is read, no more than that is read, and the bundle then passes the same checks as any other (intake.py). Its
bytes are stored again under the bundle's name, where no worker can write. Then the object is deleted. One that is left over is
deleted when its lease is over.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from prime_node.coordinator.decisions import Decisions
from prime_node.ports.blobs import Blobs, DamagedBlob, UploadUrls
from prime_node.ports.clock import Clock
from prime_protocol import limits
from prime_protocol.errors import ErrorCode, LimitExceeded, RemoteError
from prime_protocol.replies import UploadUrl
from prime_protocol.requests import UploadUrlRequest
from prime_protocol.rollout import RolloutHeader, body_bytes_max
from prime_protocol.run_spec import PinnedRun

log = logging.getLogger(__name__)

BODIES_MAX = 4
"""Bodies from the bucket in memory at once; further bundles wait."""
SWEEP_S = 600.0
"""Interval at which objects that are left over are looked for."""


@dataclass(frozen=True, slots=True)
class DirectBucket:
    """Place for bodies that workers write."""

    incoming: Blobs
    """Objects, by lease instead of by digest."""
    urls: UploadUrls


@dataclass(slots=True)
class DirectUploads:
    """Bodies in a bucket, or none if the coordinator takes all bodies itself."""

    run: PinnedRun
    clock: Clock
    decisions: Decisions
    bucket: DirectBucket | None
    _reading: set[str] = field(default_factory=set)
    _room: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(BODIES_MAX))

    async def upload_url(self, signer: str, request: UploadUrlRequest) -> UploadUrl:
        """Answer with a URL for the body of the bundle of one lease. Raise RemoteError."""
        lease = self.decisions.state.lease_of(request.lease_id, signer)
        if self.bucket is None:
            raise RemoteError(ErrorCode.NOT_FOUND, "this coordinator takes bundles itself")
        if lease is None or lease.worker != signer or lease.bundle is not None:
            raise RemoteError(ErrorCode.LEASE_UNKNOWN, "no lease of yours waits for a bundle under this id")
        bound = lease_bytes_max(len(lease.slots), self.run)
        if request.body_bytes > bound:
            raise LimitExceeded("the lease's body_bytes_max", request.body_bytes, bound)
        sha256 = bytes.fromhex(request.body_sha256)
        return UploadUrl(url=self.bucket.urls.url(request.lease_id, body_bytes=request.body_bytes, sha256=sha256))

    @asynccontextmanager
    async def body_of(self, header: RolloutHeader) -> AsyncIterator[bytes]:
        """Yield the body that the bucket holds for a lease, unverified. Delete it unless the same header may come again.

        Raise RemoteError, and OSError if the service fails.
        """
        if header.lease_id in self._reading:  # one request must not cost many readings
            raise RemoteError(ErrorCode.UNAVAILABLE, "this bundle is being read", retry_after_s=1.0)
        self._reading.add(header.lease_id)
        try:
            async with self._room:
                try:
                    yield await self._read(header)
                except RemoteError as error:
                    if not error.is_transient:
                        await self._forget(header.lease_id)
                    raise
                await self._forget(header.lease_id)
        finally:
            self._reading.discard(header.lease_id)

    async def sweep(self) -> None:
        """Delete the objects of leases that are over, now and again. Runs until it is cancelled."""
        while self.bucket is not None:
            age_s = self.run.spec.lease_seconds + limits.UPLOAD_URL_S_MAX + limits.REQUEST_AGE_S_MAX
            before_ms = self.clock.now_ms() - round(1_000 * age_s)
            try:
                for name in [name async for name in self.bucket.incoming.digests(before_ms=before_ms)]:
                    await self.bucket.incoming.delete(name)
            except OSError as error:
                log.warning("uploads that are left over stay in the bucket for now: %s", error)
            await self.clock.sleep(SWEEP_S)

    async def _read(self, header: RolloutHeader) -> bytes:
        missing = RemoteError(ErrorCode.NOT_FOUND, "the bucket does not hold this body: send the bundle whole")
        if self.bucket is None:
            raise missing
        try:
            if await self.bucket.incoming.size(header.lease_id) != header.body_bytes:
                raise missing
            return await self.bucket.incoming.get(header.lease_id, start=0, end=header.body_bytes)
        except (KeyError, DamagedBlob):
            raise missing from None

    async def _forget(self, lease_id: str) -> None:
        if self.bucket is None:
            return
        try:
            await self.bucket.incoming.delete(lease_id)
        except OSError as error:
            log.info("the upload of lease %s stays in the bucket for now: %s", lease_id[:12], error)


def lease_bytes_max(num_slots: int, run: PinnedRun) -> int:
    """Return the bound on the body of a lease's bundle, compressed or not."""
    return body_bytes_max(
        num_rollouts=num_slots * run.spec.rollouts_per_group,
        completion_tokens_max=run.spec.sampling.completion_tokens_max,
        turns_max=run.spec.turns_max,
        context_tokens_max=max(map(run.spec.context_tokens_max, run.spec.environments)),
    )
