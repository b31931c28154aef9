"""Where the shipped configurations are: in a checkout's configs/, or inside an installed wheel."""

from __future__ import annotations

from pathlib import Path

import prime_node
from prime_protocol.errors import LocalError


def config_path(name: str) -> Path:
    """Path of a shipped config. Raises LocalError with the known names."""
    package = Path(prime_node.__file__).parent
    folders = [package / "_configs", package.parents[1] / "configs"]
    for folder in folders:
        if (folder / name).is_file():
            return folder / name
    known = sorted({path.name for folder in folders if folder.is_dir() for path in folder.glob("*.toml")})
    raise LocalError(f"no shipped config {name}; known are {', '.join(known) or 'none'}")
