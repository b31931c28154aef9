"""Attention over algo.packing's rows: a layout of packed_attention.py.

The trunk attends to itself; every row attends to the trunk, whose keys and values exist once, and to its own ancestors.

Letters: D size of a head, H heads, P trunk tokens, R rows, W tokens of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from prime_node.algo.packing import PackedRows


@dataclass(frozen=True, slots=True)
class TreeLayout:
    """Attention data of a PackedRows; the same for all layers."""

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
