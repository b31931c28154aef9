"""The CLASS mode on numba's kernels: buffers, and the way between bytes and planes.

The idea: a weight changes by about the learning rate whatever its size, so the chance that its bf16 changes at all doubles with
every binade down. The receiver holds the base; so changes are coded inside classes of elements whose base has a like exponent,
where they are equally likely, and positions cost about as much as a perfect coder would take. SPEC.md, section "CLASS".
"""

from __future__ import annotations

import threading

import numpy as np

from prime_protocol.codec.errors import CodecError
from prime_protocol.codec.kernels import decode, encode, full, huffman, streams
from prime_protocol.codec.kernels.base import CODER, COUNT, PLAN_COLUMNS
from prime_protocol.codec.kernels.patch import BLOCKS_MAX, STARTS
from prime_protocol.codec.kernels.vector import GROUP, HAS_WIDE
from prime_protocol.codec.layout import CHUNK_ELEMENTS, HEAD_BYTES, Array, Body, ElementType
from prime_protocol.codec.planes import PlaneKind, join_plane, read_plane, require_end, split_plane, write_plane
from prime_protocol.codec.wire import BODY_AT, CLASSES_MAX, PLANE, narrow, widen


class Buffers:
    """One thread's working memory, made when it is first needed and kept: 4 MB of planes and 3 MB of lists per direction."""

    def __init__(self) -> None:
        self.lowest = np.zeros(CLASSES_MAX, np.uint8)
        self.fill = np.zeros(CLASSES_MAX, np.int64)
        self.plan = np.zeros((CLASSES_MAX, PLAN_COLUMNS), np.int64)
        self.positions = np.zeros(CHUNK_ELEMENTS, np.int32)  # gaps when encoding, ranks when decoding
        self.steps = np.zeros(CHUNK_ELEMENTS, np.int16)
        self.quotients = np.zeros(3 * CHUNK_ELEMENTS, np.int32)
        self.places = np.zeros(CHUNK_ELEMENTS, np.int32)
        self.octets = np.zeros(2 * CHUNK_ELEMENTS + 4096, np.uint8)
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


def encode_classes(new: Array, base: Array, element: ElementType, *, wide: bool = HAS_WIDE) -> Body | None:
    """The body of a CLASS chunk, or None where nothing changed. It lies in this thread's buffers: join it before the next."""
    b, shift = _buffers(), element.exponent_shift
    new, base = _readonly(widen(new)), _readonly(widen(base))
    top, boundaries, num_classes, num_escapes, size = encode.encode_classes(
        new, base, shift, wide, b.lowest, b.fill, b.scattered, b.escapes, b.plan, b.positions, b.steps,
        b.quotients, b.octets,
    )  # fmt: skip
    if size == 0:
        return None
    body: Body = [bytes((top,)), int(boundaries).to_bytes(2, "little"), b.octets[:size].data]
    for number in np.flatnonzero(b.plan[:num_classes, CODER] == PLANE):
        body += write_plane(b.scattered[number, : b.fill[number]].view(np.uint8))
    body.append(b.escapes[:num_escapes].astype("<u2").tobytes())
    return body


def decode_classes(
    data: bytes | memoryview, out: Array, base: Array, element: ElementType, *, wide: bool = HAS_WIDE
) -> None:
    """Apply a CLASS chunk. `out` may be `base`; all streams are checked before the first write."""
    if element.itemsize == 1:
        words = np.empty(out.size, np.uint16)
        _decode_words(data, words, widen(base), element.exponent_shift, wide)
        out[:] = narrow(words, element)
    else:
        _decode_words(data, out, base, element.exponent_shift, wide)


def _decode_words(data: bytes | memoryview, out: Array, base: Array, shift: int, wide: bool) -> None:
    b, base = _buffers(), _readonly(base)
    if not BODY_AT <= len(data) <= b.octets.size - streams.PADDING:
        raise CodecError(f"{len(data)} bytes are no CLASS chunk")
    body = _readonly(np.frombuffer(data, np.uint8, offset=HEAD_BYTES))
    status, num_classes, end, num_escapes = decode.decode_classes(
        body, b.octets, out, base, shift, wide, b.lowest, b.fill, b.plan, b.positions, b.steps, b.quotients, b.places,
        b.clean, b.escapes, b.words, b.starts,
    )  # fmt: skip
    if status == decode.HAS_PLANES:
        _read_planes(memoryview(data), HEAD_BYTES + end, num_classes, num_escapes)
        status = decode.apply(
            out, base, shift, wide, b.lowest, num_classes, b.fill, b.plan, b.positions, b.steps, b.clean,
            b.escapes, num_escapes,
        )  # fmt: skip
    if status < 0:
        raise CodecError(streams.REASONS[-status])


def _read_planes(data: memoryview, end: int, num_classes: int, num_escapes: int) -> None:
    """Put the planes and escapes behind the streams into the buffers; touches neither before all are checked."""
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
    """The body of a FULL chunk of two-byte floats, as portable.encode_full makes it, faster. It lies in the buffers too."""
    b = _buffers()
    low, high = b.low[: new.size], b.high[: new.size]
    full.split_words(_readonly(new), low, high)
    size = huffman.write_frame(high, b.octets, b.pairs)
    exponents = join_plane(PlaneKind.ZSTD, b.octets[:size].data) if size else write_plane(high)
    return [*write_plane(low), *exponents]


def decode_full(data: bytes | memoryview, out: Array) -> None:
    """The inverse, straight into `out`."""
    view = memoryview(data)
    low, behind = read_plane(view, HEAD_BYTES, out.size)
    high, end = _read_exponents(view, behind, out.size)
    require_end(view, end)
    full.merge_words(out, _readonly(low), _readonly(high))


def _read_exponents(data: memoryview, offset: int, size: int) -> tuple[Array, int]:
    """As read_plane does, faster where the frame is one of `encode_full`'s."""
    kind, payload, end = split_plane(data, offset)
    if kind == PlaneKind.ZSTD:
        plane = _buffers().high[:size]
        if huffman.read_frame(_readonly(np.frombuffer(payload, np.uint8)), plane):
            return plane, end
    return read_plane(data, offset, size)


def _readonly(array: Array) -> Array:
    """The same memory, not to be written: numba compiles once for arrays of files and of memory, not once for each."""
    if not array.flags.writeable:
        return array
    view = array.view()
    view.flags.writeable = False
    return view
