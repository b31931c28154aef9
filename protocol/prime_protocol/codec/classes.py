"""The CLASS mode on numba's kernels: buffers, and the way between bytes and planes.

The idea: a weight changes by about the learning rate whatever its size, so the chance that its bf16 changes at all doubles with
every binade down. The receiver holds the base; so changes are coded inside classes of elements whose base has a like exponent,
where they are equally likely, and positions cost about as much as a perfect coder would take. SPEC.md, section "CLASS".
"""

from __future__ import annotations

import threading

import numpy as np

from prime_protocol.codec.errors import CodecError
from prime_protocol.codec.kernels import classes, decode, encode
from prime_protocol.codec.kernels.base import CODER, COUNT, PLAN_COLUMNS
from prime_protocol.codec.kernels.vector import BLOCK, HAS_WIDE
from prime_protocol.codec.layout import CHUNK_ELEMENTS, HEAD_BYTES, Array, ElementType
from prime_protocol.codec.planes import read_plane, write_plane
from prime_protocol.codec.wire import BODY_AT, CLASSES_MAX, PLANE, lowest_exponents, narrow, widen

class Buffers(threading.local):
    """One thread's working memory, made when it is first needed and kept: 4 MB of planes and 3 MB of lists per direction."""

    def __init__(self) -> None:
        self.lowest = np.zeros(CLASSES_MAX, np.uint8)
        self.fill = np.zeros(CLASSES_MAX, np.int64)
        self.plan = np.zeros((CLASSES_MAX, PLAN_COLUMNS), np.int64)
        self.positions = np.zeros(CHUNK_ELEMENTS, np.int32)  # gaps when encoding, ranks when decoding
        self.steps = np.zeros(CHUNK_ELEMENTS, np.int16)
        self.quotients = np.zeros(3 * CHUNK_ELEMENTS, np.int32)
        self.octets = np.zeros(2 * CHUNK_ELEMENTS + 4096, np.uint8)
        self.escapes = np.zeros(CHUNK_ELEMENTS, np.uint16)
        self.scattered = np.zeros((CLASSES_MAX, CHUNK_ELEMENTS + 2 * BLOCK), np.int8)
        self.clean = np.zeros((CLASSES_MAX, CHUNK_ELEMENTS + 2 * BLOCK), np.int8)


_buffers = Buffers()


def encode_classes(new: Array, base: Array, element: ElementType, *, wide: bool = HAS_WIDE) -> bytes | None:
    """The body of a CLASS chunk, or None where nothing changed."""
    new, base, b, shift = widen(new), widen(base), _buffers, element.exponent_shift
    top, boundaries = classes.choose_classes(new, base, shift)
    limits = lowest_exponents(top, boundaries)
    num_classes = len(limits)
    b.lowest[:num_classes] = limits
    b.fill[:] = 0
    num_escapes, begin = 0, 0
    if wide:
        num_escapes = classes.scatter_wide(new, base, shift, b.lowest, num_classes, b.fill, b.scattered, b.escapes)
        begin = new.size - new.size % BLOCK
    num_escapes = classes.scatter_scalar(
        new, base, begin, shift, b.lowest, num_classes, b.fill, b.scattered, b.escapes, num_escapes
    )
    encode.analyze(b.fill, b.scattered, num_classes, b.plan, b.positions, b.steps)
    coders = b.plan[:num_classes, CODER]
    if not coders.any():
        return None
    size = encode.write(b.octets, b.plan, num_classes, num_escapes, b.positions, b.steps, b.quotients)
    body = [bytes((top,)), int(boundaries).to_bytes(2, "little"), b.octets[:size].tobytes()]
    for number in np.flatnonzero(coders == PLANE):
        body.append(write_plane(b.scattered[number, : b.fill[number]].view(np.uint8)))
    body.append(b.escapes[:num_escapes].astype("<u2").tobytes())
    return b"".join(body)


def decode_classes(data: bytes, out: Array, base: Array, element: ElementType, *, wide: bool = HAS_WIDE) -> None:
    """Apply a CLASS chunk. `out` may be `base`; all streams are checked before the first write."""
    b, count, shift = _buffers, base.size, element.exponent_shift
    if not BODY_AT <= len(data) <= b.octets.size - decode.PADDING:
        raise CodecError(f"{len(data)} bytes are no CLASS chunk")
    boundaries = int.from_bytes(data[HEAD_BYTES + 1 : BODY_AT], "little")
    limits = lowest_exponents(data[HEAD_BYTES], boundaries)
    num_classes = len(limits)
    b.lowest[:num_classes] = limits
    size = len(data) - BODY_AT
    b.octets[:size] = np.frombuffer(data, np.uint8, offset=BODY_AT)
    b.octets[size : size + decode.PADDING] = 0
    position, num_escapes = decode.read_plan(b.octets, 8 * size, num_classes, count, b.plan)
    if position < 0:
        raise CodecError(decode.REASONS[num_escapes])
    position = decode.read_steps(
        b.octets, position, 8 * size, num_classes, count, b.plan, b.positions, b.steps, b.quotients
    )
    if position < 0:
        raise CodecError(decode.REASONS[-position])
    planes, end = [], BODY_AT + (position + 7) // 8
    for number in np.flatnonzero(b.plan[:num_classes, CODER] == PLANE):
        plane, end = read_plane(memoryview(data), end, int(b.plan[number, COUNT]))
        planes.append((number, plane))
    if len(data) - end != 2 * num_escapes:
        raise CodecError(f"{len(data) - end} bytes at the end, {num_escapes} escapes expected")
    escapes = np.frombuffer(data, "<u2", offset=end)
    for number, plane in planes:
        b.clean[number, : plane.size] = plane.view(np.int8)
    decode.scatter_steps(b.plan, num_classes, b.positions, b.steps, b.clean)
    if element.itemsize == 1:
        wide_base = widen(base)
        wide_out = np.empty_like(wide_base)
        fits = _gather(wide_out, wide_base, shift, num_classes, escapes, wide=wide)
        out[:] = narrow(wide_out, element)
    else:
        fits = _gather(out, base, shift, num_classes, escapes, wide=wide)
    decode.clear(b.plan, num_classes, b.positions, b.clean)
    if not fits:
        raise CodecError("its classes do not fit this base")


def _gather(
    out: Array, base: Array, shift: int, num_classes: int, escapes: Array, *, wide: bool
) -> bool:
    """Apply the planes; False if the base's classes have other sizes than the chunk says."""
    b, used, begin = _buffers, 0, 0
    b.fill[:] = 0
    if wide:
        used = classes.gather_wide(out, base, shift, b.lowest, num_classes, b.fill, b.clean, escapes)
        begin = out.size - out.size % BLOCK
    if used >= 0:
        used = classes.gather_scalar(
            out, base, begin, shift, b.lowest, num_classes, b.fill, b.clean, escapes, used
        )
    return bool(used == escapes.size) and bool(decode.check_fill(b.plan, num_classes, b.positions, b.fill))
