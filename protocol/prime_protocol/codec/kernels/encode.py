"""Planes -> plan and bit streams. SPEC.md, section "CLASS"; `write` shows the order of the streams."""

# mypy: allow-untyped-defs, allow-untyped-calls
from __future__ import annotations

import numpy as np
from numba import int64, uint64

from prime_protocol.codec.kernels.base import (
    CODER,
    COUNT,
    DATA_AT,
    ELEMENTS,
    FIRST,
    GAP_BITS,
    MAGNITUDE_BITS,
    MAGNITUDES,
    NEW_AT,
    NUM_EXCEPTIONS,
    OLD_AT,
    SHIFT,
    floor_log2,
    inline,
    kernel,
    part,
    words_at,
)
from prime_protocol.codec.kernels.classes import choose_classes, scatter_scalar, scatter_wide
from prime_protocol.codec.kernels.vector import BLOCK, nonzero_bytes
from prime_protocol.codec.kernels.words import population, store_word, trailing_zeros
from prime_protocol.codec.layout import CHUNK_ELEMENTS, HEAD_BYTES, MAGIC, Mode
from prime_protocol.codec.wire import BODY_AT, EMPTY, EXCEPTIONS, GOLOMB, ONES, PLANE, RICE, SPARSE

CLASS = int(Mode.CLASS)
OCTETS_MAX = 4 * CHUNK_ELEMENTS + 4096
"""Space for one chunk without its planes, if each change needs an escape."""
PLANE_SIZE_MIN = 2048
"""Minimum size of a class stored as a plane: the frame and Huffman table cost some sixty bytes."""


@inline
def put_bits(octets, writer, value, width):
    """Append `width` <= 32 bits. A writer is (byte offset, bits of an incomplete byte, their number < 8)."""
    at, bits, filled = writer
    bits |= uint64(value) << uint64(filled)
    filled += width
    store_word(octets, at, bits)
    return at + (filled >> 3), bits >> uint64(filled & 56), filled & 7


@inline
def put_unary(octets, writer, value):
    """Append `value` zeros and a one."""
    while value >= 32:
        writer = put_bits(octets, writer, int64(0), int64(32))
        value -= 32
    return put_bits(octets, writer, int64(1) << value, value + 1)


@inline
def rice_cost(values, begin, end, low_bits):
    """Return the bits of Rice codes for values[begin:end] with that many low bits."""
    total = int64(0)
    for j in range(begin, end):
        total += values[j] >> low_bits
    return total + (end - begin) * (1 + low_bits)


@inline
def rice_bits(total, count):
    """Return the best number of low bits for `count` geometric values with the sum `total`."""
    bits = int64(0)
    while bits < 18 and (count << bits) * 141 < total * 69:  # switch at 2^bits * sqrt 2 = mean * ln 2
        bits += 1
    return bits


@kernel
def encode_class_table(
    table, first, wide, lowest, fill, planes, escapes, plan, gaps, steps, unary, octets, ends, found
):  # fmt: skip
    """Encode chunks from row `first` of the table on, one after the other. Returns the row after the last one that is done.

    `ends` receives the end of each one in `octets`; an unchanged chunk takes no bytes. Returns early if the space is
    used up, or after a chunk with planes. `found` is then (classes, escapes), and the caller adds planes and escapes.
    """
    end = int64(0)
    found[0] = 0
    for at in range(first, table.shape[0]):
        if octets.size - end < OCTETS_MAX:
            return at
        row = table[at]
        new, base = words_at(row[NEW_AT], row[ELEMENTS]), words_at(row[OLD_AT], row[ELEMENTS])
        shift = row[SHIFT]
        top, boundaries, num_classes = choose_classes(new, base, shift, lowest)
        fill[:] = 0
        done, num_escapes = int64(0), int64(0)
        if wide:
            done, num_escapes = scatter_wide(new, base, shift, lowest, num_classes, fill, planes, escapes)
        num_escapes = scatter_scalar(new, base, done, shift, lowest, num_classes, fill, planes, escapes, num_escapes)
        ends[at] = end
        if analyze(fill, planes, num_classes, plan, gaps, steps) == 0:
            continue
        store_word(octets, end, MAGIC | (CLASS << 8) | (row[DATA_AT] << 16) | (row[ELEMENTS] << 24))
        octets[end + HEAD_BYTES] = top
        octets[end + HEAD_BYTES + 1] = boundaries & 0xFF
        octets[end + HEAD_BYTES + 2] = boundaries >> 8
        end = write(octets, end + BODY_AT, plan, num_classes, num_escapes, gaps, steps, unary)
        ends[at] = end
        for number in range(num_classes):
            if plan[number, CODER] == PLANE:
                found[0], found[1] = num_classes, num_escapes
                return at + 1
        for j in range(num_escapes):
            octets[end + 2 * j] = escapes[j] & 0xFF
            octets[end + 2 * j + 1] = escapes[j] >> 8
        end += 2 * num_escapes
        ends[at] = end
    return table.shape[0]


@part
def analyze(fill, planes, num_classes, plan, gaps, steps):
    """Find each class's changes and a code for them. Returns the number of changes.

    `gaps` and `steps` receive the sparse classes' changes in class order; a plane only gets its row in `plan`.
    """
    listed, changes = int64(0), int64(0)
    magnitudes = np.zeros(129, np.int64)
    for number in range(num_classes):
        first, size = listed, fill[number]
        plane, row = planes[number], plan[number]
        plane[size : size + BLOCK] = 0
        count = int64(0)
        for begin in range(0, size, BLOCK):
            count += population(nonzero_bytes(plane, begin))
        changes += count
        row[:] = 0
        row[FIRST] = first
        row[COUNT] = count
        if count == 0:
            continue
        if size >= PLANE_SIZE_MIN and count * 5 > size * 3:
            row[CODER] = PLANE
            row[COUNT] = size
            continue
        last = int64(-1)
        magnitudes[:] = 0
        for begin in range(0, size, BLOCK):
            changed = nonzero_bytes(plane, begin)
            while changed:
                rank = begin + trailing_zeros(changed)
                step = plane[rank]
                gaps[listed] = rank - last - 1
                steps[listed] = step
                magnitudes[abs(int64(step))] += 1
                last = rank
                listed += 1
                changed &= changed - uint64(1)
        plan_sparse(row, gaps, magnitudes, last + 1)
    return changes


@inline
def plan_sparse(row, gaps, magnitudes, span):
    """Choose the parameters of a sparse class."""
    first, count = row[FIRST], row[COUNT]
    row[CODER] = SPARSE
    bits = rice_bits(span - count, count)
    cost = rice_cost(gaps, first, first + count, bits)
    for other in range(max(int64(0), bits - 1), bits + 2):
        other_cost = rice_cost(gaps, first, first + count, other)
        if other_cost < cost:
            bits, cost = other, other_cost
    row[GAP_BITS] = bits
    plan_magnitudes(row, magnitudes, count)


@inline
def plan_magnitudes(row, magnitudes, count):
    """Choose ONES if all steps are units; otherwise the cheapest of the three other codes, from the histogram alone."""
    exceptions = count - magnitudes[1]
    row[MAGNITUDES] = ONES
    if exceptions == 0:
        return
    row[MAGNITUDES] = EXCEPTIONS
    row[NUM_EXCEPTIONS] = exceptions
    row[MAGNITUDE_BITS] = rice_bits(count - exceptions, exceptions)
    cost = exceptions * (1 + row[MAGNITUDE_BITS]) + ((count - exceptions) >> row[MAGNITUDE_BITS])
    for magnitude in range(2, 129):
        cost += magnitudes[magnitude] * (2 * floor_log2(magnitude - 1) + 1)
    for bits in range(8):
        rice, golomb = int64(0), int64(0)
        for magnitude in range(1, 129):
            if magnitudes[magnitude]:
                value = magnitude - 1
                rice += magnitudes[magnitude] * ((value >> bits) + 1 + bits)
                golomb += magnitudes[magnitude] * (2 * floor_log2((value >> bits) + 1) + 1 + bits)
        if rice < cost:
            cost = rice
            row[MAGNITUDES], row[MAGNITUDE_BITS], row[NUM_EXCEPTIONS] = RICE, bits, 0
        if golomb < cost:
            cost = golomb
            row[MAGNITUDES], row[MAGNITUDE_BITS], row[NUM_EXCEPTIONS] = GOLOMB, bits, 0


@inline
def put_length(octets, writer, value):
    """Append a number from 1 to 2^18 + 1: its bit length in five bits, then the bits below the leading one."""
    length = floor_log2(value) + 1
    writer = put_bits(octets, writer, length, int64(5))
    return put_bits(octets, writer, value - (int64(1) << (length - 1)), length - 1)


@inline
def low_part(value, bits):
    """Return the lowest `bits` bits of a value."""
    return value & ((int64(1) << bits) - 1)


@part
def write(octets, begin, plan, num_classes, num_escapes, gaps, steps, unary):
    """Write plan, signs, low bits, unary codes and suffixes. Returns the offset after them. `unary` is scratch."""
    writer = int64(begin), uint64(0), int64(0)
    total = int64(0)
    for number in range(num_classes):
        writer = write_row(octets, writer, plan[number])
        if plan[number, CODER] == SPARSE:
            total += plan[number, COUNT]
    writer = put_length(octets, writer, num_escapes + 1)
    for j in range(total):
        writer = put_bits(octets, writer, int64(steps[j] < 0), int64(1))
    num_unary = int64(0)
    for number in range(num_classes):
        row = plan[number]
        if row[CODER] != SPARSE:
            continue
        first, end, bits = row[FIRST], row[FIRST] + row[COUNT], row[GAP_BITS]
        for j in range(first, end):
            gap = int64(gaps[j])
            writer = put_bits(octets, writer, low_part(gap, bits), bits)
            unary[num_unary] = gap >> bits
            num_unary += 1
        kind, bits = row[MAGNITUDES], row[MAGNITUDE_BITS]
        if kind == EXCEPTIONS:
            last = first - 1
            for j in range(first, end):
                if steps[j] != 1 and steps[j] != -1:
                    run = j - last - 1
                    last = j
                    writer = put_bits(octets, writer, low_part(run, bits), bits)
                    unary[num_unary] = run >> bits
                    num_unary += 1
            for j in range(first, end):
                if steps[j] != 1 and steps[j] != -1:
                    unary[num_unary] = floor_log2(abs(int64(steps[j])) - 1)
                    num_unary += 1
        elif kind != ONES:
            for j in range(first, end):
                value = abs(int64(steps[j])) - 1
                writer = put_bits(octets, writer, low_part(value, bits), bits)
                quotient = value >> bits
                unary[num_unary] = quotient if kind == RICE else floor_log2(quotient + 1)
                num_unary += 1
    for j in range(num_unary):
        writer = put_unary(octets, writer, int64(unary[j]))
    writer = write_suffixes(octets, writer, plan, num_classes, steps)
    return writer[0] + int64(writer[2] > 0)


@inline
def write_row(octets, writer, row):
    """Append the parameters of one class."""
    coder, kind = row[CODER], row[MAGNITUDES]
    writer = put_bits(octets, writer, coder, int64(2))
    if coder != EMPTY:
        writer = put_length(octets, writer, row[COUNT])
    if coder == SPARSE:
        writer = put_bits(octets, writer, row[GAP_BITS], int64(5))
        writer = put_bits(octets, writer, kind, int64(2))
        if kind == EXCEPTIONS:
            writer = put_length(octets, writer, row[NUM_EXCEPTIONS])
            writer = put_bits(octets, writer, row[MAGNITUDE_BITS], int64(5))
        elif kind != ONES:
            writer = put_bits(octets, writer, row[MAGNITUDE_BITS], int64(3))
    return writer


@inline
def write_suffixes(octets, writer, plan, num_classes, steps):
    """Append the bits below the leading one of every exponential Golomb code, in the order of their prefixes."""
    for number in range(num_classes):
        row = plan[number]
        if row[CODER] != SPARSE or (row[MAGNITUDES] != EXCEPTIONS and row[MAGNITUDES] != GOLOMB):
            continue
        for j in range(row[FIRST], row[FIRST] + row[COUNT]):
            value = abs(int64(steps[j])) - 1
            if row[MAGNITUDES] == GOLOMB:
                value = (value >> row[MAGNITUDE_BITS]) + 1
            if value > 1:
                length = floor_log2(value)
                writer = put_bits(octets, writer, value - (int64(1) << length), length)
    return writer
