"""Attention over packed tokens, registered with transformers under the name "packed".

The model sees one flat sequence [1, T]: its linear layers run over all tokens at once, and only attention separates the
sequences. A Layout, passed through the model's keyword arguments, defines which tokens see each other: tree_attention.py
(shared prefixes computed once) or SequenceLayout (sequences one after another).

Trap (measured): without a mask function of that name transformers makes no mask, and the layout alone decides. An
`attention_mask` of ones or a cache would silently join the sequences (logprobs off by up to 0.89).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from prime_node.adapters.training.tree_attention import expand_heads
from prime_protocol.errors import LocalError

NAME = "packed"


class Layout(Protocol):
    """Rule for which tokens see each other in one pass; the same for all layers. Letters: D size of a head, H heads, T tokens."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, scaling: float) -> Tensor:
        """Attend from [1, H, T, D] to keys and values with their own number of heads; return [1, T, H, D]."""


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,  # [1, H, T, D]
    key: Tensor,  # [1, H of keys, T, D]
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    layout: Layout,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Return [1, T, H, D], as transformers expects it.

    Raises LocalError for a bound on attention logits (Gemma 2) and for attention sinks (gpt-oss), which no layout computes.
    """
    if softcap is not None or s_aux is not None:
        raise LocalError(
            "this model bounds its attention logits or has attention sinks, which the trainer cannot compute"
        )
    return layout.attend(query, key, value, scaling=scaling), None


AttentionInterface.register(NAME, packed_attention)


@dataclass(frozen=True, slots=True)
class SequenceLayout:
    """Layout of sequences one after another.

    On GPUs in half precision it is torch's own variable-length flash attention, elsewhere one causal call for each sequence. On
    a CPU that is 2.7 times faster than one call with a block-diagonal mask.
    """

    lengths: tuple[int, ...]
    bounds: Tensor
    """[sequences + 1] int32 on the device: the start of each, and the end of the last."""

    @classmethod
    def of(cls, lengths: Sequence[int], *, device: torch.device) -> SequenceLayout:
        """Make the layout of sequences of these lengths."""
        bounds = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
        return cls(tuple(lengths), bounds)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, scaling: float) -> Tensor:
        """Attend within each sequence; keys and values are [1, H of keys, T, D]."""
        grouped = query.shape[1] != key.shape[1]
        if query.is_cuda and query.dtype in {torch.bfloat16, torch.float16}:
            longest = max(self.lengths)
            query_THD, key_THD, value_THD = (tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value))
            out = varlen_attn(
                query_THD,
                key_THD,
                value_THD,
                self.bounds,
                self.bounds,
                longest,
                longest,
                scale=scaling,
                window_size=(-1, 0),
                enable_gqa=grouped,
            )
            assert isinstance(out, Tensor)
            return out[None]
        if grouped and query.is_cuda:  # fp32, in which torch's fast kernels take no grouped heads
            key, value = expand_heads(key, query.shape[1]), expand_heads(value, query.shape[1])
            grouped = False
        parts = zip(
            *(tensor.split_with_sizes(list(self.lengths), dim=2) for tensor in (query, key, value)), strict=True
        )
        seen = [
            scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=grouped)
            for q, k, v in parts
        ]
        return torch.cat(seen, dim=2).transpose(1, 2)
