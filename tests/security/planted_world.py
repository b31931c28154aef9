"""Files of a stranger's folder that hang who reads them, or fill the memory."""

from __future__ import annotations

import os
from pathlib import Path

PLANTED = ("pipe", "device", "huge file")


def plant(file: Path, kind: str) -> None:
    """Put one of PLANTED in the place of a file."""
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "device":
        file.symlink_to("/dev/zero")
    else:
        with file.open("wb") as made:
            made.truncate(2**33)
        file.chmod(0o600)
