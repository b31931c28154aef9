"""Intrinsics for numba: 64 elements at a time through wide registers.

`scatter_group` and `gather_group` are one idea in both directions. The elements of a block fall into classes by their
base's magnitude. The encoder compresses each class's steps to the end of that class's plane; the decoder expands them
from there. Both need AVX-512 VBMI2 (`HAS_WIDE`); classes.py has a scalar loop for other machines and for the last
elements of a chunk. The other intrinsics compile to what the machine supports. The caller keeps all accesses in bounds:
64 elements at `index` (FANOUT times as many for a group of marks), and 64 bytes after each class's fill level.
"""

from __future__ import annotations

import functools
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from prime_protocol.codec.kernels.words import (
    BIT,
    FEATURES,
    I8,
    I16,
    I32,
    I64,
    LINE_ELEMENTS,
    ask_for_line,
    call,
    load_at,
    pointer_to,
    splat,
    store_at,
)

HAS_WIDE = "+avx512vbmi2" in FEATURES
_PACKS = "+avx512bw" in FEATURES
BLOCK = 64
GROUP = 4 * BLOCK
"""Elements that the wide loops take at once: the blocks share the loop over the classes."""
FANOUT = 16
"""Numbers that a search compares at once."""
AHEAD_ELEMENTS = 4 * FANOUT * BLOCK
"""Distance of prefetching ahead of the compares; a few groups more or less make no difference."""

_MASK, _BYTES, _WORDS = (ir.VectorType(lane, BLOCK) for lane in (BIT, I8, I16))


def _constant(vector: ir.VectorType, value: int) -> ir.Constant:
    return ir.Constant(vector, [value] * BLOCK)


def _each_class(context: Any, builder: Any, sig: Any, args: Any, words: list[Any], body: Any) -> None:
    """Run body(class, block, mask of the block's lanes in the class, fill level); the level grows by the number of lanes."""
    (shift_t, lowest_t, num_t, fill_t), (shift, lowest, num, fill) = sig, args
    del shift_t, num_t
    exponents = [_exponents(builder, block, shift) for block in words]
    above = [cgutils.alloca_once_value(builder, _constant(_MASK, 0)) for _ in words]
    with cgutils.for_range(builder, num) as loop:
        limit = load_at(builder, pointer_to(context, builder, lowest_t, lowest, loop.index, I8), I8)
        limits = splat(builder, limit, _BYTES)
        level_at = pointer_to(context, builder, fill_t, fill, loop.index, I64)
        level = load_at(builder, level_at, I64)
        for number, seen in enumerate(above):
            reached = builder.icmp_unsigned(">=", exponents[number], limits)
            lanes = builder.xor(reached, builder.load(seen))
            builder.store(reached, seen)
            body(loop.index, number, lanes, level)
            size = call(builder, "llvm.ctpop.i64", I64, [builder.bitcast(lanes, I64)])
            level = builder.add(level, size)
        store_at(builder, level, level_at)


def _blocks(
    context: Any, builder: Any, array_type: Any, array: Any, index: Any, count: int = GROUP // BLOCK
) -> list[Any]:
    """Return pointers to the blocks that begin at `index`, by default a group's."""
    starts = [builder.add(index, ir.Constant(I64, BLOCK * number)) for number in range(count)]
    return [pointer_to(context, builder, array_type, array, start, _WORDS) for start in starts]


def _report(context: Any, builder: Any, array_type: Any, array: Any, masks: list[Any]) -> Any:
    """Store each block's mask. Returns nonzero if any lane is set."""
    words = [builder.bitcast(mask, I64) for mask in masks]
    for number, word in enumerate(words):
        store_at(builder, word, pointer_to(context, builder, array_type, array, ir.Constant(I64, number), I64))
    return functools.reduce(builder.or_, words)


@intrinsic
def scatter_group(
    _: Any, new: Any, base: Any, index: Any, shift: Any, lowest: Any, num: Any, fill: Any, planes: Any,
    stride: Any, masks: Any,
) -> Any:  # fmt: skip
    """Append a group's steps to the planes of their classes. `masks` receives the lanes whose step needs more bits."""
    signature = types.uint64(new, base, index, shift, lowest, num, fill, planes, stride, masks)

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        old = [load_at(builder, at, _WORDS) for at in _blocks(context, builder, sig.args[1], args[1], args[2])]
        young = [load_at(builder, at, _WORDS) for at in _blocks(context, builder, sig.args[0], args[0], args[2])]
        octets, escaped = [], []
        for before, after in zip(old, young, strict=True):
            steps = builder.sub(after, before)
            # -127 .. 127 fit; shifted by 127 and read as unsigned that is 0 .. 254.
            shifted = builder.add(steps, _constant(_WORDS, 127))
            escaped.append(builder.icmp_unsigned(">", shifted, _constant(_WORDS, 254)))
            octets.append(builder.select(escaped[-1], _constant(_BYTES, 0x80), builder.trunc(steps, _BYTES)))

        def append(number: Any, block: int, lanes: Any, level: Any) -> None:
            arguments = [octets[block], _constant(_BYTES, 0), lanes]
            packed = call(builder, "llvm.x86.avx512.mask.compress.v64i8", _BYTES, arguments)
            at = builder.add(builder.mul(number, args[8]), level)
            store_at(builder, packed, pointer_to(context, builder, sig.args[7], args[7], at, _BYTES))

        _each_class(context, builder, sig.args[3:7], args[3:7], old, append)
        return _report(context, builder, sig.args[9], args[9], escaped)

    return signature, generate


@intrinsic
def gather_group(
    _: Any, out: Any, base: Any, index: Any, shift: Any, lowest: Any, num: Any, fill: Any, planes: Any,
    stride: Any, masks: Any,
) -> Any:  # fmt: skip
    """Write a group: base plus the next steps of each class's plane. `masks` receives the lanes with the escape byte."""
    signature = types.uint64(out, base, index, shift, lowest, num, fill, planes, stride, masks)

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        old = [load_at(builder, at, _WORDS) for at in _blocks(context, builder, sig.args[1], args[1], args[2])]
        octets = [cgutils.alloca_once_value(builder, _constant(_BYTES, 0)) for _ in old]

        def take(number: Any, block: int, lanes: Any, level: Any) -> None:
            at = builder.add(builder.mul(number, args[8]), level)
            packed = load_at(builder, pointer_to(context, builder, sig.args[7], args[7], at, _BYTES), _BYTES)
            arguments = [packed, _constant(_BYTES, 0), lanes]
            spread = call(builder, "llvm.x86.avx512.mask.expand.v64i8", _BYTES, arguments)
            builder.store(builder.or_(builder.load(octets[block]), spread), octets[block])

        _each_class(context, builder, sig.args[3:7], args[3:7], old, take)
        escaped = []
        targets = _blocks(context, builder, sig.args[0], args[0], args[2])
        for target, before, sparse in zip(targets, old, octets, strict=True):
            steps = builder.load(sparse)
            after = builder.add(before, builder.sext(steps, _WORDS))
            store_at(builder, after, target)
            escaped.append(builder.icmp_unsigned("==", steps, _constant(_BYTES, 0x80)))
        return _report(context, builder, sig.args[9], args[9], escaped)

    return signature, generate


@intrinsic
def mark_group(
    _: Any, base: Any, index: Any, shift: Any, lowest: Any, num: Any, words: Any, at: Any, stride: Any
) -> Any:  # fmt: skip
    """Store a word for each of the first classes and each of FANOUT blocks at `index`.

    Its bits are the elements whose exponent reaches the class's lowest one. The first class's words go to `at` of the
    flattened `words`, each other class's `stride` later. Lines are prefetched ahead, even past the array's end, where
    the next chunk may be.
    """
    signature = types.void(base, index, shift, lowest, num, words, at, stride)

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        blocks = _blocks(context, builder, sig.args[0], args[0], args[1], FANOUT)
        for begin in range(AHEAD_ELEMENTS, AHEAD_ELEMENTS + FANOUT * BLOCK, LINE_ELEMENTS):
            at = builder.add(args[1], ir.Constant(I64, begin))
            ask_for_line(builder, pointer_to(context, builder, sig.args[0], args[0], at, I8))
        exponents = [_exponents(builder, load_at(builder, block, _WORDS), args[2]) for block in blocks]
        with cgutils.for_range(builder, args[4]) as loop:
            limit = load_at(builder, pointer_to(context, builder, sig.args[3], args[3], loop.index, I8), I8)
            limits = splat(builder, limit, _BYTES)
            row_at = builder.add(builder.mul(loop.index, args[7]), args[6])
            for number, block in enumerate(exponents):
                reached = builder.bitcast(builder.icmp_unsigned(">=", block, limits), I64)
                place = builder.add(row_at, ir.Constant(I64, number))
                store_at(builder, reached, pointer_to(context, builder, sig.args[5], args[5], place, I64))
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def give_signs(_: Any, steps: Any, index: Any, signs: Any) -> Any:
    """Negate those of 32 magnitudes at `index` whose bit is set. Returns the bits of the others that are 128."""
    numbers = ir.VectorType(I16, 32)

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        at = pointer_to(context, builder, sig.args[0], args[0], args[1], numbers)
        found = load_at(builder, at, numbers)
        negative = builder.bitcast(builder.trunc(args[2], I32), ir.VectorType(BIT, 32))
        store_at(builder, builder.select(negative, builder.neg(found), found), at)
        greatest = builder.icmp_unsigned("==", found, ir.Constant(numbers, [128] * 32))
        return builder.zext(builder.bitcast(builder.and_(greatest, builder.not_(negative)), I32), I64)

    return types.uint64(steps, index, types.uint64), generate


@intrinsic
def count_words(_: Any, words: Any, at: Any, stride: Any, starts: Any, to: Any, before: Any) -> Any:
    """Count the bits before each of FANOUT words, including `before`. Returns the count with the last word.

    A word's bits are those of `words` that are not in the word `stride` earlier.
    """
    signature = types.int64(words, at, stride, starts, to, types.int64)
    counts_t, rows_t = ir.VectorType(I64, FANOUT), ir.VectorType(I32, FANOUT)

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        own, above = (
            load_at(builder, pointer_to(context, builder, sig.args[0], args[0], place, counts_t), counts_t)
            for place in (args[1], builder.sub(args[1], args[2]))
        )
        counts = builder.trunc(call(builder, "llvm.ctpop.v16i64", counts_t, [builder.xor(own, above)]), rows_t)
        running, zeros = counts, ir.Constant(rows_t, [0] * FANOUT)
        for distance in (1, 2, 4, 8):
            lanes = [FANOUT + lane - distance if lane >= distance else lane for lane in range(FANOUT)]
            running = builder.add(running, builder.shuffle_vector(zeros, running, ir.Constant(rows_t, lanes)))
        begin = splat(builder, builder.trunc(args[5], I32), rows_t)
        starts_at = pointer_to(context, builder, sig.args[3], args[3], args[4], rows_t)
        store_at(builder, builder.add(builder.sub(running, counts), begin), starts_at)
        last = builder.extract_element(running, ir.Constant(I32, FANOUT - 1))
        return builder.add(args[5], builder.zext(last, I64))

    return signature, generate


@intrinsic
def count_passed(_: Any, levels: Any, index: Any, rank: Any) -> Any:
    """Return how many of 16 ascending numbers at `index` are not above `rank`."""
    numbers = ir.VectorType(I32, FANOUT)

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        at = pointer_to(context, builder, sig.args[0], args[0], args[1], numbers)
        ranks = splat(builder, builder.trunc(args[2], I32), numbers)
        passed = builder.icmp_signed("<=", load_at(builder, at, numbers), ranks)
        size = call(builder, "llvm.ctpop.i16", I16, [builder.bitcast(passed, I16)])
        return builder.zext(size, I64)

    return types.int64(levels, index, types.int64), generate


def _exponents(builder: Any, words: Any, shift: Any) -> Any:
    places = splat(builder, builder.trunc(shift, I16), _WORDS)
    return _low_bytes(builder, builder.lshr(builder.and_(words, _constant(_WORDS, 0x7FFF)), places))


def _low_bytes(builder: Any, words: Any) -> Any:
    """Narrow words below 256 to bytes. AVX-512 needs two instructions, the compiler's choice five on the same execution port."""
    if not _PACKS:
        return builder.trunc(words, _BYTES)
    halves = [
        builder.shuffle_vector(words, words, ir.Constant(ir.VectorType(I32, 32), list(range(begin, begin + 32))))
        for begin in (0, 32)
    ]
    packed = call(builder, "llvm.x86.avx512.packuswb.512", _BYTES, halves)  # 8 bytes of each half in turn
    lanes = ir.VectorType(I64, 8)
    eights = builder.bitcast(packed, lanes)
    order = ir.Constant(ir.VectorType(I32, 8), [0, 2, 4, 6, 1, 3, 5, 7])
    return builder.bitcast(builder.shuffle_vector(eights, eights, order), _BYTES)


@intrinsic
def merge_block(_: Any, words: Any, index: Any, low: Any, high: Any) -> Any:
    """Write 64 words, bypassing the cache, from their low bytes (rotated left by one bit) and their high ones.

    `words` must be aligned to 64 bytes at `index`. The caller ends with `settle_stores`.
    """

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        lows, highs = (
            builder.zext(load_at(builder, pointer_to(context, builder, kind, array, args[1], _BYTES), _BYTES), _WORDS)
            for kind, array in ((sig.args[2], args[2]), (sig.args[3], args[3]))
        )
        top = builder.or_(builder.shl(highs, _constant(_WORDS, 7)), builder.shl(lows, _constant(_WORDS, 15)))
        merged = builder.or_(builder.lshr(lows, _constant(_WORDS, 1)), top)
        store = builder.store(merged, pointer_to(context, builder, sig.args[0], args[0], args[1], _WORDS))
        store.align = 64
        store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(I32, 1)]))
        return context.get_dummy_value()

    return types.void(words, index, low, high), generate


@intrinsic
def settle_stores(_: Any) -> Any:
    """Make the writes that bypass the cache visible to other threads."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


def _compare_block(lane: ir.Type) -> Any:
    vector = ir.VectorType(lane, BLOCK)

    @intrinsic
    def differing(_: Any, left: Any, right: Any, index: Any) -> Any:
        """Return the lanes among 64 at `index` in which two arrays differ."""

        def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            one = load_at(builder, pointer_to(context, builder, sig.args[0], args[0], args[2], vector), vector)
            two = load_at(builder, pointer_to(context, builder, sig.args[1], args[1], args[2], vector), vector)
            return builder.bitcast(builder.icmp_unsigned("!=", one, two), I64)

        return types.uint64(left, right, index), generate

    return differing


differing_words = _compare_block(I16)


@intrinsic
def nonzero_bytes(_: Any, plane: Any, index: Any) -> Any:
    """Return the nonzero bytes among 64 at `index`."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        octets = load_at(builder, pointer_to(context, builder, sig.args[0], args[0], args[1], _BYTES), _BYTES)
        return builder.bitcast(builder.icmp_unsigned("!=", octets, _constant(_BYTES, 0)), I64)

    return types.uint64(plane, index), generate
