"""Unnamed files that hold what a publication would need memory for. They end with the process, however that ends."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Self

import numpy as np

from prime_node.files import kind_of
from prime_protocol.codec import DTYPES
from prime_protocol.errors import LocalError
from prime_protocol.manifest import PartEntry, TensorEntry
from prime_protocol.weights import WeightTensor


class PartSpool:
    """The encoded parts of one publication until they are uploaded: no more than one is in memory. Closing it frees the space.

    Used by one thread at a time.
    """

    def __init__(self, folder: Path) -> None:
        """Open a spool in a folder that has room for all encodings of a policy."""
        self._folder = folder
        self.file = tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115 - closed by __exit__
        self._places: dict[str, int] = {}
        self._end = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def keep(self, entry: PartEntry, data: bytes | bytearray) -> None:
        """Write a part, once for each digest. Raises LocalError if the disk is full."""
        if entry.digest in self._places:
            return
        try:
            written = 0
            while written < len(data):
                written += os.pwrite(self.file.fileno(), memoryview(data)[written:], self._end + written)
        except OSError as error:
            raise kind_of(error)(
                f"an encoded policy does not fit into {self._folder}: {error}. Free some space there"
            ) from error
        self._places[entry.digest] = self._end
        self._end += len(data)

    def read(self, entry: PartEntry) -> bytes:
        """Return a part that was kept. Raises LocalError."""
        data = os.pread(self.file.fileno(), entry.size, self._places[entry.digest])
        if len(data) != entry.size:
            raise LocalError(f"the temporary file in {self._folder} lost bytes of part {entry.digest[:12]}")
        return data


_ALIGNED_BYTES = 64


class DiskRoom:
    """Mapped space for the tensors of one policy, each requested once.

    All of it is allocated at once: writing to a mapped file on a full disk would kill the process. What is not free is not asked
    for: the system would fill the disk before it refuses.
    """

    def __init__(self, tensors: Sequence[TensorEntry], folder: Path) -> None:
        """Allocate the space. Raises LocalError if the disk has no room."""
        size = sum(_room(entry.dtype, entry.shape) for entry in tensors)
        with tempfile.TemporaryFile(dir=folder) as file:
            try:
                if size > (free := shutil.disk_usage(folder).free):
                    raise OSError(errno.ENOSPC, f"only {free:,} bytes are free")
                os.posix_fallocate(file.fileno(), 0, max(1, size))
            except OSError as error:
                raise kind_of(error)(
                    f"a policy of {size:,} bytes does not fit into {folder}: {error}. Free some space there"
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
