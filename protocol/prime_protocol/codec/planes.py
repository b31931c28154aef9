"""Byte planes: the bytes at one position of many values, stored raw, as a constant or as one zstd frame.

A plane on the wire: kind u8, length u24 little-endian, payload. The reader knows in advance how many bytes the plane
must yield. It rejects a frame that declares another size without decompressing it. This check is necessary because
python-zstandard ignores `max_output_size` when a frame declares its own size.
"""

from __future__ import annotations

import threading
from enum import IntEnum

import numpy as np
import zstandard

from prime_protocol.codec.errors import CodecError
from prime_protocol.codec.layout import Array

PLANE_HEAD_BYTES = 4


class PlaneKind(IntEnum):
    """Storage of a plane's payload."""

    RAW = 0
    ZSTD = 1
    CONSTANT = 2
    """One payload byte that represents all."""


ENTROPY_ONLY = zstandard.ZstdCompressionParameters(
    window_log=18, hash_log=6, chain_log=6, search_log=1, min_match=7, strategy=zstandard.STRATEGY_FAST
)
"""Parameters with almost no match search: exponents and steps do not repeat, so zstd's Huffman coder alone is fast and enough."""
MATCHING = zstandard.ZstdCompressionParameters.from_level(3)

_local = threading.local()


def _compressor(parameters: zstandard.ZstdCompressionParameters) -> zstandard.ZstdCompressor:
    """Return one context per thread and setting: contexts are expensive to create and must not be shared."""
    name = "entropy" if parameters is ENTROPY_ONLY else "matching"
    found: zstandard.ZstdCompressor | None = getattr(_local, name, None)
    if found is None:
        found = zstandard.ZstdCompressor(compression_params=parameters)
        setattr(_local, name, found)
    return found


def _decompressor() -> zstandard.ZstdDecompressor:
    found: zstandard.ZstdDecompressor | None = getattr(_local, "decompressor", None)
    if found is None:
        found = _local.decompressor = zstandard.ZstdDecompressor()
    return found


def looks_incompressible(plane: Array) -> bool:
    """Estimate from 16 pieces of 256 bytes whether entropy exceeds 7.8 bits each, so that compressing would waste time."""
    sample = plane if plane.size < 4096 else plane[: plane.size // 16 * 16].reshape(16, -1)[:, :256].reshape(-1)
    counts = np.bincount(sample, minlength=256)
    shares = counts[counts > 0] / sample.size
    missing_bits = 255 / (2 * np.log(2) * sample.size)  # Miller-Madow: a sample's entropy is too low by this much
    return bool(sample.size >= 2048 and -(shares * np.log2(shares)).sum() + missing_bits > 7.8)


def write_plane(
    plane: Array, parameters: zstandard.ZstdCompressionParameters = ENTROPY_ONLY
) -> tuple[bytes, bytes | memoryview]:
    """Return the smallest form of a plane of at least one byte: its head, and a payload that may be the plane itself."""
    first = plane[:1].tobytes()
    kind: PlaneKind = PlaneKind.RAW
    payload: bytes | memoryview = b""
    if plane[-1] == plane[0] and not (plane != plane[0]).any():
        kind, payload = PlaneKind.CONSTANT, first
    elif plane.size > 32 and not looks_incompressible(plane):
        kind, payload = PlaneKind.ZSTD, compress(plane, parameters)
    if kind is PlaneKind.RAW or len(payload) >= plane.size:
        kind, payload = PlaneKind.RAW, plane.data
    return join_plane(kind, payload)


def join_plane(kind: PlaneKind, payload: bytes | memoryview) -> tuple[bytes, bytes | memoryview]:
    """Return a plane's head and its payload."""
    return bytes((kind,)) + len(payload).to_bytes(3, "little"), payload


def split_plane(data: memoryview, offset: int) -> tuple[int, memoryview, int]:
    """Return kind and payload of the plane at `offset`, and the offset of the next one. Raises CodecError."""
    begin = offset + PLANE_HEAD_BYTES
    if begin > len(data):
        raise CodecError("ends inside a plane's head")
    kind, end = data[offset], begin + int.from_bytes(data[offset + 1 : begin], "little")
    if end > len(data):
        raise CodecError("ends inside a plane")
    return kind, data[begin:end], end


def read_plane(data: memoryview, offset: int, size: int) -> tuple[Array, int]:
    """Return the plane of `size` bytes at `offset`, and the offset of the next one. Raises CodecError."""
    kind, payload, end = split_plane(data, offset)
    if kind == PlaneKind.RAW and len(payload) == size:
        return np.frombuffer(payload, np.uint8), end
    if kind == PlaneKind.CONSTANT and len(payload) == 1:
        return np.full(size, payload[0], np.uint8), end
    if kind == PlaneKind.ZSTD:
        return decompress_plane(payload, size), end
    raise CodecError(f"plane of kind {kind} with {len(payload)} bytes, {size} expected")


def require_end(data: memoryview, end: int) -> None:
    """Raise CodecError if bytes follow the last plane."""
    if end != len(data):
        raise CodecError(f"{len(data) - end} bytes after the end")


def compress(plane: Array, parameters: zstandard.ZstdCompressionParameters = ENTROPY_ONLY) -> bytes:
    """Compress into one zstd frame that declares its content size."""
    return _compressor(parameters).compress(np.ascontiguousarray(plane).data)


def decompress_plane(frame: memoryview, size: int) -> Array:
    """Decompress exactly `size` bytes from exactly one frame. Allocates no more than `size`. Raises CodecError."""
    try:
        declared = zstandard.get_frame_parameters(frame)
        if declared.content_size != size or declared.dict_id:
            raise CodecError(f"a zstd frame declares {declared.content_size} bytes, {size} expected")
        content = _decompressor().decompress(frame, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CodecError(f"zstd: {error}") from error
    if len(content) != size:
        raise CodecError(f"a zstd frame yields {len(content)} bytes, {size} expected")
    return np.frombuffer(content, np.uint8)
