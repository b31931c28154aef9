"""Files that survive: written under another name, synced, renamed, the folder synced.

After `write_durably` has returned, the file is there whole, even after kill -9 or a power cut; before, the old one is.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def write_durably(path: Path, data: bytes, *, partial_folder: Path | None = None) -> None:
    """Create or replace a file. Unfinished files lie beside it as `*.partial`, or in `partial_folder`. Raises OSError."""
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
    """Create or replace a file, whole for its readers, not durable: for what is only about now. Raises OSError."""
    partial = path.with_name(f"{path.name}.partial")
    partial.unlink(missing_ok=True)
    with partial.open("xb") as file:  # never through a link that lies there
        file.write(data)
    partial.replace(path)


def sync(path: Path) -> None:
    """Make a file's content, or a folder's list of names, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
