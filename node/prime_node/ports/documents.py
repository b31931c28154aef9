"""Documents: a few small named files, and the names of those that a run publishes."""

from __future__ import annotations

from typing import Protocol

RUN_NAME, HEAD_NAME, TIMESTAMP_NAME = "run.json", "head.json", "timestamp.json"
"""The RunSpec, the newest manifest, and the coordinator's statement of what is newest."""


def manifest_name(policy_version: int) -> str:
    """Return the name of a manifest."""
    return f"manifests/{policy_version:08d}.json"


def batch_name(step: int, part: int) -> str:
    """Return the name of a batch behind a published policy."""
    return f"batches/{step:08d}-{part:04d}.json"


def key_ring_name(version: int) -> str:
    """Return the name of a key ring."""
    return f"keys/{version:04d}.json"


def amendment_name(version: int) -> str:
    """Return the name of an amendment of the calibration."""
    return f"calibrations/{version:04d}.json"


def blob_name(digest: str) -> str:
    """Return the place of a blob in a published folder."""
    return f"blobs/{digest[:2]}/{digest}"


class Documents(Protocol):
    """Storage of named bytes.

    Names are our own ("manifests/00000041.json"), never a peer's. Methods may raise OSError and may be retried.
    """

    async def write(self, name: str, data: bytes) -> None:
        """Store or replace a document durably; no reader ever sees half of it."""

    async def read(self, name: str, *, start: int = 0, end: int | None = None) -> bytes:
        """Return bytes [start, end) of a document. Raises KeyError if it does not exist."""

    async def size(self, name: str) -> int:
        """Return the size of a document. Raises KeyError if it does not exist."""
