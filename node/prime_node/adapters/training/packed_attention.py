"""Attention over packed tokens, registered with transformers under the name "packed".

The model sees one flat sequence [1, T]: its linear layers run over all tokens at once, and only attention separates the
sequences. A Layout, passed through the model's keyword arguments, defines which tokens see each other: tree_attention.py
(shared prefixes computed once) or sequence_attention.py (sequences one after another).

Trap (measured): without a mask function of that name transformers makes no mask, and the layout alone decides. An
`attention_mask` of ones or a cache would silently join the sequences (logprobs off by up to 0.89).
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface

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
