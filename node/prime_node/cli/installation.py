"""What install.py of a release has recorded about the environment that this program runs in."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

VERSIONS = "versions"
"""Folder of the environments, one for each version, next to the record."""


def recorded_installation() -> tuple[Path, dict[str, Any]] | None:
    """Return the folder of the installation and its record; None if another program made this environment.

    The record names the key that releases are signed by, so only one that belongs to this user counts.
    """
    environment = Path(sys.prefix)
    folder = environment.parent.parent
    path = folder / "install.json"
    try:
        if environment.parent.name != VERSIONS or path.is_symlink() or path.stat().st_uid != os.geteuid():
            return None
        kept = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return (folder, kept) if isinstance(kept, dict) else None
