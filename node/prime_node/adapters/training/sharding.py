"""Distribution of a model over its ranks: FSDP2 over the decoder layers and, as one more unit, over the rest.

The fp32 master weights are sharded. A layer's parameters are gathered as `compute_dtype` while it computes, and gradients are
reduced in fp32. They are summed, not averaged: the loss is already divided by the whole batch's counts, so the number of ranks
changes nothing but the order of the sum. Embedding and head stay in one unit, because they may be tied.

Traps (measured): the sum needs both settings below, on every unit, because they do not recurse. A rank that does not use a
parameter (an expert that no token chose) crashes gloo without `set_reduce_scatter_unused_params`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from prime_node.adapters.engines.torch_weights import to_weights
from prime_node.adapters.models.policy_module import PolicyModule, ValueModule
from prime_node.adapters.training.ranks import Ranks
from prime_protocol.errors import LocalError
from prime_protocol.weights import Weights, WeightTensor

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Placement:
    """Placement settings. Example: Placement(compute_dtype="bf16", recompute=True)."""

    compute_dtype: str = "fp32"
    """Type of forward and backward: fp32 or bf16. Master weights, reductions and the optimizer are always fp32."""
    recompute: bool = False
    """Whether to use activation checkpointing: a layer's activations are recomputed in the backward pass instead of stored."""
    compile_backend: str | None = None
    """Backend of torch.compile, for each layer; None computes eagerly."""
    offload: bool = False
    """Whether master weights, gradients and optimizer are in the host's memory, where the optimizer runs."""
    reduce_each_pass: bool = True
    """Whether to reduce gradients after each pass, which needs little memory. False: once a step, with a whole gradient on each
    rank until then."""

    @property
    def needs_ranks(self) -> bool:
        """Whether torch.distributed is needed, if only with one rank."""
        return self.compute_dtype != "fp32" or self.offload


PLAIN = Placement()


def arrange(policy: PolicyModule | ValueModule, placement: Placement, ranks: Ranks) -> None:
    """Apply recomputation, compilation and sharding, in this order, in place."""
    if placement.compute_dtype not in DTYPES:
        raise LocalError(f"trainer.compute_dtype = {placement.compute_dtype!r}: known are {', '.join(DTYPES)}")
    layers = decoder_layers(policy)
    if placement.recompute:
        policy.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if placement.compile_backend is not None:
        for layer in layers:
            layer.compile(backend=placement.compile_backend)
    if ranks.mesh is None:
        return
    on_host: OffloadPolicy = CPUOffloadPolicy(pin_memory=ranks.mesh.device_type == "cuda")
    for unit in (*layers, policy):
        fully_shard(
            unit,
            mesh=ranks.mesh,
            mp_policy=MixedPrecisionPolicy(param_dtype=DTYPES[placement.compute_dtype], reduce_dtype=torch.float32),
            offload_policy=on_host if placement.offload else OffloadPolicy(),
        )
    for module in units(policy):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        module.set_reduce_scatter_unused_params(True)


def decoder_layers(policy: PolicyModule | ValueModule) -> list[torch.nn.Module]:
    """Return the modules that must stay whole according to transformers: FSDP shards them one by one."""
    kinds = set(policy.model._no_split_modules or ())
    return [module for module in policy.model.modules() if type(module).__name__ in kinds]


def units(policy: torch.nn.Module) -> Iterator[FSDPModule]:
    """Yield the modules that FSDP shards as units."""
    return (module for module in policy.modules() if isinstance(module, FSDPModule))


def local_rows(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return this rank's rows of a parameter and the index of the first one. A tensor that is not sharded returns all rows."""
    if not isinstance(tensor, DTensor):
        return tensor, 0
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tensor.to_local(), int(offset[0]) if offset else 0


def gathered(rows: Iterable[tuple[str, torch.Tensor]], ranks: Ranks, *, dtype: str) -> Weights:
    """Return whole tensors, rounded, one after another, on the first rank; none elsewhere.

    A collective. HSDP's further copies contribute nothing.
    """
    weights: dict[str, WeightTensor] = {}
    for name, tensor in to_weights(rows, dtype=dtype).items():
        parts = ranks.gather_at(0, tensor if ranks.copy == 0 else None)
        if parts is None:
            continue
        shards = [part for part in parts if part is not None]
        shape = (sum(part.shape[0] for part in shards), *tensor.shape[1:])
        weights[name] = WeightTensor(dtype, shape, np.concatenate([part.data for part in shards]))
    return weights


def dealt(weights: Weights | None, counts: Sequence[int], ranks: Ranks) -> Weights:
    """Return this rank's rows of the first rank's tensors: `counts` of each in order. A collective; the others pass None."""
    everywhere = ranks.gather(list(counts))
    mine: dict[str, WeightTensor] = {}
    tensors = iter(() if weights is None else weights.items())
    for place in range(len(counts)):
        parts = None
        if ranks.is_first:
            name, tensor = next(tensors)
            ends = np.cumsum([each[place] for each in everywhere])
            rows = tensor.data.reshape(tensor.shape)
            assert ends[-1] == len(rows), f"{name} has {len(rows)} rows, the ranks have {ends[-1]}"
            shards = [rows[end - each[place] : end] for each, end in zip(everywhere, ends, strict=True)]
            parts = [(name, WeightTensor(tensor.dtype, shard.shape, shard.reshape(-1).copy())) for shard in shards]
        name, own = ranks.deal(parts)
        mine[name] = own
    return mine
