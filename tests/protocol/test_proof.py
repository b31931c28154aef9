"""Hidden-state proofs: the published polynomial and bytes, the effects of noise and other weights, and no crash on any input."""

from __future__ import annotations

import base64

import numpy as np
import pytest
from hypothesis import given
from hypothesis.extra import numpy as arrays

from prime_protocol.errors import RemoteError
from prime_protocol.proof import (
    MANTISSA_ERROR_MAX,
    PROOF_BYTES,
    TOP_VALUES,
    Bits,
    build_proofs,
    compare_proofs,
    num_proofs,
    parse_proofs,
)
from prime_protocol.proof_polynomial import PRIME

# Result of toploc 0.1.6's compute_newton_coefficients for the 128 largest values of `published()`.
PUBLISHED = (
    "/9lklHXDfowyKVC/+d2tVefQ3RgMqIH/jeWNQhuQ8qJlQWddI3Lxs95pRk2iQi1zaSyS5FdOJIGQ9XjeHOPe/6IjjfLm/v79HOrkCVwH+4FzzaI4TnWZFLQF"
    "IcyjcLXGvi3eFJ06MwXqJc5R5CBAf44TtNGWhb0lQxu/Dy15qjJhDDBPvnznj9nUQ3nFaG+ykZwoZ4+BD9mQ9RXQVzRzh8nY+FNbdou97BEGCEOIgdQJsLZw"
    "5TvnRPDyAmeonyRryDtqUIJmuTrj0fWvKps4Txy3y3FOLVqQ4J/zKKOkDOOhTyyyCTJe7ww5xnThmVfOj9XJHnMSw/lq0qpKo3GpXcBQ"
)


def published() -> Bits:
    places = np.arange(32 * 64)
    return ((places * 40503 % 30000 + 1000) | ((places % 3 == 0) << 15)).astype(np.uint16).reshape(32, 64)


def to_bf16(values: np.ndarray) -> Bits:
    return ((values.astype(np.float32).view(np.uint32) + 0x8000) >> 16).astype(np.uint16)


def hidden_states(num_tokens: int, *, size: int = 64, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((num_tokens, size))


def test_the_bytes_are_the_published_ones() -> None:
    assert build_proofs(published(), [32]).tobytes() == base64.b64decode(PUBLISHED)


def test_the_polynomial_goes_through_the_committed_values() -> None:
    bits = to_bf16(hidden_states(40, size=4096))
    moduli, coefficients = parse_proofs(build_proofs(bits, [40]), [40])
    flat = bits[:32].reshape(-1)
    for place in np.argsort(-(flat & 0x7FFF).astype(int), kind="stable")[:TOP_VALUES].tolist():
        power_sum = sum(int(c) * pow(place % int(moduli[0]), i, PRIME) for i, c in enumerate(coefficients[0]))
        assert power_sum % PRIME == flat[place] % PRIME


def test_one_proof_for_every_32_tokens_of_each_completion() -> None:
    lengths = [1, 32, 33]
    assert num_proofs(lengths) == 4
    assert build_proofs(to_bf16(hidden_states(66)), lengths).shape == (4, PROOF_BYTES)


def test_a_chunk_with_few_values_commits_to_all_of_them() -> None:
    bits = to_bf16(hidden_states(1, size=8))
    errors = compare_proofs(build_proofs(bits, [1]), bits, [1])
    assert (errors.values_C.tolist(), errors.exponent_mismatches_C.tolist()) == ([8], [0])


def test_the_same_hidden_states_agree_exactly_and_noise_moves_mantissas_a_little() -> None:
    states = hidden_states(70)
    proofs = build_proofs(to_bf16(states), [70])
    same = compare_proofs(proofs, to_bf16(states), [70])
    assert (
        same.exponent_mismatches_C.sum() == same.mantissa_error_mean_C.sum() == same.mantissa_error_median_C.sum() == 0
    )
    noisy = compare_proofs(proofs, to_bf16(states * (1 + 0.005 * hidden_states(70, seed=1))), [70])
    assert noisy.exponent_mismatches_C.max() <= TOP_VALUES // 8
    assert 0 < noisy.mantissa_error_median_C.max() <= 2


def test_other_hidden_states_are_far_from_the_proof() -> None:
    proofs = build_proofs(to_bf16(hidden_states(64)), [64])
    errors = compare_proofs(proofs, to_bf16(hidden_states(64, seed=1)), [64])
    assert errors.exponent_mismatches_C.min() > TOP_VALUES // 2
    assert errors.mantissa_error_mean_C.min() > 10


def test_a_proof_of_zeros_agrees_with_nothing() -> None:
    proofs = np.zeros((1, PROOF_BYTES), np.uint8)
    proofs[:, :2] = (0xFF, 0xD9)
    errors = compare_proofs(proofs, to_bf16(hidden_states(32)), [32])
    assert errors.exponent_mismatches_C.tolist() == [TOP_VALUES]
    assert errors.mantissa_error_mean_C.tolist() == errors.mantissa_error_median_C.tolist() == [MANTISSA_ERROR_MAX]


@pytest.mark.parametrize("shape", [(0, PROOF_BYTES), (1, PROOF_BYTES), (3, PROOF_BYTES), (2, PROOF_BYTES - 2), (2, 2)])
def test_another_number_or_size_of_proofs_is_refused(shape: tuple[int, int]) -> None:
    with pytest.raises(RemoteError, match="shape"):
        compare_proofs(np.zeros(shape, np.uint8), to_bf16(hidden_states(64)), [64])


@pytest.mark.parametrize(
    ("word", "value", "what"), [(0, 0, "modulus"), (0, PRIME + 1, "modulus"), (7, PRIME, "coefficient")]
)
def test_numbers_out_of_range_are_refused(word: int, value: int, what: str) -> None:
    bits = to_bf16(hidden_states(32))
    proofs = build_proofs(bits, [32])
    proofs[0, 2 * word : 2 * word + 2] = divmod(value, 256)
    with pytest.raises(RemoteError, match=what):
        compare_proofs(proofs, bits, [32])


@given(proofs=arrays.arrays(np.uint8, (2, PROOF_BYTES)), bits=arrays.arrays(np.uint16, (40, 5)))
def test_no_bytes_from_a_peer_can_crash_the_comparison(proofs: np.ndarray, bits: Bits) -> None:
    proofs[:, 0] |= 0x80  # else nearly every example stops at the modulus
    try:
        errors = compare_proofs(proofs, bits, [40])
    except RemoteError:
        return
    assert (errors.exponent_mismatches_C <= errors.values_C).all()
    assert np.isfinite(errors.mantissa_error_mean_C).all()
