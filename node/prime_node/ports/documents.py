"""Documents: a few small named files, such as the published manifests."""

from __future__ import annotations

from typing import Protocol


class Documents(Protocol):
    """Storage of named bytes.

    Names are our own ("manifests/00000041.json"), never a peer's. Methods may raise OSError and may be retried.
    """

    async def write(self, name: str, data: bytes) -> None:
        """Store or replace a document durably; no reader ever sees half of it."""
        ...

    async def read(self, name: str, *, start: int = 0, end: int | None = None) -> bytes:
        """Return bytes [start, end) of a document. Raises KeyError if it does not exist."""
        ...

    async def size(self, name: str) -> int:
        """Return the size of a document. Raises KeyError if it does not exist."""
        ...
