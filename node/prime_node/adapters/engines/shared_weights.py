"""Weights in anonymous shared memory, from which vLLM's processes take them."""

from __future__ import annotations

import os
from collections.abc import Mapping

from prime_node.adapters.engines.vllm_worker_extension import TensorPlace
from prime_protocol.weights import Weights, num_bytes


def share_weights(weights: Weights, *, aliases: Mapping[str, str]) -> tuple[int, list[TensorPlace]]:
    """Return a descriptor of memory with the weights, and the places of tensors and of `aliases` (name -> tensor)."""
    memory = os.memfd_create("prime-node weights")
    os.ftruncate(memory, num_bytes(weights))
    places: list[TensorPlace] = []
    offset = 0
    with open(memory, "wb", closefd=False) as file:
        for name, tensor in weights.items():
            tensor.data.tofile(file)
            places.append((name, tensor.dtype, list(tensor.shape), offset))
            offset += tensor.data.nbytes
    place_of = {place[0]: place for place in places}
    return memory, [*places, *((alias, *place_of[name][1:]) for alias, name in aliases.items())]
