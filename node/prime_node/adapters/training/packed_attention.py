"""Attention over packed tokens, registered with transformers under the name "packed".

The model sees one flat sequence [1, T]: its linear layers run over all tokens at once, and only attention separates the
sequences. A Layout, passed through the model's keyword arguments, defines which tokens see each other: TreeLayout
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

from prime_node.algo.packing import PackedRows
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


@dataclass(frozen=True, slots=True)
class TreeLayout:
    """Attention data of algo.packing's rows; the same for all layers.

    The trunk attends to itself; every row attends to the trunk, whose keys and values exist once, and to its own ancestors.

    Letters: D size of a head, H heads, P trunk tokens, R rows, W tokens of a row.
    """

    trunk_tokens: int
    num_rows: int
    mask_R1WK: Tensor
    """[R, 1, W, P + W] float: 0 if a token sees another, else -inf."""

    @classmethod
    def of(cls, packed: PackedRows, *, device: torch.device, dtype: torch.dtype) -> TreeLayout:
        """Make the layout of packed rows, with the mask in `dtype`."""
        end_RW = torch.from_numpy(packed.subtree_end_RW).to(device)
        num_rows, width = end_RW.shape
        place_W = torch.arange(width, device=device)
        sees_RWW = (place_W[None, :] <= place_W[:, None]) & (place_W[:, None] < end_RW[:, None, :])
        mask = torch.zeros(num_rows, 1, width, packed.trunk_tokens + width, dtype=dtype, device=device)
        mask[:, 0, :, packed.trunk_tokens :].masked_fill_(~sees_RWW, float("-inf"))
        return cls(packed.trunk_tokens, num_rows, mask)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, scaling: float) -> Tensor:
        """Attend as above; keys and values are [1, H of keys, P + R * W, D]."""
        trunk, rows = self.trunk_tokens, self.num_rows
        grouped = query.shape[1] != key.shape[1]
        if grouped and query.is_cuda:
            # With a mask only torch's slow kernel takes grouped heads, and it keeps all scores for the backward pass.
            key, value = expand_heads(key, query.shape[1]), expand_heads(value, query.shape[1])
            grouped = False
        keys = torch.cat([key[:, :, :trunk].expand(rows, -1, -1, -1), _rows(key, trunk, rows)], dim=2)
        values = torch.cat([value[:, :, :trunk].expand(rows, -1, -1, -1), _rows(value, trunk, rows)], dim=2)
        seen_RHWD = scaled_dot_product_attention(
            _rows(query, trunk, rows), keys, values, attn_mask=self.mask_R1WK, scale=scaling, enable_gqa=grouped
        )
        out = seen_RHWD.transpose(1, 2).flatten(0, 1).unsqueeze(0)  # [1, R * W, H, D]
        if trunk:
            above = scaled_dot_product_attention(
                query[:, :, :trunk],
                key[:, :, :trunk],
                value[:, :, :trunk],
                is_causal=True,
                scale=scaling,
                enable_gqa=grouped,
            )
            out = torch.cat([above.transpose(1, 2), out], dim=1)
        return out


def expand_heads(tensor: Tensor, heads: int) -> Tensor:
    """Repeat the heads of keys or values [1, H of keys, T, D] until there is one for each head of the queries."""
    return tensor.repeat_interleave(heads // tensor.shape[1], dim=1)


def _rows(tensor: Tensor, trunk: int, rows: int) -> Tensor:
    """Return the rows [R, H, W, D] of [1, H, P + R * W, D], without the trunk."""
    _, heads, _, size = tensor.shape
    return tensor[0, :, trunk:].reshape(heads, rows, -1, size).transpose(0, 1)
