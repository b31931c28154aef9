"""prime_protocol.noise on any device: numpy's version in the CPU's memory, one Triton kernel on a GPU, or the same in torch.

On a CPU numpy is faster (16 rows of 151,936 tokens: 15 ms instead of 48). The torch version serves devices for which Triton
cannot compile, and is what the kernel (triton_noise.py) is compared with. It keeps the hash's 32-bit words in int32:
multiplication wraps modulo 2**32 as for unsigned words, and right shifts are masked to be logical. Logarithms are float64 and
are rounded to float32 once, as in noise.py; a test compares the two versions over many seeds.

Letters: B rows, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import lru_cache
from types import ModuleType

import numpy as np
import torch

from prime_protocol import noise

log = logging.getLogger(__name__)

BLOCK_BYTES = 2**21
"""Approximate size of numpy's float64 intermediates, so that they stay in the cache."""


def add_gumbel_noise(
    logits_BV: torch.Tensor, rows: Sequence[int], seeds: Sequence[int], positions: Sequence[int]
) -> None:
    """Add the noise of seeds[n] and positions[n] to row rows[n], in place. Rows that are not named stay as they are."""
    fused = _kernel_for(logits_BV.device) if logits_BV.is_cuda and logits_BV.dtype == torch.float32 else None
    if fused is not None and logits_BV.stride(1) == 1:
        fused.add_noise_of_rows(logits_BV, rows, seeds, positions)
        return
    noise_NV = torch_gumbel_noise(seeds, positions, logits_BV.shape[1], logits_BV.device)
    if len(rows) == len(logits_BV) and list(rows) == list(range(len(rows))):
        logits_BV += noise_NV
    else:
        logits_BV[torch.tensor(rows, device=logits_BV.device)] += noise_NV


@lru_cache
def _kernel_for(device: torch.device) -> ModuleType | None:
    """Return the module with the kernel, or None where Triton is missing or cannot compile. It needs a C compiler."""
    try:
        from prime_node.adapters.engines import triton_noise

        triton_noise.add_noise_of_rows(torch.zeros((1, 8), device=device), [0], [0], [0])
    except Exception as error:  # noqa: BLE001 (whatever its compiler, linker or driver raises)
        log.warning("Triton cannot add the noise on %s (%s); torch does it in 29 kernels", device, error)
        return None
    return triton_noise


def torch_gumbel_noise(
    seeds: Sequence[int], positions: Sequence[int], vocab_size: int, device: torch.device
) -> torch.Tensor:
    """Return the same as prime_protocol.noise.gumbel_noise: float32 [B, V] on `device`."""
    if device.type != "cpu":
        return noise_in_torch(seeds, positions, vocab_size, device)
    rows = max(1, BLOCK_BYTES // (8 * vocab_size))
    noise_BV = np.empty((len(seeds), vocab_size), dtype=np.float32)
    for start in range(0, len(seeds), rows):
        part = slice(start, start + rows)
        noise_BV[part] = noise.gumbel_noise(seeds[part], positions[part], vocab_size)
    return torch.from_numpy(noise_BV)


def noise_in_torch(
    seeds: Sequence[int], positions: Sequence[int], vocab_size: int, device: torch.device
) -> torch.Tensor:
    """Return the same noise, computed on `device`."""
    prefixes_B = torch.from_numpy(noise.hash_prefixes(seeds, positions).view(np.int32)).to(device)
    return _to_gumbel(_finish(prefixes_B[:, None] ^ _token_words(vocab_size, device)))


@lru_cache(maxsize=4)
def _token_words(vocab_size: int, device: torch.device) -> torch.Tensor:
    words = torch.arange(vocab_size, dtype=torch.int32, device=device) * _signed(0xCC9E2D51)
    return ((words << 15) | _shift_right(words, 17)) * _signed(0x1B873593)


def _finish(state: torch.Tensor) -> torch.Tensor:
    state = (state << 13) | _shift_right(state, 19)
    state = state * 5 + _signed(0xE6546B64)
    state = state ^ 16  # number of bytes hashed
    state = (state ^ _shift_right(state, 16)) * _signed(0x85EBCA6B)
    state = (state ^ _shift_right(state, 13)) * _signed(0xC2B2AE35)
    return state ^ _shift_right(state, 16)


def _to_gumbel(state: torch.Tensor) -> torch.Tensor:
    uniform = (state.to(torch.float64).remainder_(2.0**32) + 0.5).mul_(2.0**-32)
    return uniform.neg_().log1p_().neg_().log_().neg_().to(torch.float32)


def _shift_right(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift logically: int32 shifts copies of the sign bit in, and the mask removes them."""
    return (words >> bits) & ((1 << (32 - bits)) - 1)


def _signed(word: int) -> int:
    """Return the int32 with the bits of an unsigned word."""
    return word - 2**32 if word >= 2**31 else word
