"""KV cache of a batch: a transformers cache of a fixed size, whose rows can be repeated, dropped and reordered.

transformers' own dynamic cache copies everything at every token. Here each layer writes new tokens into a buffer made once,
and returns views of the part in use; only a new selection of rows is a copy.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin


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
    """Cache with one BatchLayer for each layer of the model, and room for `columns` tokens of every sequence."""

    def __init__(self, num_layers: int, *, columns: int) -> None:
        self._own = [BatchLayer(columns) for _ in range(num_layers)]
        super().__init__(layers=list(self._own))

    def select(self, rows_B: torch.Tensor) -> None:
        """Keep exactly these rows in every layer, in this order."""
        for layer in self._own:
            layer.select(rows_B)
