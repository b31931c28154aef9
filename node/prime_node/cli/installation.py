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
    return (folder, with_roles(kept)) if isinstance(kept, dict) else None


def with_roles(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record in its present form. Those of the first installers name one role, as `role`."""
    return {"roles": [record["role"]] if "role" in record else [], **record}
