"""The index of an encoding: maps bytes of its parts to elements of its tensors. SPEC.md, section "Index".

A row gives a chunk's length, the number of elements that it decodes to, and its digest. Its place follows from the rows
before it: chunks fill the parts and cover the tensors in order. So the format cannot express a gap, an overlap or
another order. It remains to check that every part and every tensor ends where a chunk ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from prime_protocol import limits
from prime_protocol.codec import CHUNK_ELEMENTS
from prime_protocol.digest import digest_of
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.manifest import Encoding, TensorEntry

MAGIC = b"PRX1"
HEAD_BYTES = len(MAGIC) + 4
"""Magic and the number of rows, u32 little-endian."""
ROW = np.dtype([("size", "<u4"), ("count", "<u4"), ("digest", "V32")])
"""Bytes in the part, elements, and blake3 of the bytes."""
INDEX_BYTES_MAX = HEAD_BYTES + limits.CHUNKS_MAX * ROW.itemsize

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class ChunkEntry:
    """Range of one part that decodes to a range of one tensor."""

    part: int
    offset: int
    """First byte in the part."""
    size: int
    digest: str
    """Digest of the compressed bytes."""
    tensor: int
    start: int
    """First element."""
    count: int


@dataclass(frozen=True, slots=True)
class ChunkIndex:
    """Verified index. Chunks are numbered from 0 in their order."""

    rows: Array  # [C] of ROW
    parts: Array  # [C] number of the chunk's part
    offsets: Array  # [C]
    tensors: Array  # [C] number of the chunk's tensor
    starts: Array  # [C]
    first_of_part: Array  # [P + 1] number of each part's first chunk

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> ChunkEntry:
        row = self.rows[number]
        return ChunkEntry(
            part=int(self.parts[number]),
            offset=int(self.offsets[number]),
            size=int(row["size"]),
            digest=self.digest(number),
            tensor=int(self.tensors[number]),
            start=int(self.starts[number]),
            count=int(row["count"]),
        )

    def digest(self, number: int) -> str:
        """Return the digest of a chunk's bytes."""
        digest: bytes = self.rows["digest"][number].tobytes()
        return digest.hex()

    def places(self, numbers: range) -> list[tuple[int, int, int]]:
        """Return (tensor, first element, elements) of neighbouring chunks."""
        these = slice(numbers.start, numbers.stop)
        columns = self.tensors[these], self.starts[these], self.rows["count"][these]
        return list(zip(*(column.tolist() for column in columns), strict=True))

    def cut(self, numbers: range, data: bytes | memoryview) -> list[memoryview]:
        """Split the joined bytes of neighbouring chunks of one part."""
        view, ends = memoryview(data), [0, *accumulate(self.rows["size"][numbers.start : numbers.stop].tolist())]
        assert ends[-1] == len(view)
        return [view[start:end] for start, end in pairwise(ends)]

    def of_part(self, part: int) -> range:
        """Return the numbers of the chunks that fill one part."""
        return range(int(self.first_of_part[part]), int(self.first_of_part[part + 1]))


def pack_index(chunks: Iterable[tuple[int, int, str]]) -> bytes:
    """Pack (size, count, digest) of every chunk in order into the index's bytes."""
    rows = np.array([(size, count, bytes.fromhex(digest)) for size, count, digest in chunks], dtype=ROW)
    return MAGIC + len(rows).to_bytes(4, "little") + rows.tobytes()


def open_index(data: bytes, encoding: Encoding, tensors: Sequence[TensorEntry]) -> ChunkIndex:
    """Open the index of an encoding whose manifest has passed chain.check_manifest. Raises RemoteError.

    (1) it has the size and digest that the manifest names; (2) magic, and as many rows as it declares; (3) no chunk is
    empty or larger than the codec's; (4) every part ends where a chunk ends, and the last chunk ends the last part; (5)
    the same for tensors.
    """
    if len(data) != encoding.index.size or digest_of(data) != encoding.index.digest:  # (1)
        raise RemoteError(ErrorCode.DIGEST_MISMATCH, f"index {encoding.index.digest[:12]} does not match its digest")
    if len(data) < HEAD_BYTES or data[: len(MAGIC)] != MAGIC:  # (2)
        raise RemoteError(ErrorCode.CHAIN_BROKEN, "an index must begin with PRX1 and its number of rows")
    if len(data) - HEAD_BYTES != int.from_bytes(data[len(MAGIC) : HEAD_BYTES], "little") * ROW.itemsize:  # (2)
        raise RemoteError(ErrorCode.CHAIN_BROKEN, "the number of rows of an index differs from the declared one")
    rows = np.frombuffer(data, dtype=ROW, offset=HEAD_BYTES)
    sizes, counts = rows["size"].astype(np.int64), rows["count"].astype(np.int64)
    if not (sizes.all() and counts.all() and (counts <= CHUNK_ELEMENTS).all()):  # (3)
        raise RemoteError(
            ErrorCode.CHAIN_BROKEN, f"a chunk must have at least one byte and 1 to {CHUNK_ELEMENTS} elements"
        )
    parts, offsets = _places(sizes, [part.size for part in encoding.parts], "part")  # (4)
    numbers, starts = _places(counts, [prod(tensor.shape) for tensor in tensors], "tensor")  # (5)
    first_of_part = np.searchsorted(parts, np.arange(len(encoding.parts) + 1))
    return ChunkIndex(rows, parts, offsets, numbers, starts, first_of_part)


def _places(lengths: Array, rooms: Sequence[int], what: str) -> tuple[Array, Array]:
    """Return each chunk's room and its place in it, as chunks fill rooms in order. Raises RemoteError unless they fit exactly."""
    bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    ends = np.cumsum(np.array(rooms, np.int64))
    room_end = int(ends[-1]) if len(ends) else 0
    unmet = np.flatnonzero(bounds[np.minimum(np.searchsorted(bounds, ends), len(bounds) - 1)] != ends)
    if len(unmet) or int(bounds[-1]) != room_end:
        place = int(unmet[0]) if len(unmet) else len(rooms)
        raise RemoteError(ErrorCode.CHAIN_BROKEN, f"the chunks of an index do not end where {what} {place} ends")
    numbers = np.searchsorted(ends, bounds[:-1], side="right")
    begins = ends - np.array(rooms, np.int64)
    return numbers, bounds[:-1] - begins[numbers]
