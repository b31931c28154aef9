"""What LLVM has and numba lacks, for one word of 64 bits or one address; and how such an intrinsic is put together.

All are compiled to what the machine has. The caller keeps all accesses in bounds: eight bytes at `index`.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import config, njit, uint64
from numba.core import cgutils, types
from numba.extending import intrinsic

FEATURES = (config.CPU_FEATURES or llvm.get_host_cpu_features().flatten()).split(",")
LINE_ELEMENTS = 32
"""Elements in a cache line."""

BIT, I8, I16, I32, I64 = (ir.IntType(width) for width in (1, 8, 16, 32, 64))


def pointer_to(context: Any, builder: Any, array_type: Any, array: Any, index: Any, target: ir.Type) -> Any:
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), target.as_pointer())


def load_at(builder: Any, pointer: Any, target: ir.Type) -> Any:
    loaded = builder.load(pointer, typ=target)
    loaded.align = 1
    return loaded


def store_at(builder: Any, value: Any, pointer: Any) -> None:
    builder.store(value, pointer).align = 1


def splat(builder: Any, value: Any, vector: ir.VectorType) -> Any:
    lane0 = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), vector.count), [0] * vector.count)
    return builder.shuffle_vector(lane0, ir.Constant(vector, ir.Undefined), zeros)


def call(builder: Any, name: str, result: ir.Type, args: list[Any]) -> Any:
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, [a.type for a in args]), name)
    return builder.call(function, args)


def ask_for_line(builder: Any, pointer: Any) -> None:
    """Begin to bring a cache line into the second cache. No address is wrong."""
    signature = ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I32, I32, I32])
    function = cgutils.get_or_insert_function(builder.module, signature, "llvm.prefetch.p0i8")
    builder.call(function, [pointer, *(ir.Constant(I32, number) for number in (0, 2, 1))])  # to read, level 2, data


@intrinsic
def pointer(_: Any, address: Any) -> Any:
    """For `carray`: an array that lies at an address, so that one call can be given any number of them."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


@intrinsic
def ask_for(_: Any, words: Any, index: Any) -> Any:
    """Begin to bring the line of a word into the second cache. No index is wrong."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        ask_for_line(builder, pointer_to(context, builder, sig.args[0], args[0], args[1], I8))
        return context.get_dummy_value()

    return types.void(words, index), generate


@intrinsic
def load_word(_: Any, octets: Any, index: Any) -> Any:
    """Eight bytes at `index` as a little-endian number."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return load_at(builder, pointer_to(context, builder, sig.args[0], args[0], args[1], I64), I64)

    return types.uint64(octets, index), generate


@intrinsic
def store_word(_: Any, octets: Any, index: Any, value: Any) -> Any:
    """The inverse of `load_word`."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        store_at(builder, args[2], pointer_to(context, builder, sig.args[0], args[0], args[1], I64))
        return context.get_dummy_value()

    return types.void(octets, index, types.uint64), generate


@intrinsic
def trailing_zeros(_: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return call(builder, "llvm.cttz.i64", I64, [args[0], ir.Constant(BIT, 0)])

    return types.int64(types.uint64), generate


if "+bmi2" in FEATURES:

    @intrinsic
    def place_of(_: Any, word: Any, number: Any) -> Any:
        """The place of set bit `number` of a word, counted from 0 and from the lowest."""

        def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            one = builder.shl(ir.Constant(I64, 1), args[1])
            alone = call(builder, "llvm.x86.bmi.pdep.64", I64, [one, args[0]])
            return call(builder, "llvm.cttz.i64", I64, [alone, ir.Constant(BIT, 0)])

        return types.int64(types.uint64, types.int64), generate

else:

    @njit(inline="always")
    def place_of(word: Any, number: Any) -> Any:
        """The same without the instruction."""
        while number > 0:
            word &= word - uint64(1)
            number -= 1
        return trailing_zeros(word)


@intrinsic
def leading_zeros(_: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return call(builder, "llvm.ctlz.i64", I64, [args[0], ir.Constant(BIT, 0)])

    return types.int64(types.uint64), generate


@intrinsic
def population(_: Any, value: Any) -> Any:
    """The number of set bits."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return call(builder, "llvm.ctpop.i64", I64, [args[0]])

    return types.int64(types.uint64), generate
