"""The modes that need only numpy and zstd: GAP, DENSE and FULL, for every element type.

Each body is a series of byte planes (planes.py), lowest byte first. Decoders return the new bit patterns and write
nothing, so a malformed chunk has no effect.

A change is a step from one bit pattern to another: their difference modulo 2^w, with w bits per element. So every pair of
patterns, NaN or not, has exactly one step, and adding it to the base restores the new pattern exactly. For a float that keeps
its sign it counts units in the last place, away from zero if positive.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import zstandard

from prime_protocol.codec.errors import CodecError
from prime_protocol.codec.layout import HEAD_BYTES, Array, Body, ElementType
from prime_protocol.codec.planes import ENTROPY_ONLY, MATCHING, read_plane, require_end, write_plane

GAP_PLANES = 3
"""Bytes of a gap: it is smaller than CHUNK_ELEMENTS, so three are enough."""


def encode_gap(new: Array, base: Array, element: ElementType, changed: Array) -> Body:
    """Return the body of a GAP chunk. `changed` holds the positions, at least one.

    It has the u24 number of changes, three planes of gaps, then the planes of the zigzag steps.
    """
    gaps = np.diff(changed, prepend=-1) - 1
    steps = new[changed] - base[changed]
    planes = [*split_bytes(gaps.astype("<u4"))[:GAP_PLANES], *split_bytes(zigzag(steps, element))]
    return [len(changed).to_bytes(3, "little"), *_written(planes, MATCHING)]


def decode_gap(data: bytes | memoryview, base: Array, element: ElementType) -> Array:
    """Return the new bit patterns of a GAP chunk. Raises CodecError."""
    view, begin = memoryview(data), HEAD_BYTES + 3
    num_changes = int.from_bytes(data[HEAD_BYTES:begin], "little")
    if len(data) < begin or not 1 <= num_changes <= base.size:
        raise CodecError(f"{num_changes} changes in {base.size} elements")
    planes, end = _read_planes(view, begin, num_changes, GAP_PLANES + element.itemsize)
    require_end(view, end)
    gaps = join_bytes([*planes[:GAP_PLANES], np.zeros(num_changes, np.uint8)], np.dtype("<u4"))
    changed = np.cumsum(gaps.astype(np.int64) + 1) - 1
    if changed[-1] >= base.size:
        raise CodecError("a change is past the last element")
    steps = unzigzag(join_bytes(planes[GAP_PLANES:], element.storage), element)
    new = base.copy()
    new[changed] += steps
    return new


def encode_dense(new: Array, base: Array, element: ElementType) -> Body:
    """Return the body of a DENSE chunk: the planes of the zigzag steps of all elements."""
    return _written(split_bytes(zigzag(new - base, element)))


def decode_dense(data: bytes | memoryview, base: Array, element: ElementType) -> Array:
    """Return the new bit patterns of a DENSE chunk. Raises CodecError."""
    view = memoryview(data)
    planes, end = _read_planes(view, HEAD_BYTES, base.size, element.itemsize)
    require_end(view, end)
    new: Array = base + unzigzag(join_bytes(planes, element.storage), element)
    return new


def portable_encode_full(new: Array, element: ElementType) -> Body:
    """Return the body of a FULL chunk: the planes of the elements.

    Floats are rotated left by one bit first, so that the exponent fills a byte of its own and the sign joins the
    mantissa.
    """
    return _written(split_bytes(rotate_left(new, element)))


def portable_decode_full(data: bytes | memoryview, count: int, element: ElementType) -> Array:
    """Return the bit patterns of a FULL chunk. Raises CodecError."""
    view = memoryview(data)
    planes, end = _read_planes(view, HEAD_BYTES, count, element.itemsize)
    require_end(view, end)
    return rotate_right(join_bytes(planes, element.storage), element)


def _written(planes: list[Array], parameters: zstandard.ZstdCompressionParameters = ENTROPY_ONLY) -> Body:
    return [piece for plane in planes for piece in write_plane(plane, parameters)]


def rotate_left(bits: Array, element: ElementType) -> Array:
    """Rotate floats left by one bit; leave integers unchanged."""
    if not element.is_float:
        return bits
    one, top = element.storage.type(1), element.storage.type(8 * element.itemsize - 1)
    rotated: Array = (bits << one) | (bits >> top)
    return rotated


def rotate_right(bits: Array, element: ElementType) -> Array:
    """Invert `rotate_left`."""
    if not element.is_float:
        return bits
    one, top = element.storage.type(1), element.storage.type(8 * element.itemsize - 1)
    rotated: Array = (bits >> one) | (bits << top)
    return rotated


def split_bytes(values: Array) -> list[Array]:
    """Split values into their byte planes, lowest byte first."""
    octets = np.ascontiguousarray(values).view(np.uint8).reshape(-1, values.itemsize)
    return [np.ascontiguousarray(octets[:, place]) for place in range(values.itemsize)]


def join_bytes(planes: list[Array], storage: np.dtype[Any]) -> Array:
    """Invert `split_bytes`."""
    octets = np.empty((planes[0].size, len(planes)), np.uint8)
    for place, plane in enumerate(planes):
        octets[:, place] = plane
    return octets.reshape(-1).view(storage)


def _read_planes(view: memoryview, offset: int, size: int, num_planes: int) -> tuple[list[Array], int]:
    planes: list[Array] = []
    for _ in range(num_planes):
        plane, offset = read_plane(view, offset, size)
        planes.append(plane)
    return planes, offset


def zigzag(steps: Array, element: ElementType) -> Array:
    """Map steps modulo 2^w 0, -1, 1, -2, 2 to 0, 1, 2, 3, 4: small steps of either sign become small numbers."""
    one = element.storage.type(1)
    signs = (steps.view(f"<i{element.itemsize}") >> (8 * element.itemsize - 1)).view(element.storage)
    codes: Array = (steps << one) ^ signs
    return codes


def unzigzag(codes: Array, element: ElementType) -> Array:
    """Invert `zigzag`."""
    one, zero = element.storage.type(1), element.storage.type(0)
    steps: Array = (codes >> one) ^ (zero - (codes & one))
    return steps
