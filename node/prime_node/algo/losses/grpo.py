"""GRPO (arXiv 2402.03300) as in NeMo-RL: clipped against the weights at the start of the step.

    loss = -min(rho * A, clip(rho) * A)        rho = pi / pi_prox

The sampler's logprobs are unused: if rollouts come from an older policy or another engine, the gradient is biased.
`grpo_is` corrects that; this loss is the uncorrected baseline.
"""

from __future__ import annotations

from prime_node.algo.losses.base import LossInputs, LossOutputs, clipped_surrogate, log_prox_ratio


def grpo(inputs: LossInputs, *, eps_low: float = 0.2, eps_high: float = 0.2) -> LossOutputs:
    """Compute the loss. `eps_low`, `eps_high`: how far rho may be below and above 1."""
    return clipped_surrogate(log_prox_ratio(inputs), inputs.advantages, eps_low=eps_low, eps_high=eps_high)
