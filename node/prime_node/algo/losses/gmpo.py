"""GMPO (arXiv 2507.20673): the geometric mean of a sequence's ratios, each clipped by itself.

    loss = -A exp(mean over the sequence of c)        c = log r, bounded as PPO bounds r: above where A > 0, below where A < 0

The bounds are of log r, -eps_low and eps_high. Equal to verl's `geo_mean` (verl/trainer/ppo/core_algos.py at 018f23b5).
"""

from __future__ import annotations

import torch

from prime_node.algo.losses.base import LossInputs, LossOutputs, log_ratio, sequence_mean, share_of_tokens


def gmpo(inputs: LossInputs, *, eps_low: float = 0.4, eps_high: float = 0.4) -> LossOutputs:
    """Compute the loss. `eps_low`, `eps_high`: bounds of log r (0.4 in the paper). Its aggregation is sequence_mean."""
    log_r, advantages = log_ratio(inputs), inputs.advantages
    bounded = torch.where(advantages > 0.0, log_r.clamp(max=eps_high), log_r.clamp(min=-eps_low))
    ratio = sequence_mean(bounded, inputs).exp()
    return LossOutputs(
        loss=-ratio * advantages,
        metrics={"ratio_mean": ratio, "ratio_clipped_share": share_of_tokens(bounded != log_r)},
    )
