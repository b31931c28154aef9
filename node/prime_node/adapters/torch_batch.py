"""Between samples and a loss: what every torch backend does alike.

Letters: N completion tokens of the samples, one sample's after another's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from prime_node.algo.losses import LossInputs
from prime_node.ports.train_backend import TrainSample


def batch_counts(samples: Sequence[TrainSample]) -> tuple[int, int]:
    """Trainable tokens, and sequences that have any. A sharded backend adds both up over its ranks."""
    trained = [sample.num_trained for sample in samples]
    return sum(trained), sum(count > 0 for count in trained)


def loss_inputs(logprobs_N: Tensor, samples: Sequence[TrainSample]) -> LossInputs:
    """The trainer's logprobs of these samples' completions, and beside them all that the samples bring."""
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
        """NaN where a sample has none: whoever uses it all the same fails loudly."""
        return column(values_of, empty=math.nan) if any(map(values_of, samples)) else None

    advantages = torch.tensor([sample.advantage for sample in samples], device=device)
    return LossInputs(
        trainer_logprobs=logprobs_N,
        inference_logprobs=column(lambda sample: sample.inference_logprobs, empty=0.0),
        advantages=advantages.repeat_interleave(torch.tensor(lengths, device=device)),
        loss_mask=column(lambda sample: sample.loss_mask, empty=True).bool(),
        teacher_logprobs=column_if_any(lambda sample: sample.teacher_logprobs),
        prox_logprobs=column_if_any(lambda sample: sample.prox_logprobs),
        lengths=tuple(lengths),
        modes=tuple(sample.mode for sample in samples),
    )


class Tallies:
    """Metrics of several micro-batches: [2] each, the sum over tokens and their number."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        """A sharded backend adds them up over its ranks, which may lack a name that others have."""

    def add(self, metrics: Mapping[str, Tensor]) -> None:
        for name, tally in metrics.items():
            self.sums[name] = self.sums[name] + tally if name in self.sums else tally

    def means(self) -> dict[str, float]:
        return {name: total / max(count, 1.0) for name, (total, count) in self._listed().items()}

    def _listed(self) -> dict[str, list[float]]:
        return {name: tally.tolist() for name, tally in self.sums.items()}
