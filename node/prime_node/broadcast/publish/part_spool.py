"""Encoded parts on disk until they are uploaded, so that a publication takes no more memory than one part.

One unnamed file, which ends with the process, however that ends. Used by one thread at a time.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Self

from prime_protocol.errors import LocalError
from prime_protocol.manifest import PartEntry


class PartSpool:
    """The parts of one publication. Closing it frees the space."""

    def __init__(self, folder: Path | None = None) -> None:
        """Open a spool. `folder` has room for all encodings of a policy; the default is the system's temporary folder."""
        self._folder = Path(folder or tempfile.gettempdir())
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
            raise LocalError(
                f"an encoded policy does not fit into {self._folder}: {error}. Free some space there, or set TMPDIR"
            ) from error
        self._places[entry.digest] = self._end
        self._end += len(data)

    def read(self, entry: PartEntry) -> bytes:
        """Return a part that was kept. Raises LocalError."""
        data = os.pread(self.file.fileno(), entry.size, self._places[entry.digest])
        if len(data) != entry.size:
            raise LocalError(f"the temporary file in {self._folder} lost bytes of part {entry.digest[:12]}")
        return data
