"""The noise on other devices is the protocol's noise."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from prime_node.adapters.engines.torch_noise import noise_in_torch, torch_gumbel_noise
from prime_protocol import noise
from prime_protocol.noise import SEED_MAX

CPU = torch.device("cpu")


@pytest.mark.parametrize("vocab_size", [264, 4_099])
def test_torch_and_numpy_give_the_same_bits(vocab_size: int) -> None:
    random = np.random.default_rng(0)
    seeds = [0, 1, 2**32 - 1, 2**32, SEED_MAX, *(int(seed) for seed in random.integers(0, SEED_MAX, 251))]
    positions = [0, *(int(position) for position in random.integers(0, 2**20, 255))]
    expected = noise.gumbel_noise(seeds, positions, vocab_size)
    assert np.array_equal(noise_in_torch(seeds, positions, vocab_size, CPU).numpy(), expected)
    assert np.array_equal(torch_gumbel_noise(seeds, positions, vocab_size, CPU).numpy(), expected)


def test_a_large_vocabulary_is_worked_on_in_blocks_with_the_same_result() -> None:
    seeds, positions = [3, 5, 7], [0, 1, 2]
    expected = noise.gumbel_noise(seeds, positions, 151_936)
    assert np.array_equal(torch_gumbel_noise(seeds, positions, 151_936, CPU).numpy(), expected)


@pytest.mark.gpu
def test_a_gpu_gives_the_same_numbers_but_for_the_last_bit_of_a_logarithm() -> None:
    seeds, positions = list(range(64)), [0] * 64
    expected = noise.gumbel_noise(seeds, positions, 4_099)
    found = torch_gumbel_noise(seeds, positions, 4_099, torch.device("cuda")).cpu().numpy()
    assert np.abs(found - expected).max() <= 2e-6
    assert (found != expected).mean() < 1e-5
