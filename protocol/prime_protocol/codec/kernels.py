"""The inner loops of the CLASS mode for numba. Importing this module imports numba and compiles, or loads, machine code.

Invariants: a kernel checks every number that it takes from the wire before it uses it as an index; the decoder has validated all
bit streams before `gather` writes the first element; planes that a decoder scattered into are all zero again after `clear`.
Words: a class's *plane* holds one signed byte per element of the class, the step in units in the last place, 0 where nothing
changed and ESCAPE where the step does not fit; its *rank* is an element's number inside its class.

All kernels release the GIL and none starts threads of its own: numba's `parallel=True` collapses where cores are shared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import int64, njit, uint16, uint64

from prime_protocol.codec.vector import (
    BLOCK,
    HAS_WIDE,
    differing_words,
    gather_block,
    leading_zeros,
    load_word,
    nonzero_bytes,
    scatter_block,
    store_word,
    trailing_zeros,
)

CLASSES_MAX = 16
ESCAPE = -128
EMPTY, SPARSE, PLANE = 0, 1, 2  # how a class is coded
ONES, EXCEPTIONS, RICE, GOLOMB = 0, 1, 2, 3  # how a sparse class's magnitudes are coded
CODER, COUNT, GAP_BITS, MAGNITUDES, NUM_EXCEPTIONS, MAGNITUDE_BITS, FIRST = range(7)  # columns of a plan, one row per class
PLAN_COLUMNS = 7

kernel: Callable[..., Any]


def _compiled(**options: Any) -> Callable[..., Any]:
    """njit with an on-disk cache where some folder takes one: compiling costs seconds, loading milliseconds."""

    def decorate(function: Callable[..., Any]) -> Any:
        try:
            return njit(cache=True, nogil=True, **options)(function)
        except RuntimeError:  # numba found neither __pycache__ nor the user's cache folder writable
            return njit(nogil=True, **options)(function)

    return decorate


kernel = _compiled()
inline = njit(inline="always")


@inline
def ordinal(bits):
    """A bit pattern's place among all floats in order of value; negative ones counted down."""
    bits = int64(bits)
    return 0xFFFF - bits if bits & 0x8000 else bits ^ 0x8000


@inline
def pattern(place):
    place = place & 0xFFFF
    return place ^ 0x8000 if place & 0x8000 else 0xFFFF - place


@inline
def floor_log2(value):
    return int64(63) - leading_zeros(uint64(value))


# Classes ------------------------------------------------------------------------------------------------------------


@kernel
def count_exponents(new, base, shift, population, changes):
    """Histograms of the base's exponents: of every 32nd block, and of the changed elements in every 4th."""
    for begin in range(0, new.size - BLOCK + 1, BLOCK * 4):
        differing = differing_words(new, base, begin)
        while differing:
            changes[(base[begin + trailing_zeros(differing)] & 0x7FFF) >> shift] += 1
            differing &= differing - uint64(1)
        if begin % (BLOCK * 32) == 0:
            for i in range(begin, begin + BLOCK):
                population[(base[i] & 0x7FFF) >> shift] += 1


@inline
def class_of(bits, thresholds, num_classes):
    magnitude = bits & 0x7FFF
    number = 0
    while number < num_classes - 1 and magnitude < thresholds[number]:
        number += 1
    return number


@kernel
def scatter_scalar(new, base, begin, thresholds, num_classes, fill, planes, escapes, num_escapes):
    """Append the steps of the elements from `begin` on to their classes' planes. Returns the number of escapes so far."""
    for i in range(begin, new.size):
        number = class_of(base[i], thresholds, num_classes)
        step = ordinal(new[i]) - ordinal(base[i])
        if step < -127 or step > 127:
            escapes[num_escapes] = uint16(step & 0xFFFF)
            num_escapes += 1
            step = int64(ESCAPE)
        planes[number, fill[number]] = step
        fill[number] += 1
    return num_escapes


@kernel
def scatter_wide(new, base, thresholds, num_classes, fill, planes, escapes):
    """`scatter_scalar` for whole blocks."""
    num_escapes = int64(0)
    for begin in range(0, new.size - BLOCK + 1, BLOCK):
        escaped = scatter_block(new, base, begin, thresholds, num_classes, fill, planes, planes.shape[1])
        while escaped:
            i = begin + trailing_zeros(escaped)
            escapes[num_escapes] = uint16((ordinal(new[i]) - ordinal(base[i])) & 0xFFFF)
            num_escapes += 1
            escaped &= escaped - uint64(1)
    return num_escapes


@kernel
def gather_scalar(out, base, begin, thresholds, num_classes, fill, planes, escapes, num_escapes):
    """Apply the planes' steps from `begin` on. Returns the escapes used so far, or -1 if there are too few."""
    for i in range(begin, out.size):
        number = class_of(base[i], thresholds, num_classes)
        step = int64(planes[number, fill[number]])
        fill[number] += 1
        if step == ESCAPE:
            if num_escapes >= escapes.size:
                return -1
            step = int64(escapes[num_escapes])
            num_escapes += 1
        out[i] = pattern(ordinal(base[i]) + step)
    return num_escapes


@kernel
def gather_wide(out, base, thresholds, num_classes, fill, planes, escapes, old):
    """`gather_scalar` for whole blocks. `old` keeps a block of the base, which may be `out` itself."""
    num_escapes = int64(0)
    for begin in range(0, out.size - BLOCK + 1, BLOCK):
        old[:] = base[begin : begin + BLOCK]
        escaped = gather_block(out, base, begin, thresholds, num_classes, fill, planes, planes.shape[1])
        while escaped:
            lane = trailing_zeros(escaped)
            if num_escapes >= escapes.size:
                return int64(-1)
            out[begin + lane] = pattern(ordinal(old[lane]) + int64(escapes[num_escapes]))
            num_escapes += 1
            escaped &= escaped - uint64(1)
    return num_escapes


# Encoding -----------------------------------------------------------------------------------------------------------


@inline
def put(octets, position, value, width):
    """Write `width` <= 32 bits at bit `position`; the bits behind it are zero and stay so."""
    at = position >> 3
    store_word(octets, at, load_word(octets, at) | (uint64(value) << uint64(position & 7)))
    return position + width


@inline
def rice_cost(values, begin, end, low_bits):
    total = int64(0)
    for j in range(begin, end):
        total += values[j] >> low_bits
    return total + (end - begin) * (1 + low_bits)


@inline
def rice_bits(total, count):
    """The best number of low bits for `count` geometric values that sum up to `total`."""
    bits = int64(0)
    while bits < 18 and (count << bits) * 141 < total * 69:  # switch where 2^bits * sqrt 2 = mean * ln 2
        bits += 1
    return bits


@kernel
def analyze(fill, planes, num_classes, plan, ranks, bytes_of):
    """Find each class's changes and the cheapest code for them. Returns the total number of changes in sparse classes.

    `ranks` receives gaps in class order and `bytes_of` the steps; a class that is cheaper as a plane only gets a row in `plan`.
    """
    total = int64(0)
    magnitudes = np.zeros(129, np.int64)
    for number in range(num_classes):
        first, last, size = total, int64(-1), fill[number]
        plane = planes[number]
        plane[size : size + BLOCK] = 0
        magnitudes[:] = 0
        for begin in range(0, size, BLOCK):
            changed = nonzero_bytes(plane, begin)
            while changed:
                rank = begin + trailing_zeros(changed)
                step = plane[rank]
                ranks[total] = rank - last - 1
                bytes_of[total] = step
                magnitudes[abs(int64(step))] += 1
                last = rank
                total += 1
                changed &= changed - uint64(1)
        count = total - first
        plan[number, :] = 0
        plan[number, FIRST] = first
        plan[number, COUNT] = count
        if count:
            cost = plan_sparse(plan[number], ranks, magnitudes, last + 1)
            if count * 6 > size and cost > plane_cost(magnitudes, count, size):
                plan[number, CODER] = PLANE
                plan[number, COUNT] = size
                total = first
    return total


@inline
def entropy_term(part, whole):
    return part * np.log2(whole / part) if part else 0.0


@inline
def plane_cost(magnitudes, count, size):
    """Bits of a Huffman coded plane: its order-0 entropy, signs being even, and a table."""
    bits = 500.0 + count + entropy_term(size - count, size)
    for magnitude in range(1, 129):
        bits += entropy_term(magnitudes[magnitude], size)
    return int64(bits * 1.01)


@inline
def plan_sparse(row, gaps, magnitudes, span):
    """Choose the parameters of a sparse class; returns its bits."""
    first, count = row[FIRST], row[COUNT]
    row[CODER] = SPARSE
    bits = rice_bits(span - count, count)
    cost = rice_cost(gaps, first, first + count, bits)
    for other in range(max(int64(0), bits - 1), bits + 2):
        other_cost = rice_cost(gaps, first, first + count, other)
        if other_cost < cost:
            bits, cost = other, other_cost
    row[GAP_BITS] = bits
    return cost + count + plan_magnitudes(row, magnitudes, count)


@inline
def plan_magnitudes(row, magnitudes, count):
    """ONES where all steps are units; otherwise the cheapest of the three other codes, from the histogram alone."""
    exceptions = count - magnitudes[1]
    row[MAGNITUDES] = ONES
    if exceptions == 0:
        return int64(0)
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
    return cost


@inline
def put_length(octets, position, value):
    """A number from 1 to 2^18: its bit length in five bits, then the bits below the leading one."""
    length = floor_log2(value) + 1
    position = put(octets, position, length, 5)
    return put(octets, position, value - (int64(1) << (length - 1)), length - 1)


@kernel
def write(octets, plan, num_classes, num_escapes, gaps, steps, unary):
    """Write the plan and the four streams (signs, low bits, unary, suffixes) into zeroed `octets`. Returns the number of bits.

    `unary` is scratch for the quotients, which follow all signs and low bits.
    """
    position = int64(0)
    total = int64(0)
    for number in range(num_classes):
        row = plan[number]
        position = put(octets, position, row[CODER], 2)
        if row[CODER] == PLANE:
            position = put_length(octets, position, row[COUNT])
        elif row[CODER] == SPARSE:
            position = put_length(octets, position, row[COUNT])
            position = put(octets, position, row[GAP_BITS], 5)
            position = put(octets, position, row[MAGNITUDES], 2)
            if row[MAGNITUDES] == EXCEPTIONS:
                position = put_length(octets, position, row[NUM_EXCEPTIONS])
                position = put(octets, position, row[MAGNITUDE_BITS], 5)
            elif row[MAGNITUDES] != ONES:
                position = put(octets, position, row[MAGNITUDE_BITS], 3)
            total += row[COUNT]
    position = put_length(octets, position, num_escapes + 1)
    for j in range(total):
        position = put(octets, position, int64(steps[j] < 0), 1)
    num_unary = int64(0)
    num_golomb = int64(0)
    for number in range(num_classes):
        row = plan[number]
        if row[CODER] != SPARSE:
            continue
        first, end, bits = row[FIRST], row[FIRST] + row[COUNT], row[GAP_BITS]
        for j in range(first, end):
            position = put(octets, position, gaps[j] & ((int64(1) << bits) - 1), bits)
            unary[num_unary] = gaps[j] >> bits
            num_unary += 1
        bits = row[MAGNITUDE_BITS]
        if row[MAGNITUDES] == EXCEPTIONS:
            last = first - 1
            for j in range(first, end):
                if abs(int64(steps[j])) > 1:
                    run = j - last - 1
                    last = j
                    position = put(octets, position, run & ((int64(1) << bits) - 1), bits)
                    unary[num_unary] = run >> bits
                    num_unary += 1
            for j in range(first, end):
                if abs(int64(steps[j])) > 1:
                    unary[num_unary] = floor_log2(abs(int64(steps[j])) - 1)
                    num_unary += 1
                    num_golomb += 1
        elif row[MAGNITUDES] != ONES:
            for j in range(first, end):
                value = abs(int64(steps[j])) - 1
                position = put(octets, position, value & ((int64(1) << bits) - 1), bits)
                quotient = value >> bits
                unary[num_unary] = quotient if row[MAGNITUDES] == RICE else floor_log2(quotient + 1)
                num_unary += 1
                num_golomb += row[MAGNITUDES] == GOLOMB
    for j in range(num_unary):
        position += unary[j]
        position = put(octets, position, 1, 1)
    if num_golomb:
        position = write_suffixes(octets, position, plan, num_classes, steps)
    return position


@kernel
def write_suffixes(octets, position, plan, num_classes, steps):
    """The bits below the leading one of every exponential Golomb code, in the order of their prefixes."""
    for number in range(num_classes):
        row = plan[number]
        if row[CODER] != SPARSE:
            continue
        for j in range(row[FIRST], row[FIRST] + row[COUNT]):
            magnitude = abs(int64(steps[j]))
            value = int64(1)
            if row[MAGNITUDES] == EXCEPTIONS and magnitude > 1:
                value = magnitude - 1
            elif row[MAGNITUDES] == GOLOMB:
                value = ((magnitude - 1) >> row[MAGNITUDE_BITS]) + 1
            length = floor_log2(value)
            position = put(octets, position, value - (int64(1) << length), length)
    return position
