"""Public interface of the codec: encode a tensor into chunks, decode a chunk into a range of a tensor.

The kernels serve tensors of at least KERNEL_ELEMENTS elements, so a small model never pays for importing numba. The
same tensors always give the same bytes on machines with the same packages.
"""

from __future__ import annotations

import functools
import importlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from itertools import groupby, islice
from types import ModuleType

import numpy as np

from prime_protocol.codec import class_portable, portable
from prime_protocol.codec.errors import CodecError
from prime_protocol.codec.layout import (
    CHUNK_ELEMENTS,
    HEAD_BYTES,
    TYPES,
    Array,
    ElementType,
    Mode,
    address,
    bit_patterns,
    read_chunk_head,
    require_same_size,
    write_chunk,
)

Kernels = ModuleType
"""Module codec/classes.py, if numba is installed."""

KERNEL_ELEMENTS = 2**14
"""Minimum size for the kernels; numpy alone codes smaller chunks."""
GAP_DENSITY_MAX = 0.2
"""Share of changed elements above which a step for each element is smaller than positions."""
ANCHOR_CHUNK_ELEMENTS_MIN, ANCHOR_CHUNK_ELEMENTS = KERNEL_ELEMENTS, 2**17
"""Elements that the encoder puts into one chunk of an anchor: the least, and the most. Peers forward only complete chunks, so
small ones spread sooner; in a delta even a full chunk has only a few kilobytes."""
ANCHOR_CHUNKS_WISHED = 256
"""Chunks of an anchor above which they are larger than the least. With twice as many, 64 MB cost a receiver 40 % more processor
time, and the links of scripts/bench/broadcast.py gain 1 %."""
CHUNKS_PER_TASK = 8
"""Chunks that a thread takes at once, because each hand-over costs both threads."""
TASKS_AHEAD = 3
"""Encoded tasks that may wait for the reader when a pool encodes."""
CLASS_SHARE_MAX = 0.6
"""Share of the raw bytes above which the encoder compares a CLASS chunk with a FULL one."""


@dataclass(frozen=True, slots=True)
class EncodedChunk:
    """Elements start .. start + count of one tensor. Example: EncodedChunk(b"...", start=262144, count=1000)."""

    data: bytes
    start: int
    count: int


class Target:
    """Flat, contiguous tensor to decode chunks into, and their base, if any.

    `out` may be `base` itself, to update weights in place. Applying a delta twice is then wrong, so keep a record per
    chunk.
    """

    def __init__(self, out: Array, base: Array | None, *, dtype: str) -> None:
        """Bind the tensors. Raises ValueError if they do not fit together."""
        if not out.flags.writeable:
            raise ValueError("the tensor that chunks are decoded into is read-only")
        require_same_size(out, base)
        self.element = TYPES[dtype]
        self.out = bit_patterns(out, self.element)
        self.base = self.out if base is out else None if base is None else bit_patterns(base, self.element)
        self.out_at = address(self.out)
        self.base_at = 0 if self.base is None else address(self.base)


def encode_tensor(new: Array, base: Array | None, *, dtype: str) -> Iterator[EncodedChunk]:
    """Yield the chunks of a flat, contiguous tensor in order; none if it is empty. `base` None makes an anchor."""
    return (chunk for _, chunk in encode_tensors([(new, base, dtype)]))


def anchor_chunk_elements(num_elements: int) -> int:
    """Return the elements of a chunk, for an anchor of `num_elements` in all: a power of two, between the least and the most."""
    wished = 1 << (num_elements // ANCHOR_CHUNKS_WISHED).bit_length()
    return max(ANCHOR_CHUNK_ELEMENTS_MIN, min(ANCHOR_CHUNK_ELEMENTS, wished))


def encode_tensors(
    tensors: Iterable[tuple[Array, Array | None, str]],
    *,
    pool: Executor | None = None,
    anchor_elements: int = ANCHOR_CHUNK_ELEMENTS,
) -> Iterator[tuple[int, EncodedChunk]]:
    """Yield (tensor's number, chunk) in order, for tensors given as (new, base or None, dtype).

    A chunk of a tensor without a base has at most `anchor_elements`.

    With a pool of threads, chunks are encoded in parallel, without the GIL. At most TASKS_AHEAD tasks of
    CHUNKS_PER_TASK chunks wait to be taken, and `tensors` is read no further than that. So a checkpoint larger than
    memory may stream through.
    """
    ranges = _ranges(tensors, anchor_elements)
    waiting: deque[Future[list[tuple[int, EncodedChunk]]]] = deque()
    while several := list(islice(ranges, CHUNKS_PER_TASK)):
        if pool is None:
            yield from _encoded(several)
            continue
        waiting.append(pool.submit(_encoded, several))
        if len(waiting) > TASKS_AHEAD:
            yield from waiting.popleft().result()
    while waiting:
        yield from waiting.popleft().result()


@dataclass(frozen=True, slots=True)
class _Range:
    """Input of one chunk: bits of the elements from `start` on."""

    tensor: int
    start: int
    new: Array
    base: Array | None
    element: ElementType


def _ranges(tensors: Iterable[tuple[Array, Array | None, str]], anchor_elements: int) -> Iterator[_Range]:
    for number, (new, base, dtype) in enumerate(tensors):
        element = TYPES[dtype]
        new_bits = bit_patterns(new, element)
        base_bits = None if base is None else bit_patterns(base, element)
        require_same_size(new_bits, base_bits)
        most = anchor_elements if base is None else CHUNK_ELEMENTS
        for start in range(0, new_bits.size, most):
            part = slice(start, start + most)
            yield _Range(number, start, new_bits[part], None if base_bits is None else base_bits[part], element)


def _encoded(ranges: list[_Range]) -> list[tuple[int, EncodedChunk]]:
    made: list[tuple[int, EncodedChunk]] = []
    for element, group in groupby(ranges, lambda one: one.element):
        several = list(group)
        chunks = encode_chunks([(one.new, one.base) for one in several], element)
        made += [
            (one.tensor, EncodedChunk(data, one.start, one.new.size)) for one, data in zip(several, chunks, strict=True)
        ]
    return made


def decode_chunk(
    data: bytes | memoryview, out: Array, base: Array | None, *, dtype: str, start: int, count: int
) -> None:
    """Decode one chunk of `Target(out, base)`; see `decode_chunks`."""
    decode_chunks([(data, start, count, Target(out, base, dtype=dtype))])


def decode_chunks(chunks: Iterable[tuple[bytes | memoryview, int, int, Target]]) -> None:
    """Write elements start .. start + count of each chunk, given as (data, start, count, target).

    Raises only CodecError on malformed bytes, and ValueError for a range outside the target. One call without the GIL
    decodes all chunks that the kernels support. After a CodecError all these ranges are undefined: only applying a
    chunk reveals that it does not fit its base.
    """
    by_kernels, several = [], list(chunks)  # keeps the targets alive while their addresses are in use
    for data, start, count, target in several:
        if not 0 <= start <= start + count <= target.out.size:
            raise ValueError(f"elements {start} to {start + count} of a tensor of {target.out.size} elements")
        element = target.element
        mode = read_chunk_head(data, element, count)
        if mode is not Mode.FULL and target.base is None:
            raise CodecError(f"mode {mode.name} needs a base")
        kernels = _kernels_for(element, count)
        if kernels and mode is Mode.CLASS and element.itemsize == 2:
            at = start * element.itemsize
            by_kernels.append((data, target.base_at + at, target.out_at + at, count, element.exponent_shift))
        else:
            _decode_alone(mode, data, target, slice(start, start + count), kernels)
    if by_kernels and (kernels := load_kernels()):
        kernels.decode_words(by_kernels)


def _decode_alone(mode: Mode, data: bytes | memoryview, target: Target, part: slice, kernels: Kernels | None) -> None:
    element, out = target.element, target.out[part]
    if mode is Mode.FULL:
        if kernels and element.itemsize == 2:
            kernels.decode_full(data, out)
        else:
            out[:] = portable.portable_decode_full(data, out.size, element)
        return
    assert target.base is not None
    source = target.base[part]
    if mode is Mode.SKIP:
        if len(data) != HEAD_BYTES:
            raise CodecError("a skipped chunk has no body")
        if target.base is not target.out:
            out[:] = source
    elif mode is Mode.GAP:
        out[:] = portable.decode_gap(data, source, element)
    elif mode is Mode.DENSE:
        out[:] = portable.decode_dense(data, source, element)
    elif not element.has_classes:
        raise CodecError(f"mode CLASS needs floats of one or two bytes, not {element.name}")
    elif kernels:
        kernels.decode_classes(data, out, source, element)
    else:
        out[:] = class_portable.portable_decode_classes(data, source, element)


def encode_chunks(pairs: Sequence[tuple[Array, Array | None]], element: ElementType) -> list[bytes]:
    """Encode each (new, base or None) as one chunk, in the cheapest mode. One call without the GIL encodes all kernel chunks.

    Raises ValueError unless the elements are flat, contiguous and fit one chunk.
    """
    for new, base in pairs:
        require_same_size(new, base)
        for part in (new,) if base is None else (new, base):
            bit_patterns(part, element)
        if not 1 <= new.size <= CHUNK_ELEMENTS:
            raise ValueError(f"{new.size} elements; a chunk has 1 to {CHUNK_ELEMENTS}")
    numbers = [
        number for number, (new, base) in enumerate(pairs) if base is not None and _kernels_for(element, new.size)
    ]
    kernels = load_kernels() if numbers else None
    classed = kernels.encode_classes([pairs[number] for number in numbers], element) if kernels else []
    found = dict(zip(numbers, classed, strict=True))
    return [
        _least(found[number], new, element) if number in found else _encode_alone(new, base, element)
        for number, (new, base) in enumerate(pairs)
    ]


def _least(chunk: bytes | None, new: Array, element: ElementType) -> bytes:
    """Return the CLASS chunk or a smaller one: SKIP if `chunk` is None (nothing changed), FULL if that is smaller."""
    if chunk is None:
        return write_chunk(Mode.SKIP, element, new.size, [])
    if len(chunk) <= CLASS_SHARE_MAX * new.nbytes:
        return chunk
    return min(chunk, _encode_full(new, element), key=len)


def _encode_alone(new: Array, base: Array | None, element: ElementType) -> bytes:
    if base is None:
        return _encode_full(new, element)
    changed = np.flatnonzero(new != base)
    if not changed.size:
        return write_chunk(Mode.SKIP, element, new.size, [])
    if changed.size <= GAP_DENSITY_MAX * new.size:
        return write_chunk(Mode.GAP, element, new.size, portable.encode_gap(new, base, element, changed))
    dense = write_chunk(Mode.DENSE, element, new.size, portable.encode_dense(new, base, element))
    return min(dense, _encode_full(new, element), key=len)


def _encode_full(new: Array, element: ElementType) -> bytes:
    kernels = _kernels_for(element, new.size)
    wordwise = kernels is not None and element.itemsize == 2
    body = kernels.encode_full(new) if kernels and wordwise else portable.portable_encode_full(new, element)
    return write_chunk(Mode.FULL, element, new.size, body)


def _kernels_for(element: ElementType, count: int) -> Kernels | None:
    return load_kernels() if element.has_classes and count >= KERNEL_ELEMENTS else None


def load_kernels() -> Kernels | None:
    """Return the module of the CLASS kernels, or None if numba is missing or disabled."""
    return None if disabled else _import_kernels()


def use_kernels(are_compiled: bool) -> None:
    """Disable the kernels while they are not compiled, or cannot be: this process then codes as without numba."""
    global disabled
    disabled = not are_compiled


disabled = False


@functools.cache
def _import_kernels() -> Kernels | None:
    try:
        return importlib.import_module("prime_protocol.codec.classes")
    except ImportError:
        return None
