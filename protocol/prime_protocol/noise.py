"""Assigned randomness: the Gumbel noise that decides each token, as a function of (seed, position, token id).

A worker must choose token = argmax over tokens of logits / temperature + gumbel(seed, position, token). Adding Gumbel
noise and taking the argmax samples exactly from softmax(logits / temperature) (Gumbel 1954; Maddison et al., "A*
Sampling", 2014), so an honest worker samples as usual. But the coordinator assigns the seed. So a validator can
recompute the noise and check whether a token is *the* one that an honest worker gets (the idea is in DiFR, arXiv
2511.20621).

The hash is murmur3_x86_32 over four 32-bit words (seed low, seed high, position, token id) with hash seed 0. It is
cheap on every kind of machine and needs no state. It is not cryptographic and need not be: the seed is secret until the
lease.

    h       = murmur3_x86_32(seed & 0xffffffff, seed >> 32, position, token)
    u       = (h + 0.5) / 2**32                        in float64, so 0 < u < 1
    gumbel  = -log(-log1p(-u))                         rounded to float32

`position` counts the tokens of the completion from 0. SPEC.md has golden vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

SEED_MAX = 2**63 - 1
"""Largest seed. Seeds are non-negative and fit a signed 64-bit integer, as JSON readers and tensor files require."""

_U32 = np.uint32
_MASK = 0xFFFFFFFF


def gumbel_noise(seeds: Sequence[int], positions: Sequence[int], vocab_size: int) -> npt.NDArray[np.float32]:
    """Return float32 [B, V]: the noise of B (seed, position) pairs over the whole vocabulary.

    Example: gumbel_noise([7], [0], 264) is the noise of the first token of the completion with seed 7.
    """
    return gumbel_of_hashes(token_hashes(seeds, positions, vocab_size))


def token_hashes(seeds: Sequence[int], positions: Sequence[int], vocab_size: int) -> npt.NDArray[np.uint32]:
    """Return the hashes [B, V] of B (seed, position) pairs and every token."""
    return _finish(hash_prefixes(seeds, positions)[:, None] ^ _token_words(vocab_size)[None, :])


def hash_prefixes(seeds: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.uint32]:
    """Return the hash state after the three words shared by all tokens of a position, for B (seed, position) pairs."""
    seeds_B = np.array(seeds, dtype=np.uint64)
    positions_B = np.array(positions, dtype=np.uint64)
    assert seeds_B.shape == positions_B.shape
    state = np.zeros(len(seeds_B), dtype=_U32)
    for words in (seeds_B & np.uint64(_MASK), seeds_B >> np.uint64(32), positions_B & np.uint64(_MASK)):
        state ^= _scramble(words.astype(_U32))
        state = (state << _U32(13)) | (state >> _U32(19))
        state = state * _U32(5) + _U32(0xE6546B64)
    return state


def _scramble(words: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    words = words * _U32(0xCC9E2D51)  # array arithmetic wraps modulo 2**32
    words = (words << _U32(15)) | (words >> _U32(17))
    return words * _U32(0x1B873593)


@lru_cache(maxsize=4)
def _token_words(vocab_size: int) -> npt.NDArray[np.uint32]:
    return _scramble(np.arange(vocab_size, dtype=_U32))


def _finish(state: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    state = (state << _U32(13)) | (state >> _U32(19))
    state = state * _U32(5) + _U32(0xE6546B64)
    state ^= _U32(16)  # number of hashed bytes
    state ^= state >> _U32(16)
    state = state * _U32(0x85EBCA6B)
    state ^= state >> _U32(13)
    state = state * _U32(0xC2B2AE35)
    state ^= state >> _U32(16)
    return state


def gumbel_of_hashes(hashes: npt.NDArray[np.uint32]) -> npt.NDArray[np.float32]:
    """Return the noise of each hash."""
    uniform = (hashes.astype(np.float64) + 0.5) * 2.0**-32
    gumbel: npt.NDArray[np.float64] = -np.log(-np.log1p(-uniform))
    return gumbel.astype(np.float32)
