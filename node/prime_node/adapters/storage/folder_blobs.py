"""Blobs and documents as files of a folder, durable against power loss.

    FOLDER/ab/abcd...        a blob under its digest; the first two digits spread them over 256 folders
    FOLDER/NAME              a document
    FOLDER/.partial/...      being written; old files are deleted when the folder is opened

Each write goes to a temporary name, with fsync, rename, and fsync of the folder. So a reader sees all of a file or none, and a
file survives once `put` has returned. (obstore's local store renames too, but syncs neither file nor folder, which suits caches
alone. It is the way to S3.)
"""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import os
import stat
import time
from collections.abc import AsyncIterator
from pathlib import Path

from prime_node.files import sync, write_durably
from prime_node.inside import NotRegular, open_regular, place
from prime_node.ports.blobs import DamagedBlob
from prime_protocol.digest import digest_of, is_digest

log = logging.getLogger(__name__)

PARTIAL_AGE_S_MAX = 3_600.0
"""Age at which an unfinished file counts as left behind by a crash."""


BLOBS = "blobs"
"""Folder of blobs next to published documents."""


class FolderBlobs:
    """Implementation of ports.blobs.Blobs. Several processes may read and write a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._partial = _open_folder(folder)

    async def put(self, data: bytes, *, digest: str | None = None) -> str:
        return await asyncio.to_thread(self._put, data, digest)

    async def get(self, digest: str, *, start: int = 0, end: int | None = None) -> bytes:
        return await asyncio.to_thread(self._get, digest, start, end)

    async def size(self, digest: str) -> int:
        return _size_of(self._place(digest), digest)

    async def has(self, digest: str) -> bool:
        try:
            await self.size(digest)
        except KeyError:
            return False
        return True

    async def delete(self, digest: str) -> None:
        # Not synced: a blob that returns after a power loss does no harm.
        await asyncio.to_thread(self._path(digest).unlink, missing_ok=True)

    async def digests(self, *, before_ms: int | None = None) -> AsyncIterator[str]:
        """Yield the digests of all blobs, or of those that were last stored before a time, ascending."""
        for folder in await asyncio.to_thread(sorted, self._folder.glob("??")):
            for name in await asyncio.to_thread(_names_in, folder, before_ms):
                yield name

    def _path(self, digest: str) -> Path:
        return Path(self._place(digest))

    def _place(self, digest: str) -> str:
        """Return a blob's path. Raises KeyError if it is no digest: it may come from a peer and must not name another file."""
        if not is_digest(digest):
            raise KeyError(digest)
        return f"{self._folder}/{digest[:2]}/{digest}"

    def _put(self, data: bytes, digest: str | None) -> str:
        digest = digest or digest_of(data)
        path = self._path(digest)
        if self._holds(path, digest, data):
            os.utime(path)  # the blob is young again for `digests`
        else:
            if not path.parent.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                sync(self._folder)
            write_durably(path, data, partial_folder=self._partial)
        return digest

    def _holds(self, path: Path, digest: str, data: bytes) -> bool:
        """Return whether the file of a blob has these bytes, and not others that a disk made of them."""
        try:
            is_there = self._get(digest, 0, None) == data
        except KeyError:
            return False
        except DamagedBlob:
            is_there = False
        if not is_there:
            log.warning("%s was damaged and is written again: check the disk", path)
        return is_there

    def _get(self, digest: str, start: int, end: int | None) -> bytes:
        try:
            return _part_of(self._path(digest), digest, start, end)
        except OSError as error:
            if error.errno == errno.EIO:  # a bad sector
                raise DamagedBlob(errno.EIO, f"{self._folder} cannot read this blob", digest) from error
            raise


class FolderDocuments:
    """Implementation of ports.documents.Documents."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._partial = _open_folder(folder)

    async def write(self, name: str, data: bytes) -> None:
        """Store a document, replacing the old one."""
        await asyncio.to_thread(self._write, name, data)

    async def read(self, name: str, *, start: int = 0, end: int | None = None) -> bytes:
        return await asyncio.to_thread(_part_of, place(self._folder, name), name, start, end)

    async def size(self, name: str) -> int:
        return _size_of(place(self._folder, name), name)

    def names(self) -> list[str]:
        """Return the names of all documents. A folder of blobs among them is left out."""
        found = (path.relative_to(self._folder) for path in sorted(self._folder.rglob("*")) if path.is_file())
        return [name.as_posix() for name in found if name.parts[0] not in (BLOBS, self._partial.name)]

    def _write(self, name: str, data: bytes) -> None:
        path = place(self._folder, name)
        if not path.parent.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            sync(self._folder)
        write_durably(path, data, partial_folder=self._partial)


def _part_of(path: Path, name: str, start: int, end: int | None) -> bytes:
    try:
        with os.fdopen(open_regular(path, os.O_RDONLY), "rb") as file:
            file.seek(start)
            return file.read() if end is None else file.read(max(0, end - start))
    except (FileNotFoundError, NotRegular):
        raise KeyError(name) from None


def _size_of(path: Path | str, name: str) -> int:
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        raise KeyError(name) from None
    if not stat.S_ISREG(found.st_mode):  # a link would be served to strangers
        raise KeyError(name)
    return found.st_size


def _names_in(folder: Path, before_ms: int | None) -> list[str]:
    names = sorted(path.name for path in folder.iterdir() if is_digest(path.name))
    return names if before_ms is None else [name for name in names if _stored_ms(folder / name) < before_ms]


def _stored_ms(path: Path) -> float:
    """Return when a file was last stored; infinity if it is deleted."""
    try:
        return 1_000 * path.lstat().st_mtime
    except FileNotFoundError:
        return math.inf


def _open_folder(folder: Path) -> Path:
    """Make the folder and its folder for unfinished files. Return the latter, without what a crash left."""
    partial = folder / ".partial"
    partial.mkdir(parents=True, exist_ok=True)
    for left_over in partial.iterdir():
        if _stored_ms(left_over) < 1_000 * (time.time() - PARTIAL_AGE_S_MAX):  # another process may write a younger one
            left_over.unlink(missing_ok=True)
    return partial
