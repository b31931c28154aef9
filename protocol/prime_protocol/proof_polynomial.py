"""Polynomials over the integers modulo 65497: interpolation and evaluation at 128 points each, for many chunks at once.

Numbers are integers in float64: exact below 2^53, and several times faster than 64-bit division. No sum here exceeds
2^47.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

PRIME = 65_497
_BLOCK = 16
"""Highest power of a point that is computed directly; higher ones are products of two."""

Residues = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


def interpolate(x_CK: Integers, y_CK: Integers) -> Integers:
    """Return coefficients [C, K], lowest degree first, of the unique polynomials of degree below K through K points.

    The x of a chunk are distinct. With M(x) = product of (x - x_i), w_i = y_i / M'(x_i) and the power sums S_r = sum of
    w_i x_i^r, Lagrange's sum of w_i M(x) / (x - x_i) has the coefficients p_j = sum over l > j of M_l S_{l-j-1}: a
    correlation of two sequences.
    """
    num_chunks, count = x_CK.shape
    x = _residue(x_CK.astype(np.float64))
    master = _master(x)
    powers = _powers(x, _BLOCK + 1)
    slopes = np.zeros((num_chunks, -(-count // _BLOCK) * _BLOCK))
    slopes[:, :count] = _residue(master[:, 1:] * np.arange(1, count + 1))
    weights = _residue(y_CK * _inverses()[_canonical(_at_powers(slopes, powers))])
    steps = [weights]
    while len(steps) * _BLOCK < count:
        steps.append(_residue(steps[-1] * powers[:, _BLOCK]))
    sums = np.stack(steps, axis=1) @ powers[:, :_BLOCK].transpose(0, 2, 1)
    sums = _residue(sums).reshape(num_chunks, -1)[:, :count]
    size = 2 * count  # the rounded transform is exact: its error is below 2^-8 if the values stay below 2^40
    product = np.fft.irfft(np.fft.rfft(master[:, 1:], size) * np.conj(np.fft.rfft(sums, size)), size)
    return _canonical(_residue(np.rint(product[:, :count])))


def evaluate_polynomial(coefficients_CK: Integers, x_CP: Integers) -> Integers:
    """Return the values [C, P] of each polynomial at its points."""
    num_chunks, count = coefficients_CK.shape
    padded = np.zeros((num_chunks, -(-count // _BLOCK) * _BLOCK))
    padded[:, :count] = coefficients_CK
    return _canonical(_at_powers(padded, _powers(_residue(x_CP.astype(np.float64)), _BLOCK + 1)))


def _residue(values: Residues) -> Residues:
    """Return a congruent number between -PRIME and 2 * PRIME, sufficient for further arithmetic."""
    residues: Residues = values - np.floor(values * (1.0 / PRIME)) * PRIME
    return residues


def _canonical(values: Residues) -> Integers:
    return values.astype(np.int64) % PRIME


def _master(x_CK: Residues) -> Residues:
    """Return the coefficients [C, K + 1] of the product of all (x - x_i), multiplied in a binary tree."""
    num_chunks, count = x_CK.shape
    level = np.ones((2, count, num_chunks))  # [degree + 1, polynomials, C]
    level[0] = -x_CK.T
    while level.shape[1] > 1:
        terms, number = len(level), level.shape[1]
        half = number // 2
        left, right = level[:, :half], level[:, half : 2 * half]
        product = np.zeros((2 * terms - 1, number - half, num_chunks))
        for degree in range(terms):
            product[degree : degree + terms, :half] += left[degree] * right
        if number % 2:
            product[:terms, half] = level[:, -1]
        level = _residue(product)
    return np.ascontiguousarray(level[: count + 1, 0].T)


def _powers(x_CP: Residues, number: int) -> Residues:
    """Return x^0, x^1, ... as [C, number, P]."""
    powers = np.ones((len(x_CP), number, x_CP.shape[1]))
    for exponent in range(1, number):
        powers[:, exponent] = _residue(powers[:, exponent - 1] * x_CP)
    return powers


def _at_powers(coefficients_CK: Residues, powers: Residues) -> Residues:
    """Return values [C, P]: each block of 16 coefficients times the low powers, then Horner's rule in x^16."""
    blocks = _residue(coefficients_CK.reshape(len(coefficients_CK), -1, _BLOCK) @ powers[:, :_BLOCK])
    values = blocks[:, -1]
    for block in range(blocks.shape[1] - 2, -1, -1):
        values = _residue(values * powers[:, _BLOCK] + blocks[:, block])
    return values


@lru_cache(maxsize=1)
def _inverses() -> Residues:
    """Return the inverse of each number modulo PRIME by Fermat's little theorem; 0 for 0."""
    base, result = np.arange(PRIME, dtype=np.int64), np.ones(PRIME, np.int64)
    exponent = PRIME - 2
    while exponent:
        if exponent & 1:
            result = result * base % PRIME
        base = base * base % PRIME
        exponent >>= 1
    return result.astype(np.float64)
