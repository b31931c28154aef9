"""Durable files: written under another name, synced, renamed, then the folder synced.

After `write_durably` has returned, the file is complete, even after kill -9 or a power cut; before, the old one is.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def write_durably(path: Path, data: bytes, *, partial_folder: Path | None = None) -> None:
    """Create or replace a file, durably. Raises OSError.

    Unfinished files are in the same folder as `*.partial`, or in `partial_folder`.
    """
    folder = partial_folder or path.parent
    partial = folder / f"{path.name[:100]}.{secrets.token_hex(4)}.partial"
    try:
        with partial.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync(path.parent)


def replace(path: Path, data: bytes) -> None:
    """Create or replace a file atomically but not durably, for content about the present only. Raises OSError."""
    partial = path.with_name(f"{path.name}.partial")
    partial.unlink(missing_ok=True)
    with partial.open("xb") as file:  # never through an existing link
        file.write(data)
    partial.replace(path)


def sync(path: Path) -> None:
    """Make a file's content, or a folder's list of names, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
