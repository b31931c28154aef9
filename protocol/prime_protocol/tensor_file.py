"""safetensors files as values: named arrays to bytes and back, strict on input from a peer.

The published parser accepts duplicate names (safetensors 0.8), so this module reads the header itself. It must be JSON
without duplicate keys. Its tensors must have the expected names, types and ranks, be aligned, follow each other without
gap or overlap, and fill the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save

from prime_protocol import limits
from prime_protocol.envelope import load_json
from prime_protocol.errors import ErrorCode, RemoteError

_NUMPY: dict[str, type[np.generic]] = {
    "U8": np.uint8,
    "I32": np.int32,
    "I64": np.int64,
    "F32": np.float32,
}


def pack_tensors(tensors: Mapping[str, npt.NDArray[Any]]) -> bytes:
    """Pack arrays into a safetensors file.

    Example: pack_tensors({"lengths": np.array([3], np.int32)}).
    """
    return save({name: np.ascontiguousarray(array) for name, array in tensors.items()})


def unpack_tensors(
    data: bytes, layout: Mapping[str, tuple[str, int]], *, optional: AbstractSet[str] = frozenset()
) -> dict[str, npt.NDArray[Any]]:
    """Return exactly the tensors of `layout` as read-only views of `data`. Raises RemoteError.

    `layout` maps names to (safetensors dtype, rank). Those of `optional` may be missing.
    """
    header_bytes = int.from_bytes(data[:8], "little")
    if len(data) < 8 or header_bytes > min(limits.TENSOR_HEADER_BYTES_MAX, len(data) - 8) or header_bytes % 8:
        raise _malformed("its header does not fit, or is not a multiple of 8 bytes")
    header = load_json(data[8 : 8 + header_bytes])
    if not isinstance(header, dict) or header.keys() | optional != layout.keys() | optional:
        raise _malformed(f"expected exactly the tensors {', '.join(name for name in layout if name not in optional)}")
    body = memoryview(data)[8 + header_bytes :]
    arrays = {}
    covered = []
    for name, (dtype, rank) in layout.items():
        if name in optional and name not in header:
            continue
        shape, start, end = _entry(name, header[name], dtype, rank)
        itemsize = np.dtype(_NUMPY[dtype]).itemsize
        if end - start != prod(shape) * itemsize or end > len(body) or start % itemsize:
            raise _malformed(f"{name} has a size that does not match its shape, or is not aligned")
        arrays[name] = np.frombuffer(body[start:end], dtype=_NUMPY[dtype]).reshape(shape)
        covered.append((start, end))
    if any(array.size == 0 for array in arrays.values()):
        raise _malformed("a tensor is empty")
    covered.sort()
    if covered[0][0] != 0 or covered[-1][1] != len(body) or any(a[1] != b[0] for a, b in pairwise(covered)):
        raise _malformed("its tensors overlap or leave gaps")
    return arrays


def _entry(name: str, entry: object, dtype: str, rank: int) -> tuple[list[int], int, int]:
    """Parse one header entry as (shape, start, end)."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise _malformed(f"{name} needs exactly dtype, shape and data_offsets")
    shape, offsets = entry["shape"], entry["data_offsets"]
    if entry["dtype"] != dtype or not _are_sizes(shape, rank) or not _are_sizes(offsets, 2) or offsets[0] > offsets[1]:
        raise _malformed(f"{name} must be {dtype} of rank {rank}")
    return shape, offsets[0], offsets[1]


def _are_sizes(value: object, count: int) -> bool:
    return (
        isinstance(value, list)
        and len(value) == count
        and all(type(item) is int and 0 <= item < 2**40 for item in value)
    )


def _malformed(detail: str) -> RemoteError:
    return RemoteError(ErrorCode.MALFORMED, f"tensor file: {detail[: limits.NAME_CHARS_MAX]}")
