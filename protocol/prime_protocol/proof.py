"""Hidden-state proofs: commitments to the last hidden states, 258 bytes per 32 tokens (TOPLOC, arXiv 2501.16007).

A completion's tokens are cut into chunks of 32. The chunk's last hidden states are bf16, one row per token: the row
that the token was sampled from. A polynomial over the integers modulo 65497 commits to their 128 largest values by
magnitude:

    x = place of the value in the chunk, row * D + column, modulo `modulus`
    y = the value's 16 bits
    modulus = the largest number up to 65497 under which the chunk's 128 places stay distinct
    proof = modulus and the 128 coefficients, lowest degree first, each 2 bytes, big endian

The polynomial of degree below 128 through 128 points is unique, so byte format and polynomial are the published ones. A
verifier takes *its own* 128 largest values and evaluates the polynomial at each of them. The published measures are the
number of differing exponents or signs, and the differences of the other mantissas. Ours is one number, their mean
distance: how many steps apart two values are in the order of bf16 values, at most 16. Arithmetic noise moves values by
a step or two, whether or not an exponent changes; with other weights the polynomial's values are random.

Two rules are stricter than published. There are exactly ceil(tokens / 32) proofs for each completion, checked before
any comparison: an empty proof proves nothing. And a modulus or coefficient outside its range is malformed, so nothing
that a peer sends can cause a division by zero (upstream, modulus 0 crashes the verifier).

Letters: N completions, T tokens, D hidden size, C chunks, K = 128 values of a chunk (fewer if it has no more).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.proof_polynomial import PRIME, evaluate_polynomial, interpolate

CHUNK_TOKENS = 32
TOP_VALUES = 128
MODULUS_MIN = 2**15 + 1
PROOF_BYTES = 2 * (1 + TOP_VALUES)
MANTISSA_ERROR_MAX = 128.0
"""Mantissa error of a chunk none of whose exponents agree: no two 7-bit mantissas are so far apart."""

DISTANCE_MAX = 16.0
"""Steps of bf16, an eighth of a value. A larger distance is not stronger evidence."""
CHUNKS_AT_ONCE = 64
"""Batch size that keeps the working set in the cache."""

Bits = npt.NDArray[np.uint16]
"""Bit patterns of bf16 values."""
_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ProofErrors:
    """Distances of C chunks from their proofs."""

    values_C: npt.NDArray[np.int64]
    """Number of compared values."""
    exponent_mismatches_C: npt.NDArray[np.int64]
    """Number of values whose exponent or sign differs."""
    mantissa_error_mean_C: npt.NDArray[np.float64]
    """Mean in units of the last place, over the values whose exponent and sign agree."""
    mantissa_error_median_C: npt.NDArray[np.float64]
    """Median of the same values; of two middle ones the larger."""
    distance_mean_C: npt.NDArray[np.float64]
    """Mean in steps of bf16 between claim and value, each at most 16, over all values. 0 means equal, 16 unrelated."""


def num_proofs(lengths: Sequence[int]) -> int:
    """Return the number of proofs for completions of these lengths.

    Example: num_proofs([32, 33, 1]) == 4.
    """
    return sum(-(-length // CHUNK_TOKENS) for length in lengths)


def build_proofs(hidden_TD: Bits, lengths: Sequence[int]) -> npt.NDArray[np.uint8]:
    """Return the concatenated proofs of N completions, uint8 [C, 258]; the sum of `lengths` is T."""
    proofs_CB = np.zeros((num_proofs(lengths), PROOF_BYTES), np.uint8)
    for chunks, places_CK, bits_CK in _top_values(hidden_TD, lengths):
        moduli_C = _injective_moduli(places_CK)
        coefficients_CK = interpolate(places_CK % moduli_C[:, None], bits_CK % PRIME)
        words = np.concatenate([moduli_C[:, None], coefficients_CK], axis=1).astype(">u2")
        proofs_CB[chunks, : 2 * words.shape[1]] = words.view(np.uint8)
    return proofs_CB


def compare_proofs(proofs_CB: npt.NDArray[np.uint8], hidden_TD: Bits, lengths: Sequence[int]) -> ProofErrors:
    """Measure how far the verifier's own hidden states are from the proofs.

    Raises RemoteError(MALFORMED) for malformed proofs.
    """
    moduli_C, coefficients_CK = parse_proofs(proofs_CB, lengths)
    num_chunks = len(proofs_CB)
    errors = ProofErrors(*np.zeros((2, num_chunks), np.int64), *np.zeros((3, num_chunks)))
    for chunks, places_CK, bits_CK in _top_values(hidden_TD, lengths):
        claimed_CK = evaluate_polynomial(coefficients_CK[chunks], places_CK % moduli_C[chunks][:, None])
        agree_CK = (claimed_CK >> 7) == (bits_CK >> 7)
        num_agree_C = agree_CK.sum(axis=1)
        apart_CK = np.where(agree_CK, np.abs((claimed_CK & 0x7F) - (bits_CK & 0x7F)), 2**15)  # the others sort last
        middle_C = np.sort(apart_CK, axis=1)[np.arange(len(chunks)), np.minimum(num_agree_C // 2, bits_CK.shape[1] - 1)]
        total_C = np.where(agree_CK, apart_CK, 0).sum(axis=1)
        none_C = num_agree_C == 0
        errors.values_C[chunks] = bits_CK.shape[1]
        errors.exponent_mismatches_C[chunks] = bits_CK.shape[1] - num_agree_C
        errors.mantissa_error_mean_C[chunks] = np.where(
            none_C, MANTISSA_ERROR_MAX, total_C / np.maximum(num_agree_C, 1)
        )
        errors.mantissa_error_median_C[chunks] = np.where(none_C, MANTISSA_ERROR_MAX, middle_C)
        steps_CK = np.abs(_in_order(claimed_CK) - _in_order(bits_CK))
        errors.distance_mean_C[chunks] = np.minimum(steps_CK, DISTANCE_MAX).mean(axis=1)
    return errors


def parse_proofs(proofs_CB: npt.NDArray[np.uint8], lengths: Sequence[int]) -> tuple[_Ints, _Ints]:
    """Return moduli [C] and coefficients [C, 128] after checking number and ranges. Raises RemoteError(MALFORMED)."""
    expected = (num_proofs(lengths), PROOF_BYTES)
    if proofs_CB.shape != expected:
        raise RemoteError(ErrorCode.MALFORMED, f"proofs have shape {list(proofs_CB.shape)}, not {list(expected)}")
    words = np.ascontiguousarray(proofs_CB).view(">u2").astype(np.int64)
    moduli_C, coefficients_CK = words[:, 0], words[:, 1:]
    if len(words) and not (moduli_C.min() >= MODULUS_MIN and moduli_C.max() <= PRIME):
        raise RemoteError(ErrorCode.MALFORMED, f"a proof's modulus is outside {MODULUS_MIN} to {PRIME}")
    if len(words) and coefficients_CK.max() >= PRIME:
        raise RemoteError(ErrorCode.MALFORMED, f"a proof's coefficient is not below {PRIME}")
    return moduli_C, coefficients_CK


def _top_values(hidden_TD: Bits, lengths: Sequence[int]) -> Iterator[tuple[list[int], _Ints, _Ints]]:
    """Yield (chunks, places [C, K], bits [C, K]) for each K that occurs.

    The largest magnitude comes first, of equal ones the earlier.
    """
    assert hidden_TD.dtype == np.uint16
    assert len(hidden_TD) == sum(lengths)
    groups: dict[int, list[tuple[int, _Ints, _Ints]]] = {}
    for chunk, (start, end) in enumerate(_chunks(lengths)):
        bits = hidden_TD[start:end].reshape(-1)
        count = min(TOP_VALUES, len(bits))
        magnitudes = bits & np.uint16(0x7FFF)  # bf16 magnitudes have the order of their bits
        least = np.partition(magnitudes, len(bits) - count)[len(bits) - count]
        candidates = np.flatnonzero(magnitudes >= least)
        order = np.argsort(-magnitudes[candidates].astype(np.int64), kind="stable")[:count]
        places = candidates[order].astype(np.int64)
        groups.setdefault(count, []).append((chunk, places, bits[places].astype(np.int64)))
    for found in groups.values():
        for first in range(0, len(found), CHUNKS_AT_ONCE):
            members = found[first : first + CHUNKS_AT_ONCE]
            yield (
                [chunk for chunk, _, _ in members],
                np.stack([p for _, p, _ in members]),
                np.stack([b for *_, b in members]),
            )


def _in_order(bits: _Ints) -> _Ints:
    """Map bf16 values to integers in the same order: neighbours differ by 1."""
    return np.where(bits & 0x8000, -(bits & 0x7FFF), bits)


def _chunks(lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield [start, end) of each chunk's tokens; a chunk never crosses a completion."""
    start = 0
    for length in lengths:
        for offset in range(0, length, CHUNK_TOKENS):
            yield start + offset, start + min(offset + CHUNK_TOKENS, length)
        start += length


def _injective_moduli(places_CK: _Ints) -> _Ints:
    """Return the largest modulus [C] under which each chunk's places stay distinct.

    It is PRIME except for a few chunks of wide models.
    """
    moduli_C = np.full(len(places_CK), PRIME, np.int64)
    colliding = np.flatnonzero(places_CK.max(axis=1) >= PRIME)
    while len(colliding):
        remainders = np.sort(places_CK[colliding] % moduli_C[colliding, None], axis=1)
        colliding = colliding[(np.diff(remainders, axis=1) == 0).any(axis=1)]
        moduli_C[colliding] -= 1
        assert moduli_C.min() >= MODULUS_MIN, "128 places below 2^31 collide under each of 32,729 moduli"
    return moduli_C
