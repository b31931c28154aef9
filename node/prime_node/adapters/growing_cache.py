"""Keys and values of a batch: a transformers cache that grows in place, and whose rows can be repeated, dropped and reordered.

transformers' own dynamic cache copies everything at every token. Here each layer owns a buffer with spare columns, writes
new tokens into it, and hands out views; only a full buffer or another choice of rows is copied.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin


class GrowingLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """Keys and values of one layer, [B, heads, columns, size], of which the first `length` columns are in use."""

    is_sliding = False

    def __init__(self, spare: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._spare = spare
        self._length = 0
        self._buffers: list[torch.Tensor] = []

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        end = self._length + key_states.shape[-2]
        if not self._buffers:
            self._buffers = [self._room_for(states) for states in (key_states, value_states)]
            self.is_initialized = True
        elif end > self._buffers[0].shape[-2]:
            self._buffers = [self._copy_of(buffer, columns=end) for buffer in self._buffers]
        for buffer, states in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, self._length : end] = states
        self._length = end
        self.keys, self.values = (buffer[:, :, :end] for buffer in self._buffers)
        return self.keys, self.values

    def select(self, rows_B: torch.Tensor, *, spare: int) -> None:
        """Keep exactly these rows, in this order; a row may be named several times."""
        self._spare = spare
        used = [buffer[:, :, : self._length].index_select(0, rows_B) for buffer in self._buffers]
        self._buffers = [self._copy_of(buffer, columns=self._length) for buffer in used]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._length + query_length, 0

    def get_seq_length(self) -> int:
        return self._length

    def get_max_length(self) -> int:
        return -1

    def _room_for(self, states: torch.Tensor) -> torch.Tensor:
        batch, heads, columns, size = states.shape
        return states.new_empty(batch, heads, columns + self._spare, size)

    def _copy_of(self, buffer: torch.Tensor, *, columns: int) -> torch.Tensor:
        batch, heads, _, size = buffer.shape
        larger = buffer.new_empty(batch, heads, columns + self._spare, size)
        larger[:, :, : self._length] = buffer[:, :, : self._length]
        return larger


class GrowingCache(Cache):
    """One GrowingLayer for each layer of the model. `spare` columns are kept free at every allocation."""

    def __init__(self, num_layers: int, *, spare: int) -> None:
        self._own = [GrowingLayer(spare) for _ in range(num_layers)]
        super().__init__(layers=list(self._own))

    def select(self, rows_B: torch.Tensor, *, spare: int) -> None:
        for layer in self._own:
            layer.select(rows_B, spare=spare)
