"""Blobs: immutable bytes, addressed by their digest."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol


class DamagedBlob(OSError):
    """The stored bytes of a blob cannot be read as they were written. A plain outage is another OSError."""


class Blobs(Protocol):
    """Content-addressed storage.

    Every method may raise OSError when the disk or the service fails; every call may be retried.
    """

    async def put(self, data: bytes, *, digest: str | None = None) -> str:
        """Store bytes durably and return their digest.

        Idempotent; no reader ever sees half a blob. A caller that has computed the digest of these bytes itself may
        pass it as `digest`; it is not checked.
        """

    async def get(self, digest: str, *, start: int = 0, end: int | None = None) -> bytes:
        """Return bytes [start, end).

        Raises KeyError if the blob does not exist, and DamagedBlob if the disk cannot read its bytes or the service holds
        other bytes. Not each damage is noticed: a caller that does not trust the disk checks the digest.
        """

    async def size(self, digest: str) -> int:
        """Return the size of a blob in bytes. Raises KeyError if it does not exist."""

    async def has(self, digest: str) -> bool:
        """Return whether a blob exists."""

    async def delete(self, digest: str) -> None:
        """Delete a blob. Idempotent."""

    def digests(self, *, before_ms: int | None = None) -> AsyncIterator[str]:
        """Iterate over all digests, in no order. Blobs stored during the iteration may be missing.

        With `before_ms`, only blobs that were last stored before this time, in milliseconds since 1970. Another process may
        have stored a younger blob for a command that is still on its way.
        """


class UploadUrls(Protocol):
    """Signer of URLs by which workers put the bodies of bundles into a bucket."""

    def url(self, name: str, *, body_bytes: int, sha256: bytes) -> str:
        """Return a URL for one PUT of these bytes as the blob `name`, which never replaces an object. It expires."""
