"""Sets of pieces as integers, and counts of how many sources hold each piece, updated for all pieces at once. Pure.

A set is a Python int: bit n represents piece n. The counter keeps one int per binary digit of the counts (bit slicing).
Adding a whole bitfield, or finding the rarest pieces of a set, takes a few operations on ints, whatever the number of pieces.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator, Sequence

PieceSet = int


def piece_set(numbers: Iterable[int]) -> PieceSet:
    """Return the set of these numbers.

    Example: piece_set([0, 2]) is 0b101.
    """
    made = 0
    for number in numbers:
        made |= 1 << number
    return made


def span(start: int, end: int) -> PieceSet:
    """Return pieces start to end - 1."""
    return (1 << end) - (1 << start) if end > start else 0


def spans(ranges: Iterable[Sequence[int]]) -> PieceSet:
    """Return the union of [start, end) ranges that ascend and do not overlap. The work is linear in ranges and bits.

    Example: spans([(0, 1), (2, 4)]) is 0b1101.
    """
    ranges = list(ranges)
    num_bytes = ranges[-1][1] // 8 + 1 if ranges else 0
    starts, ends = bytearray(num_bytes), bytearray(num_bytes)
    for start, end in ranges:
        starts[start >> 3] |= 1 << (start & 7)
        ends[end >> 3] |= 1 << (end & 7)
    # A range is 2^end - 2^start, so the union is one difference.
    return int.from_bytes(ends, "little") - int.from_bytes(starts, "little")


def num_runs(of: PieceSet) -> int:
    """Return the number of ranges that `runs` returns."""
    return (of & ~(of << 1)).bit_count()


def members(of: PieceSet) -> Iterator[int]:
    """Yield the numbers in a set, ascending."""
    while of:
        lowest = of & -of
        yield lowest.bit_length() - 1
        of ^= lowest


def runs(of: PieceSet) -> list[tuple[int, int]]:
    """Return the set as [start, end) ranges, ascending. The work is linear in ranges and bits.

    Example: runs(0b1101) is [(0, 1), (2, 4)].
    """
    return [found.span() for found in re.finditer("1+", f"{of:b}"[::-1])]


def any_of(of: PieceSet, rng: random.Random) -> int:
    """Return a random member of a non-empty set: the first one at or after a random place."""
    place = rng.randrange(of.bit_length())
    rest = of >> place
    return (rest & -rest).bit_length() - 1 + place


class PieceCounts:
    """Number of sources that hold each piece."""

    def __init__(self) -> None:
        self._digits: list[PieceSet] = []
        """Binary digits of the counts, least significant first."""

    def add(self, held: PieceSet) -> None:
        """Count one more source for each piece of a set."""
        for place, digit in enumerate(self._digits):
            self._digits[place], held = digit ^ held, digit & held
            if not held:
                return
        if held:
            self._digits.append(held)

    def remove(self, held: PieceSet) -> None:
        """Undo an `add`: every piece in the set was added before."""
        for place, digit in enumerate(self._digits):
            self._digits[place], held = digit ^ held, ~digit & held
            if not held:
                return
        assert not held, "a piece was removed more often than added"

    def rarest(self, of: PieceSet) -> PieceSet:
        """Return the pieces of a set that the fewest sources hold."""
        for digit in reversed(self._digits):
            of = of & ~digit or of
        return of

    def is_held(self) -> PieceSet:
        """Return the pieces that at least one source holds."""
        held = 0
        for digit in self._digits:
            held |= digit
        return held
