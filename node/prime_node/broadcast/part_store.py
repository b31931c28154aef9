"""Verified parts on disk, so that an interrupted download never starts at zero.

Invariant: a file is named by the digest of its bytes and appears under that name whole. It is hashed again
when it is read, because a disk is not trusted more than a peer.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from prime_protocol.digest import digest_of
from prime_protocol.manifest import PartEntry


class PartStore:
    """A folder of parts. Blocking; each call is short but for the disk."""

    def __init__(self, folder: Path, *, bytes_max: int) -> None:
        self._folder = folder
        self._bytes_max = bytes_max
        folder.mkdir(parents=True, exist_ok=True)
        self._sizes = {path.name: path.stat().st_size for path in folder.iterdir() if path.suffix != ".partial"}

    def read(self, entry: PartEntry) -> bytes | None:
        """The part's bytes; None where they are not there. A damaged file is removed."""
        if entry.digest not in self._sizes:
            return None
        path = self._folder / entry.digest
        data = path.read_bytes() if path.exists() else b""
        if len(data) == entry.size and digest_of(data) == entry.digest:
            return data
        self._forget(entry.digest)
        return None

    def write(self, digest: str, data: bytes) -> bool:
        """Keep a verified part. False where it would go over the bound: then it is only not resumable."""
        if digest in self._sizes:
            return True
        if sum(self._sizes.values()) + len(data) > self._bytes_max:
            return False
        partial = self._folder / f"{digest}.partial"
        partial.write_bytes(data)
        partial.replace(self._folder / digest)
        self._sizes[digest] = len(data)
        return True

    def has(self, digest: str) -> bool:
        return digest in self._sizes

    def keep_only(self, digests: Collection[str]) -> None:
        """Remove all other parts."""
        for digest in self._sizes.keys() - set(digests):
            self._forget(digest)

    def _forget(self, digest: str) -> None:
        (self._folder / digest).unlink(missing_ok=True)
        self._sizes.pop(digest, None)
