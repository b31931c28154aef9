"""What the policy and the critic share: the passes of a rank's share, and values of its samples. All are collectives.

Letters: N predictions of a pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from prime_node.adapters.training.packed_attention import Layout, SequenceLayout, TreeLayout
from prime_node.adapters.training.ranks import Ranks
from prime_node.adapters.training.sharding import DTYPES, Placement, units
from prime_node.algo.packing import PackedSequences, pack_sequences
from prime_node.algo.shares import Packed, Pass, RankShare
from prime_node.ports.train_samples import TrainSample

_NOTHING = TrainSample((0,), (0,), (0.0,), 0.0)
"""Sample that a rank computes and discards while others have more passes."""


@dataclass(frozen=True, slots=True)
class Passes:
    """One module's way through a share."""

    module: torch.nn.Module
    device: torch.device
    ranks: Ranks
    placement: Placement
    on_pass: Callable[[int, int], None] = lambda done, total: None
    """Function that gets how many of a share's passes are done, and their number."""

    def of(self, share: RankShare) -> Iterator[Pass]:
        """Yield the same number of passes on every rank, as each is a collective.

        Reduce gradients after the last, or after each.
        """
        passes = share.passes
        if share.num_passes > len(passes):
            empty = Pass(pack_sequences([_NOTHING], micro_batch_tokens=1)[0], (), ())
            passes = (*passes, *(empty,) * (share.num_passes - len(passes)))
        for number, one in enumerate(passes):
            is_last = number == len(passes) - 1
            for unit in units(self.module):
                unit.set_requires_gradient_sync(is_last or self.placement.reduce_each_pass, recurse=False)
                unit.set_is_last_backward(is_last)
            self.on_pass(number, len(passes))
            yield one
        self.on_pass(len(passes), len(passes))

    def places(self, packed: Packed) -> dict[str, Any]:
        """Return the arguments that say which places a forward pass reads: [S] distinct ones, and [N] the row of each."""
        sources_S, row_of_N = np.unique(packed.sources_N, return_inverse=True)
        return {
            "token_ids_1T": self._on_device(packed.token_ids)[None],
            "positions_1T": self._on_device(packed.positions)[None],
            "sources_S": self._on_device(sources_S),
            "row_N": self._on_device(row_of_N),
            "layout": self._layout(packed),
        }

    def targets(self, packed: Packed) -> Tensor:
        """Return [N] the predicted tokens."""
        return self._on_device(packed.targets_N)

    def values(
        self, share: RankShare, num_samples: int, compute: Callable[[Packed], tuple[Tensor, ...]]
    ) -> list[tuple[npt.NDArray[Any], ...]]:
        """Return [N, ...] values of each pass, without a gradient, by the samples of the whole batch, on every rank."""
        found: dict[int, tuple[npt.NDArray[Any], ...]] = {}
        with torch.no_grad():
            for one in self.of(share):
                values = [each.cpu().numpy() for each in compute(one.packed)]
                start = 0
                for place, sample in zip(one.places, one.samples, strict=False):
                    end = start + len(sample.completion_token_ids)
                    found[place] = tuple(each[start:end] for each in values)
                    start = end
        for unit in units(self.module):  # without a backward pass, FSDP leaves its outermost unit whole
            unit.reshard()
        everywhere = {place: values for part in self.ranks.gather(found) for place, values in part.items()}
        return [everywhere[place] for place in range(num_samples)]

    def clipped_norm(self, norm_max: float) -> float:
        """Clip the gradients to a global norm, and return the norm before."""
        norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), norm_max)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def _layout(self, packed: Packed) -> Layout:
        if isinstance(packed, PackedSequences):
            return SequenceLayout.of(packed.lengths, device=self.device)
        return TreeLayout.of(packed, device=self.device, dtype=DTYPES[self.placement.compute_dtype])

    def _on_device(self, array: npt.NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array).to(self.device)
