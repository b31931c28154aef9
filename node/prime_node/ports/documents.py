"""Documents: a few small named files, such as the published manifests."""

from __future__ import annotations

from typing import Protocol


class Documents(Protocol):
    """Named bytes. Names are our own ("manifests/00000041.json"), never a peer's. May raise OSError; may be retried."""

    async def write(self, name: str, data: bytes) -> None:
        """Store or replace, durably; no reader ever sees half a document."""
        ...

    async def read(self, name: str) -> bytes:
        """Raises KeyError where there is none."""
        ...
