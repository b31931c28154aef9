"""Decoder of the CLASS mode with numpy alone, for machines without numba. Slower than the kernels, same result.

The streams of a chunk are stored one after the other so that each can be read as an array. `BitReader` converts them to
numpy once, and every step below is a whole-array operation. SPEC.md, section "CLASS".
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prime_protocol.codec.errors import CodecError
from prime_protocol.codec.layout import HEAD_BYTES, Array, ElementType
from prime_protocol.codec.planes import read_plane
from prime_protocol.codec.wire import (
    BODY_AT,
    EMPTY,
    ESCAPE,
    EXCEPTIONS,
    GOLOMB,
    ONES,
    PARAMETER_BITS_MAX,
    PLANE,
    PREFIX_MAX,
    SPARSE,
    lowest_exponents,
    narrow,
    widen,
)


@dataclass(slots=True)
class ClassPlan:
    """Parameters of one class. Example: ClassPlan(SPARSE, count=740, gap_bits=5, magnitudes=ONES)."""

    coder: int = EMPTY
    count: int = 0
    """Number of changes of a SPARSE class, or of bytes of a PLANE."""
    gap_bits: int = 0
    magnitudes: int = ONES
    num_exceptions: int = 0
    magnitude_bits: int = 0


class BitReader:
    """Reader of bit streams: numbers from the front, then whole arrays. Raises CodecError at the end."""

    def __init__(self, body: bytes) -> None:
        self.bits = np.unpackbits(np.frombuffer(body, np.uint8), bitorder="little")
        self.at = 0
        self.ones = np.zeros(0, np.int64)  # positions of set bits not yet used as ends of unary codes

    def take(self, width: int) -> int:
        """Read one number of `width` bits."""
        return int(self.fixed(1, width)[0])

    def fixed(self, count: int, width: int) -> Array:
        """Read `count` numbers of `width` bits."""
        end = self.at + count * width
        if end > self.bits.size:
            raise CodecError("ends inside the bit streams")
        table = self.bits[self.at : end].reshape(count, width)
        self.at = end
        return table @ (np.int64(1) << np.arange(width))

    def length(self) -> int:
        """Read a number of 1 to 19 bits that follows its bit length."""
        bits = self.take(5)
        if not 1 <= bits <= 19:
            raise CodecError("a length is out of range")
        return 1 << (bits - 1) | self.take(bits - 1)

    def begin_unary(self) -> None:
        """Find the set bits from here on, before the first `unary`."""
        self.ones = np.flatnonzero(self.bits[self.at :]) + self.at

    def unary(self, count: int) -> Array:
        """Read `count` unary codes: the distances between neighbouring ones, less one."""
        if count > self.ones.size:
            raise CodecError("ends inside the bit streams")
        ends, self.ones = self.ones[:count], self.ones[count:]
        quotients = np.diff(ends, prepend=self.at - 1) - 1
        self.at = int(ends[-1]) + 1
        return quotients

    def suffixes(self, widths: Array) -> Array:
        """Read one number per width, each of that many bits."""
        begins = self.at + np.cumsum(widths) - widths
        self.at += int(widths.sum())
        if self.at > self.bits.size:
            raise CodecError("ends inside the bit streams")
        values = np.zeros(widths.size, np.int64)
        for place in range(int(widths.max(initial=0))):
            wide = widths > place
            values[wide] |= self.bits[begins[wide] + place].astype(np.int64) << place
        return values


def portable_decode_classes(data: bytes | memoryview, base: Array, element: ElementType) -> Array:
    """Return the new bit patterns of a CLASS chunk."""
    if len(data) < BODY_AT:
        raise CodecError(f"{len(data)} bytes are not a CLASS chunk")
    lowest = lowest_exponents(data[HEAD_BYTES], int.from_bytes(data[HEAD_BYTES + 1 : BODY_AT], "little"))
    reader = BitReader(bytes(data[BODY_AT:]))
    plans = [portable_read_plan(reader, base.size) for _ in lowest]
    num_escapes = reader.length() - 1
    if sum(plan.count for plan in plans) > base.size or num_escapes > base.size:
        raise CodecError("a class's parameters are out of range")
    changes = _read_changes(reader, plans)

    words = widen(base)
    numbers = _class_numbers(words, lowest, element.exponent_shift)
    steps = np.zeros(base.size, np.int64)
    end = BODY_AT + (reader.at + 7) // 8
    for number, plan in enumerate(plans):
        lanes = np.flatnonzero(numbers == number)
        if plan.coder == PLANE:
            if plan.count != lanes.size:
                raise CodecError("its classes do not match this base")
            plane, end = read_plane(memoryview(data), end, plan.count)
            steps[lanes] = plane.view(np.int8)
        elif plan.coder == SPARSE:
            ranks, class_steps = changes[number]
            if ranks[-1] >= lanes.size:
                raise CodecError("a change is past the last element")
            steps[lanes[ranks]] = class_steps
    escaped = np.flatnonzero(steps == ESCAPE)
    if len(data) - end != 2 * num_escapes or escaped.size != num_escapes:
        raise CodecError(f"{len(data) - end} bytes at the end for {escaped.size} escapes")
    steps[escaped] = np.frombuffer(data, "<u2", offset=end)
    return narrow(words + steps.astype("<u2"), element)


def _class_numbers(words: Array, lowest: list[int], shift: int) -> Array:
    """Return each element's class: the first whose lowest exponent it reaches."""
    by_exponent = np.zeros(256, np.uint8)
    exponents = np.arange(256)
    for limit in lowest:
        by_exponent += exponents < limit
    numbers: Array = by_exponent[(words & np.uint16(0x7FFF)) >> np.uint16(shift) & np.uint16(0xFF)]
    return numbers


def portable_read_plan(reader: BitReader, count: int) -> ClassPlan:
    """Read the parameters of one class of a chunk with `count` elements. Raises CodecError."""
    plan = ClassPlan(coder=reader.take(2))
    if plan.coder == EMPTY:
        return plan
    plan.count = reader.length()
    if plan.coder == SPARSE:
        plan.gap_bits, plan.magnitudes = reader.take(5), reader.take(2)
        if plan.magnitudes == EXCEPTIONS:
            plan.num_exceptions, plan.magnitude_bits = reader.length(), reader.take(5)
        elif plan.magnitudes != ONES:
            plan.magnitude_bits = reader.take(3)
    if (
        plan.coder > PLANE
        or plan.count > count
        or plan.num_exceptions > plan.count
        or max(plan.gap_bits, plan.magnitude_bits) > PARAMETER_BITS_MAX
    ):
        raise CodecError("a class's parameters are out of range")
    return plan


def _read_changes(reader: BitReader, plans: list[ClassPlan]) -> list[tuple[Array, Array]]:
    """Return ranks and steps of every class, in the order of the streams: signs, low bits, unary codes, suffixes."""
    sparse = [plan for plan in plans if plan.coder == SPARSE]
    negative = reader.fixed(sum(plan.count for plan in sparse), 1).astype(bool)
    lows = []
    for plan in sparse:
        gap_lows = reader.fixed(plan.count, plan.gap_bits)
        num_values = {ONES: 0, EXCEPTIONS: plan.num_exceptions}.get(plan.magnitudes, plan.count)
        lows.append((gap_lows, reader.fixed(num_values, plan.magnitude_bits)))
    reader.begin_unary()
    quotients = []
    for plan in sparse:
        gap_quotients, values = reader.unary(plan.count), []
        if plan.magnitudes == EXCEPTIONS:
            values = [reader.unary(plan.num_exceptions), reader.unary(plan.num_exceptions)]
        elif plan.magnitudes != ONES:
            values = [reader.unary(plan.count)]
        quotients.append((gap_quotients, values))
    changes, begin = {}, 0
    for plan, (gap_lows, value_lows), (gap_quotients, values) in zip(sparse, lows, quotients, strict=True):
        ranks = np.cumsum((gap_quotients << plan.gap_bits | gap_lows) + 1) - 1
        magnitudes = _read_magnitudes(reader, plan, value_lows, values)
        signs = negative[begin : begin + plan.count]
        begin += plan.count
        if magnitudes.max() > 128 or (magnitudes[~signs] == 128).any():
            raise CodecError("a step is out of range")
        changes[id(plan)] = ranks, np.where(signs, -magnitudes, magnitudes)
    nothing = np.zeros(0, np.int64), np.zeros(0, np.int64)
    return [changes.get(id(plan), nothing) for plan in plans]


def _read_magnitudes(reader: BitReader, plan: ClassPlan, lows: Array, quotients: list[Array]) -> Array:
    """Return |step| of every change of a class. Only exponential Golomb codes have suffixes left to read."""
    magnitudes = np.ones(plan.count, np.int64)
    if plan.magnitudes == EXCEPTIONS:
        runs, prefixes = quotients
        places = np.cumsum((runs << plan.magnitude_bits | lows) + 1) - 1
        if places[-1] >= plan.count or prefixes.max() > PREFIX_MAX:
            raise CodecError("a step is out of range")
        magnitudes[places] += 1 << prefixes | reader.suffixes(prefixes)
    elif plan.magnitudes == GOLOMB:
        if quotients[0].max() > PREFIX_MAX:
            raise CodecError("a step is out of range")
        values = (1 << quotients[0] | reader.suffixes(quotients[0])) - 1
        magnitudes += values << plan.magnitude_bits | lows
    elif plan.magnitudes != ONES:
        if quotients[0].max() > 127:
            raise CodecError("a step is out of range")
        magnitudes += quotients[0] << plan.magnitude_bits | lows
    return magnitudes
