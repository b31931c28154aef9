"""Generalized advantage estimation (arXiv 1506.02438) with a critic's values of the states before each token.

    delta_t = r_t + gamma V_(t+1) - V_t        V after the last token is 0
    A_t     = delta_t + gamma lam A_(t+1)      then whitened over the tokens of the optimizer step
    return  = A_t + V_t                        before the whitening: what the critic learns

Tokens of the environment between two turns are skipped. Equal to verl's `gae` (verl/trainer/ppo/core_algos.py at 018f23b5).
"""

from __future__ import annotations

import numpy as np

from prime_node.algo.advantages.token_base import TokenInputs, discounted_sums, token_needs


@token_needs("values")
def gae(inputs: TokenInputs, *, gamma: float = 1.0, lam: float = 1.0) -> list[list[float]]:
    """Return the advantage of each token. `gamma` is the discount for each token, `lam` the weight of later ones."""
    found = []
    for index, values in enumerate(inputs.values):
        now_T = np.array(values, np.float64)
        deltas_T = np.array(inputs.rewards(index)) + gamma * np.append(now_T[1:], 0.0)[: len(now_T)] - now_T
        found.append(discounted_sums(deltas_T.tolist(), gamma * lam))
    return found
