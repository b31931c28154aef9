"""Shared parts of the two CLASS decoders: constants of the wire, class boundaries, and one-byte floats in 16 bits."""

from __future__ import annotations

import numpy as np

from prime_protocol.codec.errors import CodecError
from prime_protocol.codec.layout import HEAD_BYTES, Array, ElementType

BODY_AT = HEAD_BYTES + 3
"""Offset of the bit streams, after the top exponent u8 and the boundaries u16."""
CLASSES_MAX = 16
WINDOW = 16
"""Binades from the top exponent down in which a class may end."""
ESCAPE = -128
"""Step byte of a change that needs more than seven bits; the step itself follows at the chunk's end."""
PARAMETER_BITS_MAX = 18
PREFIX_MAX = 7

EMPTY, SPARSE, PLANE = 0, 1, 2
"""Coders of a class."""
ONES, EXCEPTIONS, RICE, GOLOMB = 0, 1, 2, 3
"""Codes for the magnitudes of a sparse class."""


def lowest_exponents(top: int, boundaries: int) -> list[int]:
    """Return each class's lowest exponent, descending; the last is 0. Raises CodecError.

    Bit j of `boundaries` ends a class below exponent top - j.
    """
    ends = [top - j for j in range(WINDOW) if boundaries >> j & 1]
    if len(ends) >= CLASSES_MAX or (ends and ends[-1] < 1):
        raise CodecError(f"class boundaries {boundaries:#06x} below exponent {top}")
    return [*ends, 0]


def widen(bits: Array) -> Array:
    """Convert one-byte floats to 16-bit patterns: sign on top, magnitude unchanged, so order and steps stay the same."""
    if bits.itemsize == 2:
        return bits
    words = bits.astype("<u2")
    return (words & np.uint16(0x7F)) | ((words & np.uint16(0x80)) << np.uint16(8))


def narrow(words: Array, element: ElementType) -> Array:
    """Invert `widen`."""
    if element.itemsize == 2:
        return words
    return ((words & np.uint16(0x7F)) | (words >> np.uint16(8) & np.uint16(0x80))).astype(np.uint8)
