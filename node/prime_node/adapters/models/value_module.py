"""A critic: the model's decoder with a linear head of one output, the value of the state before each token.

The head begins at zero, so that the first values are 0 whatever the seed and the number of ranks.

Letters: H hidden size, N predictions, S distinct places that they are read from, T tokens of a pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from prime_node.adapters.training.packed_attention import Layout


class ValueModule(torch.nn.Module):
    """Wrapper of `model`, the decoder without its head for tokens."""

    def __init__(self, model: Any, *, hidden_size: int) -> None:
        super().__init__()
        self.model = model
        self.value_head = torch.nn.Linear(hidden_size, 1, dtype=torch.float32)

    def forward(
        self, token_ids_1T: Tensor, positions_1T: Tensor, sources_S: Tensor, row_N: Tensor, *, layout: Layout
    ) -> Tensor:
        """Return float32 [N] values. Prediction n is read at place sources_S[row_N[n]]."""
        outputs = self.model(input_ids=token_ids_1T, position_ids=positions_1T, use_cache=False, layout=layout)
        values_S1 = self.value_head(outputs.last_hidden_state[0, sources_S])
        found: Tensor = values_S1[row_N, 0].float()
        return found
