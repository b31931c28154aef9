"""Other codecs, implemented from their descriptions, to compare with our codec in one run.

Each baseline codes a whole checkpoint (name -> uint16 bit patterns of bf16) and applies it to the base, in place or into other
memory. Where its authors' own code is slower than plain numpy allows, the baseline uses the faster form, so that the comparison
is fair.

    memcpy      copies the new weights: the speed of memory, no compression
    xor         XOR with the base, chunks of 2^20 elements, zstd -1 (the usual simple delta)
    pulse       PULSE's format: per tensor the changed (row, column) pairs as differences in the narrowest unsigned type,
                and the new values, one zstd -1 frame for everything
    zipnn       ZipNN on whole tensors (full checkpoints only; measured where the package is installed)
"""

from __future__ import annotations

import importlib.util
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import numpy as np
import zstandard

Weights = dict[str, np.ndarray]
CHUNK = 1 << 20


@dataclass(frozen=True)
class Codec:
    """`encode(base, new, pool)` gives blobs; `decode(blobs, base, out, pool)` writes the new weights to `out`, which may be
    `base`."""

    name: str
    encode: Callable[[Weights, Weights, Executor | None], list[Any]]
    decode: Callable[[list[Any], Weights, Weights, Executor | None], None]


def run(pool: Executor | None, function: Callable[..., Any], *columns: Any) -> list[Any]:
    """map() on the pool, or here."""
    return list(map(function, *columns) if pool is None else pool.map(function, *columns))


def pieces(weights: Weights) -> Iterator[np.ndarray]:
    for tensor in weights.values():
        flat = tensor.reshape(-1)
        for begin in range(0, flat.size, CHUNK):
            yield flat[begin : begin + CHUNK]


# memcpy: decoding is the copy itself.
def _memcpy_encode(base: Weights, new: Weights, pool: Executor | None) -> list[Any]:
    return run(pool, np.copy, pieces(new))


def _memcpy_decode(blobs: list[Any], base: Weights, out: Weights, pool: Executor | None) -> None:
    run(pool, np.copyto, pieces(out), blobs)


def _xor_piece(base: np.ndarray, new: np.ndarray) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress((base ^ new).view(np.uint8))


def _unxor_piece(blob: bytes, base: np.ndarray, out: np.ndarray) -> None:
    np.bitwise_xor(base, np.frombuffer(zstandard.ZstdDecompressor().decompress(blob), np.uint16), out=out)


def _xor_encode(base: Weights, new: Weights, pool: Executor | None) -> list[Any]:
    return run(pool, _xor_piece, pieces(base), pieces(new))


def _xor_decode(blobs: list[Any], base: Weights, out: Weights, pool: Executor | None) -> None:
    run(pool, _unxor_piece, blobs, pieces(base), pieces(out))


def _narrowest(values: np.ndarray) -> np.ndarray:
    highest = int(values.max(initial=0))
    return values.astype(np.uint8 if highest < 1 << 8 else np.uint16 if highest < 1 << 16 else np.uint32)


def _pulse_tensor(base: np.ndarray, new: np.ndarray) -> bytes:
    width = base.shape[-1]
    changed = np.flatnonzero(base.reshape(-1) != new.reshape(-1))
    rows, columns = np.divmod(changed, width)
    row_steps = _narrowest(np.diff(rows, prepend=0))
    column_steps = _narrowest(np.where(row_steps == 0, np.diff(columns, prepend=0), columns))
    head = struct.pack("<QBB", changed.size, row_steps.itemsize, column_steps.itemsize)
    return b"".join((head, row_steps.tobytes(), column_steps.tobytes(), new.reshape(-1)[changed].tobytes()))


def _pulse_encode(base: Weights, new: Weights, pool: Executor | None) -> list[Any]:
    content = b"".join(run(pool, _pulse_tensor, base.values(), new.values()))
    return [zstandard.ZstdCompressor(level=1).compress(content)]


def _pulse_decode(blobs: list[Any], base: Weights, out: Weights, pool: Executor | None) -> None:
    content, at = zstandard.ZstdDecompressor().decompress(blobs[0]), 0
    jobs = []
    for old, tensor in zip(base.values(), out.values(), strict=True):
        count, row_size, column_size = struct.unpack_from("<QBB", content, at)
        at += 10
        columns = []
        for size in (row_size, column_size, 2):
            columns.append(np.frombuffer(content, f"<u{size}", count, at))
            at += count * size
        jobs.append((old, tensor, *columns))
    run(pool, _pulse_apply, *zip(*jobs, strict=True))


def _pulse_apply(
    base: np.ndarray, tensor: np.ndarray, row_steps: np.ndarray, column_steps: np.ndarray, values: np.ndarray
) -> None:
    if tensor is not base:
        np.copyto(tensor, base)
    if not values.size:
        return
    rows = np.cumsum(row_steps, dtype=np.int64)
    sums = np.cumsum(column_steps, dtype=np.int64)
    # Column differences restart in every row: subtract the sum of the earlier rows.
    first = np.flatnonzero(np.concatenate(([True], row_steps[1:] != 0)))
    before = sums[first] - column_steps[first]
    columns = sums - np.repeat(before, np.diff(np.append(first, rows.size)))
    tensor.reshape(-1)[rows * tensor.shape[-1] + columns] = values


def _zipnn_encode(base: Weights, new: Weights, pool: Executor | None) -> list[Any]:
    from zipnn import ZipNN

    coder = ZipNN(bytearray_dtype="bfloat16", threads=1)
    return [coder.compress(tensor.tobytes()) for tensor in new.values()]


def _zipnn_decode(blobs: list[Any], base: Weights, out: Weights, pool: Executor | None) -> None:
    from zipnn import ZipNN

    coder = ZipNN(bytearray_dtype="bfloat16", threads=1)
    for blob, tensor in zip(blobs, out.values(), strict=True):
        tensor.reshape(-1)[:] = np.frombuffer(coder.decompress(blob), np.uint16)


MEMCPY = Codec("memcpy", _memcpy_encode, _memcpy_decode)
XOR = Codec("xor+zstd-1", _xor_encode, _xor_decode)
PULSE = Codec("pulse", _pulse_encode, _pulse_decode)
ZIPNN = Codec("zipnn", _zipnn_encode, _zipnn_decode) if importlib.util.find_spec("zipnn") else None
