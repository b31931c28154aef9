"""Finds the file that a RunSpec's `options.path` means, outside the environment process.

The path is untrusted. Two safeguards. The path must lead into the data folder in this machine's own settings, after following
symbolic links, or to a file of the hub. And the caller compares the digest in the RunSpec, so environments can read only files
whose content the run's author already knows.
"""

from __future__ import annotations

import stat
from collections.abc import Sequence
from pathlib import Path

from prime_node.adapters.environments.hub_files import PREFIX, hub_file


def find_file(path: str, folder: Path | None, *, hidden: Sequence[Path] = (), hub_bytes_max: int = 0) -> Path:
    """Return the absolute path of a dataset's file in `folder`, this machine's data folder, but in no folder of `hidden`.

    Raises ValueError and OSError.
    """
    if path.startswith(PREFIX):
        return hub_file(path, bytes_max=hub_bytes_max)
    if folder is None:
        raise ValueError(
            f"options.path = {path!r} is relative to the folder of this machine's datasets; set environments.data_folder"
        )
    root = folder.resolve()
    try:
        found = (root / path).resolve(strict=True)
    except RuntimeError:
        raise ValueError(f"options.path = {path!r}: symbolic links that lead to each other") from None
    if not found.is_relative_to(root):
        raise ValueError(
            f"options.path = {path!r} leads out of {folder}; put the file there, or set environments.data_folder"
        )
    if any(found.is_relative_to(kept.resolve()) for kept in hidden):
        raise ValueError(f"options.path = {path!r} leads into a folder that holds keys; choose another data folder")
    if not stat.S_ISREG(found.stat().st_mode):
        raise ValueError(f"options.path = {path!r} is not a regular file")
    return found
