"""Steps between samples and a loss that every torch backend shares.

Letters: N completion tokens of the samples, one sample's after another's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from prime_node.adapters.training.ranks import ALONE, Ranks
from prime_node.algo.losses import LossInputs
from prime_node.algo.losses.base import LOG_RATIO_MAX
from prime_node.ports.train_samples import TrainingMode, TrainSample


def top_token_ids(samples: Sequence[TrainSample]) -> npt.NDArray[np.int64] | None:
    """Return [N, K] the teacher's likeliest tokens, 0 where it has fewer; None if no sample has any."""
    width = _width(samples)
    if not width:
        return None
    parts: list[npt.NDArray[np.int64]] = [
        _padded(sample.teacher_top.token_ids_NK, width, 0)
        if sample.teacher_top is not None
        else np.zeros((len(sample.completion_token_ids), width), np.int64)
        for sample in samples
    ]
    return np.concatenate(parts)


def loss_inputs(
    logprobs_N: Tensor,
    samples: Sequence[TrainSample],
    entropy_N: Tensor | None = None,
    top_logprobs_NK: Tensor | None = None,
) -> LossInputs:
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

    def advantages_of(sample: TrainSample) -> Sequence[float]:
        return sample.advantages or [sample.advantage] * len(sample.completion_token_ids)

    return LossInputs(
        trainer_logprobs=logprobs_N,
        inference_logprobs=column(lambda sample: sample.inference_logprobs, empty=0.0),
        advantages=column(advantages_of, empty=0.0),
        loss_mask=column(lambda sample: sample.loss_mask, empty=True).bool(),
        teacher_logprobs=column_if_any(lambda sample: sample.teacher_logprobs),
        prox_logprobs=column_if_any(lambda sample: sample.prox_logprobs),
        reference_logprobs=column_if_any(lambda sample: sample.reference_logprobs),
        entropy=entropy_N,
        values=column_if_any(lambda sample: sample.values),
        top_logprobs=top_logprobs_NK,
        teacher_top_logprobs=None if top_logprobs_NK is None else _teacher_tops(samples).to(device),
        selected=column(lambda sample: sample.selected, empty=False).bool()
        if any(sample.selected for sample in samples)
        else None,
        loss_weights=column(lambda sample: [sample.loss_weight] * len(sample.completion_token_ids), empty=1.0)
        if any(sample.loss_weight != 1.0 for sample in samples)
        else None,
        weight_means=column(lambda sample: [sample.weight_mean] * len(sample.completion_token_ids), empty=1.0)
        if any(sample.weight_mean != 1.0 for sample in samples)
        else None,
        lengths=tuple(lengths),
        modes=tuple(sample.mode for sample in samples),
    )


def value_targets(samples: Sequence[TrainSample], *, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return [N] the critic's old values, the returns, and the mask of the trained tokens."""
    lengths = [len(sample.completion_token_ids) for sample in samples]
    masks = [sample.loss_mask or (True,) * length for sample, length in zip(samples, lengths, strict=True)]
    columns = ([value for sample in samples for value in of(sample)] for of in (_old_values, _returns))
    old_N, returns_N = (torch.tensor(values, dtype=torch.float32, device=device) for values in columns)
    return old_N, returns_N, torch.tensor([value for mask in masks for value in mask], device=device)


def _old_values(sample: TrainSample) -> Sequence[float]:
    return sample.values


def _returns(sample: TrainSample) -> Sequence[float]:
    return sample.returns


def _teacher_tops(samples: Sequence[TrainSample]) -> Tensor:
    width = _width(samples)
    parts = [
        _padded(sample.teacher_top.logprobs_NK, width, -math.inf)
        if sample.teacher_top is not None
        else np.full((len(sample.completion_token_ids), width), -math.inf, np.float32)
        for sample in samples
    ]
    return torch.from_numpy(np.concatenate(parts))


def _width(samples: Sequence[TrainSample]) -> int:
    return max((each.teacher_top.token_ids_NK.shape[1] for each in samples if each.teacher_top is not None), default=0)


def _padded(values_NK: npt.NDArray[Any], width: int, filling: float) -> npt.NDArray[Any]:
    return np.pad(values_NK, ((0, 0), (0, width - values_NK.shape[1])), constant_values=filling)


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
