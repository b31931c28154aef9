"""A model's tensors by the names in its files on the hub, which are also the names that policies are published under.

They are the model's own names except in mixtures of experts. There the hub has a matrix for each expert and projection, and
transformers stores all experts of a layer as one parameter:

    mlp.experts.7.gate_proj.weight [I, H], mlp.experts.7.up_proj.weight [I, H]  =  mlp.experts.gate_up_proj[7]  [E, 2 I, H]
    mlp.experts.7.down_proj.weight [H, I]                                       =  mlp.experts.down_proj[7]     [E, H, I]

transformers itself defines these names for every architecture (conversion_mapping). vLLM loads the hub's names, and an exported
policy has the hub's format.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter, WeightRenaming

from prime_node.adapters.engines.torch_weights import to_torch
from prime_protocol.weights import Weights

Shape = tuple[int, ...]
_EXPERT = "*"


@dataclass(frozen=True, slots=True)
class HubTensor:
    """A tensor of the hub within a parameter: rows `start` to `end` of one expert, or, without an expert, all of it."""

    name: str
    shape: Shape
    expert: int | None = None
    start: int = 0
    end: int = 0


@cache
def hub_names(model_type: str) -> HubNames:
    """Return the names of one architecture.

    Example: hub_names("qwen3_moe").
    """
    return HubNames(model_type)


class HubNames:
    """Names of an architecture; create it with `hub_names`."""

    def __init__(self, model_type: str) -> None:
        find: Any = conversion_mapping.get_checkpoint_conversion_mapping
        mapping = find(model_type) or []
        self._fused = {one.target_patterns[0]: tuple(one.source_patterns) for one in mapping if _is_of_experts(one)}
        """Suffix of a parameter's name -> suffixes of the names of its parts, "*" for the expert."""
        self._renamed = [
            (one.target_patterns[0], one.source_patterns[0])
            for one in mapping
            if self._fused and type(one) is WeightRenaming
        ]

    def pieces(self, name: str, shape: Shape) -> list[HubTensor]:
        """Return the hub's tensors of a parameter, in the parameter's order."""
        for target, sources in self._fused.items():
            if name.endswith(target) and len(shape) == 3:
                rows = shape[1] // len(sources)
                return [
                    HubTensor(self._on_hub(name, target, source, expert), (rows, shape[2]), expert, start, start + rows)
                    for expert in range(shape[0])
                    for start, source in zip(range(0, shape[1], rows), sources, strict=True)
                ]
        return [HubTensor(self._renaming(name), shape)]

    def of_model(self, name: str, shape: Shape, weights: Weights) -> list[HubTensor]:
        """Return the same, but a parameter that these weights have under the model's own name keeps that name."""
        return [HubTensor(name, shape)] if name in weights else self.pieces(name, shape)

    def misfit(self, shapes: Mapping[str, Shape], weights: Weights, *, others: Iterable[str] = ()) -> str | None:
        """Return what is wrong with these weights for these shapes; `others` are further names that may be present."""
        expected = {
            piece.name: piece.shape for name, shape in shapes.items() for piece in self.of_model(name, shape, weights)
        }
        missing = expected.keys() - weights.keys()
        unknown = weights.keys() - expected.keys() - set(others)
        reshaped = {name for name, shape in expected.items() if name in weights and weights[name].shape != shape}
        for fault, names in (("lack", missing), ("have an unknown", unknown), ("have another shape of", reshaped)):
            if names:
                return f"the weights {fault} {', '.join(sorted(names)[:3])}"
        return None

    def rows(self, name: str, shape: Shape, weights: Weights, *, first: int = 0, count: int | None = None) -> Tensor:
        """Return `count` rows of a parameter from `first` on, reading only the tensors that they need."""
        end = shape[0] if count is None else first + count
        pieces = self.of_model(name, shape, weights)
        if pieces[0].expert is None:
            return to_torch(weights[pieces[0].name])[first:end]
        mine = [piece for piece in pieces if piece.expert is not None and first <= piece.expert < end]
        if not mine:
            return torch.empty(0, *shape[1:])
        parts = [to_torch(weights[piece.name]) for piece in mine]
        return torch.cat(parts).reshape(end - first, *shape[1:])

    def published(self, name: str, rows: Tensor, *, shape: Shape, first: int) -> Iterator[tuple[str, Tensor]]:
        """Yield the hub's tensors of a parameter, of which this rank has the rows from `first` on; none for experts it lacks."""
        for piece in self.pieces(name, shape):
            if piece.expert is None:
                yield piece.name, rows
            elif first <= piece.expert < first + len(rows):
                yield piece.name, rows[piece.expert - first, piece.start : piece.end]
            else:
                yield piece.name, rows.new_empty((0, *piece.shape[1:]))

    def _on_hub(self, name: str, target: str, source: str, expert: int) -> str:
        return self._renaming(name[: -len(target)] + source.replace(_EXPERT, str(expert)))

    def _renaming(self, name: str) -> str:
        for ours, theirs in self._renamed:
            name = name.replace(ours, theirs)
        return name


def _is_of_experts(one: Any) -> bool:
    """Return whether the conversion stacks experts and optionally concatenates projections. No other conversion is supported."""
    steps: list[Any] = one.operations if type(one) is WeightConverter else []
    kinds = [(type(step), getattr(step, "dim", None)) for step in steps]
    return kinds in ([(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)])
