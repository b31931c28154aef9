"""What the policy says of completion tokens, without training: logprobs, likeliest tokens, norms of the score.

Methods that take a `share` are collectives: every rank calls them with its own share, and gets the values of the whole batch.

Letters: N predictions, K likeliest tokens, S distinct places that they are read from.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from prime_node.adapters.models.lora import MergedWeights
from prime_node.adapters.training.kept_policies import KeptPolicies
from prime_node.adapters.training.passes import Passes
from prime_node.adapters.training.torch_batch import top_token_ids
from prime_node.algo.shares import Packed, Pass, RankShare
from prime_node.ports.train_backend import KeptPolicy
from prime_node.ports.train_samples import TopLogprobs


@dataclass(frozen=True, slots=True)
class PolicyScores:
    """The current policy's values, or those of a policy that is kept."""

    policy: torch.nn.Module
    passes: Passes
    kept: KeptPolicies
    merged: MergedWeights
    before_change: Callable[[], None]
    """Function to call before the weights change in place: a checkpoint that is being written may share them."""

    def logprobs(self, share: RankShare, num_samples: int, of: KeptPolicy | None = None) -> list[list[float]]:
        """Return the logprobs (nats) of every completion token of the whole batch. Raises LocalError."""
        with self._in_place(of):
            found = self.passes.values(share, num_samples, lambda packed: self.forward(packed)[:1])
        return [logprobs.tolist() for (logprobs,) in found]

    def top_logprobs(
        self, share: RankShare, num_samples: int, count: int, of: KeptPolicy | None = None
    ) -> list[TopLogprobs]:
        """Return the likeliest tokens at every completion token of the whole batch. Raises LocalError."""
        with self._in_place(of):
            found = self.passes.values(share, num_samples, lambda packed: self.forward(packed, top=count))
        return [TopLogprobs(*its) for its in found]

    def norms(self, share: RankShare, num_samples: int) -> list[list[float]]:
        """Return 1 - 2 pi + the sum of pi^2 over the vocabulary for every completion token of the whole batch."""

        def norms(packed: Packed) -> tuple[Tensor]:
            logprobs_N, squares_N = self.forward(packed, squares=True)
            return ((1.0 - 2.0 * logprobs_N.exp() + squares_N).clamp_(min=0.0),)

        return [found.tolist() for (found,) in self.passes.values(share, num_samples, norms)]

    def with_tops(self, one: Pass, *, entropy_gradient: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return [N] logprobs and entropies, and [N, K] logprobs of the teacher's likeliest tokens, if the samples have them."""
        top_ids_NK = top_token_ids(one.samples)
        if top_ids_NK is None:
            return *self.forward(one.packed, entropy_gradient=entropy_gradient), None
        count, width = top_ids_NK.shape
        asked = replace(
            one.packed,
            sources_N=np.concatenate([one.packed.sources_N, one.packed.sources_N.repeat(width)]),
            targets_N=np.concatenate([one.packed.targets_N, top_ids_NK.reshape(-1)]),
        )
        logprobs, entropies = self.forward(asked, entropy_gradient=entropy_gradient)
        return logprobs[:count], entropies[:count], logprobs[count:].reshape(count, width)

    def forward(
        self, packed: Packed, *, entropy_gradient: bool = False, squares: bool = False, top: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Return [N] logprobs of the predictions in nats, and their entropies; with `squares` sums of squared probabilities.

        With `top`, return instead [N, K] the ids of so many likeliest tokens, -1 for all, and their logprobs.
        """
        places = self.passes.places(packed)
        first, by_row = self.policy(
            **places,
            target_N=self.passes.targets(packed),
            entropy_gradient=entropy_gradient,
            squares=squares,
            top=top,
        )
        row_N = places["row_N"]
        return first[row_N] if top else first, by_row[row_N]

    @contextlib.contextmanager
    def _in_place(self, which: KeptPolicy | None) -> Iterator[None]:
        """Let the model compute with a kept policy's weights, if one is named."""
        if which is None:
            yield
            return
        self.before_change()
        try:
            with self.kept.in_place(which):
                self.merged.merge()
                yield
        finally:
            self.merged.merge()
