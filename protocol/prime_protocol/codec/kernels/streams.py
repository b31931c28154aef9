"""Bits -> plan, ranks and steps, from untrusted bytes. SPEC.md, section "CLASS".

Invariant: every number from the wire is checked before it is used as an index or a shift. `octets` ends in PADDING zero
bytes, and no check lets a reader pass the end by more than these. Negative results are reasons, in the order of
REASONS.
"""

# mypy: allow-untyped-defs, allow-untyped-calls
from __future__ import annotations

from numba import int64, uint64

from prime_protocol.codec.kernels.base import (
    CODER,
    COUNT,
    FIRST,
    GAP_BITS,
    MAGNITUDE_BITS,
    MAGNITUDES,
    NUM_EXCEPTIONS,
    floor_log2,
    inline,
    part,
)
from prime_protocol.codec.kernels.vector import give_signs
from prime_protocol.codec.kernels.words import LINE_ELEMENTS, ask_for, load_word, trailing_zeros
from prime_protocol.codec.wire import (
    EMPTY,
    EXCEPTIONS,
    GOLOMB,
    ONES,
    PARAMETER_BITS_MAX,
    PLANE,
    PREFIX_MAX,
    SPARSE,
)

PADDING = 64
REASONS = (
    "",
    "ends inside the bit streams",
    "a class's parameters are out of range",
    "a change is past the last element",
    "a step is out of range",
    "the number of escapes does not match the bytes at the end",
    "its classes do not match this base",
    "its class boundaries are out of range",
)
CUT, PARAMETERS, BEHIND, STEP, TRAILING, MISFIT, BOUNDS = range(1, 8)
"""Indices in REASONS."""
MAGNITUDE_MAX = 128
"""Magnitude of an escape; other steps are smaller."""


@inline
def take_bits(octets, position, width):
    """Return `width` <= 32 bits at bit `position`."""
    word = load_word(octets, position >> 3) >> uint64(position & 7)
    return int64(word & ((uint64(1) << uint64(width)) - uint64(1)))


@inline
def take_length(octets, position):
    """Invert `put_length`: return the value, 0 if it is malformed, and the next position."""
    length = take_bits(octets, position, 5)
    if length < 1 or length > 19:
        return int64(0), position
    value = (int64(1) << (length - 1)) | take_bits(octets, position + 5, length - 1)
    return value, position + 4 + length


@part
def take_unary(octets, position, end, count, quotients):
    """Read the next `count` unary codes. Returns the position after them, or -1 if they do not end before `end`."""
    word = load_word(octets, position >> 3) & (~uint64(0) << uint64(position & 7))
    origin = position & ~int64(7)  # the bit number of the word's lowest bit
    after = position  # position after the last one found
    found = int64(0)
    while True:
        while word:
            at = origin + trailing_zeros(word)
            quotients[found] = at - after
            after = at + 1
            word &= word - uint64(1)
            found += 1
            if found == count:
                return after if after <= end else int64(-1)
        origin += 64
        if origin >= end:
            return int64(-1)
        word = load_word(octets, origin >> 3)


@part
def read_plan(octets, end, num_classes, count, plan):
    """Parse the classes' parameters. Returns the position after them and the number of escapes, or (-1, reason)."""
    position, changes, in_planes = int64(0), int64(0), int64(0)
    for number in range(num_classes):
        row = plan[number]
        row[:] = 0
        if position > end:
            return int64(-1), int64(CUT)
        coder = take_bits(octets, position, 2)
        position += 2
        if coder == EMPTY:
            continue
        size, position = take_length(octets, position)
        if coder > PLANE or size < 1 or size > count:
            return int64(-1), int64(PARAMETERS)
        row[CODER], row[COUNT] = coder, size
        if coder == PLANE:
            in_planes += size
            continue
        row[FIRST] = changes
        changes += size
        row[GAP_BITS] = take_bits(octets, position, 5)
        row[MAGNITUDES] = take_bits(octets, position + 5, 2)
        position += 7
        if row[GAP_BITS] > PARAMETER_BITS_MAX:
            return int64(-1), int64(PARAMETERS)
        if row[MAGNITUDES] == EXCEPTIONS:
            row[NUM_EXCEPTIONS], position = take_length(octets, position)
            row[MAGNITUDE_BITS] = take_bits(octets, position, 5)
            position += 5
            if row[NUM_EXCEPTIONS] < 1 or row[NUM_EXCEPTIONS] > size or row[MAGNITUDE_BITS] > PARAMETER_BITS_MAX:
                return int64(-1), int64(PARAMETERS)
        elif row[MAGNITUDES] != ONES:
            row[MAGNITUDE_BITS] = take_bits(octets, position, 3)
            position += 3
    escapes, position = take_length(octets, position)
    if position > end:
        return int64(-1), int64(CUT)
    if escapes < 1 or escapes - 1 > count or changes + in_planes > count:
        return int64(-1), int64(PARAMETERS)
    return position, escapes - 1


@inline
def streams(plan, num_classes, position):
    """Return where the low bits and the unary codes begin, if the signs begin at `position`."""
    low_at, unary_at = position, position
    for number in range(num_classes):
        row = plan[number]
        if row[CODER] == SPARSE:
            low_at += row[COUNT]
            unary_at += row[COUNT] * (1 + row[GAP_BITS])
            if row[MAGNITUDES] == EXCEPTIONS:
                unary_at += row[NUM_EXCEPTIONS] * row[MAGNITUDE_BITS]
            elif row[MAGNITUDES] != ONES:
                unary_at += row[COUNT] * row[MAGNITUDE_BITS]
    return low_at, unary_at


@inline
def take_sums(octets, low_at, bits, size, quotients, first, found, base, few):
    """Store running sums of `size` gaps as ranks from `first` on. Returns the last one and where the next low bits begin.

    If the changes are few, reading the base is limited by memory bandwidth, and this loop uses none. So it prefetches
    two of the base's lines with each gap.
    """
    rank, line = int64(-1), first * 2 * LINE_ELEMENTS
    for j in range(size):
        rank += ((int64(quotients[j]) << bits) | take_bits(octets, low_at, bits)) + 1
        low_at += bits
        found[first + j] = rank
        if few:
            ask_for(base, line)
            ask_for(base, line + LINE_ELEMENTS)
            line += 2 * LINE_ELEMENTS
    return rank, low_at


@part
def read_steps(octets, position, end, num_classes, plan, ranks, steps, quotients, places, base, few):
    """Decode all sparse classes into ranks and steps. Returns the position after the streams, or minus a reason.

    When this returns a position, all indices that `scatter_steps` uses have been checked.
    """
    (low_at, unary_at), num_places = streams(plan, num_classes, position), int64(0)
    if unary_at > end:
        return int64(-CUT)
    for number in range(num_classes):
        row = plan[number]
        if row[CODER] != SPARSE:
            continue
        first, size, kind = row[FIRST], row[COUNT], row[MAGNITUDES]
        unary_at = take_unary(octets, unary_at, end, size, quotients)
        if unary_at < 0:
            return int64(-CUT)
        rank, low_at = take_sums(octets, low_at, row[GAP_BITS], size, quotients, first, ranks, base, few)
        if rank >= base.size:
            return int64(-BEHIND)
        steps[first : first + size] = 1
        if kind == EXCEPTIONS:
            unary_at, low_at = read_exceptions(
                octets, unary_at, end, low_at, row, steps, quotients, places, num_places, base
            )
            num_places += row[NUM_EXCEPTIONS]
        elif kind != ONES:
            unary_at, low_at = read_magnitudes(octets, unary_at, end, low_at, row, steps, quotients)
        if unary_at < 0:
            return unary_at
    unary_at = read_suffixes(octets, unary_at, end, num_classes, plan, steps, places)
    if unary_at < 0:
        return unary_at
    return unary_at if read_signs(octets, position, num_classes, plan, steps) else int64(-STEP)


@inline
def read_exceptions(octets, unary_at, end, low_at, row, steps, quotients, places, num_places, base):
    """Mark a class's exceptions with 1 + 2^prefix. Returns both positions; a negative first one is a reason."""
    size = row[NUM_EXCEPTIONS]
    unary_at = take_unary(octets, unary_at, end, size, quotients)
    if unary_at < 0:
        return int64(-CUT), low_at
    last, low_at = take_sums(octets, low_at, row[MAGNITUDE_BITS], size, quotients, num_places, places, base, False)
    if last >= row[COUNT]:
        return int64(-STEP), low_at
    unary_at = take_unary(octets, unary_at, end, size, quotients)
    if unary_at < 0:
        return int64(-CUT), low_at
    for e in range(size):
        if quotients[e] > PREFIX_MAX:
            return int64(-STEP), low_at
        places[num_places + e] += row[FIRST]
        steps[places[num_places + e]] = 1 + (int64(1) << int64(quotients[e]))
    return unary_at, low_at


@inline
def read_magnitudes(octets, unary_at, end, low_at, row, steps, quotients):
    """Read a class's magnitudes coded by RICE, or by GOLOMB without suffixes. Returns the same as `read_exceptions`."""
    size, bits, golomb = row[COUNT], row[MAGNITUDE_BITS], row[MAGNITUDES] == GOLOMB
    unary_at = take_unary(octets, unary_at, end, size, quotients)
    if unary_at < 0:
        return int64(-CUT), low_at
    for j in range(size):
        quotient = int64(quotients[j])
        if quotient > (PREFIX_MAX if golomb else MAGNITUDE_MAX):
            return int64(-STEP), low_at
        if golomb:
            quotient = (int64(1) << quotient) - 1
        value = 1 + ((quotient << bits) | take_bits(octets, low_at, bits))
        low_at += bits
        if value > MAGNITUDE_MAX:
            return int64(-STEP), low_at
        steps[row[FIRST] + j] = value
    return unary_at, low_at


@inline
def read_suffixes(octets, position, end, num_classes, plan, steps, places):
    """Complete magnitudes with known prefixes: 1 + 2^p (EXCEPTIONS), 1 + ((2^p - 1) << b | low) (GOLOMB)."""
    num_places = int64(0)
    for number in range(num_classes):
        row = plan[number]
        kind = row[MAGNITUDES]
        if row[CODER] != SPARSE or (kind != EXCEPTIONS and kind != GOLOMB):
            continue
        golomb = kind == GOLOMB
        bits = row[MAGNITUDE_BITS] if golomb else int64(0)
        for e in range(row[COUNT] if golomb else row[NUM_EXCEPTIONS]):
            j = row[FIRST] + e if golomb else int64(places[num_places + e])
            value = ((int64(steps[j]) - 1) >> bits) + int64(golomb)
            if value > 1:
                length = floor_log2(value)
                steps[j] += take_bits(octets, position, length) << bits
                position += length
                if steps[j] > MAGNITUDE_MAX or position > end:
                    return int64(-STEP)
        num_places += row[NUM_EXCEPTIONS]
    return position


@inline
def read_signs(octets, position, num_classes, plan, steps):
    """Give the magnitudes their signs, 32 at a time. Returns False if an escape's magnitude has the wrong one."""
    total, wrong = int64(0), uint64(0)
    for number in range(num_classes):
        if plan[number, CODER] == SPARSE:
            total += plan[number, COUNT]
    for begin in range(0, total, 32):
        word = load_word(octets, position >> 3) >> uint64(position & 7)
        position += 32
        behind = uint64(max(int64(0), begin + 32 - total))
        wrong |= give_signs(steps, begin, word) << (uint64(32) + behind)
    return wrong == uint64(0)
