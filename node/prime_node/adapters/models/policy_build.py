"""Builds the model to train from a run's config.json and weights or a seed: on one device, or sharded over ranks.

With weights, a sharded model is built without memory (on torch's meta device) and sharded. Each rank then reads its own rows of
each tensor, so no rank ever holds the whole model. Without weights the seed draws them, whole and on every rank, so that they
are the same for any number of ranks. That is for small models that start from random weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.initialization import no_init_weights

from prime_node.adapters.engines.torch_weights import TORCH_DTYPES
from prime_node.adapters.models.hub_names import hub_names
from prime_node.adapters.models.lora import (
    LoraSettings,
    add_adapters,
    base_name,
    compute_merged,
    draw_adapters,
    is_adapter,
)
from prime_node.adapters.models.model_config import config_at_fault, read_model_config, require_memory
from prime_node.adapters.models.policy_module import PolicyModule, ValueModule
from prime_node.adapters.models.pretrained_model import folder_weights
from prime_node.adapters.training import packed_attention
from prime_node.adapters.training.ranks import Ranks
from prime_node.adapters.training.sharding import Placement, arrange, local_rows
from prime_protocol.errors import LocalError
from prime_protocol.weights import Weights

BYTES_PER_PARAMETER = 5 * 4
"""Memory per parameter in fp32: the rounded weight, its master, its gradient and AdamW's two moments."""
CRITIC_BYTES_PER_PARAMETER = 4 * 4
"""The same for a critic, whose weights are their own masters."""
_FROZEN_BYTES_PER_PARAMETER = 4 + 2
"""The same where adapters are trained, which are small: the merged weight, and the base's in its own type."""


def build_policy(
    folder: Path,
    weights: Weights | None,
    *,
    seed: int,
    temperature: float,
    device: torch.device,
    ranks: Ranks,
    placement: Placement,
    published_dtype: str,
    lora: LoraSettings | None = None,
) -> PolicyModule:
    """Build the architecture of config.json with these weights, else those in the folder, else random ones from torch's seed.

    Adapted layers compute with the weights of which `published_dtype` is the type; those of a pinned base keep the base's own.
    Raises LocalError. The ranks of one machine share its memory, so each may take its share of what is available.
    """
    where = torch.device("cpu") if placement.offload else device
    needed = BYTES_PER_PARAMETER if lora is None else _FROZEN_BYTES_PER_PARAMETER
    with _architecture(folder, weights, seed, needed, where, ranks) as (model, weights):
        model.tie_weights()
    if lora is not None:
        add_adapters(model, lora)
        pinned = weights if lora.alone and weights is not None else {}
        compute_merged(model, lambda name: TORCH_DTYPES[pinned[name].dtype if name in pinned else published_dtype])
    policy = PolicyModule(model.train(), temperature=temperature)
    _place(policy, where, ranks, placement, is_empty=weights is not None)
    if weights is not None:
        copy_rows(policy.model, weights)
    if lora is not None:
        draw_adapters(policy.model, seed=seed)
    return policy


def build_critic(
    folder: Path, weights: Weights | None, *, seed: int, device: torch.device, ranks: Ranks, placement: Placement
) -> ValueModule:
    """Build a critic: the decoder of config.json with these weights, as for a policy, and a head of zeros. Raises LocalError."""
    where = torch.device("cpu") if placement.offload else device
    with _architecture(folder, weights, seed, CRITIC_BYTES_PER_PARAMETER, where, ranks) as (whole, weights):
        module = ValueModule(whole.base_model, hidden_size=whole.config.hidden_size)
    _place(module.train(), where, ranks, placement, is_empty=weights is not None)
    if weights is not None:
        targets = {f"{whole.base_model_prefix}.{name}": each for name, each in module.model.named_parameters()}
        _copy_into(targets, whole.config.model_type, weights, others=weights)
    with torch.no_grad():
        for parameter in module.value_head.parameters():
            parameter.zero_()
    return module


@contextlib.contextmanager
def _architecture(
    folder: Path, weights: Weights | None, seed: int, bytes_per_parameter: int, where: torch.device, ranks: Ranks
) -> Iterator[tuple[Any, Weights | None]]:
    """Yield the config's model, and the weights to copy into it: these, else the folder's. None: the seed has drawn them.

    Inside, parameters are created without memory if there are weights to copy. Raises LocalError, also for too little memory.
    """
    config = read_model_config(folder)
    here = ranks.count if where.type == "cpu" else 1
    require_memory(folder, config, bytes_per_parameter=bytes_per_parameter * here // ranks.count, device=where)
    if weights is None and any(folder.glob("*.safetensors")):
        weights = folder_weights(folder)
    torch.manual_seed(seed)
    auto: Any = AutoModelForCausalLM
    with config_at_fault(folder), _nothing_drawn() if weights is not None else contextlib.nullcontext():
        model = auto.from_config(
            config, dtype=torch.float32, attn_implementation=packed_attention.NAME, trust_remote_code=False
        )
        yield model, weights


def _place(
    module: PolicyModule | ValueModule, where: torch.device, ranks: Ranks, placement: Placement, *, is_empty: bool
) -> None:
    """Move a module to its device and shard it. `is_empty`: its parameters have no memory yet, and get no values here."""
    if not is_empty:
        module.to(where)
    arrange(module, placement, ranks)
    if is_empty:
        _materialise(module, where)


def copy_rows(model: Any, weights: Weights) -> None:
    """Overwrite every parameter, on each rank its rows. Raises LocalError, before writing anything, if the weights do not fit."""
    targets = {base_name(name): tensor for name, tensor in model.named_parameters() if not is_adapter(name)}
    _copy_into(targets, model.config.model_type, weights, others=map(base_name, model.state_dict()))


def _copy_into(
    targets: Mapping[str, torch.Tensor], model_type: str, weights: Weights, *, others: Iterable[str]
) -> None:
    shapes = {name: tuple(target.shape) for name, target in targets.items()}
    names = hub_names(model_type)
    fault = names.misfit(shapes, weights, others=others)
    if fault is not None:
        raise LocalError(f"these weights are not this model's: {fault}")
    with torch.no_grad():
        for name, target in targets.items():
            rows, first = local_rows(target)
            rows.copy_(names.rows(name, shapes[name], weights, first=first, count=len(rows)))


@contextlib.contextmanager
def _nothing_drawn() -> Iterator[None]:
    """Create parameters without memory. Buffers, such as the rotary frequencies, are real and keep their values."""
    register = torch.nn.Module.register_parameter

    def on_meta(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        # A parameter that is already there may be another module's: a new one would untie a tied head.
        if parameter is not None and not parameter.is_meta:
            parameter = torch.nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    torch.nn.Module.register_parameter = on_meta  # type: ignore[assignment,method-assign]
    try:
        with no_init_weights():
            yield
    finally:
        torch.nn.Module.register_parameter = register  # type: ignore[method-assign]


def _materialise(policy: PolicyModule | ValueModule, device: torch.device) -> None:
    """Allocate this rank's shards, and restore the buffers, because `to_empty` empties them too, without an error."""
    buffers = {name: buffer.clone() for name, buffer in policy.named_buffers()}
    policy.to_empty(device=device)
    policy.model.tie_weights()  # to_empty makes one tensor for each name
    for name, buffer in policy.named_buffers():
        buffer.copy_(buffers[name])
