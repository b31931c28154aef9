"""Parts on disk, whole ones and those that are on their way, so that an interrupted download never starts at zero.

Invariant: a file that is named by a digest alone has that digest, and appears under that name whole. A part on its way lies in
`<digest>.partial`: pieces are put where they belong after they were verified, holes are zero. Which of them are there is written
down nowhere: after a restart the bytes are hashed again, because a disk is not trusted more than a peer. Whatever has another
name, or is no file (a link to one would be served to strangers), is neither read nor removed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path

from prime_node.inside import NotRegular, open_regular, place, read_regular
from prime_protocol.digest import digest_of, digest_of_all
from prime_protocol.errors import ErrorCode, PeerError
from prime_protocol.manifest import PartEntry

PARTIAL = ".partial"
_DIGEST = re.compile("[0-9a-f]{64}")
READ_BYTES = 2**20
"""Held at a time of a part that is read to its end."""


class PartStore:
    """A folder of parts. Blocking; each call is short but for the disk. Raises OSError."""

    def __init__(self, folder: Path, *, bytes_max: int) -> None:
        self._folder = folder
        self._bytes_max = bytes_max
        folder.mkdir(parents=True, exist_ok=True)
        self._sizes: dict[str, int] = {}
        """Of whole parts."""
        self._begun: dict[str, int] = {}
        """Of parts on their way: what they will take."""
        for entry in os.scandir(folder):
            digest = entry.name.removesuffix(PARTIAL)
            if _DIGEST.fullmatch(digest) and entry.is_file(follow_symlinks=False):
                sizes = self._sizes if digest == entry.name else self._begun
                sizes[digest] = entry.stat(follow_symlinks=False).st_size

    # Whole parts

    def read(self, entry: PartEntry) -> bytes | None:
        """The part's bytes; None where they are not there whole. A damaged file is removed."""
        if entry.digest not in self._sizes:
            return None
        try:
            data = read_regular(self._whole(entry.digest))
        except (FileNotFoundError, NotRegular):
            data = b""
        if len(data) == entry.size and digest_of(data) == entry.digest:
            return data
        self._forget(entry.digest)
        return None

    def are_sound(self, entries: Collection[PartEntry]) -> bool:
        """Are all of these there whole, and does the disk still give their bytes? A damaged file is removed."""
        for entry in entries:
            if entry.digest not in self._sizes:
                return False
            if digest_of_all(_in_turn(self._whole(entry.digest))) != entry.digest:
                self._forget(entry.digest)
                return False
        return True

    def write(self, digest: str, data: bytes) -> bool:
        """Keep a verified part. False where it would go over the bound: then it is only not resumable."""
        if digest in self._sizes:
            return True
        if not self._has_room(len(data)):
            return False
        partial = self._partial(digest)
        partial.unlink(missing_ok=True)
        with partial.open("xb") as file:
            file.write(data)
        partial.replace(self._whole(digest))
        self._begun.pop(digest, None)
        self._sizes[digest] = len(data)
        return True

    def has(self, digest: str) -> bool:
        return digest in self._sizes

    def has_some(self, digest: str) -> bool:
        """Whole, or on its way since last time."""
        return digest in self._sizes or digest in self._begun

    def size(self, digest: str) -> int | None:
        """Bytes of a part that is there whole."""
        return self._sizes.get(digest)

    # Parts on their way

    def begin(self, entry: PartEntry) -> bool:
        """Make room for a part that comes in pieces, unless it is here, or as much of it as came last time. False: no room."""
        for path, known in ((self._whole(entry.digest), self._sizes), (self._partial(entry.digest), self._begun)):
            if entry.digest in known and path.exists() and path.stat().st_size == entry.size:
                return True
        if entry.digest not in self._begun and not self._has_room(entry.size):
            return False
        self._sizes.pop(entry.digest, None)
        descriptor = open_regular(self._partial(entry.digest), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        with os.fdopen(descriptor, "wb") as file:
            file.truncate(entry.size)
        self._begun[entry.digest] = entry.size
        return True

    def reopen(self, digest: str) -> None:
        """A part that was whole has bytes that are not right any more: from now on it is on its way again."""
        self._whole(digest).replace(self._partial(digest))
        self._begun[digest] = self._sizes.pop(digest)

    def put(self, digest: str, start: int, data: bytes) -> None:
        """Verified bytes of a part that has begun."""
        try:
            descriptor = open_regular(self._partial(digest), os.O_WRONLY)
        except FileNotFoundError:
            if digest in self._sizes:
                return  # a second copy of the last piece, or a part that occurs twice
            raise
        try:
            os.pwrite(descriptor, data, start)
        finally:
            os.close(descriptor)

    def finish(self, entry: PartEntry) -> None:
        """All pieces of a part have come: from now on it is a whole one.

        Raises PeerError(CHAIN_BROKEN) where its digest is another one although every piece was right: it was published so.
        """
        if entry.digest in self._sizes:
            return
        path = self._partial(entry.digest)
        if digest_of_all(_in_turn(path)) != entry.digest:
            self._forget(entry.digest)
            raise PeerError(ErrorCode.CHAIN_BROKEN, f"part {entry.digest[:12]} was published with another digest")
        path.replace(self._whole(entry.digest))
        del self._begun[entry.digest]
        self._sizes[entry.digest] = entry.size

    def get(self, digest: str, start: int, end: int) -> bytes | None:
        """Bytes [start, end) of a part, whole or on its way: whether these have come is the caller's to know."""
        whole = self._whole(digest)
        for path in (whole, self._partial(digest), whole):  # it may become whole in between
            try:
                descriptor = open_regular(path, os.O_RDONLY)
            except (FileNotFoundError, NotRegular):
                continue
            try:
                return os.pread(descriptor, end - start, start)
            finally:
                os.close(descriptor)
        return None

    def get_cached(self, digest: str, start: int, end: int) -> bytes | None:
        """As `get`, for the event loop: only what the system holds in memory, as it does what came lately. Never waits for the
        disk; None where it would have to."""
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
            self._forget(digest)

    def _has_room(self, num_bytes: int) -> bool:
        return sum(self._sizes.values()) + sum(self._begun.values()) + num_bytes <= self._bytes_max

    def _whole(self, digest: str) -> Path:
        return place(self._folder, digest)

    def _partial(self, digest: str) -> Path:
        return place(self._folder, f"{digest}{PARTIAL}")

    def _forget(self, digest: str) -> None:
        self._whole(digest).unlink(missing_ok=True)
        self._partial(digest).unlink(missing_ok=True)
        self._sizes.pop(digest, None)
        self._begun.pop(digest, None)


def _in_turn(path: Path) -> Iterator[bytes]:
    """Nothing where there is no file."""
    try:
        descriptor = open_regular(path, os.O_RDONLY)
    except (FileNotFoundError, NotRegular):
        return
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        while data := file.read(READ_BYTES):
            yield data
