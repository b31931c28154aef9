"""Clip-Cov and KL-Cov (arXiv 2505.22617): restrain the few tokens whose advantage and logprob vary together most.

    cov_t      (A_t - mean(A)) (log pi_t - mean(log pi))        over the trainable tokens of the optimizer step
    clip_cov   -min(rho A, clip(rho) A), and 0 for the chosen tokens: max(1, clip_cov_ratio n) of n at random, of those that
               PPO's bounds do not clip and with clip_cov_lb < cov < clip_cov_ub
    kl_cov     -rho A, and ppo_kl_coef |log rho| more for the chosen tokens: those with the largest cov, max(1, kl_cov_ratio n)

Formulas and defaults are verl's (verl/trainer/ppo/core_algos.py at 018f23b5). There each micro-batch has means and a choice of
its own; here they are the whole optimizer step's, so no split of a batch changes the result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random

import numpy as np
import numpy.typing as npt
import torch

from prime_node.algo.losses.base import (
    LossInputs,
    LossOutputs,
    clipped_surrogate,
    log_prox_ratio,
    needs,
    share_of_tokens,
)
from prime_protocol.errors import LocalError


@needs("selected")
def clip_cov(
    inputs: LossInputs,
    *,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    clip_cov_ratio: float = 2e-4,
    clip_cov_lb: float = 1.0,
    clip_cov_ub: float = 5.0,
) -> LossOutputs:
    """Compute the loss. The settings of covariances determine `inputs.selected`, through `choose_clip_cov`."""
    assert inputs.selected is not None, "the loss asked for them"
    plain = clipped_surrogate(log_prox_ratio(inputs), inputs.advantages, eps_low=eps_low, eps_high=eps_high)
    metrics = {**plain.metrics, "selected_share": share_of_tokens(inputs.selected)}
    return LossOutputs(torch.where(inputs.selected, 0.0, plain.loss), metrics)


@needs("selected")
def kl_cov(inputs: LossInputs, *, kl_cov_ratio: float = 2e-4, ppo_kl_coef: float = 1.0) -> LossOutputs:
    """Compute the loss. `kl_cov_ratio` determines `inputs.selected`, through `choose_kl_cov`."""
    assert inputs.selected is not None, "the loss asked for them"
    log_rho = log_prox_ratio(inputs)
    ratio = log_rho.exp()
    held = torch.where(inputs.selected, ppo_kl_coef * log_rho.abs(), 0.0)
    metrics = {"ratio_mean": ratio, "selected_share": share_of_tokens(inputs.selected)}
    return LossOutputs(held - ratio * inputs.advantages, metrics)


def choose_clip_cov(
    advantages: Sequence[float],
    logprobs: Sequence[float],
    log_ratios: Sequence[float],
    random: Random,
    *,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    clip_cov_ratio: float = 2e-4,
    clip_cov_lb: float = 1.0,
    clip_cov_ub: float = 5.0,
) -> set[int]:
    """Return the places of the tokens that get no loss. `log_ratios` are log rho. Raises LocalError."""
    wanted = _count(len(advantages), clip_cov_ratio, "clip_cov_ratio")
    lowest = math.log1p(-eps_low) if eps_low < 1.0 else -math.inf
    cov_N, advantages_N, log_rho_N = _covariances(advantages, logprobs), np.asarray(advantages), np.asarray(log_ratios)
    is_clipped_N = (advantages_N > 0.0) & (log_rho_N > math.log1p(eps_high))
    is_clipped_N |= (advantages_N < 0.0) & (log_rho_N < lowest)
    candidates = np.flatnonzero((clip_cov_lb < cov_N) & (cov_N < clip_cov_ub) & ~is_clipped_N)
    drawn = random.sample(range(len(candidates)), min(wanted, len(candidates)))
    return set(candidates[drawn].tolist())


def choose_kl_cov(
    advantages: Sequence[float],
    logprobs: Sequence[float],
    log_ratios: Sequence[float],
    random: Random,
    *,
    kl_cov_ratio: float = 2e-4,
    ppo_kl_coef: float = 1.0,
) -> set[int]:
    """Return the places of the tokens that are held near the proximal policy. Raises LocalError."""
    cov_N = _covariances(advantages, logprobs)
    wanted = min(len(cov_N), _count(len(cov_N), kl_cov_ratio, "kl_cov_ratio"))
    if not wanted:
        return set()
    least = np.partition(cov_N, -wanted)[-wanted]
    above = np.flatnonzero(cov_N > least).tolist()
    return {*above, *np.flatnonzero(cov_N == least)[: wanted - len(above)].tolist()}  # of equal ones the first


def _count(num_tokens: int, ratio: float, name: str) -> int:
    if ratio <= 0.0:
        raise LocalError(f"{name} = {ratio}: expected a share above 0")
    return max(1, int(ratio * num_tokens))


def _covariances(advantages: Sequence[float], logprobs: Sequence[float]) -> npt.NDArray[np.float64]:
    if not len(advantages):
        return np.zeros(0)
    mean, center = math.fsum(advantages) / len(advantages), math.fsum(logprobs) / len(logprobs)
    return (np.asarray(advantages, np.float64) - mean) * (np.asarray(logprobs, np.float64) - center)
