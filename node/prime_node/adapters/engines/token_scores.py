"""What tokens are chosen by, and completions that are scored policy by policy over one cache.

Letters: B completions, P different prompts, N positions, T tokens of a completion, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from prime_node.adapters.engines.torch_noise import gumbel_noise
from prime_node.adapters.models.causal_model import CausalModel, Rows
from prime_node.ports.engine import ScoreRequest
from prime_protocol.assignment import Sampling


@dataclass(frozen=True, slots=True)
class TokenScores:
    """What a token is chosen by, at N positions."""

    scaled_NV: Tensor
    """Logits at the sampling temperature."""
    noisy_NV: Tensor
    """The same with the seeds' noise: the largest is the token."""

    def logprobs(self, tokens_N: Tensor) -> Tensor:
        return self.scaled_NV.gather(1, tokens_N[:, None])[:, 0] - self.scaled_NV.logsumexp(dim=1)

    def margins(self, tokens_N: Tensor) -> Tensor:
        return self.noisy_NV.amax(dim=1) - self.noisy_NV.gather(1, tokens_N[:, None])[:, 0]


def score_tokens(logits_NV: Tensor, seeds: Sequence[int], positions: Sequence[int], sampling: Sampling) -> TokenScores:
    if sampling.temperature == 0.0:
        return TokenScores(logits_NV, logits_NV)
    scaled_NV = logits_NV / sampling.temperature
    return TokenScores(scaled_NV, scaled_NV + gumbel_noise(seeds, positions, logits_NV.shape[1], logits_NV.device))


@dataclass
class Mixture:
    """Completions with the same cuts, scored span by span over one cache that every policy leaves its keys and values in."""

    requests: Sequence[ScoreRequest]
    rows: Rows | None = None
    position: int = 0
    """Tokens scored so far."""

    def score(self, model: CausalModel, num_tokens: int, sampling: Sampling) -> list[tuple[Tensor, Tensor]]:
        """Logprobs and margins [num_tokens] of each completion's next span, by the policy that `model` holds now."""
        total = len(self.requests[0].completion_token_ids)
        device, first, end = model.device, self.position, self.position + num_tokens
        tokens_BT = torch.tensor([request.completion_token_ids for request in self.requests], device=device)
        if self.rows is None:
            prompts = list(dict.fromkeys(request.prompt_token_ids for request in self.requests))
            of_B = torch.tensor([prompts.index(request.prompt_token_ids) for request in self.requests], device=device)
            self.rows, hidden_PH = model.begin(prompts, spare=total)
            self.rows.select(of_B)
            hidden_BTH = hidden_PH[of_B][:, None]
            if num_tokens > 1:
                hidden_BTH = torch.cat([hidden_BTH, model.extend(self.rows, tokens_BT[:, : end - 1])], dim=1)
        else:  # the last token before the cut is forwarded by the policy that chooses the next one
            hidden_BTH = model.extend(self.rows, tokens_BT[:, first - 1 : end - 1])
        self.position = end
        found = []
        for place, request in enumerate(self.requests):
            positions = range(first, end)
            scores = score_tokens(
                model.logits(hidden_BTH[place]), [request.seed] * num_tokens, list(positions), sampling
            )
            chosen_T = tokens_BT[place, first:end]
            found.append((scores.logprobs(chosen_T), scores.margins(chosen_T)))
        return found
