"""Room on the disk for one policy's tensors, so that holding it takes no memory: the file is mapped, and has no name.

It ends with the process, however that ends. All of it is taken at once: a mapped file that the disk has no room for would end the
process where it is written to.
"""

from __future__ import annotations

import os
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
    """For the tensors of one table, each asked for once."""

    def __init__(self, tensors: Sequence[TensorEntry], folder: Path | None = None) -> None:
        """Raises LocalError where the disk has no room."""
        place = Path(folder or tempfile.gettempdir())
        size = sum(_room(entry.dtype, entry.shape) for entry in tensors)
        with tempfile.TemporaryFile(dir=place) as file:
            try:
                os.posix_fallocate(file.fileno(), 0, max(1, size))
            except OSError as error:
                raise LocalError(
                    f"a policy of {size:,} bytes does not fit into {place}: {error}. Make room there"
                ) from error
            self._bytes = np.memmap(file, np.uint8, mode="r+", shape=(max(1, size),))
        self._end = 0

    def tensor(self, dtype: str, shape: tuple[int, ...]) -> WeightTensor:
        """The next one, uninitialised."""
        start, size = self._end, prod(shape) * DTYPES[dtype]
        self._end += _room(dtype, shape)
        return WeightTensor(dtype, shape, np.asarray(self._bytes[start : start + size]).view(f"<u{DTYPES[dtype]}"))


def _room(dtype: str, shape: tuple[int, ...]) -> int:
    return -(-prod(shape) * DTYPES[dtype] // _ALIGNED_BYTES) * _ALIGNED_BYTES
