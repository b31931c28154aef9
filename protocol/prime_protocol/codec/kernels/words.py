"""LLVM operations that numba lacks, for one 64-bit word or one address, and helpers that build such intrinsics.

All compile to what the machine supports. The caller keeps all accesses in bounds: eight bytes at `index`.
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
    """Return a pointer to an array's element, cast to the target type."""
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), target.as_pointer())


def load_at(builder: Any, pointer: Any, target: ir.Type) -> Any:
    """Load a value from an address of any alignment."""
    loaded = builder.load(pointer, typ=target)
    loaded.align = 1
    return loaded


def store_at(builder: Any, value: Any, pointer: Any) -> None:
    """Store a value at an address of any alignment."""
    builder.store(value, pointer).align = 1


def splat(builder: Any, value: Any, vector: ir.VectorType) -> Any:
    """Return a vector with the value in every lane."""
    lane0 = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), vector.count), [0] * vector.count)
    return builder.shuffle_vector(lane0, ir.Constant(vector, ir.Undefined), zeros)


def call(builder: Any, name: str, result: ir.Type, args: list[Any]) -> Any:
    """Call an LLVM function by name."""
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, [a.type for a in args]), name)
    return builder.call(function, args)


def ask_for_line(builder: Any, pointer: Any) -> None:
    """Prefetch a cache line into the second-level cache. Any address is allowed."""
    signature = ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I32, I32, I32])
    function = cgutils.get_or_insert_function(builder.module, signature, "llvm.prefetch.p0i8")
    builder.call(function, [pointer, *(ir.Constant(I32, number) for number in (0, 2, 1))])  # to read, level 2, data


@intrinsic
def pointer(_: Any, address: Any) -> Any:
    """Convert an address to a pointer for `carray`, so that one call can take any number of arrays."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


@intrinsic
def ask_for(_: Any, words: Any, index: Any) -> Any:
    """Prefetch the line of a word into the second-level cache. Any index is allowed."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        ask_for_line(builder, pointer_to(context, builder, sig.args[0], args[0], args[1], I8))
        return context.get_dummy_value()

    return types.void(words, index), generate


@intrinsic
def load_word(_: Any, octets: Any, index: Any) -> Any:
    """Load eight bytes at `index` as a little-endian number."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return load_at(builder, pointer_to(context, builder, sig.args[0], args[0], args[1], I64), I64)

    return types.uint64(octets, index), generate


@intrinsic
def store_word(_: Any, octets: Any, index: Any, value: Any) -> Any:
    """Store a number as eight little-endian bytes at `index`."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        store_at(builder, args[2], pointer_to(context, builder, sig.args[0], args[0], args[1], I64))
        return context.get_dummy_value()

    return types.void(octets, index, types.uint64), generate


@intrinsic
def trailing_zeros(_: Any, value: Any) -> Any:
    """Return the number of zero bits below the lowest set bit; 64 for 0."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return call(builder, "llvm.cttz.i64", I64, [args[0], ir.Constant(BIT, 0)])

    return types.int64(types.uint64), generate


if "+bmi2" in FEATURES:

    @intrinsic
    def place_of(_: Any, word: Any, number: Any) -> Any:
        """Return the place of set bit `number` of a word, counted from 0 and from the lowest."""

        def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            one = builder.shl(ir.Constant(I64, 1), args[1])
            alone = call(builder, "llvm.x86.bmi.pdep.64", I64, [one, args[0]])
            return call(builder, "llvm.cttz.i64", I64, [alone, ir.Constant(BIT, 0)])

        return types.int64(types.uint64, types.int64), generate

else:

    @njit(inline="always")
    def place_of(word: Any, number: Any) -> Any:
        """Return the same without the instruction."""
        while number > 0:
            word &= word - uint64(1)
            number -= 1
        return trailing_zeros(word)


@intrinsic
def leading_zeros(_: Any, value: Any) -> Any:
    """Return the number of zero bits above the highest set bit; 64 for 0."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return call(builder, "llvm.ctlz.i64", I64, [args[0], ir.Constant(BIT, 0)])

    return types.int64(types.uint64), generate


@intrinsic
def population(_: Any, value: Any) -> Any:
    """Return the number of set bits."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return call(builder, "llvm.ctpop.i64", I64, [args[0]])

    return types.int64(types.uint64), generate
