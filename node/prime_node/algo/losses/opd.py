"""On-policy distillation: a teacher's logprobs of the student's own tokens replace rewards.

    loss = -sg(min(r, delta)) * sg(log pi_teacher - log pi) * log pi        r = pi / mu

Its expected gradient is that of the reverse KL divergence from teacher to student. The weight corrects for a sampler
that is some steps old.
"""

from __future__ import annotations

from prime_node.algo.losses.base import LossInputs, LossOutputs, log_ratio
from prime_protocol.errors import LocalError


def opd(inputs: LossInputs, *, delta: float = 8.0) -> LossOutputs:
    """Compute the loss. `delta` is the largest weight of a token. Raises LocalError without teacher logprobs."""
    if inputs.teacher_logprobs is None:
        raise LocalError("loss opd: the samples have no teacher logprobs; set trainer.teacher.url")
    weight = log_ratio(inputs).exp().detach().clamp(max=delta)
    advantages = inputs.teacher_logprobs - inputs.trainer_logprobs.detach()
    return LossOutputs(
        loss=-weight * advantages * inputs.trainer_logprobs,
        metrics={"teacher_kl": -advantages, "ratio_mean": weight},
    )
