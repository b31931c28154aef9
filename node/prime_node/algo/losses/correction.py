"""Importance weight of the rollout correction, at a configurable level. Shared by tis.py and mis.py.

token       w = pi_prox / mu                          of each token
sequence    w = exp(sum of log(pi_prox / mu))         of the whole sequence
geometric   w = exp(mean of log(pi_prox / mu))        of the whole sequence, per token
"""

from __future__ import annotations

from enum import StrEnum

from torch import Tensor

from prime_node.algo.losses.base import LOG_RATIO_MAX, LossInputs, log_prox_weight, sequence_mean, sequence_sum
from prime_protocol.errors import LocalError


class CorrectionLevel(StrEnum):
    """Scope of one importance weight."""

    TOKEN = "token"
    """One weight for each token: little variance, some bias."""
    SEQUENCE = "sequence"
    """One product for all tokens of a sequence: unbiased, large variance."""
    GEOMETRIC = "geometric"
    """One geometric mean for all tokens of a sequence."""


def behavior_weight(inputs: LossInputs, level: str) -> Tensor:
    """Return [N] w, without a gradient. Raises LocalError for an unknown level."""
    log_weight = log_prox_weight(inputs)
    if level == CorrectionLevel.TOKEN:
        return log_weight.exp()
    if level == CorrectionLevel.SEQUENCE:
        return sequence_sum(log_weight, inputs).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX).exp()
    if level == CorrectionLevel.GEOMETRIC:
        return sequence_mean(log_weight, inputs).exp()
    raise LocalError(f"loss level {level!r}: expected one of {', '.join(CorrectionLevel)}")
