"""Two-byte floats <-> their two byte planes, rotated left by one bit: the exponent's byte, and mantissa with sign."""

# mypy: allow-untyped-defs, allow-untyped-calls
from __future__ import annotations

from numba import uint8, uint16

from prime_protocol.codec.kernels.base import kernel


@kernel
def split_words(words, low, high):
    for i in range(words.size):
        word = words[i]
        low[i] = uint8((word << uint16(1)) | (word >> uint16(15)))
        high[i] = uint8(word >> uint16(7))


@kernel
def merge_words(words, low, high):
    for i in range(words.size):
        words[i] = (uint16(low[i]) >> uint16(1)) | (uint16(high[i]) << uint16(7)) | (uint16(low[i]) << uint16(15))
