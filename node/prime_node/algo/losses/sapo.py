"""SAPO (arXiv 2511.20347): a smooth gate in place of the clip, narrower where the advantage is negative.

    loss = -(4 / tau) sigmoid(tau (r - 1)) A        r = pi / mu, tau = tau_pos where A > 0, else tau_neg

At r = 1 value and gradient are 2 / tau A and those of -r A. Equal to verl's `sapo` (verl/trainer/ppo/core_algos.py at 018f23b5).
"""

from __future__ import annotations

import torch

from prime_node.algo.losses.base import LossInputs, LossOutputs, log_ratio


def sapo(inputs: LossInputs, *, tau_pos: float = 1.0, tau_neg: float = 1.05) -> LossOutputs:
    """Compute the loss. `tau_pos`, `tau_neg`: steepness of the gate by the advantage's sign."""
    ratio = log_ratio(inputs).exp()
    tau = torch.where(inputs.advantages > 0.0, tau_pos, tau_neg)
    gate = torch.sigmoid(tau * (ratio - 1.0)) * (4.0 / tau)
    return LossOutputs(-gate * inputs.advantages, {"ratio_mean": ratio})
