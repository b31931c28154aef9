"""Temporary folders that live no longer than their process.

Invariant: a folder whose lock is free has no owner. A killed process cannot clean up, but the system frees its locks.
So the process that creates the next folder of a kind removes what dead processes have left of it.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import os
import secrets
import shutil
import stat
import tempfile
import time
from pathlib import Path

YOUNG_S = 60.0
"""Age below which an unlocked folder is kept: its creator may not have locked it yet."""


class Scratch:
    """A new folder in the system's temporary folder; `close` removes it. Example: Scratch("environments").path.

    Other users may pass through one with the mode 0o711 if they know its name.
    """

    def __init__(self, kind: str, *, mode: int = 0o700) -> None:
        prefix = f"prime-{kind}-"
        _sweep(Path(tempfile.gettempdir()), prefix)
        self.path = Path(tempfile.gettempdir()) / f"{prefix}{secrets.token_hex(8)}"
        self.path.mkdir(mode=mode)
        self._descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def close(self) -> None:
        """Remove the folder. Idempotent."""
        if self._descriptor >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._descriptor)
            self._descriptor = -1


@functools.cache
def process_folder(kind: str) -> Path:
    """Return this process's folder of a kind, removed at exit."""
    made = Scratch(kind)
    atexit.register(made.close)
    return made.path


def _sweep(folder: Path, prefix: str) -> None:
    """Remove this user's folders of this kind that no process holds any more."""
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
