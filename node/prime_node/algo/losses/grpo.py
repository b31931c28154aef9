"""GRPO (arXiv 2402.03300) as NeMo-RL runs it: clipped against the weights that the step began with.

    loss = -min(rho * A, clip(rho) * A)        rho = pi / pi_prox

The sampler's logprobs play no part: where rollouts come from an older policy or another engine, the gradient is biased.
`grpo_is` corrects that; this one shows what happens without.
"""

from __future__ import annotations

from prime_node.algo.losses.base import LossInputs, LossOutputs, clipped_surrogate, log_prox_ratio


def grpo(inputs: LossInputs, *, eps_low: float = 0.2, eps_high: float = 0.2) -> LossOutputs:
    """`eps_low`, `eps_high`: how far rho may lie below and above 1."""
    return clipped_surrogate(log_prox_ratio(inputs), inputs.advantages, eps_low=eps_low, eps_high=eps_high)
