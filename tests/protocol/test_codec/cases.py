"""Weights to encode, ways to change them, and comparisons of all decoders."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from prime_lab import codec_reference as reference
from prime_protocol.codec import (
    CodecError,
    Mode,
    class_portable,
    classes,
    decode_chunk,
    encode_tensor,
    mode_of,
)
from prime_protocol.codec.kernels.vector import HAS_WIDE
from prime_protocol.codec.layout import TYPES, read_chunk_head, write_head

Array = npt.NDArray[Any]
FLOATS_WITH_CLASSES = [name for name, element in TYPES.items() if element.has_classes]
SPECIALS = {
    # +-0, least and greatest subnormal, least normal, 1, -1, greatest, +-inf, quiet and signalling NaNs with payloads
    "bf16": [0, 0x8000, 1, 0x8001, 0x7F, 0x80, 0x3F80, 0xBF80, 0x7F7F, 0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF],
    "fp16": [0, 0x8000, 1, 0x8001, 0x3FF, 0x400, 0x3C00, 0xBC00, 0x7BFF, 0x7C00, 0xFC00, 0x7E00, 0x7C01, 0xFFFF],
    "fp8_e4m3": [0, 0x80, 1, 0x81, 7, 8, 0x38, 0xB8, 0x7E, 0x7F, 0xFF],
    "fp8_e5m2": [0, 0x80, 1, 0x81, 3, 4, 0x3C, 0xBC, 0x7B, 0x7C, 0xFC, 0x7D, 0xFF],
}


def weights(count: int, dtype: str, seed: int) -> Array:
    """Return bit patterns distributed like weights: mostly a few binades, and every special value somewhere."""
    element, rng = TYPES[dtype], np.random.default_rng(seed)
    bits = rng.integers(0, 256, count * element.itemsize, np.uint8).view(element.storage)
    if element.has_classes:
        top = (1 << (8 * element.itemsize - 1 - element.exponent_shift)) // 2
        exponents = np.maximum(top - rng.geometric(0.5, count), 0).astype(element.storage)
        exponent_mask = element.storage.type((1 << (8 * element.itemsize - 1)) - (1 << element.exponent_shift))
        bits = (bits & ~exponent_mask) | (exponents << element.storage.type(element.exponent_shift))
        places = rng.integers(0, max(1, count), count // 50)
        bits[places] = rng.choice(np.array(SPECIALS[dtype], element.storage), places.size)
    return bits


def changed(bits: Array, density: float, spread: float, seed: int) -> Array:
    """Return a copy in which a share of the elements moved by steps of about `spread`, and a few by any amount."""
    rng, new = np.random.default_rng(seed), bits.copy()
    where = np.flatnonzero(rng.random(bits.size) < density)
    steps = np.rint(rng.laplace(0, spread, where.size)).astype(np.int64)
    new[where] += (steps + np.where(steps >= 0, 1, 0)).astype(bits.dtype)
    wild = where[rng.random(where.size) < 0.01]
    new[wild] = rng.integers(0, 256, wild.size * bits.itemsize, np.uint8).view(bits.dtype)
    return new


def round_trip(new: Array, base: Array | None, dtype: str) -> list[Mode]:
    """Encode, decode in another order and in place, compare; return the used modes."""
    chunks = list(encode_tensor(new, base, dtype=dtype))
    assert sum(chunk.count for chunk in chunks) == new.size
    out = np.full_like(new, 7)
    in_place = None if base is None else base.copy()
    for chunk in random.Random(0).sample(chunks, len(chunks)):
        decode_chunk(chunk.data, out, base, dtype=dtype, start=chunk.start, count=chunk.count)
        if in_place is not None:
            decode_chunk(chunk.data, in_place, in_place, dtype=dtype, start=chunk.start, count=chunk.count)
    assert np.array_equal(out, new)
    assert in_place is None or np.array_equal(in_place, new)
    return [mode_of(chunk.data) for chunk in chunks]


def class_chunk(new: Array, base: Array, dtype: str) -> bytes:
    (chunk,) = classes.encode_classes([(new, base)], TYPES[dtype])
    return write_head(Mode.SKIP, TYPES[dtype], new.size) if chunk is None else chunk


Decoder = Callable[[bytes, Array, str, Array], list[int]]


def _by_kernels(data: bytes, base: Array, dtype: str, out: Array, *, wide: bool) -> list[int]:
    classes.decode_classes(data, out, base, TYPES[dtype], wide=wide and HAS_WIDE)
    result: list[int] = out.tolist()
    return result


KERNELS: list[Decoder] = [partial(_by_kernels, wide=True), partial(_by_kernels, wide=False)]
ALL_DECODERS: list[Decoder] = [
    lambda data, base, dtype, _: reference.decode(data, base.tolist(), dtype=dtype, count=base.size),
    lambda data, base, dtype, _: class_portable.portable_decode_classes(data, base, TYPES[dtype]).tolist(),
    *KERNELS,
]


def decode_all_ways(
    data: bytes, base: Array, dtype: str, decoders: Sequence[Decoder] = ALL_DECODERS
) -> list[list[int] | None]:
    """Return the result of each implementation of the CLASS decoder for a chunk; None if it refuses the chunk.

    The head, which bounds the chunk's length, is checked before all of them, as `decode_chunk` does: they read only the body.
    """
    results: list[list[int] | None] = []
    guarded = np.full(base.size + 512, 0xA5, base.dtype)
    for decode in decoders:
        try:
            read_chunk_head(data, TYPES[dtype], base.size)
            results.append(decode(data, base, dtype, guarded[256:-256]))
        except CodecError:
            results.append(None)
    assert (guarded[:256] == 0xA5).all()
    assert (guarded[-256:] == 0xA5).all()
    return results
