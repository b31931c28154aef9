"""A policy's weights in this process's memory, in the form that the publisher takes."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from prime_protocol.checkpoint import encode_parts, tensor_table
from prime_protocol.manifest import BasePolicy, Encoding, PartEntry, TensorEntry
from prime_protocol.weights import Weights, num_bytes

ENCODE_THREADS = max(1, min(8, (os.cpu_count() or 1) // 2))
"""Half the cores: encoding runs during the next step, which needs the others."""


@dataclass(frozen=True, slots=True)
class WholeCopy:
    """Implementation of ports.train_backend.PolicyCopy. The weights must not change any more."""

    weights: Weights

    @property
    def raw_bytes(self) -> int:
        """Bytes of all tensors."""
        return num_bytes(self.weights)

    def tensors(self) -> tuple[TensorEntry, ...]:
        """Return the table of tensors."""
        return tensor_table(self.weights)

    def encode(
        self, base: tuple[BasePolicy, WholeCopy] | None, *, keep: Callable[[PartEntry, bytearray], object]
    ) -> tuple[Encoding, bytes]:
        """Encode the policy, as an anchor or against `base`. Return the encoding and its index."""
        old = None if base is None else (base[0], base[1].weights)
        if ENCODE_THREADS == 1:
            return encode_parts(self.weights, old, keep=keep)
        with ThreadPoolExecutor(ENCODE_THREADS, thread_name_prefix="encode") as pool:
            return encode_parts(self.weights, old, keep=keep, pool=pool)

    def drop(self) -> None:
        """Do nothing: Python frees the memory."""
