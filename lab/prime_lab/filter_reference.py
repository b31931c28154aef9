"""The engines' token filters and compared choices in numpy, as SPEC.md defines them. Slow; the golden vectors are made with it.

Engines have their own tensor implementations (torch_nucleus.py, token_scores.py). Tests compare them with this one.

Filters top-k, top-p and min-p: which tokens may be chosen, and by what margin a token is in or out.

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

Seeded choices compared with those at a lower temperature, and with those by larger errors of the scores.

`margin` counts what a choice is off the seed's, and nothing where both agree. Two more statistics ask what would explain the
choice better, and count for a worker where the explanation would have led elsewhere:

    cooler   the margin less that at COOLER times the temperature T: m(z / T + g) - m(z / (COOLER T) + g), m of the same token
    looser   log(q / r), q and r its chances under softmax((z / T + g) / s) at the larger and the smaller scale s of LOOSE

z are the validator's logits and g the assigned noise. If errors of the scores make an honest worker choose by r, looser has
E[exp(looser)] = 1, whatever the policy is. Real errors differ, so both are calibrated (calibration.py).

Both are defined above temperature 0 and without filters.

Letters: N positions, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from prime_protocol.assignment import Sampling
from prime_protocol.verify import COOLER, LOOSE, OUTSIDE_MIN

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


def cooler_of(
    scaled_NV: npt.NDArray[np.floating], noise_NV: npt.NDArray[np.floating], tokens_N: npt.NDArray[np.integer]
) -> Scores:
    """Return `cooler` [N] of chosen tokens, for logits at the sampling temperature."""
    scaled, noise = scaled_NV.astype(np.float64), noise_NV.astype(np.float64)
    return _margins(scaled + noise, tokens_N) - _margins(scaled / COOLER + noise, tokens_N)


def looser_of(scores_NV: npt.NDArray[np.floating], tokens_N: npt.NDArray[np.integer]) -> Scores:
    """Return `looser` [N] of chosen tokens, for noisy scores."""
    small, large = (_log_chances(scores_NV.astype(np.float64) / scale, tokens_N) for scale in LOOSE)
    return large - small


def _margins(scores_NV: Scores, tokens_N: npt.NDArray[np.integer]) -> Scores:
    found: Scores = scores_NV.max(axis=1) - np.take_along_axis(scores_NV, tokens_N[:, None], axis=1)[:, 0]
    return found


def _log_chances(scores_NV: Scores, tokens_N: npt.NDArray[np.integer]) -> Scores:
    chosen = np.take_along_axis(scores_NV, tokens_N[:, None], axis=1)[:, 0]
    found: Scores = chosen - np.logaddexp.reduce(scores_NV, axis=1)
    return found
