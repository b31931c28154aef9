"""Outer layout of a chunk, and the element types. SPEC.md, section "Chunks".

byte 0      magic 0xC5 (the format's version: another layout takes another magic) byte 1      mode byte 2      dtype
code bytes 3-5   number of elements, u24 little-endian, 1 .. CHUNK_ELEMENTS bytes 6-    body, depending on the mode;
nothing may follow it
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from prime_protocol.codec.errors import CodecError

MAGIC = 0xC5
HEAD_BYTES = 6
CHUNK_ELEMENTS = 2**18
"""Maximum elements in a chunk: small enough for a core's own cache, large enough that the head costs nothing."""

Array = npt.NDArray[Any]
Body = list[bytes | memoryview]
"""Bytes after a chunk's head, in pieces."""


class Mode(IntEnum):
    """Representation of the elements in the body. Encoders choose freely; decoders support all modes."""

    SKIP = 0
    """Unchanged elements. The body is empty."""
    CLASS = 1
    """Floats of one or two bytes: steps in order of the base's exponent, each class coded with its own parameters."""
    GAP = 2
    """Positions of the changes as gaps, and the steps, as byte planes."""
    DENSE = 3
    """A step for every element, as byte planes."""
    FULL = 4
    """The elements themselves, as byte planes. The only mode without a base."""


_MODES = tuple(Mode)


@dataclass(frozen=True)
class ElementType:
    """One dtype of the wire. Example: bf16 is ElementType("bf16", code=1, itemsize=2, mantissa_bits=7)."""

    name: str
    code: int
    itemsize: int
    mantissa_bits: int | None
    """Stored fraction bits of a float; None for integers."""

    @property
    def is_float(self) -> bool:
        """Whether the type is a float."""
        return self.mantissa_bits is not None

    @cached_property
    def has_classes(self) -> bool:
        """Whether the CLASS mode supports the type."""
        return self.is_float and self.itemsize <= 2

    @property
    def exponent_shift(self) -> int:
        """Lowest bit of the exponent in a float's bit pattern."""
        assert self.mantissa_bits is not None
        return self.mantissa_bits

    @cached_property
    def storage(self) -> np.dtype[np.unsignedinteger[Any]]:
        """Little-endian unsigned integer type that holds one element's bit pattern."""
        return np.dtype(f"<u{self.itemsize}")


TYPES: dict[str, ElementType] = {
    element.name: element
    for element in (
        ElementType("bf16", 1, 2, 7),
        ElementType("fp16", 2, 2, 10),
        ElementType("fp32", 3, 4, 23),
        ElementType("fp64", 4, 8, 52),
        ElementType("fp8_e4m3", 5, 1, 3),
        ElementType("fp8_e5m2", 6, 1, 2),
        ElementType("u8", 16, 1, None),
        ElementType("u16", 17, 2, None),
        ElementType("u32", 18, 4, None),
        ElementType("u64", 19, 8, None),
        ElementType("i8", 20, 1, None),
        ElementType("i16", 21, 2, None),
        ElementType("i32", 22, 4, None),
        ElementType("i64", 23, 8, None),
        ElementType("bool", 24, 1, None),
    )
}
DTYPES: dict[str, int] = {element.name: element.itemsize for element in TYPES.values()}
"""Element types of the wire: name -> bytes per element."""


def chunk_bytes_max(element: ElementType, count: int) -> int:
    """Return the maximum size of a chunk: FULL stores raw planes if nothing is smaller."""
    return HEAD_BYTES + count * element.itemsize + 1024


def write_head(mode: Mode, element: ElementType, count: int) -> bytes:
    """Return the six bytes before a chunk's body."""
    assert 1 <= count <= CHUNK_ELEMENTS
    return bytes((MAGIC, mode, element.code)) + count.to_bytes(3, "little")


def write_chunk(mode: Mode, element: ElementType, count: int, body: Body) -> bytes:
    """Return a whole chunk. Only this function copies the pieces of its body."""
    return b"".join((write_head(mode, element, count), *body))


def read_chunk_head(data: bytes | memoryview, element: ElementType, count: int) -> Mode:
    """Check the head against the manifest. The head is redundant so that a chunk can be checked alone. Raises CodecError."""
    if len(data) < HEAD_BYTES:
        raise CodecError(f"{len(data)} bytes are not a chunk header")
    if data[0] != MAGIC:
        raise CodecError(f"magic {data[0]:#04x} is not {MAGIC:#04x}")
    if data[2] != element.code:
        raise CodecError(f"dtype code {data[2]} does not match {element.name}")
    announced = int.from_bytes(data[3:6], "little")
    if announced != count or not 1 <= count <= CHUNK_ELEMENTS:
        raise CodecError(f"{announced} elements announced, {count} expected, at most {CHUNK_ELEMENTS}")
    if len(data) > chunk_bytes_max(element, count):
        raise CodecError(f"{len(data)} bytes are too many for {count} elements")
    return mode_of(data)


def mode_of(data: bytes | memoryview) -> Mode:
    """Return a chunk's mode, for statistics and to choose where to decode it. Raises CodecError."""
    if len(data) < HEAD_BYTES or data[1] >= len(_MODES):
        raise CodecError("unknown mode")
    return _MODES[data[1]]


def bit_patterns(array: Array, element: ElementType) -> Array:
    """View a flat array as its unsigned little-endian bit patterns, without a copy. Raises ValueError for any other array."""
    if array.ndim != 1 or not array.flags.c_contiguous or array.itemsize != element.itemsize:
        raise ValueError(
            f"{array.ndim} dimensions of {array.dtype}, not a flat, contiguous tensor of {element.itemsize}-byte elements"
        )
    return array.view(element.storage)


def require_same_size(new: Array, base: Array | None) -> None:
    """Raise ValueError if sizes differ: kernels read as many elements of a base as there are new ones."""
    if base is not None and base.size != new.size:
        raise ValueError(f"a tensor of {new.size} elements, its base has {base.size}")


def address(array: Array) -> int:
    """Return the address of an array's first element."""
    found: int = array.ctypes.data
    return found
