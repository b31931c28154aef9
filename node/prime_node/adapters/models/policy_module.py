"""A causal language model as the trainer uses it: packed tokens in, log-probabilities of the predicted tokens out.

One module wraps the whole forward pass, so that FSDP2's root is what is called. Inside it the head's weight is whole, and
logits of the whole vocabulary never leave it (chosen_logprobs.py).

Letters: H hidden size, N predictions, S distinct places that they are read from, T tokens of a pass, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from prime_node.adapters.training.chosen_logprobs import chosen_logprobs, of_logits, squared_sums, top_of_rows
from prime_node.adapters.training.packed_attention import Layout

_HEAD_SETTINGS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "logits_scale")
"""Settings of architectures that change the head's output before the softmax (Gemma 2, Cohere, Granite); these compute it
themselves."""


class PolicyModule(torch.nn.Module):
    """Wrapper of `model`, one of transformers', whose parameters keep their own names under the prefix "model."."""

    def __init__(self, model: Any, *, temperature: float) -> None:
        super().__init__()
        self.model = model
        self._temperature = temperature
        settings = {name: getattr(model.config, name, None) for name in _HEAD_SETTINGS}
        self._plain_head = not any(value not in (None, 1, 1.0) for value in settings.values())

    def forward(
        self,
        token_ids_1T: Tensor,
        positions_1T: Tensor,
        sources_S: Tensor,
        row_N: Tensor,
        target_N: Tensor,
        *,
        layout: Layout,
        entropy_gradient: bool = False,
        squares: bool = False,
        top: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """Return float32 [N] logprobs in nats, and [S] entropies in nats, without a gradient unless it is asked for.

        Prediction n is read at place sources_S[row_N[n]]. With `squares`, [S] sums of squared probabilities instead of entropies.
        With `top`, return instead [S, K] the ids of so many likeliest tokens, -1 for all, and their logprobs, without a gradient.
        """
        inputs = {"input_ids": token_ids_1T, "position_ids": positions_1T, "use_cache": False, "layout": layout}
        if not self._plain_head:
            logits_SV = self.model(**inputs, logits_to_keep=sources_S).logits[0]
            logits_SV = logits_SV.float() / self._temperature
            if top:
                found_SK = logits_SV.log_softmax(-1).topk(
                    logits_SV.shape[1] if top < 0 else min(top, logits_SV.shape[1]), -1
                )
                return found_SK.indices, found_SK.values
            found = of_logits(logits_SV, row_N, target_N, entropy_gradient=entropy_gradient)
            return (found[0], logits_SV.softmax(-1).square().sum(-1)) if squares else found
        hidden_SH = self.model.base_model(**inputs).last_hidden_state[0, sources_S]
        head = self.model.get_output_embeddings()
        weights = (head.weight, getattr(head, "bias", None))
        temperature = self._temperature
        if top:
            return top_of_rows(hidden_SH, *weights, top, temperature=temperature)
        found = chosen_logprobs(
            hidden_SH, *weights, row_N, target_N, temperature=temperature, entropy_gradient=entropy_gradient
        )
        return (found[0], squared_sums(hidden_SH, *weights, temperature=temperature)) if squares else found


class ValueModule(torch.nn.Module):
    """A critic: `model`, a decoder without its head for tokens, with a linear head for the value of the state before each token.

    The head begins at zero, so that the first values are 0 whatever the seed and the number of ranks.
    """

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
