"""Parts on disk, whole and partial, so that an interrupted download never starts at zero.

Invariant: a file named by a digest alone has that digest, and appears under that name whole. A part being downloaded is in
`<digest>.partial`: verified pieces are written at their offsets, holes are zero. No record says which pieces are there. After
a restart the bytes are hashed again, because a disk is trusted no more than a peer. A file that another program has removed or
cut short, or that has a bad sector, counts as absent. Files with other names, and entries that are not regular files (a symbolic
link would be served to strangers), are neither read nor removed.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Collection
from pathlib import Path

from prime_node.files import digest_of_file
from prime_node.inside import NotRegular, naming, open_regular, place, read_regular
from prime_protocol.digest import digest_of, is_digest
from prime_protocol.manifest import PartEntry

log = logging.getLogger(__name__)

PARTIAL = ".partial"


class PartStore:
    """A folder of parts. Its calls block, each briefly except for the disk. Raises OSError."""

    def __init__(self, folder: Path, *, bytes_max: int) -> None:
        self._folder = folder
        self._bytes_max = bytes_max
        folder.mkdir(parents=True, exist_ok=True)
        self._sizes: dict[str, int] = {}
        """Bytes of whole parts."""
        self._begun: dict[str, int] = {}
        """Final bytes of partial parts."""
        for entry in os.scandir(folder):
            digest = entry.name.removesuffix(PARTIAL)
            if is_digest(digest) and entry.is_file(follow_symlinks=False):
                sizes = self._sizes if digest == entry.name else self._begun
                sizes[digest] = entry.stat(follow_symlinks=False).st_size

    # Whole parts

    def read(self, entry: PartEntry) -> bytes | None:
        """Return the part's bytes, or None if the whole part is not stored. Remove a damaged file."""
        if entry.digest not in self._sizes:
            return None
        try:
            data = read_regular(self._whole(entry.digest))
        except OSError as error:
            _require_lost(error)
            data = b""
        if len(data) == entry.size and digest_of(data) == entry.digest:
            return data
        self.drop(entry.digest)
        return None

    def are_sound(self, entries: Collection[PartEntry]) -> bool:
        """Return whether all of these are stored whole and undamaged. Remove a damaged file."""
        for entry in entries:
            if entry.digest not in self._sizes:
                return False
            if _digest_of(self._whole(entry.digest)) != entry.digest:
                self.drop(entry.digest)
                return False
        return True

    def write(self, digest: str, data: bytes) -> bool:
        """Keep a verified part. Return False if it would exceed the bound: then the download cannot be resumed."""
        if digest in self._sizes:
            return True
        if not self._has_room(len(data)):
            return False
        partial = self._partial(digest)
        self._folder.mkdir(parents=True, exist_ok=True)
        partial.unlink(missing_ok=True)
        with naming(self._whole(digest)), partial.open("xb") as file:
            file.write(data)
        partial.replace(self._whole(digest))
        self._begun.pop(digest, None)
        self._sizes[digest] = len(data)
        return True

    def has(self, digest: str) -> bool:
        """Return whether the whole part is stored."""
        return digest in self._sizes

    def has_some(self, digest: str) -> bool:
        """Return whether a part is stored, whole or partial from an earlier download."""
        return digest in self._sizes or digest in self._begun

    def size(self, digest: str) -> int | None:
        """Return the bytes of a whole part, else None."""
        return self._sizes.get(digest)

    # Partial parts

    def begin(self, entry: PartEntry) -> bool:
        """Make room for a part that arrives in pieces, unless it or its partial file is stored already.

        Return False if there is no room.
        """
        for path, known in ((self._whole(entry.digest), self._sizes), (self._partial(entry.digest), self._begun)):
            if entry.digest in known and path.exists() and path.stat().st_size == entry.size:
                return True
        if entry.digest not in self._begun and not self._has_room(entry.size):
            return False
        self._sizes.pop(entry.digest, None)
        self._folder.mkdir(parents=True, exist_ok=True)
        descriptor = open_regular(self._partial(entry.digest), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        with naming(self._partial(entry.digest)), os.fdopen(descriptor, "wb") as file:
            file.truncate(entry.size)
        self._begun[entry.digest] = entry.size
        return True

    def reopen(self, digest: str) -> None:
        """Turn a whole part with wrong bytes into a partial one."""
        self._whole(digest).replace(self._partial(digest))
        self._begun[digest] = self._sizes.pop(digest)

    def put(self, digest: str, start: int, data: bytes) -> None:
        """Write verified bytes of a partial part."""
        try:
            descriptor = open_regular(self._partial(digest), os.O_WRONLY)
        except FileNotFoundError:
            # A second copy of the last piece, or a part that occurs twice. `finish` renames the file in another thread, before it
            # records the part, so look for the file.
            if self._whole(digest).exists():
                return
            raise
        try:
            rest = memoryview(data)
            with naming(self._partial(digest)):
                # A disk that has room for some bytes takes these, and reports no error before the next ones.
                while rest:
                    num_bytes = os.pwrite(descriptor, rest, start)
                    rest, start = rest[num_bytes:], start + num_bytes
        finally:
            os.close(descriptor)

    def finish(self, entry: PartEntry) -> bool:
        """Turn a partial part into a whole one, once all its pieces have arrived. Return False if its digest is wrong.

        Two threads may finish one part: the later one finds it under its final name.
        """
        if entry.digest in self._sizes:
            return True
        partial, whole = self._partial(entry.digest), self._whole(entry.digest)
        if _digest_of(partial) == entry.digest:
            with contextlib.suppress(FileNotFoundError):
                partial.replace(whole)
        elif _digest_of(whole) != entry.digest:
            return False
        self._begun.pop(entry.digest, None)
        self._sizes[entry.digest] = entry.size
        return True

    def get(self, digest: str, start: int, end: int) -> bytes | None:
        """Return bytes [start, end) of a part, whole or partial. The caller knows whether they have arrived."""
        whole = self._whole(digest)
        for path in (whole, self._partial(digest), whole):  # it may be completed in the meantime
            try:
                descriptor = open_regular(path, os.O_RDONLY)
                try:
                    return os.pread(descriptor, end - start, start)
                finally:
                    os.close(descriptor)
            except OSError as error:
                _require_lost(error)
        return None

    def get_cached(self, digest: str, start: int, end: int) -> bytes | None:
        """Return as `get` does, but only from the page cache, for the event loop.

        It never waits for the disk, and returns None where it would have to. The system caches recent data.
        """
        if not hasattr(os, "RWF_NOWAIT"):
            return None
        path = self._whole(digest) if digest in self._sizes else self._partial(digest)
        data = bytearray(end - start)
        try:
            descriptor = open_regular(path, os.O_RDONLY)
            try:
                num_bytes = os.preadv(descriptor, [data], start, os.RWF_NOWAIT)
            finally:
                os.close(descriptor)
        except OSError:  # not in memory, not on this file system, or just renamed
            return None
        return bytes(data) if num_bytes == len(data) else None

    # Both

    def keep_only(self, digests: Collection[str]) -> None:
        """Remove all other parts."""
        for digest in (self._sizes.keys() | self._begun.keys()) - set(digests):
            self.remove(digest)

    def drop(self, digest: str) -> None:
        """Remove a part whose bytes were found to be lost."""
        log.warning("%s is damaged, or was removed: it is no longer served. Check the disk", self._whole(digest))
        self.remove(digest)

    def _has_room(self, num_bytes: int) -> bool:
        return sum(self._sizes.values()) + sum(self._begun.values()) + num_bytes <= self._bytes_max

    def _whole(self, digest: str) -> Path:
        return place(self._folder, digest)

    def _partial(self, digest: str) -> Path:
        return place(self._folder, f"{digest}{PARTIAL}")

    def remove(self, digest: str) -> None:
        """Remove a part, whole or partial."""
        self._sizes.pop(digest, None)  # first: a reader in another thread would take it for lost
        self._begun.pop(digest, None)
        self._whole(digest).unlink(missing_ok=True)
        self._partial(digest).unlink(missing_ok=True)


def _digest_of(path: Path) -> str:
    """Return a file's digest; empty if its bytes are lost."""
    try:
        return digest_of_file(path)
    except OSError as error:
        _require_lost(error)
        return ""


def _require_lost(error: OSError) -> None:
    """Raise an error of reading again, unless it says that the bytes are lost."""
    if not isinstance(error, (FileNotFoundError, NotRegular)) and error.errno != errno.EIO:
        raise error
