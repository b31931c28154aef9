"""The format in plain Python, one element and one bit at a time. Deliberately slow; it defines the meaning of a chunk.

`decode` takes a chunk and the base's bit patterns as a list of integers and returns the new ones. All decoders in
`prime_protocol.codec` must agree with it on every input, valid or not; tests check that. SPEC.md, section "Chunks",
describes the same in words.
"""

from __future__ import annotations

import zstandard

from prime_protocol.codec.errors import CodecError
from prime_protocol.codec.layout import HEAD_BYTES, TYPES, ElementType, Mode, read_chunk_head
from prime_protocol.codec.wire import (
    BODY_AT,
    EMPTY,
    EXCEPTIONS,
    GOLOMB,
    ONES,
    PARAMETER_BITS_MAX,
    PLANE,
    PREFIX_MAX,
    SPARSE,
    lowest_exponents,
)


def decode(data: bytes, base: list[int] | None, *, dtype: str, count: int) -> list[int]:
    """Return the `count` new bit patterns. Raises CodecError."""
    element = TYPES[dtype]
    mode = read_chunk_head(data, element, count)
    if mode is Mode.FULL:
        planes, end = read_planes(data, HEAD_BYTES, count, element.itemsize)
        require(end == len(data), "bytes after the end")
        return [reference_rotate_right(value, element) for value in reference_join(planes)]
    if base is None:
        raise CodecError("needs a base")
    if mode is Mode.SKIP:
        require(len(data) == HEAD_BYTES, "a skipped chunk has no body")
        return list(base)
    if mode is Mode.CLASS:
        require(element.has_classes, "CLASS is for floats of one or two bytes")
        return decode_class(data, base, element)
    if mode is Mode.GAP:
        steps = gap_steps(data, count, element)
    else:
        planes, end = read_planes(data, HEAD_BYTES, count, element.itemsize)
        require(end == len(data), "bytes after the end")
        steps = [reference_unzigzag(code) for code in reference_join(planes)]
    modulus = 1 << 8 * element.itemsize
    return [(bits + step) % modulus for bits, step in zip(base, steps, strict=True)]


def require(condition: bool, reason: str) -> None:
    """Raise CodecError with the reason unless the condition holds."""
    if not condition:
        raise CodecError(reason)


# Elements -----------------------------------------------------------------------------------------------------------


def reference_unzigzag(code: int) -> int:
    """Invert zigzag: 0, 1, 2, 3, 4 -> 0, -1, 1, -2, 2."""
    return -(code + 1) // 2 if code & 1 else code // 2


def reference_rotate_right(value: int, element: ElementType) -> int:
    """Rotate a float's bits right by one; leave an integer unchanged."""
    return value >> 1 | (value & 1) << (8 * element.itemsize - 1) if element.is_float else value


# Planes -------------------------------------------------------------------------------------------------------------


def read_planes(data: bytes, at: int, size: int, num_planes: int) -> tuple[list[bytes], int]:
    """Read consecutive planes of `size` bytes. Return them and the offset after the last one."""
    planes = []
    for _ in range(num_planes):
        require(at + 4 <= len(data), "ends inside a plane's head")
        kind, length = data[at], int.from_bytes(data[at + 1 : at + 4], "little")
        payload, at = data[at + 4 : at + 4 + length], at + 4 + length
        require(at <= len(data), "ends inside a plane")
        if kind == 0:
            plane = payload
        elif kind == 1:
            plane = inflate(payload, size)
        else:
            require(kind == 2 and length == 1, "malformed plane")
            plane = payload * size
        require(len(plane) == size, "a plane of the wrong size")
        planes.append(plane)
    return planes, at


def inflate(frame: bytes, size: int) -> bytes:
    """Decompress one zstd frame with a declared content size, no dictionary and no trailing bytes."""
    try:
        parameters = zstandard.get_frame_parameters(frame)
        require(parameters.content_size == size and parameters.dict_id == 0, "a zstd frame of the wrong size")
        return zstandard.ZstdDecompressor().decompress(frame, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CodecError("zstd") from error


def reference_join(planes: list[bytes]) -> list[int]:
    """Join planes into numbers; the first plane holds the lowest bytes."""
    return [int.from_bytes(octets, "little") for octets in zip(*planes, strict=True)]


def gap_steps(data: bytes, count: int, element: ElementType) -> list[int]:
    """Return the step of every element of a GAP chunk, 0 if it did not change."""
    require(len(data) >= HEAD_BYTES + 3, "ends inside the number of changes")
    num_changes = int.from_bytes(data[HEAD_BYTES : HEAD_BYTES + 3], "little")
    require(1 <= num_changes <= count, "number of changes")
    planes, end = read_planes(data, HEAD_BYTES + 3, num_changes, 3 + element.itemsize)
    require(end == len(data), "bytes after the end")
    steps, at = [0] * count, -1
    for gap, code in zip(reference_join(planes[:3]), reference_join(planes[3:]), strict=True):
        at += gap + 1
        require(at < count, "a change is past the last element")
        steps[at] = reference_unzigzag(code)
    return steps


# Classes ------------------------------------------------------------------------------------------------------------


class ReferenceBits:
    """Bits of a byte string, the lowest bit of the first byte first."""

    def __init__(self, octets: bytes) -> None:
        self.octets, self.at = octets, 0

    def take(self, width: int) -> int:
        """Read a number of `width` bits, the lowest bit first."""
        value = 0
        for place in range(width):
            require(self.at < 8 * len(self.octets), "ends inside the bit streams")
            value |= (self.octets[self.at // 8] >> self.at % 8 & 1) << place
            self.at += 1
        return value

    def length(self) -> int:
        """Read a number of 1 to 19 bits that follows its bit length."""
        width = self.take(5)
        require(1 <= width <= 19, "a length is out of range")
        return 1 << (width - 1) | self.take(width - 1)

    def unary(self) -> int:
        """Read a unary code: the number of zeros before a one."""
        zeros = 0
        while not self.take(1):
            zeros += 1
        return zeros


def decode_class(data: bytes, base: list[int], element: ElementType) -> list[int]:
    """Return the new bit patterns of a CLASS chunk."""
    require(len(data) >= BODY_AT, "ends before the bit streams")
    lowest = lowest_exponents(data[HEAD_BYTES], int.from_bytes(data[HEAD_BYTES + 1 : BODY_AT], "little"))
    bits = ReferenceBits(data[BODY_AT:])
    classes = [read_class(bits, len(base)) for _ in lowest]
    num_escapes = bits.length() - 1
    require(num_escapes <= len(base) and sum(c["count"] for c in classes) <= len(base), "too many elements")
    changes = read_changes(bits, classes)

    # Members of each class, in the order of the tensor.
    words = [bits if element.itemsize == 2 else bits & 0x7F | (bits & 0x80) << 8 for bits in base]
    members: list[list[int]] = [[] for _ in lowest]
    for i, word in enumerate(words):
        exponent = (word & 0x7FFF) >> element.exponent_shift
        members[next(number for number, limit in enumerate(lowest) if exponent >= limit)].append(i)

    steps, end = [0] * len(base), BODY_AT + (bits.at + 7) // 8
    for number, row in enumerate(classes):
        if row["coder"] == PLANE:
            require(row["count"] == len(members[number]), "a plane does not fit its class")
            (plane,), end = read_planes(data, end, row["count"], 1)
            for i, octet in zip(members[number], plane, strict=True):
                steps[i] = octet - 256 if octet >= 128 else octet
        for rank, step in changes[number]:
            require(rank < len(members[number]), "a change is past the last element")
            steps[members[number][rank]] = step
    require(len(data) - end == 2 * num_escapes == 2 * steps.count(-128), "escapes do not match the bytes at the end")
    for i, step in enumerate(steps):
        if step == -128:
            steps[i] = int.from_bytes(data[end : end + 2], "little")
            end += 2
    new = [(word + step) % 65536 for word, step in zip(words, steps, strict=True)]
    return new if element.itemsize == 2 else [word & 0x7F | word >> 8 & 0x80 for word in new]


def read_class(bits: ReferenceBits, count: int) -> dict[str, int]:
    """Read the parameters of one class."""
    row = {"coder": bits.take(2), "count": 0, "gap": 0, "kind": ONES, "exceptions": 0, "low": 0}
    if row["coder"] == EMPTY:
        return row
    require(row["coder"] in (SPARSE, PLANE), "unknown coder")
    row["count"] = bits.length()
    if row["coder"] == SPARSE:
        row["gap"], row["kind"] = bits.take(5), bits.take(2)
        if row["kind"] == EXCEPTIONS:
            row["exceptions"], row["low"] = bits.length(), bits.take(5)
        elif row["kind"] != ONES:
            row["low"] = bits.take(3)
    require(row["count"] <= count and row["exceptions"] <= row["count"], "a class with too many changes")
    require(max(row["gap"], row["low"]) <= PARAMETER_BITS_MAX, "a parameter with too many bits")
    return row


def read_changes(bits: ReferenceBits, classes: list[dict[str, int]]) -> list[list[tuple[int, int]]]:
    """Return (rank, step) of every change, class by class. The streams: signs, low bits, unary codes, suffixes."""
    sparse = [row if row["coder"] == SPARSE else {**row, "count": 0, "kind": ONES} for row in classes]
    signs = [[bits.take(1) for _ in range(row["count"])] for row in sparse]
    values = [
        {ONES: 0, EXCEPTIONS: row["exceptions"]}.get(row["kind"], row["count"]) for row in sparse
    ]  # number of values that describe the magnitudes
    gap_lows, value_lows = [], []
    for row, num_values in zip(sparse, values, strict=True):
        gap_lows.append([bits.take(row["gap"]) for _ in range(row["count"])])
        value_lows.append([bits.take(row["low"]) for _ in range(num_values)])
    gaps, quotients, prefixes = [], [], []
    for row, num_values, lows in zip(sparse, values, gap_lows, strict=True):
        gaps.append([bits.unary() << row["gap"] | low for low in lows])
        quotients.append([bits.unary() for _ in range(num_values)])
        prefixes.append([bits.unary() for _ in range(row["exceptions"])])
    changes = []
    for row, *streams in zip(sparse, signs, gaps, value_lows, quotients, prefixes, strict=True):
        sign_bits, class_gaps, lows, class_quotients, class_prefixes = streams
        magnitudes = reference_magnitudes(bits, row, lows, class_quotients, class_prefixes)
        rank, pairs = -1, []
        for gap, magnitude, negative in zip(class_gaps, magnitudes, sign_bits, strict=True):
            rank += gap + 1
            require(magnitude <= 127 + negative, "a step is out of range")
            pairs.append((rank, -magnitude if negative else magnitude))
        changes.append(pairs)
    return changes


def reference_magnitudes(
    bits: ReferenceBits, row: dict[str, int], lows: list[int], quotients: list[int], prefixes: list[int]
) -> list[int]:
    """Return |step| of every change of one class."""
    magnitudes = [1] * row["count"]
    if row["kind"] == EXCEPTIONS:
        place = -1
        for quotient, low, prefix in zip(quotients, lows, prefixes, strict=True):
            place += (quotient << row["low"] | low) + 1
            require(place < row["count"] and prefix <= PREFIX_MAX, "a step is out of range")
            magnitudes[place] = 1 + (1 << prefix | bits.take(prefix))
    elif row["kind"] == GOLOMB:
        for place, (prefix, low) in enumerate(zip(quotients, lows, strict=True)):
            require(prefix <= PREFIX_MAX, "a step is out of range")
            magnitudes[place] = 1 + (((1 << prefix | bits.take(prefix)) - 1) << row["low"] | low)
    elif row["kind"] != ONES:
        for place, (quotient, low) in enumerate(zip(quotients, lows, strict=True)):
            magnitudes[place] = 1 + (quotient << row["low"] | low)
    return magnitudes
