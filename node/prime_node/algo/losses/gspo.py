"""GSPO (arXiv 2507.18071): one importance ratio for a whole sequence, the geometric mean of its tokens'.

    loss = -min(s * A, clip(s, 1 - eps_low, 1 + eps_high) * A)        s = exp(mean over the sequence of log(pi / mu))

The bounds are far narrower than those of token-wise ratios: a mean of many moves little.
"""

from __future__ import annotations

from prime_node.algo.losses.base import LossInputs, LossOutputs, clipped_surrogate, log_ratio, sequence_mean


def gspo(inputs: LossInputs, *, eps_low: float = 3e-4, eps_high: float = 4e-4) -> LossOutputs:
    """Compute the loss. Its aggregation is sequence_mean.

    `eps_low`, `eps_high`: how far s may be below and above 1 (the paper's section 5.1).
    """
    log_s = sequence_mean(log_ratio(inputs), inputs)
    return clipped_surrogate(log_s, inputs.advantages, eps_low=eps_low, eps_high=eps_high)
