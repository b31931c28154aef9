"""The CLASS mode on numba's kernels: buffers, and the conversion between bytes and planes.

A weight changes by about the learning rate whatever its size, so the chance that its bf16 changes at all doubles with
every binade down. The receiver holds the base. So changes are coded within classes of elements whose base has a similar
exponent, where all are equally likely to change. Positions then cost about as much as with a perfect coder. SPEC.md,
section "CLASS".
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import numpy as np

from prime_protocol.codec.errors import CodecError
from prime_protocol.codec.kernels import decode, encode, full, huffman, streams
from prime_protocol.codec.kernels.base import CODER, COUNT, PLAN_COLUMNS
from prime_protocol.codec.kernels.patch import BLOCKS_MAX, STARTS
from prime_protocol.codec.kernels.vector import GROUP, HAS_WIDE
from prime_protocol.codec.layout import CHUNK_ELEMENTS, HEAD_BYTES, Array, Body, ElementType, address
from prime_protocol.codec.planes import PlaneKind, join_plane, read_plane, require_end, split_plane, write_plane
from prime_protocol.codec.wire import BODY_AT, CLASSES_MAX, PLANE, narrow, widen

ENCODED_BYTES = 1 << 18
"""Space for the chunks that one call encodes before the last one."""


class Buffers:
    """Working memory of one thread, allocated on first use and kept: 4 MB of planes and 3 MB of lists per direction."""

    def __init__(self) -> None:
        self.lowest = np.zeros(CLASSES_MAX, np.uint8)
        self.fill = np.zeros(CLASSES_MAX, np.int64)
        self.plan = np.zeros((CLASSES_MAX, PLAN_COLUMNS), np.int64)
        self.positions = np.zeros(CHUNK_ELEMENTS, np.int32)  # gaps when encoding, ranks when decoding
        self.steps = np.zeros(CHUNK_ELEMENTS, np.int16)
        self.quotients = np.zeros(3 * CHUNK_ELEMENTS, np.int32)
        self.places = np.zeros(CHUNK_ELEMENTS, np.int32)
        self.octets = np.zeros(encode.OCTETS_MAX + ENCODED_BYTES, np.uint8)
        self.escapes = np.zeros(CHUNK_ELEMENTS, np.uint16)
        self.low, self.high = np.zeros(CHUNK_ELEMENTS, np.uint8), np.zeros(CHUNK_ELEMENTS, np.uint8)
        self.pairs = np.zeros(1 << 16, np.uint32)
        self.words = np.zeros((CLASSES_MAX + 1, BLOCKS_MAX), np.uint64)
        self.starts = np.zeros((CLASSES_MAX, STARTS), np.int32)
        self.scattered = np.zeros((CLASSES_MAX, CHUNK_ELEMENTS + GROUP), np.int8)
        self.clean = np.zeros((CLASSES_MAX, CHUNK_ELEMENTS + GROUP), np.int8)


_local = threading.local()


def _buffers() -> Buffers:
    found: Buffers | None = getattr(_local, "buffers", None)
    if found is None:
        found = _local.buffers = Buffers()
    return found


def encode_classes(
    pairs: Sequence[tuple[Array, Array]], element: ElementType, *, wide: bool = HAS_WIDE
) -> list[bytes | None]:
    """Return the CLASS chunk of each (new, base), each at most one chunk long; None if nothing changed."""
    b, shift = _buffers(), element.exponent_shift
    words = [(widen(new), widen(base)) for new, base in pairs]
    table = np.array([(address(base), address(new), new.size, shift, element.code, 0) for new, base in words], np.int64)
    ends, found = np.zeros(len(words), np.int64), np.zeros(2, np.int64)
    chunks: list[bytes | None] = []
    while len(chunks) < len(words):
        done = encode.encode_class_table(
            table, len(chunks), wide, b.lowest, b.fill, b.scattered, b.escapes, b.plan, b.positions, b.steps,
            b.quotients, b.octets, ends, found,
        )  # fmt: skip
        begin = 0
        for end in ends[len(chunks) : done].tolist():
            chunks.append(b.octets[begin:end].tobytes() if end > begin else None)
            begin = end
        if found[0]:
            head = chunks.pop()
            assert head is not None
            chunks.append(b"".join((head, *_planes_and_escapes(*found.tolist()))))
    return chunks


def _planes_and_escapes(num_classes: int, num_escapes: int) -> Iterator[bytes | memoryview]:
    """Yield the planes and escapes that end a chunk."""
    b = _buffers()
    for number in np.flatnonzero(b.plan[:num_classes, CODER] == PLANE):
        yield from write_plane(b.scattered[number, : b.fill[number]].view(np.uint8))
    yield b.escapes[:num_escapes].astype("<u2").tobytes()


Words = tuple[bytes | memoryview, int, int, int, int]
"""Tuple of a chunk with a checked head, the addresses of its words in the base and in the new tensor, their number, and
the position of a word's exponent."""


def decode_words(chunks: Sequence[Words], *, wide: bool = HAS_WIDE) -> None:
    """Apply CLASS chunks to two-byte floats.

    The new words may overwrite the old ones. All streams of a chunk are checked before its first write. Raises
    CodecError for one chunk; others may be done or not.
    """
    b, found, done = _buffers(), np.zeros(4, np.int64), 0
    table = np.array([(*where, *_body(data)) for data, *where in chunks], np.int64)
    while done < len(chunks):
        done = decode.decode_class_table(
            table, done, found[0] == decode.HAS_PLANES, b.octets, wide, b.lowest, b.fill, b.plan, b.positions, b.steps,
            b.quotients, b.places, b.clean, b.escapes, b.words, b.starts, found,
        )  # fmt: skip
        status, num_classes, end, num_escapes = found.tolist()
        if status < 0:
            raise CodecError(streams.REASONS[-status])
        if status == decode.HAS_PLANES:
            _read_planes(memoryview(chunks[done][0]), HEAD_BYTES + end, num_classes, num_escapes)


def _body(data: bytes | memoryview) -> tuple[int, int]:
    """Return address and size of the bytes after the head."""
    if not BODY_AT <= len(data) <= encode.OCTETS_MAX - streams.PADDING:
        raise CodecError(f"{len(data)} bytes are not a CLASS chunk")
    return address(np.frombuffer(data, np.uint8)) + HEAD_BYTES, len(data) - HEAD_BYTES


def decode_classes(
    data: bytes | memoryview, out: Array, base: Array, element: ElementType, *, wide: bool = HAS_WIDE
) -> None:
    """Decode one chunk of floats of one or two bytes; see `decode_words`."""
    new, old = (out, base) if element.itemsize == 2 else (np.empty(out.size, np.uint16), widen(base))
    decode_words([(data, address(old), address(new), old.size, element.exponent_shift)], wide=wide)
    if new is not out:
        out[:] = narrow(new, element)


def _read_planes(data: memoryview, end: int, num_classes: int, num_escapes: int) -> None:
    """Read the planes and escapes after the streams into the buffers, once all of them are checked."""
    b, planes = _buffers(), []
    for number in np.flatnonzero(b.plan[:num_classes, CODER] == PLANE):
        plane, end = read_plane(data, end, int(b.plan[number, COUNT]))
        planes.append((number, plane))
    if len(data) - end != 2 * num_escapes:
        raise CodecError(streams.REASONS[streams.TRAILING])
    b.escapes[:num_escapes] = np.frombuffer(data, "<u2", offset=end)
    for number, plane in planes:
        b.clean[number, : plane.size] = plane.view(np.int8)


def encode_full(new: Array) -> Body:
    """Return the body of a FULL chunk of two-byte floats, like portable_encode_full but faster. It may use the buffers."""
    b = _buffers()
    low, high = b.low[: new.size], b.high[: new.size]
    full.split_words(_readonly(new), low, high)
    size = huffman.write_frame(high, b.octets, b.pairs)
    exponents = join_plane(PlaneKind.ZSTD, b.octets[:size].data) if size else write_plane(high)
    return [*write_plane(low), *exponents]


def decode_full(data: bytes | memoryview, out: Array) -> None:
    """Decode a FULL chunk of two-byte floats into `out`."""
    view = memoryview(data)
    low, behind = read_plane(view, HEAD_BYTES, out.size)
    high, end = _read_exponents(view, behind, out.size)
    require_end(view, end)
    full.merge_words(out, _readonly(low), _readonly(high))


def _read_exponents(data: memoryview, offset: int, size: int) -> tuple[Array, int]:
    """Read a plane as read_plane does, faster if the frame is one of `encode_full`'s."""
    kind, payload, end = split_plane(data, offset)
    if kind == PlaneKind.ZSTD:
        plane = _buffers().high[:size]
        if huffman.read_huffman_frame(_readonly(np.frombuffer(payload, np.uint8)), plane):
            return plane, end
    return read_plane(data, offset, size)


def _readonly(array: Array) -> Array:
    """Return a read-only view. numba then compiles once for arrays of files and of memory, not twice."""
    if not array.flags.writeable:
        return array
    view = array.view()
    view.flags.writeable = False
    return view
