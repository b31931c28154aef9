from __future__ import annotations

import struct
from math import exp, log, log1p

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prime_protocol.noise import SEED_MAX, gumbel_noise

MASK = 0xFFFFFFFF
SEEDS = st.integers(0, SEED_MAX)
POSITIONS = st.integers(0, 2**20)


def murmur3(data: bytes, seed: int) -> int:
    """Compute murmur3_x86_32 from its definition: whole little-endian words, then the rest, then the finalizer."""

    def scramble(word: int) -> int:
        word = word * 0xCC9E2D51 & MASK
        return ((word << 15 | word >> 17) & MASK) * 0x1B873593 & MASK

    h = seed
    whole = len(data) // 4 * 4
    for (word,) in struct.iter_unpack("<I", data[:whole]):
        h ^= scramble(word)
        h = (h << 13 | h >> 19) & MASK
        h = (h * 5 + 0xE6546B64) & MASK
    h ^= scramble(int.from_bytes(data[whole:], "little"))
    h ^= len(data)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h = (h ^ h >> shift) * factor & MASK
    return h ^ h >> 16


def gumbel_by_definition(seed: int, position: int, token: int) -> float:
    h = murmur3(struct.pack("<4I", seed & MASK, seed >> 32, position, token), 0)
    return -log(-log1p(-(h + 0.5) / 2**32))


@pytest.mark.parametrize(
    ("data", "seed", "expected"),
    [
        (b"", 0, 0),
        (b"", 1, 0x514E28B7),
        (b"", 0xFFFFFFFF, 0x81F16F39),
        (b"\xff\xff\xff\xff", 0, 0x76293B50),
        (b"\x21\x43\x65\x87", 0, 0xF55B516B),
        (b"\x21\x43\x65\x87", 0x5082EDEE, 0x2362F9DE),
        (b"\x21\x43\x65", 0, 0x7E4A8634),
        (b"\x21\x43", 0, 0xA0F7B07A),
        (b"\x21", 0, 0x72661CF4),
        (b"\0\0\0\0", 0, 0x2362F9DE),
        (b"aaaa", 0x9747B28C, 0x5A97808A),
        (b"Hello, world!", 0x9747B28C, 0x24884CBA),
        (b"The quick brown fox jumps over the lazy dog", 0x9747B28C, 0x2FA826CD),
    ],
)
def test_the_hash_is_murmur3_as_published(data: bytes, seed: int, expected: int) -> None:
    assert murmur3(data, seed) == expected


@given(SEEDS, POSITIONS, st.integers(0, 2**18 - 1))
def test_the_noise_is_the_definition(seed: int, position: int, token: int) -> None:
    noise = gumbel_noise([seed], [position], 2**18)
    assert noise.dtype == np.float32
    assert abs(float(noise[0, token]) - gumbel_by_definition(seed, position, token)) <= 2e-6


@given(SEEDS, POSITIONS, st.integers(1, 300))
def test_a_tokens_noise_depends_on_neither_the_batch_nor_the_vocabulary(
    seed: int, position: int, vocab_size: int
) -> None:
    batch = gumbel_noise([seed, 5], [position, 0], vocab_size)
    assert batch.shape == (2, vocab_size)
    assert np.array_equal(batch[:1], gumbel_noise([seed], [position], 300)[:, :vocab_size])


def test_golden_values() -> None:
    noise = gumbel_noise([7, SEED_MAX], [0, 31], 264)
    assert noise[0, :4].tolist() == pytest.approx([0.8287906, 0.05055927, 0.4533012, 2.2764256], abs=1e-6)
    assert noise.argmax(axis=1).tolist() == [29, 170]


def test_every_word_matters_to_its_last_bit() -> None:
    base = gumbel_noise([1], [1], 64)
    for seed, position in ((0, 1), (1 + 2**31, 1), (1 + 2**32, 1), (1 + 2**62, 1), (1, 0), (1, 2)):
        assert np.mean(gumbel_noise([seed], [position], 64) == base) < 0.1


def test_the_noise_is_finite_at_both_ends_of_the_hash() -> None:
    """u = (h + 0.5) / 2**32 is never 0 or 1."""
    noise = gumbel_noise(range(8), [0] * 8, 2**20)
    assert np.isfinite(noise).all()
    assert -3.14 < noise.min() < -2.6
    assert 14 < noise.max() < 22.88


def test_the_noise_is_gumbel_distributed() -> None:
    noise = np.sort(gumbel_noise(range(64), range(64), 1_024).ravel().astype(np.float64))
    ideal = np.exp(-np.exp(-noise))
    observed = (np.arange(noise.size) + 0.5) / noise.size
    assert np.abs(ideal - observed).max() < 1.95 / noise.size**0.5  # Kolmogorov-Smirnov at 0.1 %
    assert noise.mean() == pytest.approx(0.5772, abs=0.02)


def test_the_argmax_samples_from_the_softmax() -> None:
    logits = np.array([2.0, 1.0, 0.0, -1.0])
    chosen = (logits + gumbel_noise(range(40_000), [3] * 40_000, 4)).argmax(axis=1)
    shares = np.bincount(chosen, minlength=4) / 40_000
    total = sum(exp(x) for x in logits)
    assert shares == pytest.approx([exp(x) / total for x in logits], abs=0.01)


def test_neighbouring_seeds_positions_and_tokens_are_unrelated() -> None:
    by_seed = gumbel_noise(range(300), [0] * 300, 300)
    by_position = gumbel_noise([0] * 300, range(300), 300)
    for table in (by_seed, by_position):
        for a, b in ((table[:-1], table[1:]), (table[:, :-1], table[:, 1:])):
            assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.015


def test_the_noise_does_not_remember_what_was_asked_before() -> None:
    first = gumbel_noise([1], [2], 50).copy()
    gumbel_noise([9], [9], 50)[:] = 0
    assert np.array_equal(gumbel_noise([1], [2], 50), first)
