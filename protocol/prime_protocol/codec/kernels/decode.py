"""Chunks of the CLASS mode -> elements: streams.py reads their streams, then the steps are applied. SPEC.md, section "CLASS".

Invariant: nothing is written before all streams are checked. Only applying a chunk reveals that it does not fit its
base.
"""

# mypy: allow-untyped-defs, allow-untyped-calls
from __future__ import annotations

from numba import int64, uint16, uint64

from prime_protocol.codec.kernels.base import (
    CODER,
    COUNT,
    DATA_AT,
    DATA_BYTES,
    ELEMENTS,
    FIRST,
    NEW_AT,
    OLD_AT,
    SHIFT,
    inline,
    kernel,
    octets_at,
    part,
    words_at,
)
from prime_protocol.codec.kernels.classes import gather_scalar, gather_wide
from prime_protocol.codec.kernels.patch import GROUP_ELEMENTS, patch
from prime_protocol.codec.kernels.streams import BOUNDS, MISFIT, PADDING, TRAILING, read_plan, read_steps
from prime_protocol.codec.layout import HEAD_BYTES
from prime_protocol.codec.wire import BODY_AT, CLASSES_MAX, PLANE, SPARSE, WINDOW

HAS_PLANES = 1
BOUNDS_BYTES = BODY_AT - HEAD_BYTES
"""Bytes of the top exponent and the boundaries."""
CHANGES_SHARE, CHANGES_SHARE_WIDE = 8, 50
"""Elements per change from which finding each change is faster than walking over all planes."""
SORTED_MAX = 256
"""Maximum number of escapes that are worth sorting into the order of their elements."""


@inline
def scatter_steps(plan, num_classes, ranks, steps, planes):
    """Put checked steps into planes that are all zero."""
    for number in range(num_classes):
        if plan[number, CODER] == SPARSE:
            plane = planes[number]
            for j in range(plan[number, FIRST], plan[number, FIRST] + plan[number, COUNT]):
                plane[ranks[j]] = steps[j]


@inline
def clear(plan, num_classes, ranks, planes):
    """Reset the planes to zero by clearing only the written elements."""
    for number in range(num_classes):
        plane = planes[number]
        if plan[number, CODER] == SPARSE:
            for j in range(plan[number, FIRST], plan[number, FIRST] + plan[number, COUNT]):
                plane[ranks[j]] = 0
        elif plan[number, CODER] == PLANE:
            plane[: plan[number, COUNT]] = 0


@inline
def fits(plan, num_classes, ranks, fill):
    """Return whether every class has as many elements as its plane, or more than its last rank."""
    for number in range(num_classes):
        row = plan[number]
        if row[CODER] == PLANE and fill[number] != row[COUNT]:
            return False
        if row[CODER] == SPARSE and fill[number] <= ranks[row[FIRST] + row[COUNT] - 1]:
            return False
    return True


@part
def apply(out, base, shift, wide, lowest, num_classes, fill, plan, ranks, steps, planes, escapes, num_escapes):
    """Write the new elements from checked streams and filled planes, and reset the planes to zero. Returns 0 or a reason."""
    scatter_steps(plan, num_classes, ranks, steps, planes)
    fill[:] = 0
    done, used = int64(0), int64(0)
    if wide:
        done, used = gather_wide(out, base, shift, lowest, num_classes, fill, planes, escapes, num_escapes)
    if used >= 0:
        used = gather_scalar(out, base, done, shift, lowest, num_classes, fill, planes, escapes, num_escapes, used)
    clear(plan, num_classes, ranks, planes)
    if used != num_escapes or not fits(plan, num_classes, ranks, fill):
        return int64(-MISFIT)
    return int64(0)


@inline
def read_bounds(octets, lowest):
    """Read each class's lowest exponent from the three bytes before the streams.

    Returns the number of classes, 0 if malformed.
    """
    top, boundaries = int64(octets[0]), int64(octets[1]) | (int64(octets[2]) << 8)
    number = int64(0)
    for j in range(WINDOW):
        if (boundaries >> j) & 1:
            if top - j < 1 or number == CLASSES_MAX - 1:
                return int64(0)
            lowest[number] = top - j
            number += 1
    lowest[number] = 0
    return number + 1


@part
def decode_one(
    body, octets, out, base, behind, shift, wide, lowest, fill, plan, ranks, steps, quotients, places, planes,
    escapes, words, starts,
):  # fmt: skip
    """Decode and apply a chunk without planes. `out` may be `base`. Returns (status, classes, bytes before planes, escapes).

    Status: 0 done, HAS_PLANES if the streams are checked but nothing is applied yet, or minus a reason.
    """
    size = body.size - BOUNDS_BYTES
    num_classes = read_bounds(body, lowest)
    if num_classes == 0:
        return int64(-BOUNDS), num_classes, int64(0), int64(0)
    for at in range(
        uint64(size)
    ):  # A slice assignment whose sizes may differ makes numba compile string formatting: two seconds.
        octets[at] = body[at + uint64(BOUNDS_BYTES)]
    octets[size : size + PADDING] = 0
    position, num_escapes = read_plan(octets, 8 * size, num_classes, base.size, plan)
    if position < 0:
        return -num_escapes, num_classes, int64(0), int64(0)
    changes = int64(0)
    for number in range(num_classes):
        changes += plan[number, COUNT]
    few = changes * (CHANGES_SHARE_WIDE if wide else CHANGES_SHARE) <= base.size and num_escapes <= SORTED_MAX
    position = read_steps(octets, position, 8 * size, num_classes, plan, ranks, steps, quotients, places, base, few)
    if position < 0:
        return position, num_classes, int64(0), int64(0)
    end = (position + 7) >> 3
    for number in range(num_classes):
        if plan[number, CODER] == PLANE:
            return int64(HAS_PLANES), num_classes, end + BOUNDS_BYTES, num_escapes
    if size - end != 2 * num_escapes:
        return int64(-TRAILING), num_classes, end, num_escapes
    for j in range(num_escapes):
        escapes[j] = uint16(octets[end + 2 * j]) | (uint16(octets[end + 2 * j + 1]) << uint16(8))
    if few and base.size >= GROUP_ELEMENTS:
        fitting = patch(
            out, base, behind, shift, lowest, num_classes, plan, ranks, steps, words, starts, fill, escapes,
            num_escapes, places,
        )  # fmt: skip
        return int64(0 if fitting else -MISFIT), num_classes, end, num_escapes
    status = apply(out, base, shift, wide, lowest, num_classes, fill, plan, ranks, steps, planes, escapes, num_escapes)
    return status, num_classes, end, num_escapes


@kernel
def decode_class_table(
    table, first, planes_read, octets, wide, lowest, fill, plan, ranks, steps, quotients, places, planes, escapes,
    words, starts, found,
):  # fmt: skip
    """Decode and apply chunks from row `first` of the table on. Returns the row after the last one that is done.

    That is the table's end, or a row for which `found` then holds (status, classes, bytes before planes, escapes). Such
    a chunk was rejected, or it has planes that the caller must read. The caller then calls again from there with
    `planes_read`.
    """
    for at in range(first, table.shape[0]):
        row = table[at]
        out, base = words_at(row[NEW_AT], row[ELEMENTS]), words_at(row[OLD_AT], row[ELEMENTS])
        if planes_read and at == first:
            found[0] = apply(
                out, base, row[SHIFT], wide, lowest, found[1], fill, plan, ranks, steps, planes, escapes, found[3]
            )
        else:
            body = octets_at(row[DATA_AT], row[DATA_BYTES])
            behind = words_at(row[OLD_AT] + 2 * row[ELEMENTS], row[ELEMENTS])  # usually the base of another call
            if at + 1 < table.shape[0]:
                behind = words_at(table[at + 1, OLD_AT], table[at + 1, ELEMENTS])
            found[0], found[1], found[2], found[3] = decode_one(
                body, octets, out, base, behind, row[SHIFT], wide, lowest, fill, plan, ranks, steps, quotients, places,
                planes, escapes, words, starts,
            )  # fmt: skip
        if found[0] != 0:
            return at
    return table.shape[0]
