"""prime_protocol.noise as one Triton kernel, which adds the noise of seeded rows to logits in one read and one write of each.

The same in torch is 29 kernels and 79 passes over the logits (adapters/engines/torch_noise.py, which stays for machines without
Triton and as the reference). Seeds and positions are read on the device, so a step needs no copy to the host.

The hash has the protocol's bits. The Gumbel value is computed in float32, because most GPUs calculate float64 at a 64th of the
speed. Both logarithms are exact to about one unit in the last place: the hardware's own is not, and differs between devices.
The inner one is log(1 - u). Its argument is formed from the hash's complement, which loses no digits near 0, and from -u
near 1. So a value differs from the protocol's by 2e-6 at most, one unit in the last place of the largest.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

BLOCK = 4096
"""Logits of a row for each program of the grid."""
UNSEEDED = -1
"""Seed of a row or slot that gets no noise. Seeds are non-negative."""


@triton.jit
def _absorb(state, word):
    word = word * 0xCC9E2D51
    word = (word << 15) | (word >> 17)
    state = state ^ (word * 0x1B873593)
    state = (state << 13) | (state >> 19)
    return state * 5 + 0xE6546B64


@triton.jit
def hash_in_triton(seed, position, tokens):
    """Return the protocol's 32-bit hash of a seed and position (int64 scalars) and of tokens (uint32)."""
    state = _absorb((seed * 0).to(tl.uint32), (seed & 0xFFFFFFFF).to(tl.uint32))
    state = _absorb(state, (seed >> 32).to(tl.uint32))
    state = _absorb(state, (position & 0xFFFFFFFF).to(tl.uint32))
    state = _absorb(state, tokens) ^ 16  # number of hashed bytes
    state = (state ^ (state >> 16)) * 0x85EBCA6B
    state = (state ^ (state >> 13)) * 0xC2B2AE35
    return state ^ (state >> 16)


@triton.jit
def _midpoint(state):
    """Return (state + 0.5) / 2**32, rounded once: both halves of the word are exact in float32, and so are their products."""
    upper = (state >> 16).to(tl.int32).to(tl.float32)
    lower = (state & 0xFFFF).to(tl.int32).to(tl.float32)
    return upper * 1.52587890625e-05 + (lower + 0.5) * 2.3283064365386963e-10


@triton.jit
def _log_of_sum(fraction, exponent):
    """Return log((1 + fraction) * 2**exponent) for a fraction from 2**-0.5 - 1 to 2**0.5 - 1.

    With s = f / (2 + f), log(1 + f) is 2 s + 2 s^3 / 3 + ...; the coefficients are those of fdlibm's logf.
    """
    s = fraction / (2.0 + fraction)
    z = s * s
    w = z * z
    series = z * (0.66666662693 + w * 0.28498786688) + w * (0.40000972152 + w * 0.24279078841)
    half = 0.5 * fraction * fraction
    small = s * (half + series) + exponent * 9.0580006145e-06
    return small - half + fraction + exponent * 6.9313812256e-01


@triton.jit
def _split(value):
    """Return (fraction, exponent) of a positive normal float32, for _log_of_sum."""
    bits = value.to(tl.int32, bitcast=True) + (0x3F800000 - 0x3F3504F3)
    exponent = (bits >> 23) - 127
    mantissa = ((bits & 0x007FFFFF) + 0x3F3504F3).to(tl.float32, bitcast=True)
    return mantissa - 1.0, exponent.to(tl.float32)


@triton.jit
def gumbel_in_triton(state):
    """Return -log(-log(1 - u)) in float32, where u = (hash + 0.5) / 2**32."""
    u = _midpoint(state)
    fraction, exponent = _split(_midpoint(0xFFFFFFFF - state))  # of 1 - u
    near = u < 0.29
    minus_log = -_log_of_sum(tl.where(near, -u, fraction), tl.where(near, 0.0, exponent))
    fraction, exponent = _split(minus_log)
    return -_log_of_sum(fraction, exponent)


@triton.jit
def _add_noise(logits, stride, slot_of_row, position_of_row, seeds, firsts, vocab_size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_of_row + row).to(tl.int64)
    seed = tl.load(seeds + slot)
    position = tl.load(position_of_row + row).to(tl.int64) - tl.load(firsts + slot)
    if (seed >= 0) & (position >= 0):
        tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = tokens < vocab_size
        noise = gumbel_in_triton(hash_in_triton(seed, position, tokens.to(tl.uint32)))
        places = logits + row * stride + tokens
        tl.store(places, tl.load(places, mask=inside) + noise, mask=inside)


def add_noise_of_slots(
    logits_BV: torch.Tensor,
    slot_of_row_B: torch.Tensor,
    position_of_row_B: torch.Tensor,
    seeds_S: torch.Tensor,
    firsts_S: torch.Tensor,
    *,
    block: int = BLOCK,
) -> None:
    """Add noise to each row of float32 logits, in place. All tensors are on one device; nothing is read on the host.

    A row's seed is that of its slot, and its position in the completion is position_of_row - first of the slot. A row with the
    seed UNSEEDED or before its first position stays as it is.
    """
    assert logits_BV.dtype == torch.float32
    assert logits_BV.stride(1) == 1
    assert seeds_S.dtype == firsts_S.dtype == torch.int64
    rows, vocab_size = logits_BV.shape
    if not rows:
        return
    grid = (rows, triton.cdiv(vocab_size, block))
    _add_noise[grid](
        logits_BV, logits_BV.stride(0), slot_of_row_B, position_of_row_B, seeds_S, firsts_S, vocab_size, BLOCK=block
    )


def add_noise_of_rows(
    logits_BV: torch.Tensor, rows: Sequence[int], seeds: Sequence[int], positions: Sequence[int], *, block: int = BLOCK
) -> None:
    """Add the noise of seeds and positions, known on the host, to these rows: one small copy to the device and one kernel."""
    table = torch.zeros((4, len(logits_BV)), dtype=torch.int64)
    table[0] = torch.arange(len(logits_BV))
    table[2] = UNSEEDED
    rows_N = torch.tensor(rows, dtype=torch.int64)
    table[1, rows_N] = torch.tensor(positions, dtype=torch.int64)
    table[2, rows_N] = torch.tensor(seeds, dtype=torch.int64)
    if logits_BV.is_cuda:
        table = table.pin_memory().to(logits_BV.device, non_blocking=True)
    add_noise_of_slots(logits_BV, *table, block=block)
