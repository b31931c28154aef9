"""Filters top-k, top-p and min-p: which tokens may be chosen, and by what margin a token is in or out.

Each filter examines the whole distribution p = softmax(z / T); a token may be chosen if all filters allow it.

    min_p  p is at least min_p times the largest p
    top_k  fewer than k tokens have a larger p
    top_p  the tokens with a larger p have less than top_p of the mass together

A worker chooses the best noisy score among those tokens. A validator's own distribution differs by honest noise, so a
token at the edge may be in on one side and out on the other. Its slack is how many nats it is inside (at least 0) or
outside (below 0): how far its score, or all scores above it together, would have to move for the filter to decide
otherwise.

    min_p  s - s_max - log(min_p)                  s = z / T
    top_k  inside: s less the (k+1)-th largest; outside: s less the k-th largest
    top_p  log-odds of top_p less those of the mass above

The margin of a chosen token t is the cost of the cheapest explanation of the choice: max(0, -slack(t), max over other
tokens u of min(score(u) - score(t), slack(u))), with score = s + noise. Without filters it is the best score less the
chosen one's.

This is the reference. Engines have their own tensor implementations; a test compares the two.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from prime_protocol.assignment import Sampling

OUTSIDE_MIN = -1.0
"""Nats. Lower bound of top-p slack, so that no implementation has to sort the tail of the vocabulary."""
_HAIR = 1e-6

Scores = npt.NDArray[np.float64]


def slack_of(scaled_NV: npt.NDArray[np.floating], sampling: Sampling) -> Scores:
    """Return the slack [N, V] of all tokens, for logits at the sampling temperature; infinite without filters."""
    scaled = scaled_NV.astype(np.float64)
    slack = np.full(scaled.shape, np.inf)
    if sampling.min_p > 0:
        slack = np.minimum(slack, scaled - scaled.max(axis=1, keepdims=True) - np.log(sampling.min_p))
    if 0 < sampling.top_k < scaled.shape[1]:
        descending = -np.sort(-scaled, axis=1)
        kth, next_one = descending[:, sampling.top_k - 1, None], descending[:, sampling.top_k, None]
        slack = np.minimum(slack, scaled - np.where(scaled >= kth, next_one, kth))
    if sampling.top_p < 1:
        mass = np.exp(scaled - scaled.max(axis=1, keepdims=True))
        mass /= mass.sum(axis=1, keepdims=True)
        above = np.stack([_mass_above(row, weights) for row, weights in zip(scaled, mass, strict=True)])
        slack = np.minimum(slack, _top_p_slack(above, sampling.top_p))
    return slack


def margins_of(
    scaled_NV: npt.NDArray[np.floating],
    noise_NV: npt.NDArray[np.floating],
    tokens_N: npt.NDArray[np.integer],
    sampling: Sampling,
) -> Scores:
    """Return the margins [N] of chosen tokens: 0 for the noise's choice among the allowed ones."""
    slack, score = slack_of(scaled_NV, sampling), scaled_NV.astype(np.float64) + noise_NV
    rows = np.arange(len(tokens_N))
    better = np.minimum(score - score[rows, tokens_N, None], slack).max(axis=1)
    margins: Scores = np.maximum(np.maximum(better, -slack[rows, tokens_N]), 0.0)
    return margins


def choice_of(
    scaled_NV: npt.NDArray[np.floating], noise_NV: npt.NDArray[np.floating], sampling: Sampling
) -> npt.NDArray[np.int64]:
    """Return the tokens [N] that the noise chooses."""
    score = scaled_NV.astype(np.float64) + noise_NV
    best: npt.NDArray[np.int64] = np.where(slack_of(scaled_NV, sampling) >= 0, score, -np.inf).argmax(axis=1)
    return best


def _mass_above(scaled_V: Scores, mass_V: Scores) -> Scores:
    """Return the mass of all tokens with a larger score. Equal scores are not above each other."""
    order = np.argsort(-scaled_V, kind="stable")
    descending = scaled_V[order]
    before = np.concatenate([[0.0], np.cumsum(mass_V[order])[:-1]])
    above = np.empty_like(mass_V)
    above[order] = before[np.searchsorted(-descending, -descending)]
    return above


def _top_p_slack(above: Scores, top_p: float) -> Scores:
    with np.errstate(divide="ignore"):
        slack = np.log(top_p / (1 - top_p)) - np.log(above / np.maximum(1 - above, 1e-12))
    sided: Scores = np.where(above < top_p, np.maximum(slack, 0), np.minimum(slack, -_HAIR))
    return np.maximum(sided, OUTSIDE_MIN)
