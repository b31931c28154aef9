"""Blobs: immutable bytes, addressed by their digest."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol


class Blobs(Protocol):
    """Content-addressed storage.

    Every method may raise OSError when the disk or the service fails; every call may be retried.
    """

    async def put(self, data: bytes, *, digest: str | None = None) -> str:
        """Store bytes durably and return their digest.

        Idempotent; no reader ever sees half a blob. A caller that has computed the digest of these bytes itself may
        pass it as `digest`; it is not checked.
        """
        ...

    async def get(self, digest: str, *, start: int = 0, end: int | None = None) -> bytes:
        """Return bytes [start, end).

        Raises KeyError if the blob does not exist. A caller that does not trust the disk checks the digest.
        """
        ...

    async def size(self, digest: str) -> int:
        """Return the size of a blob in bytes. Raises KeyError if it does not exist."""
        ...

    async def has(self, digest: str) -> bool:
        """Return whether a blob exists."""
        ...

    async def delete(self, digest: str) -> None:
        """Delete a blob. Idempotent."""
        ...

    def digests(self) -> AsyncIterator[str]:
        """Iterate over all digests, in no order. Blobs stored during the iteration may be missing."""
        ...
