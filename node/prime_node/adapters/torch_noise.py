"""prime_protocol.noise in torch: the same numbers, on any device, for vocabularies where numpy is slow.

The hash works on 32-bit words held in int32: multiplication wraps modulo 2**32 as it does for unsigned words, shifts to
the right are masked to be logical ones. The logarithms are float64 and rounded to float32 once, as in noise.py; a test
compares the two over many seeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from prime_protocol.noise import hash_prefixes

BLOCK_ELEMENTS = 2**17
"""Elements worked on at a time on a CPU: the float64 intermediates of a block stay in the cache."""


def gumbel_noise(seeds: Sequence[int], positions: Sequence[int], vocab_size: int, device: torch.device) -> torch.Tensor:
    """Equal to prime_protocol.noise.gumbel_noise: float32 [B, V]."""
    prefixes_B = torch.from_numpy(hash_prefixes(seeds, positions).astype("int32")).to(device)
    words_V = _token_words(vocab_size, device)
    if device.type != "cpu":
        return _to_gumbel(_finish(prefixes_B[:, None] ^ words_V))
    noise_BV = torch.empty(len(prefixes_B), vocab_size)
    for prefix, row_V in zip(prefixes_B, noise_BV, strict=True):
        for words, out in zip(words_V.split(BLOCK_ELEMENTS), row_V.split(BLOCK_ELEMENTS), strict=True):
            out.copy_(_to_gumbel(_finish(words ^ prefix)))
    return noise_BV


@lru_cache(maxsize=4)
def _token_words(vocab_size: int, device: torch.device) -> torch.Tensor:
    words = torch.arange(vocab_size, dtype=torch.int32, device=device) * _signed(0xCC9E2D51)
    return ((words << 15) | _shift_right(words, 17)) * _signed(0x1B873593)


def _finish(state: torch.Tensor) -> torch.Tensor:
    state = (state << 13) | _shift_right(state, 19)
    state = state * 5 + _signed(0xE6546B64)
    state = state ^ 16  # bytes hashed
    state = (state ^ _shift_right(state, 16)) * _signed(0x85EBCA6B)
    state = (state ^ _shift_right(state, 13)) * _signed(0xC2B2AE35)
    return state ^ _shift_right(state, 16)


def _to_gumbel(state: torch.Tensor) -> torch.Tensor:
    uniform = state.to(torch.float64)
    uniform = (uniform + torch.where(state < 0, 2.0**32 + 0.5, 0.5)).mul_(2.0**-32)
    return uniform.neg_().log1p_().neg_().log_().neg_().to(torch.float32)


def _shift_right(words: torch.Tensor, bits: int) -> torch.Tensor:
    """The logical shift; int32 shifts copies of the sign bit in, which the mask takes out again."""
    return (words >> bits) & ((1 << (32 - bits)) - 1)


def _signed(word: int) -> int:
    """The int32 with the bits of an unsigned word."""
    return word - 2**32 if word >= 2**31 else word
