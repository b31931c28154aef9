"""The Triton kernel adds the protocol's noise. Without a GPU, Triton's interpreter runs the same program."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType

import numpy as np
import pytest
import torch

from prime_protocol import noise
from prime_protocol.noise import SEED_MAX

pytest.importorskip("triton")

KERNEL, PROBES = "prime_node.adapters.engines.triton_noise", "prime_lab.noise_on_device"
ERROR_MAX = 2e-6
"""One unit in the last place of the largest noise, 22.9."""
LAST = 2**32 - 1


@pytest.fixture(scope="module", autouse=True)
def interpreted() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")  # read when the kernel's functions are decorated
        for name in (KERNEL, PROBES):
            patch.delitem(sys.modules, name, raising=False)
        yield
        for name in (KERNEL, PROBES):
            sys.modules.pop(name, None)  # so that other tests get compiled kernels


@pytest.fixture
def kernel() -> ModuleType:
    return importlib.import_module(KERNEL)


@pytest.fixture
def probes() -> ModuleType:
    return importlib.import_module(PROBES)


def many(count: int) -> tuple[list[int], list[int]]:
    random = np.random.default_rng(0)
    seeds = [0, 1, 2**32 - 1, 2**32, SEED_MAX, *map(int, random.integers(0, SEED_MAX, count))]
    positions = [0, 2**31, 2**32 - 1, 0, *map(int, random.integers(0, 2**20, count + 1))]
    return seeds[:count], positions[:count]


def test_the_hash_has_the_protocols_bits(probes: ModuleType) -> None:
    seeds, positions = many(24)
    found = probes.hashes_in_triton(torch.tensor(seeds), torch.tensor(positions), 1_500)
    assert np.array_equal(found.numpy().view(np.uint32), noise.token_hashes(seeds, positions, 1_500))


def test_the_value_is_the_protocols_to_one_unit_in_the_last_place(probes: ModuleType) -> None:
    # The smallest and largest words, those where the series for log(1 - u) begins, and those where the outer logarithm is 0.
    centres = (0.29 * LAST, (1 - 2**-0.5) * LAST, (1 - np.exp(-1)) * LAST)
    words = np.concatenate(
        [
            np.arange(2**12),
            LAST - np.arange(2**12),
            *(int(centre) + np.arange(-(2**10), 2**10) for centre in centres),
            np.random.default_rng(0).integers(0, 2**32, 2**18),
        ]
    ).astype(np.uint32)
    found = probes.gumbels_in_triton(torch.from_numpy(words.view(np.int32))).numpy()
    expected = noise.gumbel_of_hashes(words)
    assert np.abs(found.astype(np.float64) - expected).max() <= ERROR_MAX
    assert np.abs(found - expected)[np.abs(expected) < 4].max() <= 2.5e-7


def test_a_noisy_argmax_is_the_protocols(probes: ModuleType) -> None:
    random = np.random.default_rng(0)
    seeds, positions = many(10_000)
    exact_NV = noise.gumbel_noise(seeds, positions, 40)
    words_NV = noise.token_hashes(seeds, positions, 40)
    found_NV = probes.gumbels_in_triton(torch.from_numpy(words_NV.view(np.int32))).numpy()
    logits_NV = random.standard_normal(exact_NV.shape, dtype=np.float32) * 2
    same = (logits_NV + exact_NV).argmax(axis=1) == (logits_NV + found_NV).argmax(axis=1)
    assert same.mean() >= 0.9999


@pytest.mark.parametrize(("vocab_size", "block"), [(264, 4096), (1_021, 256), (1_024, 256)])
def test_seeded_rows_get_noise_and_others_stay(kernel: ModuleType, vocab_size: int, block: int) -> None:
    seeds, positions = many(6)
    before = torch.randn(9, vocab_size, generator=torch.Generator().manual_seed(0))
    rows = [7, 0, 3, 4, 8, 2]
    expected = before.clone()
    expected[rows] += torch.from_numpy(noise.gumbel_noise(seeds, positions, vocab_size))
    found = before.clone()
    kernel.add_noise_of_rows(found, rows, seeds, positions, block=block)
    assert (found - expected).abs().max() <= 2 * ERROR_MAX
    assert torch.equal(found[[1, 5, 6]], before[[1, 5, 6]])


def test_masked_and_broken_logits_stay_so_and_a_view_keeps_its_padding(kernel: ModuleType) -> None:
    padded = torch.zeros(2, 300)  # an engine pads the vocabulary
    logits = padded[:, :270]
    logits[0, 3], logits[0, 269], logits[1, 0] = float("-inf"), float("nan"), float("inf")
    kernel.add_noise_of_rows(logits, [0, 1], [5, 6], [0, 1])
    assert logits[0, 3] == float("-inf")
    assert logits[0, 269].isnan()
    assert logits[1, 0] == float("inf")
    assert logits.isfinite().sum() == 2 * 270 - 3
    assert not padded[:, 270:].any()


def test_slots_give_seeds_and_first_positions(kernel: ModuleType) -> None:
    seeds_S, firsts_S = torch.tensor([11, kernel.UNSEEDED, 13]), torch.tensor([9, 0, 20])
    slot_of_row, position_of_row = torch.tensor([2, 1, 0, 2]), torch.tensor([25, 3, 9, 19])
    logits = torch.zeros(4, 50)
    kernel.add_noise_of_slots(logits, slot_of_row, position_of_row, seeds_S, firsts_S)
    expected = noise.gumbel_noise([13, 11], [5, 0], 50)
    assert np.abs(logits[[0, 2]].numpy() - expected).max() <= ERROR_MAX
    assert not logits[[1, 3]].any(), "no seed, and before the first position"


@pytest.mark.gpu
def test_a_gpu_adds_the_same_noise() -> None:
    from prime_node.adapters.engines.torch_noise import add_gumbel_noise

    seeds, positions = many(64)
    logits = torch.zeros(64, 151_936, device="cuda")
    add_gumbel_noise(logits, range(64), seeds, positions)
    assert np.abs(logits.cpu().numpy() - noise.gumbel_noise(seeds, positions, 151_936)).max() <= 3e-6
