"""Entropy bounds: the fewest bits any code of a given kind could take for a delta or for full weights.

All are code lengths of an ideal adaptive (Krichevsky-Trofimov) coder per tensor, so that the price of learning the statistics is
in them. B0 knows nothing of the base: which elements changed, and the step. B1 codes both given the base's exponent, as our
classes do; signs are one bit each. `full` is the exponent's entropy per tensor, with sign and mantissa stored as they are.
"""

from __future__ import annotations

from math import lgamma, log

import numpy as np

Weights = dict[str, np.ndarray]
MAGNITUDES = 17
"""|step| from 1 to 16, and one symbol for all larger ones, which then cost 16 bits more."""

_log_gamma = np.frompyfunc(lgamma, 1, 1)


def adaptive_bits(counts: np.ndarray) -> float:
    """KT code length of the symbols counted along the last axis, summed over the others."""
    counts = np.asarray(counts, np.float64).reshape(-1, np.shape(counts)[-1])
    counts = counts[counts.sum(1) > 0]
    size = counts.shape[1]
    if not counts.size:
        return 0.0
    inner = np.asarray(_log_gamma(counts + 0.5), np.float64).sum() - counts.size * lgamma(0.5)
    outer = np.asarray(_log_gamma(counts.sum(1) + size / 2), np.float64).sum() - len(counts) * lgamma(size / 2)
    return float(outer - inner) / log(2)


def ordinals(bits: np.ndarray) -> np.ndarray:
    return np.where(bits & 0x8000, ~bits, bits ^ np.uint16(0x8000)).astype(np.int32)


def delta_bounds(base: Weights, new: Weights) -> dict[str, float]:
    """Bits in all for B0 and B1, and the number of elements and of changes."""
    result = {"elements": 0.0, "changes": 0.0, "b0": 0.0, "b1": 0.0, "units": 0.0}
    for name, old in base.items():
        bits = old.reshape(-1)
        steps = ordinals(new[name].reshape(-1)) - ordinals(bits)
        changed = np.flatnonzero(steps)
        exponents = (bits >> 7 & 0xFF).astype(np.int64)
        magnitudes = np.minimum(np.abs(steps[changed]), MAGNITUDES) - 1
        signs = steps[changed] < 0
        large = 16 * int((magnitudes == MAGNITUDES - 1).sum())
        result["elements"] += bits.size
        result["changes"] += changed.size
        result["units"] += int((magnitudes == 0).sum())
        result["b0"] += adaptive_bits(np.array([bits.size - changed.size, changed.size])) + large
        result["b0"] += adaptive_bits(np.bincount(magnitudes * 2 + signs, minlength=2 * MAGNITUDES))
        present = np.bincount(exponents, minlength=256)
        hit = np.bincount(exponents[changed], minlength=256)
        table = np.bincount(exponents[changed] * MAGNITUDES + magnitudes, minlength=256 * MAGNITUDES)
        result["b1"] += adaptive_bits(np.stack([present - hit, hit], 1)) + changed.size + large
        result["b1"] += adaptive_bits(table.reshape(256, MAGNITUDES))
    return result


def full_bound(weights: Weights) -> float:
    """Bits in all for full weights: exponents by their entropy, 8 bits for sign and mantissa."""
    return sum(
        adaptive_bits(np.bincount(tensor.reshape(-1) >> 7 & 0xFF, minlength=256)) + 8 * tensor.size
        for tensor in weights.values()
    )
