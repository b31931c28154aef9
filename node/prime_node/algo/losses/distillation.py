"""Losses without rewards: of reference tokens, of a teacher's logprobs, and of a teacher's distribution (`Distillation`).

With q the teacher's probabilities of its K likeliest tokens and p the student's of the same tokens, at each sampled place:

    forward    sum of q (log q - log p)                                 KL(teacher || student)
    reverse    sum of p (log p - log q)                                 KL(student || teacher)
    mixed      mixed_kl_weight forward + (1 - mixed_kl_weight) reverse
    include_tail         adds (1 - Q) (log(1 - Q) - log(1 - P)) to forward: all other tokens as one, of mass 1 - Q and 1 - P
    zero_outside_topk    adds sum over all other tokens of p (log p + 100) to reverse: there the teacher's log q is -100

Over the whole vocabulary both are exact. No ratio corrects for an older sampler: the divergence at a place does not depend on
how its token was sampled. Equal to NeMo-RL's DistillationLossFn (nemo_rl/algorithms/loss/loss_functions.py; kl_type,
mixed_kl_weight, zero_outside_topk) and to verl's `forward_kl_topk` and `forward_kl_topk_tail` (verl/trainer/distillation at
01dcf9f0).

Letters: K likeliest tokens of the teacher, N completion tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from prime_node.algo.losses.base import LossInputs, LossOutputs, log_ratio
from prime_node.ports.train_backend import LossNeed
from prime_node.ports.train_samples import DistillationKind
from prime_protocol.errors import LocalError

LOG_INFINITESIMAL = -100.0
"""Logprob of the teacher outside of its K tokens, with zero_outside_topk."""
_TAIL_MASS_MIN = 1e-6
_LOG_MIN = -1e9


def sft(inputs: LossInputs) -> LossOutputs:
    """Compute the cross-entropy of the reference tokens, -log pi. Advantages and samplers are unused."""
    return LossOutputs(loss=-inputs.trainer_logprobs, metrics={"cross_entropy": -inputs.trainer_logprobs})


def opd(inputs: LossInputs, *, delta: float = 8.0) -> LossOutputs:
    """Compute on-policy distillation: -sg(min(r, delta)) sg(log pi_teacher - log pi) log pi, with r = pi / mu.

    A teacher's logprobs of the student's own tokens replace rewards. The expected gradient is that of the reverse KL divergence
    from teacher to student. The weight corrects for a sampler that is some steps old; it is at most `delta`. Raises LocalError
    without teacher logprobs.
    """
    if inputs.teacher_logprobs is None:
        raise LocalError("loss opd: the samples have no teacher logprobs; set trainer.teacher.url")
    weight = log_ratio(inputs).exp().detach().clamp(max=delta)
    advantages = inputs.teacher_logprobs - inputs.trainer_logprobs.detach()
    return LossOutputs(
        loss=-weight * advantages * inputs.trainer_logprobs,
        metrics={"teacher_kl": -advantages, "ratio_mean": weight},
    )


@dataclass(frozen=True, slots=True)
class Distillation:
    """The loss of a teacher's distribution, with its settings. Raises LocalError for settings that do not belong together."""

    kl_type: DistillationKind = DistillationKind.FORWARD
    mixed_kl_weight: float = 0.5
    include_tail: bool = False
    zero_outside_topk: bool = False

    def __post_init__(self) -> None:
        if self.zero_outside_topk and self.kl_type is DistillationKind.FORWARD:
            raise LocalError(
                "distillation: zero_outside_topk changes reverse and mixed only; use include_tail for forward"
            )
        if self.include_tail and self.kl_type is not DistillationKind.FORWARD:
            raise LocalError(
                "distillation: include_tail changes forward only; use zero_outside_topk for reverse and mixed"
            )

    @property
    def needs(self) -> frozenset[LossNeed]:
        """Return the optional inputs that the loss uses."""
        return frozenset({LossNeed.ENTROPY} if self.zero_outside_topk else ())

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """Compute the loss. Raises LocalError without the teacher's distribution."""
        if inputs.top_logprobs is None or inputs.teacher_top_logprobs is None:
            raise LocalError("distillation: the samples lack the teacher's distribution; set trainer.distillation.topk")
        known_NK = inputs.teacher_top_logprobs.isfinite()
        teacher_NK = torch.where(known_NK, inputs.teacher_top_logprobs, 0.0)
        student_NK = torch.where(known_NK, inputs.top_logprobs.clamp(min=_LOG_MIN), 0.0)
        q_NK = torch.where(known_NK, teacher_NK.exp(), 0.0)
        p_NK = torch.where(known_NK, student_NK.exp(), 0.0)
        teacher_mass_N, student_mass_N = q_NK.sum(-1), p_NK.sum(-1)
        forward_N = (q_NK * (teacher_NK - student_NK)).sum(-1)
        reverse_N = (p_NK * (student_NK - teacher_NK)).sum(-1)
        if self.include_tail:
            forward_N = forward_N + _tail(teacher_mass_N, student_mass_N)
        if self.zero_outside_topk:
            assert inputs.entropy is not None, "the loss asked for it"
            inside_N = (p_NK * student_NK).sum(-1)
            reverse_N = reverse_N - inputs.entropy - inside_N - LOG_INFINITESIMAL * (1.0 - student_mass_N)
        weight = {DistillationKind.FORWARD: 1.0, DistillationKind.REVERSE: 0.0}.get(self.kl_type, self.mixed_kl_weight)
        loss = (
            forward_N
            if weight == 1.0
            else reverse_N
            if weight == 0.0
            else weight * forward_N + (1 - weight) * reverse_N
        )
        metrics = {"teacher_kl": loss, "student_mass": student_mass_N, "teacher_mass": teacher_mass_N}
        return LossOutputs(loss, metrics)


def _tail(teacher_mass_N: Tensor, student_mass_N: Tensor) -> Tensor:
    teacher = (1.0 - teacher_mass_N).clamp(0.0, 1.0)
    student = (1.0 - student_mass_N).clamp(_TAIL_MASS_MIN, 1.0)
    return teacher * (teacher.clamp(min=torch.finfo(teacher.dtype).tiny).log() - student.log())
