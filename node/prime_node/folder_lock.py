"""Lock for one process per folder.

Two coordinators on one store, or two workers on one spool, would destroy each other's data.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Self

from prime_node.files import disk_fault, disk_faults
from prime_node.inside import open_regular, refuse_links
from prime_protocol.errors import LocalError


class FolderInUse(LocalError):
    """Another process holds the lock of a folder."""


class FolderLock:
    """A lock held until `release`, until its context ends, or until the process ends in any way."""

    def __init__(self, folder: Path) -> None:
        """Lock the folder.

        Raises FolderInUse if another process holds it, LocalError if it cannot be locked or a link in it could lead elsewhere.
        """
        with disk_faults(folder):
            folder.mkdir(parents=True, exist_ok=True)
            refuse_links(folder)
            self._descriptor = open_regular(folder / "lock", os.O_RDWR | os.O_CREAT, mode=0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(self._descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(self._descriptor)
            raise FolderInUse(
                f"folder {folder}: process {holder} already uses it; stop that process, or choose another folder"
            ) from None
        try:
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)
        except OSError as error:
            os.close(self._descriptor)
            raise disk_fault(error, folder / "lock") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Release the lock. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def is_in_use(folder: Path) -> bool:
    """Return whether another process holds the folder's lock. Raises LocalError if it cannot be locked."""
    try:
        FolderLock(folder).release()
    except FolderInUse:
        return True
    return False
