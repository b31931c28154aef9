"""Kernels that return the parts of the noise kernel, the hash and the Gumbel value, so that each can be compared alone."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from prime_node.adapters.engines.triton_noise import gumbel_in_triton, hash_in_triton

BLOCK = 2**14


@triton.jit
def _hashes(out, seeds, positions, vocab_size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    words = hash_in_triton(tl.load(seeds + row), tl.load(positions + row), tokens.to(tl.uint32))
    tl.store(out + row * vocab_size + tokens, words.to(tl.int32, bitcast=True), mask=tokens < vocab_size)


@triton.jit
def _gumbels(out, words, count, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    state = tl.load(words + places, mask=inside).to(tl.uint32, bitcast=True)
    tl.store(out + places, gumbel_in_triton(state), mask=inside)


def hashes_in_triton(seeds_B: torch.Tensor, positions_B: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return the hashes [B, V] as int32. Seeds and positions are int64."""
    out = torch.empty((len(seeds_B), vocab_size), dtype=torch.int32, device=seeds_B.device)
    _hashes[(len(seeds_B), triton.cdiv(vocab_size, BLOCK))](out, seeds_B, positions_B, vocab_size, BLOCK=BLOCK)
    return out


def gumbels_in_triton(words: torch.Tensor) -> torch.Tensor:
    """Return the noise of hashes, given as int32, in float32."""
    out = torch.empty(words.shape, dtype=torch.float32, device=words.device)
    _gumbels[(triton.cdiv(words.numel(), BLOCK),)](out, words, words.numel(), BLOCK=BLOCK)
    return out
