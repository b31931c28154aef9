"""Step arithmetic that makes deltas small: a change is a step from one bit pattern to another.

The step is the difference of two patterns modulo 2^w, with w bits per element. So every pair of patterns, NaN or not,
has exactly one step, and adding it to the base restores the new pattern exactly. For a float that keeps its sign it
counts units in the last place, away from zero if positive.
"""

from __future__ import annotations

from prime_protocol.codec.layout import Array, ElementType


def zigzag(steps: Array, element: ElementType) -> Array:
    """Map steps modulo 2^w 0, -1, 1, -2, 2 to 0, 1, 2, 3, 4: small steps of either sign become small numbers."""
    one = element.storage.type(1)
    signs = (steps.view(f"<i{element.itemsize}") >> (8 * element.itemsize - 1)).view(element.storage)
    codes: Array = (steps << one) ^ signs
    return codes


def unzigzag(codes: Array, element: ElementType) -> Array:
    """Invert `zigzag`."""
    one, zero = element.storage.type(1), element.storage.type(0)
    steps: Array = (codes >> one) ^ (zero - (codes & one))
    return steps
