"""Two-byte floats <-> their two byte planes, rotated left by one bit: the exponent's byte, and mantissa with sign."""

# mypy: allow-untyped-defs, allow-untyped-calls
from __future__ import annotations

from numba import uint8, uint16

from prime_protocol.codec.kernels.base import inline, kernel
from prime_protocol.codec.kernels.vector import BLOCK, merge_block, settle_stores

ALIGNMENT = 64


@kernel
def split_words(words, low, high):
    """Split words, rotated left by one bit, into low and high bytes."""
    for i in range(words.size):
        word = words[i]
        low[i] = uint8((word << uint16(1)) | (word >> uint16(15)))
        high[i] = uint8(word >> uint16(7))


@kernel
def merge_words(words, low, high):
    """Join low and high bytes into words.

    It writes the whole chunk, which is not read soon. So its stores bypass the cache, which need not fetch the old content.
    """
    aligned = (-words.ctypes.data % ALIGNMENT) // 2
    begin = min(aligned if words.ctypes.data % 2 == 0 else words.size, words.size)
    end = begin + (words.size - begin) // BLOCK * BLOCK
    merge_some(words, low, high, 0, begin)
    for i in range(begin, end, BLOCK):
        merge_block(words, i, low, high)
    merge_some(words, low, high, end, words.size)
    settle_stores()


@inline
def merge_some(words, low, high, begin, end):
    """Join the words from `begin` to `end` one by one."""
    for i in range(begin, end):
        words[i] = (uint16(low[i]) >> uint16(1)) | (uint16(high[i]) << uint16(7)) | (uint16(low[i]) << uint16(15))
