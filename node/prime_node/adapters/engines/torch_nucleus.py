"""The tokens that top-k, top-p and min-p allow, on any device and without sorting the whole vocabulary.

Letters: N positions, V vocabulary, K the largest logits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from prime_protocol.verify import OUTSIDE_MIN

LARGEST = 256
"""Number of largest logits examined first; if they do not reach far enough, the number grows eightfold."""
HAIR = 1e-6
TokenFilters = tuple[float, int, float]
"""Values of top-p, top-k and min-p."""


def mask_excluded(logits_NV: Tensor, filters_of: Mapping[int, TokenFilters]) -> None:
    """Set the logits of excluded tokens to minus infinity, in place, in the rows that have filters."""
    for filters in set(filters_of.values()):
        alike = torch.tensor([row for row, its in filters_of.items() if its == filters], device=logits_NV.device)
        scores = logits_NV[alike]
        logits_NV[alike] = scores.masked_fill_(torch_slack_of(scores, *filters) < 0, float("-inf"))


def torch_slack_of(scaled_NV: Tensor, top_p: float, top_k: int, min_p: float) -> Tensor:
    """Return the slack [N, V] of all tokens, in nats (SPEC.md, section 9): below 0 for those that are not allowed."""
    slack_NV = torch.full_like(scaled_NV, float("inf"))
    if min_p > 0:
        slack_NV = torch.minimum(slack_NV, scaled_NV - scaled_NV.amax(dim=1, keepdim=True) - math.log(min_p))
    if 0 < top_k < scaled_NV.shape[1]:
        largest_NK = scaled_NV.topk(top_k + 1, dim=1).values
        kth_N1, next_N1 = largest_NK[:, -2:-1], largest_NK[:, -1:]
        slack_NV = torch.minimum(slack_NV, scaled_NV - torch.where(scaled_NV >= kth_N1, next_N1, kth_N1))
    return torch.minimum(slack_NV, _top_p_slack(scaled_NV, top_p)) if top_p < 1 else slack_NV


def _top_p_slack(scaled_NV: Tensor, top_p: float) -> Tensor:
    vocab_size = scaled_NV.shape[1]
    total_N1 = scaled_NV.double().logsumexp(dim=1, keepdim=True)  # the tail is the remainder of 1
    count = min(LARGEST, vocab_size)
    while True:
        values_NK, places_NK = scaled_NV.topk(count, dim=1)
        slack_NK = _slack_of_largest(values_NK, total_N1, top_p)
        if count == vocab_size or bool((slack_NK[:, -1] <= OUTSIDE_MIN).all()):
            break
        count = min(8 * count, vocab_size)
    return torch.full_like(scaled_NV, OUTSIDE_MIN).scatter_(1, places_NK, slack_NK)


def _slack_of_largest(values_NK: Tensor, total_N1: Tensor, top_p: float) -> Tensor:
    mass_NK = (values_NK - total_N1).exp()
    before_NK = mass_NK.cumsum(dim=1) - mass_NK
    is_new_NK = torch.ones_like(values_NK, dtype=torch.bool)
    is_new_NK[:, 1:] = values_NK[:, 1:] != values_NK[:, :-1]
    columns_K = torch.arange(values_NK.shape[1], device=values_NK.device)
    first_NK = torch.where(is_new_NK, columns_K, 0).cummax(dim=1).values  # equal logits get the same rank
    above_NK = before_NK.gather(1, first_NK).clamp_(min=0)
    slack_NK = math.log(top_p / (1 - top_p)) - (above_NK / (1 - above_NK).clamp_(min=1e-12)).log()
    is_in_NK = above_NK < top_p
    slack_NK = torch.where(is_in_NK, slack_NK.clamp(min=0), slack_NK.clamp(max=-HAIR))
    return slack_NK.clamp_(min=OUTSIDE_MIN).to(values_NK.dtype)
