"""Weights in anonymous shared memory, from which vLLM's processes take them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from prime_node.adapters.engines.vllm_worker_extension import TensorPlace
from prime_protocol.weights import Weights, num_bytes, tensor_digests

_PART = re.compile(r".*?\.\d+\.[^.]+")
"""Layer and part of a tensor's name: model.layers.3.self_attn."""


def digests_by_name(weights: Weights) -> dict[str, str]:
    """Return each tensor's digest."""
    return dict(zip(weights, tensor_digests(weights.values()), strict=True))


def to_replace(held: Mapping[str, str], wanted: Mapping[str, str]) -> set[str]:
    """Return the names of tensors to give to vLLM, which has those of the digests `held`, so that it has those `wanted`.

    vLLM joins matrices of one part of a layer, such as the three of its attention, and needs all of them or none. On a CPU it
    packs all experts again whenever it gets any.
    """
    if any(".experts." in name for name in wanted):
        return set(wanted)
    changed = {_part_of(name) for name, digest in wanted.items() if held.get(name) != digest}
    return {name for name in wanted if _part_of(name) in changed}


def _part_of(name: str) -> str:
    found = _PART.match(name)
    return name if found is None else found.group()


def share_weights(weights: Weights, *, aliases: Mapping[str, str]) -> tuple[int, list[TensorPlace]]:
    """Return a descriptor of memory with the weights, and the places of tensors and of `aliases` (name -> tensor) of them."""
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
    return memory, [*places, *((alias, *place_of[name][1:]) for alias, name in aliases.items() if name in place_of)]
