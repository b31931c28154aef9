"""Symbolic links on the way to a path, which a view of the file system must contain besides their targets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

LINKS_MAX = 40
"""Links on one path that the system follows."""
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


def replaceable(path: Path, changeable: Iterable[Path]) -> tuple[Path, Path] | None:
    """Find what lets a process that may write in the folders `changeable` decide where an absolute path leads.

    That is a place on the way, or the path itself, inside one of the folders: a link can take its place. Returns the place and
    the folder. The folders themselves stay what they are: what is above them cannot be changed.
    """
    roots = [folder.resolve() for folder in changeable]
    return next(((place, root) for place in _places(path) for root in roots if root in place.parents), None)


def _places(path: Path) -> Iterator[Path]:
    """Yield the real place of each name that the system follows, those in the targets of links included."""
    here, names, num_links = Path("/"), [*path.parts[1:]], 0
    while names:
        name = names.pop(0)
        if name == "..":
            here = here.parent
            continue
        place = here / name
        yield place
        if not place.is_symlink():
            here = place
            continue
        num_links += 1
        if num_links > LINKS_MAX:
            return
        target = place.readlink()
        if target.is_absolute():
            here = Path("/")
        names[:0] = target.parts[1:] if target.is_absolute() else target.parts
