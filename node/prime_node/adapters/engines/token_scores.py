"""Scores from which tokens are chosen, and completions that are scored policy by policy over one cache.

Letters: B completions, P different prompts, N positions, T tokens of a completion, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from prime_node.adapters.engines.hidden_rows import bf16_bits
from prime_node.adapters.engines.torch_noise import add_gumbel_noise
from prime_node.adapters.engines.torch_nucleus import torch_slack_of
from prime_node.adapters.models.causal_model import CausalModel, Rows
from prime_node.ports.engine import ScoreRequest
from prime_protocol.assignment import Sampling
from prime_protocol.verify import COOLER, FLATTER, LOOSE, SHARPER, Prefill
from prime_protocol.weights import Weights

LOGITS_BLOCK = 2**24
"""Elements of logits that are in memory at a time: 64 MiB of float32."""
LOOSE_SCORES = 32
"""Noisy scores that `looser` counts. The noise alone puts further ones some 4 nats behind the largest."""


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Scores of all tokens at N positions."""

    scaled_NV: Tensor
    """Logits at the sampling temperature."""
    noisy_NV: Tensor
    """The same with the seeds' noise: the largest one among the allowed tokens is chosen."""
    slack_NV: Tensor | None = None
    """Slack as torch_slack_of returns it: tokens below 0 are not allowed. None: all are."""

    def choice(self) -> Tensor:
        """Return the chosen token at each position."""
        if self.slack_NV is None:
            return self.noisy_NV.argmax(dim=1)
        return self.noisy_NV.masked_fill(self.slack_NV < 0, float("-inf")).argmax(dim=1)

    def logprobs(self, tokens_N: Tensor) -> Tensor:
        """Return the tokens' logprobs [N] at the sampling temperature, over the whole vocabulary."""
        return _chosen(self.scaled_NV, tokens_N) - self.scaled_NV.logsumexp(dim=1)

    def spreads(self, tokens_N: Tensor, logprobs_N: Tensor) -> Tensor:
        """Return Prefill.spread_T [N] of tokens with these logprobs [N]."""
        shift_N = logprobs_N - _chosen(self.scaled_NV, tokens_N)
        squares_N = (self.scaled_NV + shift_N[:, None]).exp_().square_().sum(dim=1)
        return (1 - 2 * logprobs_N.exp() + squares_N).clamp_(min=0).sqrt()

    def margins(self, tokens_N: Tensor) -> Tensor:
        """Return the margins [N] of chosen tokens, as SPEC.md, section 9, defines them."""
        chosen_N = _chosen(self.noisy_NV, tokens_N)
        if self.slack_NV is None:
            return self.noisy_NV.amax(dim=1) - chosen_N
        better_N = torch.minimum(self.noisy_NV - chosen_N[:, None], self.slack_NV).amax(dim=1)
        return torch.maximum(better_N, -_chosen(self.slack_NV, tokens_N)).clamp_(min=0)

    def cooler(self, tokens_N: Tensor) -> Tensor:
        """Return Prefill.cooler_T [N] of the tokens. Not defined with filters."""
        colder_NV = torch.add(self.noisy_NV, self.scaled_NV, alpha=1 / COOLER - 1)
        return self.margins(tokens_N) - (colder_NV.amax(dim=1) - _chosen(colder_NV, tokens_N))

    def looser(self, tokens_N: Tensor) -> Tensor:
        """Return Prefill.looser_T [N] of the tokens. Not defined with filters."""
        largest_NK = self.noisy_NV.topk(min(LOOSE_SCORES, self.noisy_NV.shape[1]), dim=1).values
        behind_NK, behind_N = largest_NK - largest_NK[:, :1], _chosen(self.noisy_NV, tokens_N) - largest_NK[:, 0]
        small_N, large_N = (behind_N / scale - (behind_NK / scale).logsumexp(dim=1) for scale in LOOSE)
        return large_N - small_N

    def expectation(self) -> tuple[Tensor, Tensor]:
        """Return mean and variance [N] of the chosen token's logprob over the allowed tokens."""
        logprobs_NV = self.scaled_NV - self.scaled_NV.logsumexp(dim=1, keepdim=True)
        chances_NV = self.scaled_NV
        if self.slack_NV is not None:
            chances_NV = chances_NV.masked_fill(self.slack_NV < 0, float("-inf"))
        chances_NV = chances_NV.softmax(dim=1)
        mean_N = (chances_NV * logprobs_NV).sum(dim=1)
        return mean_N, (chances_NV * (logprobs_NV - mean_N[:, None]).square()).sum(dim=1)

    def tempered(self, tokens_N: Tensor, ratio: float) -> Tensor:
        """Return the nats by which these tokens are likelier [N] at `ratio` times the temperature. Not defined with filters."""
        logprobs_NV = self.scaled_NV - self.scaled_NV.logsumexp(dim=1, keepdim=True)
        other_NV = logprobs_NV / ratio
        return _chosen(other_NV - logprobs_NV, tokens_N) - other_NV.logsumexp(dim=1)

    def outside(self, tokens_N: Tensor) -> Tensor:
        """Return the distance [N] of the tokens from the allowed set: their margins if no seed was assigned."""
        if self.slack_NV is None:
            return torch.zeros_like(self.scaled_NV[:, 0])
        return (-_chosen(self.slack_NV, tokens_N)).clamp_(min=0)

    def stop_margins(self, tokens_N: Tensor, stop_token_ids: Sequence[int]) -> Tensor:
        """Return a stop token's margin; for other tokens, by how much a stop token would have been the better choice."""
        sampled = [token for token in stop_token_ids if token < self.scaled_NV.shape[1]]  # a run may name any
        if not sampled:
            return torch.zeros_like(self.scaled_NV[:, 0])
        stops_S = torch.tensor(sampled, device=tokens_N.device)
        better_NS = self.noisy_NV[:, stops_S] - _chosen(self.noisy_NV, tokens_N)[:, None]
        if self.slack_NV is not None:
            better_NS = torch.minimum(better_NS, self.slack_NV[:, stops_S])
        is_stop_N = torch.isin(tokens_N, stops_S)
        return torch.where(is_stop_N, self.margins(tokens_N), better_NS.amax(dim=1).clamp_(min=0))


def _chosen(values_NV: Tensor, tokens_N: Tensor) -> Tensor:
    return values_NV.gather(1, tokens_N[:, None])[:, 0]


class Judged(NamedTuple):
    """Results of a forward pass for T tokens, in the CPU's memory. See prime_protocol.verify.Prefill."""

    logprobs_T: Tensor
    margins_T: Tensor
    stop_margins_T: Tensor
    spread_T: Tensor
    hidden_TD: Tensor | None
    expected_T: Tensor | None = None
    variance_T: Tensor | None = None
    sharper_T: Tensor | None = None
    flatter_T: Tensor | None = None
    cooler_T: Tensor | None = None
    looser_T: Tensor | None = None

    def split(self, lengths: list[int]) -> list[Judged]:
        """Split into results of these lengths."""
        columns = [[None] * len(lengths) if tensor is None else torch.split(tensor, lengths) for tensor in self]
        return [Judged(*parts) for parts in zip(*columns, strict=True)]


class OutputHead(Protocol):
    """The part of a model that computes logits."""

    vocab_size: int

    def logits(self, hidden_NH: Tensor) -> Tensor:
        """Return the logits [N, V] of hidden states, as float32."""


def judge_tokens(
    model: OutputHead,
    hidden_TD: Tensor,
    tokens_T: Tensor,
    seeds: Sequence[int | None],
    positions: Sequence[int],
    sampling: Sampling,
    *,
    keep_hidden: bool,
) -> Judged:
    """Judge tokens chosen from these hidden states. Logits are computed LOGITS_BLOCK elements at a time."""
    parts: list[dict[str, Tensor]] = []
    for start in range(0, len(seeds), block := max(1, LOGITS_BLOCK // model.vocab_size)):
        part = slice(start, start + block)
        scores = score_tokens(model.logits(hidden_TD[part]), seeds[part], positions[part], sampling)
        chosen, is_filtered = tokens_T[part], scores.slack_NV is not None
        logprobs_N = scores.logprobs(chosen)
        found = {"logprobs_T": logprobs_N, "spread_T": scores.spreads(chosen, logprobs_N)}
        if seeds[0] is None:
            outside_N = scores.outside(chosen)
            found |= {"margins_T": outside_N, "stop_margins_T": torch.zeros_like(outside_N)}
            found["expected_T"], found["variance_T"] = scores.expectation()
            if not is_filtered:
                found["sharper_T"], found["flatter_T"] = (scores.tempered(chosen, one) for one in (SHARPER, FLATTER))
        else:
            found["margins_T"] = scores.margins(chosen)
            found["stop_margins_T"] = scores.stop_margins(chosen, sampling.stop_token_ids)
            if not is_filtered and sampling.temperature > 0:
                found |= {"cooler_T": scores.cooler(chosen), "looser_T": scores.looser(chosen)}
        parts.append({name: number.cpu() for name, number in found.items()})
    hidden = hidden_TD.to(torch.bfloat16, copy=True).cpu() if keep_hidden else None
    return Judged(hidden_TD=hidden, **{name: torch.cat([one[name] for one in parts]) for name in parts[0]})


def prefill_of(parts: Iterable[Judged]) -> Prefill:
    """Concatenate the parts in order."""
    columns = [[tensor for tensor in column if tensor is not None] for column in zip(*parts, strict=True)]
    if not columns:
        return Prefill(np.empty(0, np.float32), np.empty(0, np.float32))
    whole = {name: torch.cat(column) for name, column in zip(Judged._fields, columns, strict=True) if column}
    arrays: dict[str, Any] = {
        name: bf16_bits(one) if name == "hidden_TD" else one.numpy() for name, one in whole.items()
    }
    return Prefill(**arrays)


def score_tokens(
    logits_NV: Tensor, seeds: Sequence[int | None], positions: Sequence[int], sampling: Sampling
) -> TokenScores:
    """Compute the scores, without noise if the seeds are None: either all or none of them are."""
    if sampling.temperature == 0.0:
        return TokenScores(logits_NV, logits_NV)
    scaled_NV = logits_NV / sampling.temperature
    noisy_NV, known = scaled_NV, [seed for seed in seeds if seed is not None]
    if known:
        noisy_NV = scaled_NV.clone()
        add_gumbel_noise(noisy_NV, range(len(known)), known, positions)
    return TokenScores(
        scaled_NV, noisy_NV, None if sampling.filters is None else torch_slack_of(scaled_NV, *sampling.filters)
    )


def reference_scores(
    model: CausalModel, weights: Weights, completions: Iterable[tuple[tuple[int, ...], tuple[int, ...]]]
) -> tuple[Tensor, Tensor]:
    """Return logprobs and spreads [T] of completions' tokens by a plain forward pass at temperature 1, on the CPU.

    Each completion is given as prompt and tokens.
    """
    completions = list(completions)
    parts = []
    logits = model.reference_logits(weights, [prompt + tokens for prompt, tokens in completions])
    for logits_NV, (_, tokens) in zip(logits, completions, strict=True):
        scaled_NV = logits_NV[-len(tokens) :]
        scores = TokenScores(scaled_NV, scaled_NV)
        tokens_N = torch.tensor(tokens, device=scaled_NV.device)
        logprobs_N = scores.logprobs(tokens_N)
        parts.append((logprobs_N.cpu(), scores.spreads(tokens_N, logprobs_N).cpu()))
    logprobs, spreads = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(spreads)


@dataclass
class Mixture:
    """Completions with the same cuts, scored span by span over one cache that holds the keys and values of every policy."""

    requests: Sequence[ScoreRequest]
    rows: Rows | None = None
    position: int = 0
    """Number of tokens scored so far."""

    def score(self, model: CausalModel, num_tokens: int, sampling: Sampling) -> list[Judged]:
        """Score each completion's next span of `num_tokens` tokens with the policy that `model` now holds."""
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
        else:  # the policy that chooses the next token forwards the last one before the cut
            hidden_BTH = model.extend(self.rows, tokens_BT[:, first - 1 : end - 1])
        self.position = end
        found = []
        for place, request in enumerate(self.requests):
            seeds, positions, tokens_T = [request.seed] * num_tokens, range(first, end), tokens_BT[place, first:end]
            hidden_TH = hidden_BTH[place]
            found.append(
                judge_tokens(model, hidden_TH, tokens_T, seeds, positions, sampling, keep_hidden=request.hidden)
            )
        return found
