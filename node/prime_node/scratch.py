"""Folders for what lives no longer than the process that made them.

Invariant: a folder whose lock is free belongs to nobody. A process that is killed cannot clean up, but the system frees its
locks, so whoever makes the next folder of a kind removes what dead processes have left of it.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import os
import shutil
import stat
import tempfile
import time
from pathlib import Path

YOUNG_S = 60.0
"""A folder that was changed so recently may be one whose maker has not come to lock it yet."""


class Scratch:
    """A new folder below the system's folder for temporary files; `close` removes it. Example: Scratch("environments").path."""

    def __init__(self, kind: str) -> None:
        prefix = f"prime-{kind}-"
        _sweep(Path(tempfile.gettempdir()), prefix)
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        self._descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def close(self) -> None:
        """Idempotent."""
        if self._descriptor >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._descriptor)
            self._descriptor = -1


@functools.cache
def process_folder(kind: str) -> Path:
    """One for as long as this process lives."""
    made = Scratch(kind)
    atexit.register(made.close)
    return made.path


def _sweep(folder: Path, prefix: str) -> None:
    """Remove our own user's folders of this kind that no process holds any more."""
    for path in folder.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            found = path.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
                continue
            if time.time() - found.st_mtime < YOUNG_S:
                continue
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(descriptor)
