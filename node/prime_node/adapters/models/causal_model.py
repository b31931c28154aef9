"""A causal language model of transformers and the two forward passes that inference consists of.

Synchronous, one thread. Prompts of a batch share prefixes: all share a template, and the completions of a group share their
whole prompt. So the common prefix is forwarded once, then the rest of each different prompt once; then rows of the cache are
repeated for the completions. The result is the same as without sharing; the engine's probe compares the two.

Letters: B completions, P different prompts, K columns of the cache, Q new columns, H hidden size, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.initialization import no_init_weights

from prime_node.adapters.models.hub_names import hub_names
from prime_node.adapters.models.model_config import config_at_fault, read_model_config, require_memory
from prime_protocol.weights import Weights


class BatchLayer(CacheLayerMixin):
    """Keys and values of one layer, [B, heads, columns, size] each, of which the first `length` columns are in use."""

    is_sliding = False

    def __init__(self, columns: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # it has no types
        self._columns = columns
        self._length = 0
        self._buffers: list[torch.Tensor] = []

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate the buffers."""
        self._buffers = [
            states.new_empty((*states.shape[:2], self._columns, states.shape[3]))
            for states in (key_states, value_states)
        ]
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append the keys and values of new tokens. Return views of all in use."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, end = self._length, self._length + key_states.shape[2]
        assert end <= self._columns
        for buffer, states in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, start:end] = states
        self._length = end
        self.keys, self.values = (buffer[:, :, :end] for buffer in self._buffers)
        return self.keys, self.values

    def select(self, rows_B: torch.Tensor) -> None:
        """Keep exactly these rows, in this order; a row may be repeated.

        Columns that are not in use are not copied: the system gives them no memory until they are.
        """
        for place, buffer in enumerate(self._buffers):
            kept = buffer.new_empty((len(rows_B), *buffer.shape[1:]))
            kept[:, :, : self._length] = buffer[:, :, : self._length].index_select(0, rows_B)
            self._buffers[place] = kept

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the columns that a mask covers, and its offset."""
        return self._length + query_length, 0

    def get_seq_length(self) -> int:
        """Return the number of tokens in the cache."""
        return self._length

    def get_max_length(self) -> int:
        """Return the number of tokens that fit."""
        return self._columns


class BatchCache(Cache):
    """Cache with one BatchLayer for each layer of the model, and room for `columns` tokens of every sequence.

    transformers' own dynamic cache copies everything at every token. Here each layer writes new tokens into a buffer made once,
    and returns views of the part in use; only a new selection of rows is a copy.
    """

    def __init__(self, num_layers: int, *, columns: int) -> None:
        self._own = [BatchLayer(columns) for _ in range(num_layers)]
        super().__init__(layers=list(self._own))

    def select(self, rows_B: torch.Tensor) -> None:
        """Keep exactly these rows in every layer, in this order."""
        for layer in self._own:
            layer.select(rows_B)


def layers_of(model: nn.Module, count: int) -> list[nn.Module]:
    """Return the model's `count` layers; none if no list of modules is that long, or if layers share parameters."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            names = [id(parameter) for layer in module for parameter in layer.parameters()]
            return list(module) if len(names) == len(set(names)) else []
    return []


@contextlib.contextmanager
def borrowed(layers: Sequence[nn.Module], made: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Give each layer, only while it computes, `made(parameter)` for each of its parameters."""
    own: dict[int, Tensor] = {}

    def lend(layer: nn.Module, *_: Any) -> None:
        with torch.inference_mode(False), torch.no_grad():  # a parameter takes no tensor of the inference mode
            for parameter in layer.parameters():
                own[id(parameter)] = parameter.data
                parameter.data = made(parameter)

    def give_back(layer: nn.Module, *_: Any) -> None:
        for parameter in layer.parameters():
            if id(parameter) in own:  # an error may come between two of them
                parameter.data = own.pop(id(parameter))

    hooks = [layer.register_forward_pre_hook(lend) for layer in layers]
    hooks += [layer.register_forward_hook(give_back, always_call=True) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""Arithmetic types. On a CPU without AMX bf16 is two to three times slower than fp32, and further from any other engine."""


def common_prefix(prompts: Sequence[tuple[int, ...]]) -> int:
    """Return the number of tokens that all prompts share, leaving each at least one. Example: [(1, 2, 3), (1, 2)] gives 1."""
    first, last = min(prompts), max(prompts)
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False)))
    return min(same, min(map(len, prompts)) - 1)


@dataclass
class Rows:
    """State from which the next forward pass continues. `CausalModel.extend` changes it in place."""

    cache: BatchCache
    visible_BK: Tensor
    """[B, K] bool: False for padding columns of the cache."""
    lengths_B: Tensor
    """[B] int64: tokens so far, without padding."""

    def select(self, rows_B: Tensor) -> None:
        """Keep exactly these rows, in this order; a row may occur several times."""
        self.cache.select(rows_B)
        self.visible_BK = self.visible_BK[rows_B]
        self.lengths_B = self.lengths_B[rows_B]


class CausalModel:
    """AutoModelForCausalLM with full attention, built from a folder's config.json, without weights until `load`."""

    def __init__(self, folder: Path, *, dtype: str, device: str, tensors: Mapping[str, Tensor] | None = None) -> None:
        """Build the model; with `tensors` over parameters of another module, which `load` then only compares."""
        config = read_model_config(folder)
        self.device = torch.device(device)
        self.dtype = DTYPES[dtype]
        self._shares = tensors is not None
        size = 0 if self._shares else self.dtype.itemsize
        require_memory(folder, config, bytes_per_parameter=size, device=self.device)
        auto: Any = AutoModelForCausalLM
        with config_at_fault(folder), no_init_weights():
            model = auto.from_config(config, dtype=self.dtype, trust_remote_code=False)
        model.tie_weights()  # if configured; transformers does it in the initialisation that is skipped above
        if tensors is not None:
            for name, parameter in model.named_parameters():
                parameter.data = tensors[name]
        self._model: Any = model.eval().requires_grad_(False).to(self.device)
        self._backbone: Any = self._model.base_model
        self._head: Any = self._model.get_output_embeddings()
        self._parameters: dict[str, Tensor] = dict(self._model.named_parameters())
        self._shapes = {name: tuple(tensor.shape) for name, tensor in self._parameters.items()}
        self._names = hub_names(config.model_type)
        by_place = {tensor.data_ptr(): name for name, tensor in self._parameters.items()}
        self.tied: dict[str, str] = {
            name: by_place[tensor.data_ptr()]
            for name, tensor in self._model.state_dict().items()
            if name not in self._parameters and tensor.data_ptr() in by_place
        }
        """Further names of parameters, such as that of an output head tied to the embedding: name -> parameter."""
        self.vocab_size: int = config.vocab_size
        self.num_layers: int = config.num_hidden_layers
        self.positions_max: int | None = getattr(config, "max_position_embeddings", None)
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.cache_bytes_per_token = 2 * self.num_layers * heads * head_size * self.dtype.itemsize

    def require_fit(self, weights: Weights) -> None:
        """Check that names and shapes are this model's. Raises ValueError if not."""
        fault = self._names.misfit(self._shapes, weights, others=self._model.state_dict())
        if fault is not None:
            raise ValueError(fault)

    def load(self, weights: Weights) -> None:
        """Copy into the existing parameters. Raises ValueError, before changing anything, if the weights do not fit.

        Parameters of another module hold them already; otherwise raises ValueError too.
        """
        self.require_fit(weights)
        for name, parameter in self._parameters.items():
            rows = self._names.rows(name, self._shapes[name], weights)
            if not self._shares:
                parameter.copy_(rows)
            elif not torch.equal(parameter, rows.to(self.device, self.dtype)):
                raise ValueError(f"{name} is shared and has other values than this policy")

    def begin(self, prompts: Sequence[tuple[int, ...]], *, spare: int) -> tuple[Rows, Tensor]:
        """Forward P different prompts, with room for `spare` more tokens.

        Returns their rows, and the hidden states [P, H] that choose the first token.
        """
        shared = common_prefix(prompts)
        rests = [prompt[shared:] for prompt in prompts]
        width = max(map(len, rests))
        cache = BatchCache(self.num_layers, columns=shared + width + spare)
        rows = Rows(cache, self._tensor([[]]).bool(), self._tensor([0]))
        if shared:
            self.extend(rows, self._tensor([prompts[0][:shared]]))
        rows.select(self._tensor([0] * len(prompts)))
        # Padding is on the left, so that each row's newest token is in the last column.
        padded_PQ = self._tensor([[0] * (width - len(rest)) + list(rest) for rest in rests])
        real_PQ = self._tensor([[False] * (width - len(rest)) + [True] * len(rest) for rest in rests])
        return rows, self.extend(rows, padded_PQ, real_PQ)[:, -1]

    def extend(self, rows: Rows, token_ids_BQ: Tensor, real_BQ: Tensor | None = None) -> Tensor:
        """Forward more tokens of every row; `real` is False at padding. Return the hidden states [B, Q, H]."""
        if real_BQ is None:
            real_BQ = torch.ones_like(token_ids_BQ, dtype=torch.bool)
        num_new = token_ids_BQ.shape[1]
        causal_QQ = torch.ones(num_new, num_new, dtype=torch.bool, device=self.device).tril()
        sees_BQK = torch.cat([rows.visible_BK[:, None].expand(-1, num_new, -1), causal_QQ & real_BQ[:, None, :]], dim=2)
        # Finite, so that a padding token, which sees nothing, gives a harmless value instead of NaN.
        mask_B1QK = torch.zeros(sees_BQK.shape, dtype=self.dtype, device=self.device)
        mask_B1QK = mask_B1QK.masked_fill_(~sees_BQK, torch.finfo(self.dtype).min)[:, None]
        counts_BQ = real_BQ.cumsum(1)
        hidden_BQH: Tensor = self._backbone(
            input_ids=token_ids_BQ,
            attention_mask=mask_B1QK,
            position_ids=(rows.lengths_B[:, None] + counts_BQ - 1).clamp_(min=0),
            past_key_values=rows.cache,
            use_cache=True,
        ).last_hidden_state
        rows.visible_BK = torch.cat([rows.visible_BK, real_BQ], dim=1)
        rows.lengths_B = rows.lengths_B + counts_BQ[:, -1]
        return hidden_BQH

    def logits(self, hidden_NH: Tensor) -> Tensor:
        """Return the logits, float32 [N, V]."""
        logits_NV: Tensor = self._head(hidden_NH)
        return logits_NV.float()

    def reference_logits(self, weights: Weights, sequences: Sequence[Sequence[int]]) -> Iterator[Tensor]:
        """Yield the logits [T - 1, V] for each token but the first of each sequence, directly from `weights`, in fp32.

        It is independent of `load` and of all methods above: the model's plain forward pass, without cache, sharing or padding,
        over tensors made here from `weights`, a layer at a time; shared parameters, which `load` has compared with them, need no
        second copy.
        """
        layers = [] if self._shares else layers_of(self._model, self.num_layers)
        inside = {id(parameter) for layer in layers for parameter in layer.parameters()}
        outside = {
            name: self._converted(name, weights)
            for name, parameter in self._parameters.items()
            if not self._shares and id(parameter) not in inside
        }
        name_of = {id(parameter): name for name, parameter in self._parameters.items()}
        with borrowed(layers, lambda parameter: self._converted(name_of[id(parameter)], weights)):
            for sequence in sequences:
                inputs = {"input_ids": self._tensor([sequence]), "use_cache": False}
                found = torch.func.functional_call(self._model, outside, kwargs=inputs)
                yield found.logits[0, :-1].float()

    def _converted(self, name: str, weights: Weights) -> Tensor:
        """Return a parameter's tensor, made from `weights`."""
        return self._names.rows(name, self._shapes[name], weights).to(self.device, self.dtype)

    def _tensor(self, values: Any) -> Tensor:
        return torch.tensor(values, device=self.device)
