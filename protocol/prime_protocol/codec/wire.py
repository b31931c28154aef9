"""What the two decoders of the CLASS mode share: its numbers on the wire, its classes, and one-byte floats in 16 bits."""

from __future__ import annotations

import numpy as np

from prime_protocol.codec.errors import CodecError
from prime_protocol.codec.layout import HEAD_BYTES, Array, ElementType

BODY_AT = HEAD_BYTES + 3
"""Top exponent u8 and boundaries u16 come before the bit streams."""
CLASSES_MAX = 16
WINDOW = 16
"""Binades from the top exponent down in which a class may end."""
ESCAPE = -128
"""The step byte of a change that needs more than seven bits; the step itself follows at the chunk's end."""
PARAMETER_BITS_MAX = 18
PREFIX_MAX = 7

EMPTY, SPARSE, PLANE = 0, 1, 2
"""How a class is coded."""
ONES, EXCEPTIONS, RICE, GOLOMB = 0, 1, 2, 3
"""How the magnitudes of a sparse class are coded."""


def lowest_exponents(top: int, boundaries: int) -> list[int]:
    """Each class's lowest exponent, falling; the last is 0. Bit j of `boundaries` ends a class below exponent top - j."""
    ends = [top - j for j in range(WINDOW) if boundaries >> j & 1]
    if len(ends) >= CLASSES_MAX or (ends and ends[-1] < 1):
        raise CodecError(f"class boundaries {boundaries:#06x} below exponent {top}")
    return [*ends, 0]


def widen(bits: Array) -> Array:
    """One-byte floats as 16-bit patterns: sign on top, magnitude unchanged, so that order and steps stay the same."""
    if bits.itemsize == 2:
        return bits
    words = bits.astype("<u2")
    return (words & np.uint16(0x7F)) | ((words & np.uint16(0x80)) << np.uint16(8))


def narrow(words: Array, element: ElementType) -> Array:
    """The inverse of `widen`."""
    if element.itemsize == 2:
        return words
    return ((words & np.uint16(0x7F)) | (words >> np.uint16(8) & np.uint16(0x80))).astype(np.uint8)
