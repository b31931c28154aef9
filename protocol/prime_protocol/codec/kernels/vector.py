"""Four intrinsics for numba: 64 elements at a time through wide registers, and the bit tricks around them.

`scatter_block` and `gather_block` are one idea in both directions: the elements of a block fall into classes by their base's
magnitude; the encoder compresses each class's steps to the end of that class's plane, the decoder expands them from there.
Both need AVX-512 VBMI2 (`HAS_WIDE`); kernels.py has a scalar loop for every other machine and for the last elements of a chunk.
The caller keeps all accesses in bounds: 64 elements at `index`, and 64 bytes behind each class's fill level.
"""

from __future__ import annotations

import functools
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

HAS_WIDE = bool(llvm.get_host_cpu_features().get("avx512vbmi2"))
BLOCK = 64
GROUP = 4 * BLOCK
"""Elements that the wide loops take at once: the blocks share the loop over the classes."""

_BIT, _I8, _I16, _I64 = ir.IntType(1), ir.IntType(8), ir.IntType(16), ir.IntType(64)
_MASK, _BYTES, _WORDS = (ir.VectorType(lane, BLOCK) for lane in (_BIT, _I8, _I16))


def _pointer(context: Any, builder: Any, array_type: Any, array: Any, index: Any, target: ir.Type) -> Any:
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), target.as_pointer())


def _load(builder: Any, pointer: Any, target: ir.Type) -> Any:
    loaded = builder.load(pointer, typ=target)
    loaded.align = 1
    return loaded


def _store(builder: Any, value: Any, pointer: Any) -> None:
    builder.store(value, pointer).align = 1


def _splat(builder: Any, value: Any, vector: ir.VectorType) -> Any:
    lane0 = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), BLOCK), [0] * BLOCK)
    return builder.shuffle_vector(lane0, ir.Constant(vector, ir.Undefined), zeros)


def _constant(vector: ir.VectorType, value: int) -> ir.Constant:
    return ir.Constant(vector, [value] * BLOCK)


def _call(builder: Any, name: str, result: ir.Type, args: list[Any]) -> Any:
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, [a.type for a in args]), name)
    return builder.call(function, args)


def _each_class(context: Any, builder: Any, sig: Any, args: Any, words: list[Any], body: Any) -> None:
    """body(class, block, mask of the block's lanes in the class, fill level), the level growing by the number of lanes."""
    (shift_t, lowest_t, num_t, fill_t), (shift, lowest, num, fill) = sig, args
    del shift_t, num_t
    places = _splat(builder, builder.trunc(shift, _I16), _WORDS)
    exponents = [
        builder.trunc(builder.lshr(builder.and_(block, _constant(_WORDS, 0x7FFF)), places), _BYTES) for block in words
    ]
    above = [cgutils.alloca_once_value(builder, _constant(_MASK, 0)) for _ in words]
    with cgutils.for_range(builder, num) as loop:
        limit = _load(builder, _pointer(context, builder, lowest_t, lowest, loop.index, _I8), _I8)
        limits = _splat(builder, limit, _BYTES)
        level_at = _pointer(context, builder, fill_t, fill, loop.index, _I64)
        level = _load(builder, level_at, _I64)
        for number, seen in enumerate(above):
            reached = builder.icmp_unsigned(">=", exponents[number], limits)
            lanes = builder.xor(reached, builder.load(seen))
            builder.store(reached, seen)
            body(loop.index, number, lanes, level)
            size = _call(builder, "llvm.ctpop.i64", _I64, [builder.bitcast(lanes, _I64)])
            level = builder.add(level, size)
        _store(builder, level, level_at)


def _blocks(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> list[Any]:
    """Pointers to the blocks of a group that begins at `index`."""
    starts = [builder.add(index, ir.Constant(_I64, BLOCK * number)) for number in range(GROUP // BLOCK)]
    return [_pointer(context, builder, array_type, array, start, _WORDS) for start in starts]


def _report(context: Any, builder: Any, array_type: Any, array: Any, masks: list[Any]) -> Any:
    """Store each block's mask; nonzero if any lane is set."""
    words = [builder.bitcast(mask, _I64) for mask in masks]
    for number, word in enumerate(words):
        _store(builder, word, _pointer(context, builder, array_type, array, ir.Constant(_I64, number), _I64))
    return functools.reduce(builder.or_, words)


@intrinsic
def scatter_group(
    _: Any, new: Any, base: Any, index: Any, shift: Any, lowest: Any, num: Any, fill: Any, planes: Any,
    stride: Any, masks: Any,
) -> Any:  # fmt: skip
    """Append a group's steps to the planes of their classes. `masks` receives the lanes whose step needs more bits."""
    signature = types.uint64(new, base, index, shift, lowest, num, fill, planes, stride, masks)

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        old = [_load(builder, at, _WORDS) for at in _blocks(context, builder, sig.args[1], args[1], args[2])]
        young = [_load(builder, at, _WORDS) for at in _blocks(context, builder, sig.args[0], args[0], args[2])]
        octets, escaped = [], []
        for before, after in zip(old, young, strict=True):
            steps = builder.sub(after, before)
            # -127 .. 127 fit; seen as unsigned and shifted by 127 that is 0 .. 254.
            shifted = builder.add(steps, _constant(_WORDS, 127))
            escaped.append(builder.icmp_unsigned(">", shifted, _constant(_WORDS, 254)))
            octets.append(builder.select(escaped[-1], _constant(_BYTES, 0x80), builder.trunc(steps, _BYTES)))

        def append(number: Any, block: int, lanes: Any, level: Any) -> None:
            arguments = [octets[block], _constant(_BYTES, 0), lanes]
            packed = _call(builder, "llvm.x86.avx512.mask.compress.v64i8", _BYTES, arguments)
            at = builder.add(builder.mul(number, args[8]), level)
            _store(builder, packed, _pointer(context, builder, sig.args[7], args[7], at, _BYTES))

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
        old = [_load(builder, at, _WORDS) for at in _blocks(context, builder, sig.args[1], args[1], args[2])]
        octets = [cgutils.alloca_once_value(builder, _constant(_BYTES, 0)) for _ in old]

        def take(number: Any, block: int, lanes: Any, level: Any) -> None:
            at = builder.add(builder.mul(number, args[8]), level)
            packed = _load(builder, _pointer(context, builder, sig.args[7], args[7], at, _BYTES), _BYTES)
            arguments = [packed, _constant(_BYTES, 0), lanes]
            spread = _call(builder, "llvm.x86.avx512.mask.expand.v64i8", _BYTES, arguments)
            builder.store(builder.or_(builder.load(octets[block]), spread), octets[block])

        _each_class(context, builder, sig.args[3:7], args[3:7], old, take)
        escaped = []
        targets = _blocks(context, builder, sig.args[0], args[0], args[2])
        for target, before, sparse in zip(targets, old, octets, strict=True):
            steps = builder.load(sparse)
            after = builder.add(before, builder.sext(steps, _WORDS))
            _store(builder, after, target)
            escaped.append(builder.icmp_unsigned("==", steps, _constant(_BYTES, 0x80)))
        return _report(context, builder, sig.args[9], args[9], escaped)

    return signature, generate


def _compare_block(lane: ir.Type) -> Any:
    vector = ir.VectorType(lane, BLOCK)

    @intrinsic
    def differing(_: Any, left: Any, right: Any, index: Any) -> Any:
        """The lanes among 64 at `index` in which two arrays differ."""

        def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            one = _load(builder, _pointer(context, builder, sig.args[0], args[0], args[2], vector), vector)
            two = _load(builder, _pointer(context, builder, sig.args[1], args[1], args[2], vector), vector)
            return builder.bitcast(builder.icmp_unsigned("!=", one, two), _I64)

        return types.uint64(left, right, index), generate

    return differing


differing_words = _compare_block(_I16)


@intrinsic
def nonzero_bytes(_: Any, plane: Any, index: Any) -> Any:
    """The nonzero bytes among 64 at `index`."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        octets = _load(builder, _pointer(context, builder, sig.args[0], args[0], args[1], _BYTES), _BYTES)
        return builder.bitcast(builder.icmp_unsigned("!=", octets, _constant(_BYTES, 0)), _I64)

    return types.uint64(plane, index), generate


@intrinsic
def load_word(_: Any, octets: Any, index: Any) -> Any:
    """Eight bytes at `index` as a little-endian number."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _load(builder, _pointer(context, builder, sig.args[0], args[0], args[1], _I64), _I64)

    return types.uint64(octets, index), generate


@intrinsic
def store_word(_: Any, octets: Any, index: Any, value: Any) -> Any:
    """The inverse of `load_word`."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        _store(builder, args[2], _pointer(context, builder, sig.args[0], args[0], args[1], _I64))
        return context.get_dummy_value()

    return types.void(octets, index, types.uint64), generate


@intrinsic
def trailing_zeros(_: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _call(builder, "llvm.cttz.i64", _I64, [args[0], ir.Constant(_BIT, 0)])

    return types.int64(types.uint64), generate


@intrinsic
def leading_zeros(_: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _call(builder, "llvm.ctlz.i64", _I64, [args[0], ir.Constant(_BIT, 0)])

    return types.int64(types.uint64), generate


@intrinsic
def population(_: Any, value: Any) -> Any:
    """The number of set bits."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _call(builder, "llvm.ctpop.i64", _I64, [args[0]])

    return types.int64(types.uint64), generate
