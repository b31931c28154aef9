"""Blobs: immutable bytes under their own digest."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol


class Blobs(Protocol):
    """Content-addressed storage. Every method may raise OSError where the disk or the service fails; all may be retried."""

    async def put(self, data: bytes, *, digest: str | None = None) -> str:
        """Store, durably, and return the digest. Idempotent; no reader ever sees half a blob.

        `digest` is for a caller who has computed it from these bytes himself: it is taken as it is.
        """
        ...

    async def get(self, digest: str, *, start: int = 0, end: int | None = None) -> bytes:
        """Bytes [start, end). Raises KeyError where there is none. The caller checks the digest if he does not trust the disk."""
        ...

    async def size(self, digest: str) -> int:
        """Bytes of a blob. Raises KeyError."""
        ...

    async def has(self, digest: str) -> bool: ...

    async def delete(self, digest: str) -> None:
        """Forget a blob. Idempotent."""
        ...

    def digests(self) -> AsyncIterator[str]:
        """All digests, in no order. Blobs put meanwhile may be missing."""
        ...
