"""Symbolic links on the way to a path, which a view of the file system must contain besides their targets."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

MADE_ANEW = ("proc", "dev")
"""Folders of the root whose links a view creates itself."""


def links_on_the_way(paths: Iterable[Path]) -> dict[Path, Path]:
    """Find the links in the names of absolute paths: the real place of each, and the real path behind it.

    Neither leads through another link, so a view may create the links in any order. Links without an existing target are left
    out. Example: {Path("/bin"): Path("/usr/bin")}.
    """
    found: dict[Path, Path] = {}
    for path in paths:
        here = Path("/")
        for name in path.parts[1:]:
            step = here.parent if name == ".." else here / name
            if step.parts[1:2] and step.parts[1] in MADE_ANEW:
                break
            if not step.is_symlink():
                here = step
                continue
            try:
                found[step] = here = step.resolve(strict=True)
            except (OSError, RuntimeError):
                break
    return found
