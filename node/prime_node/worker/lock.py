"""One process per folder: two workers on one spool and one identity would fight over both."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from prime_protocol.errors import LocalError


class FolderLock:
    """Held until `release`, or until the process ends in whatever way."""

    def __init__(self, folder: Path) -> None:
        """Raises LocalError where another process holds it."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise LocalError(f"folder {folder}: {error.strerror}; choose another folder") from None
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._descriptor)
            raise LocalError(
                f"folder {folder}: another worker runs in it; give each worker a folder of its own"
            ) from None

    def release(self) -> None:
        """Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
