"""Apply a chunk with few changes: find each change's element, and write nothing else.

A block's members of each class are a word of bits; the number of members before the block is its *start*. A rank is
found by a search in the starts of its class, then in one word. Three search steps of FANOUT reach all blocks of a
chunk. No branch depends on the data, so none is mispredicted. The search needs no memory bandwidth, so it prefetches
lines at the end of the next chunk's base. It works with any vector width; the wide loops of classes.py need AVX-512.
"""

# mypy: allow-untyped-defs, allow-untyped-calls
from __future__ import annotations

import numpy as np
from numba import int64, uint16, uint64

from prime_protocol.codec.kernels.base import COUNT, FIRST, inline, part
from prime_protocol.codec.kernels.classes import class_table
from prime_protocol.codec.kernels.vector import BLOCK, FANOUT, count_passed, count_words, mark_group
from prime_protocol.codec.kernels.words import LINE_ELEMENTS, ask_for, place_of
from prime_protocol.codec.layout import CHUNK_ELEMENTS
from prime_protocol.codec.wire import CLASSES_MAX, ESCAPE

GROUP_ELEMENTS = FANOUT * BLOCK
GROUPS_MAX = CHUNK_ELEMENTS // GROUP_ELEMENTS
BLOCKS_MAX = CHUNK_ELEMENTS // BLOCK
MIDDLE = BLOCKS_MAX
TOP = MIDDLE + GROUPS_MAX
STARTS = TOP + FANOUT
"""Row of a class: its elements before each block, before each group of 16, and before each sixteenth group."""
FAR = 1 << 30
"""Start of missing groups: above any rank."""


@inline
def copy(out, base, begin, end):
    """Copy the words from `begin` to `end`."""
    for at in range(uint64(begin), uint64(end)):  # assigning a slice copies one element at a time
        out[at] = base[at]


@part
def count_starts(out, base, shift, lowest, num_classes, words, starts, sums):
    """Fill `words`, `starts` and `sums`, each class's elements, for all whole groups. Returns the number of groups.

    It also copies the base if `out` is not the base. Words are written first and read afterwards, because a vector that
    is read too soon after its parts were stored has to wait.
    """
    num_groups, flat, marks = base.size // GROUP_ELEMENTS, starts.reshape(-1), words.reshape(-1)
    beside = out.ctypes.data != base.ctypes.data
    words[num_classes, : num_groups * FANOUT] = ~uint64(0)  # the last class has all elements that no other has
    for group in range(num_groups):
        at = BLOCKS_MAX + group * FANOUT
        mark_group(base, group * GROUP_ELEMENTS, shift, lowest, num_classes - 1, marks, at, BLOCKS_MAX)
        if beside:
            copy(out, base, group * GROUP_ELEMENTS, (group + 1) * GROUP_ELEMENTS)
    if beside:
        copy(out, base, num_groups * GROUP_ELEMENTS, base.size)
    for number in range(num_classes):
        row, total = starts[number], int64(0)
        row[MIDDLE:STARTS] = FAR
        for group in range(num_groups):
            row[MIDDLE + group] = total
            if group % FANOUT == 0:
                row[TOP + group // FANOUT] = total
            at = (number + 1) * BLOCKS_MAX + group * FANOUT
            total = count_words(marks, at, BLOCKS_MAX, flat, number * STARTS + group * FANOUT, total)
        sums[number] = total
    return num_groups


@part
def patch(
    out, base, behind, shift, lowest, num_classes, plan, ranks, steps, words, starts, sums, escapes, num_escapes, escaped
):  # fmt: skip
    """Write base plus steps to `out`, which may be `base`. Returns False if the streams do not fit.

    They do not fit if a class lacks a rank, or the number of escapes differs. `behind` is the base of the next chunk,
    for prefetching only: none of it is used. `escaped` is scratch.
    """
    num_groups = count_starts(out, base, shift, lowest, num_classes, words, starts, sums)
    flat, marks = starts.reshape(-1), words.reshape(-1)
    cursors, ends = np.zeros(CLASSES_MAX, np.int64), np.zeros(CLASSES_MAX, np.int64)
    found = uint64(0)
    for number in range(num_classes):
        row, own = uint64(number * STARTS), uint64((number + 1) * BLOCKS_MAX)
        first, end = plan[number, FIRST], plan[number, FIRST] + plan[number, COUNT]
        inside = end
        while inside > first and ranks[inside - 1] >= sums[number]:
            inside -= 1
        for j in range(uint64(first), uint64(inside)):
            rank = int64(ranks[j])
            block = uint64(count_passed(flat, row + uint64(TOP), rank) - 1) * uint64(FANOUT)
            block = (block + uint64(count_passed(flat, row + uint64(MIDDLE) + block, rank) - 1)) * uint64(FANOUT)
            block += uint64(count_passed(flat, row + block, rank) - 1)
            lanes = marks[own + block] ^ marks[own + block - uint64(BLOCKS_MAX)]
            at = block * uint64(BLOCK) + uint64(place_of(lanes, rank - int64(flat[row + block])))
            out[at] += uint16(steps[j])
            escaped[found] = at
            found += uint64(steps[j] == ESCAPE)
            ask_for(behind, behind.size - j * LINE_ELEMENTS)
        cursors[number], ends[number] = inside, end
    table = class_table(lowest, num_classes)
    for at in range(num_groups * GROUP_ELEMENTS, base.size):
        number = table[((base[at] & uint16(0x7FFF)) >> uint16(shift)) & uint16(0xFF)]
        cursor = cursors[number]
        if cursor < ends[number] and ranks[cursor] == sums[number]:
            out[at] += uint16(steps[cursor])
            escaped[found] = at
            found += uint64(steps[cursor] == ESCAPE)
            cursors[number] += 1
        sums[number] += 1
    for number in range(num_classes):
        if cursors[number] != ends[number]:
            return False
    if int64(found) != num_escapes:
        return False
    sort(escaped, num_escapes)
    for j in range(num_escapes):
        out[escaped[j]] += escapes[j] - uint16(ESCAPE & 0xFFFF)
    return True


@inline
def sort(numbers, count):
    """Sort the first `count` numbers by insertion."""
    for end in range(1, count):
        number, at = numbers[end], end
        while at > 0 and numbers[at - 1] > number:
            numbers[at] = numbers[at - 1]
            at -= 1
        numbers[at] = number
