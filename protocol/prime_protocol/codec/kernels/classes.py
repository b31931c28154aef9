"""Elements by class: choose the classes, spread steps over their planes, and apply planes to a base.

The wide loops process whole blocks and need AVX-512; the scalar ones do the rest of a chunk, or all of it on other
machines.
"""

# mypy: allow-untyped-defs, allow-untyped-calls
from __future__ import annotations

import numpy as np
from numba import int64, uint16, uint64

from prime_protocol.codec.kernels.base import inline, part, step_between
from prime_protocol.codec.kernels.vector import BLOCK, GROUP, HAS_WIDE, differing_words, gather_group, scatter_group
from prime_protocol.codec.kernels.words import trailing_zeros
from prime_protocol.codec.wire import CLASSES_MAX, ESCAPE, WINDOW

CLASS_PRICE = 120.0
"""Bits that a class must save: about 35 for its row of the plan, the rest for its time in both directions."""


@part
def count_exponents(new, base, shift, population, changes):
    """Count the base's exponents: in every 32nd block, and of the changed elements in every 4th."""
    for begin in range(0, new.size - BLOCK + 1, BLOCK * 4):
        differing = differing_words(new, base, begin)
        while differing:
            changes[(base[begin + trailing_zeros(differing)] & 0x7FFF) >> shift] += 1
            differing &= differing - uint64(1)
        if begin % (BLOCK * 32) == 0:
            for i in range(begin, begin + BLOCK):
                population[(base[i] & 0x7FFF) >> shift] += 1


@inline
def class_cost(elements, changes):
    """Return the bits for a class of that many elements: which of them changed, and a row of the plan."""
    if changes == 0:
        return 2.0
    kept = max(elements - changes, 1.0)
    return changes * np.log2(elements / changes) + kept * np.log2(elements / kept) + CLASS_PRICE


@part
def choose_classes(new, base, shift, lowest):
    """Divide the binades into the cheapest classes. Returns the top exponent, the boundaries and the number of classes.

    `lowest` receives each class's lowest exponent; bit j of the boundaries ends a class below exponent top - j.
    """
    population, changes = np.zeros(256, np.int64), np.zeros(256, np.int64)
    count_exponents(new, base, shift, population, changes)
    total, top, above = changes.sum(), 255, int64(0)
    while top > 1 and (above + changes[top]) * 1000 <= total:
        above += changes[top]
        top -= 1
    # Cells: at or above the top exponent, each binade below it, and everything below the window.
    elements, changed = np.zeros(WINDOW + 1), np.zeros(WINDOW + 1)
    for exponent in range(256):
        cell = min(max(top - exponent, 0), WINDOW)
        changed[cell] += changes[exponent] * 4
        elements[cell] += population[exponent] * 32
    best, cut = np.zeros(WINDOW + 2), np.zeros(WINDOW + 2, np.int64)
    for end in range(1, WINDOW + 2):
        best[end] = 1e18
        inside, hits = 0.0, 0.0
        for begin in range(end - 1, -1, -1):
            inside += elements[begin]
            hits += changed[begin]
            cost = best[begin] + class_cost(max(inside, hits), hits)
            if cost < best[end]:
                best[end], cut[end] = cost, begin
    boundaries, end = int64(0), cut[WINDOW + 1]
    while end > 0:
        if top - (end - 1) >= 1:
            boundaries |= int64(1) << (end - 1)
        end = cut[end]
    number = 0
    for j in range(WINDOW):
        if (boundaries >> j) & 1 and number < CLASSES_MAX - 1:
            lowest[number] = top - j
            number += 1
    lowest[number] = 0
    return top, boundaries, number + 1


@inline
def class_table(lowest, num_classes):
    """Return the class of every exponent."""
    table = np.zeros(256, np.uint8)
    for number in range(num_classes - 1):
        for exponent in range(lowest[number]):
            table[exponent] += 1
    return table


@inline
def cursors(fill, num_classes, stride):
    """Return each class's place in the flattened planes. Unsigned, because numba adds code for negative indices otherwise."""
    at = np.zeros(CLASSES_MAX, np.uint64)
    for number in range(num_classes):
        at[number] = uint64(number * stride + fill[number])
    return at


@part
def scatter_scalar(new, base, begin, shift, lowest, num_classes, fill, planes, escapes, num_escapes):
    """Append the steps of the elements from `begin` on to their classes' planes. Returns the number of escapes so far."""
    table, flat, stride = class_table(lowest, num_classes), planes.reshape(-1), planes.shape[1]
    at = cursors(fill, num_classes, stride)
    for i in range(uint64(begin), uint64(new.size)):
        number = table[((base[i] & uint16(0x7FFF)) >> uint16(shift)) & uint16(0xFF)]
        step = step_between(base[i], new[i])
        if step < -127 or step > 127:
            escapes[num_escapes] = uint16(step & 0xFFFF)
            num_escapes += 1
            step = int64(ESCAPE)
        flat[at[number]] = step
        at[number] += uint64(1)
    for number in range(num_classes):
        fill[number] = int64(at[number]) - number * stride
    return num_escapes


@part
def gather_scalar(out, base, begin, shift, lowest, num_classes, fill, planes, escapes, limit, num_escapes):
    """Apply the planes' steps from `begin` on. Returns the escapes used so far, or -1 for one over `limit`."""
    table, flat, stride = class_table(lowest, num_classes), planes.reshape(-1), planes.shape[1]
    at = cursors(fill, num_classes, stride)
    for i in range(uint64(begin), uint64(out.size)):
        number = table[((base[i] & uint16(0x7FFF)) >> uint16(shift)) & uint16(0xFF)]
        step = int64(flat[at[number]])
        at[number] += uint64(1)
        if step == ESCAPE:
            if num_escapes >= limit:
                return -1
            step = int64(escapes[num_escapes])
            num_escapes += 1
        out[i] = uint16((int64(base[i]) + step) & 0xFFFF)
    for number in range(num_classes):
        fill[number] = int64(at[number]) - number * stride
    return num_escapes


if HAS_WIDE:

    @part
    def scatter_wide(new, base, shift, lowest, num_classes, fill, planes, escapes):
        """Process whole groups like `scatter_scalar`. Returns the number of elements done and of escapes."""
        num_escapes, done = int64(0), new.size // GROUP * GROUP
        masks, stride = np.empty(GROUP // BLOCK, np.uint64), planes.shape[1]
        for begin in range(0, done, GROUP):
            if scatter_group(new, base, begin, shift, lowest, num_classes, fill, planes, stride, masks):
                for block in range(GROUP // BLOCK):
                    while masks[block]:
                        i = begin + block * BLOCK + trailing_zeros(masks[block])
                        escapes[num_escapes] = uint16(step_between(base[i], new[i]) & 0xFFFF)
                        num_escapes += 1
                        masks[block] &= masks[block] - uint64(1)
        return done, num_escapes

    @part
    def gather_wide(out, base, shift, lowest, num_classes, fill, planes, escapes, limit):
        """Process whole groups like `gather_scalar`. Returns the number of elements done and of escapes, or -1.

        An escape is first applied as if it were a step, then corrected.
        """
        num_escapes, done = int64(0), out.size // GROUP * GROUP
        masks, stride = np.empty(GROUP // BLOCK, np.uint64), planes.shape[1]
        for begin in range(0, done, GROUP):
            if gather_group(out, base, begin, shift, lowest, num_classes, fill, planes, stride, masks):
                for block in range(GROUP // BLOCK):
                    while masks[block]:
                        i = begin + block * BLOCK + trailing_zeros(masks[block])
                        if num_escapes >= limit:
                            return done, int64(-1)
                        out[i] = uint16((int64(out[i]) - ESCAPE + int64(escapes[num_escapes])) & 0xFFFF)
                        num_escapes += 1
                        masks[block] &= masks[block] - uint64(1)
        return done, num_escapes

else:

    @part
    def scatter_wide(new, base, shift, lowest, num_classes, fill, planes, escapes):
        """Return no progress: this machine lacks AVX-512."""
        return int64(0), int64(0)

    @part
    def gather_wide(out, base, shift, lowest, num_classes, fill, planes, escapes, limit):
        """Return no progress: this machine lacks AVX-512."""
        return int64(0), int64(0)
