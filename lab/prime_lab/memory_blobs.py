"""Blobs and documents in memory, for tests and simulations."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

from prime_protocol.digest import digest_of


class MemoryBlobs:
    """Implementation of ports.blobs.Blobs."""

    def __init__(self) -> None:
        self._blobs: dict[str, bytes] = {}
        self._stored_ms: dict[str, float] = {}

    async def put(self, data: bytes, *, digest: str | None = None) -> str:
        digest = digest or digest_of(data)
        self._blobs[digest], self._stored_ms[digest] = bytes(data), 1_000 * time.time()
        return digest

    async def get(self, digest: str, *, start: int = 0, end: int | None = None) -> bytes:
        return self._blobs[digest][start:end]

    async def size(self, digest: str) -> int:
        return len(self._blobs[digest])

    async def has(self, digest: str) -> bool:
        return digest in self._blobs

    async def delete(self, digest: str) -> None:
        self._blobs.pop(digest, None)

    async def digests(self, *, before_ms: int | None = None) -> AsyncIterator[str]:
        for digest in list(self._blobs):
            if before_ms is None or self._stored_ms[digest] < before_ms:
                yield digest


class MemoryDocuments:
    """Implementation of ports.documents.Documents."""

    def __init__(self) -> None:
        self._documents: dict[str, bytes] = {}

    async def write(self, name: str, data: bytes) -> None:
        """Store a document, replacing the old one."""
        self._documents[name] = data

    async def read(self, name: str, *, start: int = 0, end: int | None = None) -> bytes:
        return self._documents[name][start:end]

    async def size(self, name: str) -> int:
        return len(self._documents[name])
