"""Blobs and documents in memory, for tests and simulations."""

from __future__ import annotations

from collections.abc import AsyncIterator

from prime_protocol.digest import digest_of


class MemoryBlobs:
    """Implements ports.blobs.Blobs."""

    def __init__(self) -> None:
        self._blobs: dict[str, bytes] = {}

    async def put(self, data: bytes, *, digest: str | None = None) -> str:
        digest = digest or digest_of(data)
        self._blobs[digest] = bytes(data)
        return digest

    async def get(self, digest: str, *, start: int = 0, end: int | None = None) -> bytes:
        return self._blobs[digest][start:end]

    async def size(self, digest: str) -> int:
        return len(self._blobs[digest])

    async def has(self, digest: str) -> bool:
        return digest in self._blobs

    async def delete(self, digest: str) -> None:
        self._blobs.pop(digest, None)

    async def digests(self) -> AsyncIterator[str]:
        for digest in list(self._blobs):
            yield digest


class MemoryDocuments:
    """Implements ports.documents.Documents."""

    def __init__(self) -> None:
        self._documents: dict[str, bytes] = {}

    async def write(self, name: str, data: bytes) -> None:
        self._documents[name] = data

    async def read(self, name: str) -> bytes:
        return self._documents[name]
