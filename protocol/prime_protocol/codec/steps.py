"""The arithmetic that makes deltas small: elements as points on a line, and changes as steps along it.

A float's bit pattern is mapped to an unsigned integer that grows with the float's value, so that neighbouring floats differ
by one. A change is the difference of two such numbers modulo 2^w, w bits per element; every pair of bit patterns, NaN or not,
has exactly one step, and adding the step to the base's number gives the new one back exactly. Integers are their own numbers.
"""

from __future__ import annotations

from prime_protocol.codec.layout import Array, ElementType


def to_ordinal(bits: Array, element: ElementType) -> Array:
    """Bit patterns -> ordinals: negative floats are complemented, the others get the sign bit set."""
    if not element.is_float:
        return bits
    sign = element.storage.type(1 << (8 * element.itemsize - 1))
    # All ones where the sign is set, else only the sign bit: the sign smeared over the word by an arithmetic shift.
    smeared = (bits.view(f"<i{element.itemsize}") >> (8 * element.itemsize - 1)).view(element.storage)
    ordinals: Array = bits ^ (smeared | sign)
    return ordinals


def from_ordinal(ordinals: Array, element: ElementType) -> Array:
    """The inverse of `to_ordinal`."""
    if not element.is_float:
        return ordinals
    sign = element.storage.type(1 << (8 * element.itemsize - 1))
    smeared = (ordinals.view(f"<i{element.itemsize}") >> (8 * element.itemsize - 1)).view(element.storage)
    bits: Array = ordinals ^ (~smeared | sign)
    return bits


def zigzag(steps: Array, element: ElementType) -> Array:
    """Steps modulo 2^w -> 0, 1, 2, 3, 4 for 0, -1, 1, -2, 2: small steps of either sign become small numbers."""
    one = element.storage.type(1)
    signs = (steps.view(f"<i{element.itemsize}") >> (8 * element.itemsize - 1)).view(element.storage)
    codes: Array = (steps << one) ^ signs
    return codes


def unzigzag(codes: Array, element: ElementType) -> Array:
    """The inverse of `zigzag`."""
    one, zero = element.storage.type(1), element.storage.type(0)
    steps: Array = (codes >> one) ^ (zero - (codes & one))
    return steps
