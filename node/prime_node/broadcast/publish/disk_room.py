"""Disk space for one policy's tensors in an unnamed, mapped file, so that holding them takes no memory.

It ends with the process, however that ends. All space is allocated at once: writing to a mapped file on a full disk would
kill the process. What is not free is not asked for: the system would fill the disk before it refuses.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from math import prod
from pathlib import Path

import numpy as np

from prime_protocol.codec import DTYPES
from prime_protocol.errors import LocalError
from prime_protocol.manifest import TensorEntry
from prime_protocol.weights import WeightTensor

_ALIGNED_BYTES = 64


class DiskRoom:
    """Space for the tensors of one table, each requested once."""

    def __init__(self, tensors: Sequence[TensorEntry], folder: Path | None = None) -> None:
        """Allocate the space. Raises LocalError if the disk has no room."""
        place = Path(folder or tempfile.gettempdir())
        size = sum(_room(entry.dtype, entry.shape) for entry in tensors)
        with tempfile.TemporaryFile(dir=place) as file:
            try:
                if size > (free := shutil.disk_usage(place).free):
                    raise OSError(f"only {free:,} bytes are free")
                os.posix_fallocate(file.fileno(), 0, max(1, size))
            except OSError as error:
                raise LocalError(
                    f"a policy of {size:,} bytes does not fit into {place}: {error}. Free some space there"
                ) from error
            self._bytes = np.memmap(file, np.uint8, mode="r+", shape=(max(1, size),))
        self._end = 0

    def tensor(self, dtype: str, shape: tuple[int, ...]) -> WeightTensor:
        """Return the next tensor, uninitialised."""
        start, size = self._end, prod(shape) * DTYPES[dtype]
        self._end += _room(dtype, shape)
        return WeightTensor(dtype, shape, np.asarray(self._bytes[start : start + size]).view(f"<u{DTYPES[dtype]}"))


def _room(dtype: str, shape: tuple[int, ...]) -> int:
    return -(-prod(shape) * DTYPES[dtype] // _ALIGNED_BYTES) * _ALIGNED_BYTES
