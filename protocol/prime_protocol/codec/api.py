"""What the rest of the project calls: a tensor in, chunks out; a chunk in, a range of a tensor out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from prime_protocol.codec import portable
from prime_protocol.codec.errors import CodecError
from prime_protocol.codec.layout import (
    CHUNK_ELEMENTS,
    HEAD_BYTES,
    TYPES,
    Array,
    ElementType,
    Mode,
    bit_patterns,
    read_head,
    write_head,
)

GAP_DENSITY_MAX = 0.2
"""Above this share of changed elements a step for each element is smaller than positions."""


@dataclass(frozen=True, slots=True)
class EncodedChunk:
    """Elements start .. start + count of one tensor. Example: EncodedChunk(b"\\xc5\\x00...", start=262144, count=262144)."""

    data: bytes
    start: int
    count: int


def encode_tensor(new: Array, base: Array | None, *, dtype: str) -> Iterator[EncodedChunk]:
    """Chunks of a flat, contiguous tensor in order; none where the tensor is empty. `base` None makes an anchor."""
    element = TYPES[dtype]
    new_bits = bit_patterns(new, element)
    base_bits = None if base is None else bit_patterns(base, element)
    assert base_bits is None or base_bits.size == new_bits.size
    for start in range(0, new_bits.size, CHUNK_ELEMENTS):
        part = slice(start, start + CHUNK_ELEMENTS)
        data = encode_chunk(new_bits[part], None if base_bits is None else base_bits[part], element)
        yield EncodedChunk(data, start, new_bits[part].size)


def decode_chunk(
    data: bytes, out: Array, base: Array | None, *, dtype: str, start: int, count: int
) -> None:
    """Write elements start .. start + count of `out`.

    Raises CodecError, and nothing else, on any bytes. A chunk that is refused has written nothing. `out` may be `base`
    itself, to update weights in place; applying a delta twice is then wrong, so keep a record per chunk.
    """
    element = TYPES[dtype]
    assert 0 <= start and start + count <= out.size and (base is None or base.size == out.size)
    target = bit_patterns(out, element)[start : start + count]
    source = None if base is None else bit_patterns(base, element)[start : start + count]
    mode = read_head(data, element, count)
    if mode is Mode.FULL:
        target[:] = portable.decode_full(data, count, element)
        return
    if source is None:
        raise CodecError(f"mode {mode.name} needs a base")
    if mode is Mode.SKIP:
        if len(data) != HEAD_BYTES:
            raise CodecError("a skipped chunk has no body")
        target[:] = source
    elif mode is Mode.GAP:
        target[:] = portable.decode_gap(data, source, element)
    elif mode is Mode.DENSE:
        target[:] = portable.decode_dense(data, source, element)
    else:
        raise CodecError(f"mode {mode.name} is not known")


def encode_chunk(new: Array, base: Array | None, element: ElementType) -> bytes:
    """One chunk in the mode that costs least."""
    if base is None:
        return write_head(Mode.FULL, element, new.size) + portable.encode_full(new, element)
    changed = np.flatnonzero(new != base)
    if not changed.size:
        return write_head(Mode.SKIP, element, new.size)
    if changed.size <= GAP_DENSITY_MAX * new.size:
        return write_head(Mode.GAP, element, new.size) + portable.encode_gap(new, base, element, changed)
    dense = portable.encode_dense(new, base, element)
    full = portable.encode_full(new, element)
    mode, body = (Mode.DENSE, dense) if len(dense) < len(full) else (Mode.FULL, full)
    return write_head(mode, element, new.size) + body


def warm_up() -> None:
    """Load what the fast paths need, so that the first chunk does not wait for it. Optional."""
