"""Steps between samples and a loss that every torch backend shares.

Letters: N completion tokens of the samples, one sample's after another's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from prime_node.adapters.training.ranks import ALONE, Ranks
from prime_node.algo.losses import LossInputs
from prime_node.algo.losses.base import LOG_RATIO_MAX
from prime_node.ports.train_backend import TrainingMode, TrainSample


def loss_inputs(logprobs_N: Tensor, samples: Sequence[TrainSample], entropy_N: Tensor | None = None) -> LossInputs:
    """Return the trainer's logprobs of these samples' completions, together with all that the samples provide."""
    device = logprobs_N.device
    lengths = [len(sample.completion_token_ids) for sample in samples]

    def column(values_of: Callable[[TrainSample], Sequence[float]], *, empty: float) -> Tensor:
        values = [
            value
            for sample, length in zip(samples, lengths, strict=True)
            for value in values_of(sample) or [empty] * length
        ]
        return torch.tensor(values, device=device)

    def column_if_any(values_of: Callable[[TrainSample], Sequence[float]]) -> Tensor | None:
        """Return a column if any sample has one, with NaN for the others, so that using those values fails visibly."""
        return column(values_of, empty=math.nan) if any(map(values_of, samples)) else None

    advantages = torch.tensor([sample.advantage for sample in samples], device=device)
    return LossInputs(
        trainer_logprobs=logprobs_N,
        inference_logprobs=column(lambda sample: sample.inference_logprobs, empty=0.0),
        advantages=advantages.repeat_interleave(torch.tensor(lengths, device=device)),
        loss_mask=column(lambda sample: sample.loss_mask, empty=True).bool(),
        teacher_logprobs=column_if_any(lambda sample: sample.teacher_logprobs),
        prox_logprobs=column_if_any(lambda sample: sample.prox_logprobs),
        reference_logprobs=column_if_any(lambda sample: sample.reference_logprobs),
        entropy=entropy_N,
        prompt_weights=column(lambda sample: [sample.prompt_weight] * len(sample.completion_token_ids), empty=1.0)
        if any(sample.prompt_weight != 1.0 for sample in samples)
        else None,
        lengths=tuple(lengths),
        modes=tuple(sample.mode for sample in samples),
    )


def credible(inputs: LossInputs, samples: Sequence[TrainSample]) -> tuple[LossInputs, dict[str, Tensor]]:
    """Mask tokens whose claimed logprob is further from the trainer's than `TrainSample.claim_nats_max`.

    A false claim makes an importance ratio of any size, so one rollout could decide the step. Masked tokens still count
    in the batch's mean. Also return `claims_masked_share`, the [2] tally of masked tokens among the claimed ones.
    """
    bounds = [sample.claim_nats_max for sample in samples]
    if all(map(math.isinf, bounds)):
        return inputs, {}
    device = inputs.loss_mask.device
    lengths = torch.tensor(inputs.lengths, device=device)
    bound_N = torch.tensor(bounds, device=device).repeat_interleave(lengths)
    # A NaN of the trainer's own is not masked: the step must fail, as without this rule.
    is_false_N = (inputs.trainer_logprobs.detach() - inputs.inference_logprobs).abs() > bound_N
    claimed_N = inputs.loss_mask & bound_N.isfinite()
    share = _tally(is_false_N.to(torch.float32), claimed_N)
    return replace(inputs, loss_mask=inputs.loss_mask & ~is_false_N), {"claims_masked_share": share}


def drift(inputs: LossInputs, entropies_N: Tensor) -> dict[str, Tensor]:
    """Return [2] tallies of the difference between trainer and inference, over the trained tokens and over all sampled ones.

    `kl` is the estimator r - 1 - log r of KL(inference || trainer) (http://joschu.net/blog/kl-approx.html), never negative.
    """
    lengths = torch.tensor(inputs.lengths, device=entropies_N.device)
    sampled = torch.tensor([mode is not TrainingMode.SFT for mode in inputs.modes], device=entropies_N.device)
    sampled_N = sampled.repeat_interleave(lengths)
    distance_N = (inputs.trainer_logprobs.detach() - inputs.inference_logprobs).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)
    ratio_N = distance_N.exp()
    kl_N = ratio_N - 1.0 - distance_N
    trained_N = inputs.loss_mask
    return {
        "entropy_mean": _tally(entropies_N, trained_N),
        "kl_mean": _tally(kl_N, trained_N & sampled_N),
        "kl_unmasked_mean": _tally(kl_N, sampled_N),
        "ratio_unmasked_mean": _tally(ratio_N, sampled_N),
    }


def _tally(values: Tensor, mask: Tensor) -> Tensor:
    return torch.stack([torch.where(mask, values, 0.0).sum(), mask.sum().to(values.dtype)])


class Tallies:
    """Metrics of several micro-batches: [2] each, the sum over tokens and their number."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        """Sums of this rank, which may lack a name that other ranks have."""

    def add(self, metrics: Mapping[str, Tensor]) -> None:
        """Add the tallies of one micro-batch."""
        for name, tally in metrics.items():
            self.sums[name] = self.sums[name] + tally if name in self.sums else tally

    def means(self, ranks: Ranks = ALONE) -> dict[str, float]:
        """Return the means over all ranks; a collective."""
        totals: dict[str, list[float]] = {}
        for rank in ranks.gather(self._listed()):
            for name, tally in rank.items():
                totals[name] = [have + more for have, more in zip(totals.get(name, (0.0, 0.0)), tally, strict=True)]
        return {name: total / max(count, 1.0) for name, (total, count) in totals.items()}

    def _listed(self) -> dict[str, list[float]]:
        return {name: tally.tolist() for name, tally in self.sums.items()}
