"""Weights as values: named flat arrays with a wire dtype, and the digest of a whole set of them.

bf16 and other types that numpy lacks are held as unsigned integers of their bit patterns, with the dtype's name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from math import prod
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from prime_protocol.codec import DTYPES
from prime_protocol.digest import digest_of


@dataclass(frozen=True, slots=True)
class WeightTensor:
    """One tensor. Example: WeightTensor("bf16", (2, 3), np.zeros(6, np.uint16))."""

    dtype: str
    """Key of `codec.DTYPES`."""
    shape: tuple[int, ...]
    data: npt.NDArray[Any]  # [prod(shape)], contiguous, unsigned bit patterns where numpy has no such type

    def __post_init__(self) -> None:
        assert self.data.shape == (prod(self.shape),)
        assert self.data.flags.c_contiguous
        assert self.data.itemsize == DTYPES[self.dtype]

    @property
    def digest(self) -> str:
        """Digest of the raw little-endian bytes."""
        return digest_of(self.data.view(np.uint8).data)


Weights = Mapping[str, WeightTensor]
"""Tensor name -> tensor, in the model's own order."""


def state_root(tensors: Iterable[tuple[str, str, tuple[int, ...], str]]) -> str:
    """Return one digest for a whole set of weights, from rows (name, dtype, shape, digest) sorted by name.

    Each row is hashed as UTF-8 "name NUL dtype NUL d0,d1,... NUL digest LF"; SPEC.md, section "State root". The table
    and a tensor's own bytes prove that tensor; the table is in the signed manifest.
    """
    hasher = blake3()
    for name, dtype, shape, digest in sorted(tensors):
        hasher.update(f"{name}\0{dtype}\0{','.join(map(str, shape))}\0{digest}\n".encode())
    return hasher.hexdigest()


def tensor_digests(tensors: Iterable[WeightTensor], pool: Executor | None = None) -> Iterator[str]:
    """Return each tensor's digest in order; a pool of threads hashes them in parallel."""
    return map(_DIGEST, tensors) if pool is None else pool.map(_DIGEST, tensors)


def root_of(weights: Weights, *, pool: Executor | None = None) -> str:
    """Compute the state root of weights."""
    digests = tensor_digests(weights.values(), pool)
    return state_root(
        (name, tensor.dtype, tensor.shape, digest)
        for (name, tensor), digest in zip(weights.items(), digests, strict=True)
    )


def num_bytes(weights: Weights) -> int:
    """Return the raw bytes of all tensors."""
    return sum(tensor.data.nbytes for tensor in weights.values())


def empty_like(dtype: str, shape: tuple[int, ...]) -> WeightTensor:
    """Return an uninitialised tensor to decode into."""
    return WeightTensor(dtype, shape, np.empty(prod(shape), dtype=_STORAGE[DTYPES[dtype]]))


FLOATS = ("bf16", "fp16", "fp32")
"""Types that `floats` and `rounded_to` support."""


def floats(tensor: WeightTensor) -> npt.NDArray[np.float32]:
    """Return the tensor's values in its shape. `tensor.dtype` is one of FLOATS."""
    if tensor.dtype == "bf16":
        values: npt.NDArray[np.float32] = (tensor.data.astype(np.uint32) << 16).view(np.float32)
    elif tensor.dtype == "fp16":
        values = tensor.data.view(np.float16).astype(np.float32)
    else:
        values = tensor.data.view(np.float32)
    return values.reshape(tensor.shape)


def rounded_to(values: npt.NDArray[np.float32], dtype: str) -> WeightTensor:
    """Round float32 to the nearest value of `dtype`, ties to even; NaN stays NaN."""
    assert values.dtype == np.float32
    flat = np.ascontiguousarray(values).reshape(-1)
    if dtype == "bf16":
        bits = flat.view(np.uint32)
        up = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
        data = np.where(np.isnan(flat), np.uint16(0x7FC0), up)
    elif dtype == "fp16":
        data = flat.astype(np.float16).view(np.uint16)
    else:
        data = flat.view(np.uint32)
    return WeightTensor(dtype, values.shape, data)


_DIGEST = attrgetter("digest")
_STORAGE: dict[int, type[np.unsignedinteger[Any]]] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
