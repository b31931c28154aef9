"""Logits processor for vLLM's V1 model runner that chooses each token by the assigned seed.

Requests use greedy sampling (temperature 0; vLLM then ignores its own top-p and top-k). This processor masks the tokens that
top-p, top-k and min-p exclude, then adds the noise of prime_protocol.noise; the largest noisy logit is the token. vLLM takes
the reported logprob before any processor runs, so it contains neither. The request's temperature has already been applied: see
vllm_worker_extension.

vLLM creates one processor for each engine, early. So the engine also learns here which process it must not outlive.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from prime_node.adapters.engines.torch_noise import add_gumbel_noise
from prime_node.adapters.engines.torch_nucleus import TokenFilters, mask_excluded
from prime_node.adapters.engines.vllm_worker_extension import (
    FILTERS_ARGUMENT,
    OFFSET_ARGUMENT,
    SEED_ARGUMENT,
    die_with_owner,
    require_greedy,
)


@dataclass(frozen=True, slots=True)
class _Seeded:
    """One request of the batch."""

    seed: int
    filters: TokenFilters | None
    offset: int
    output_token_ids: list[int]
    """vLLM's own growing list of the tokens sampled so far."""


class SeededSampler(LogitsProcessor):
    """Logits processor for vLLM's V1 runner. Its state maps rows of the batch to seeds."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, _Seeded] = {}
        die_with_owner(vllm_config)

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Check that a request with a seed uses temperature 0. Raises ValueError if not."""
        require_greedy(sampling_params)

    def is_argmax_invariant(self) -> bool:
        """Return False: the noise changes the largest logit."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow requests that enter, leave or move within the batch."""
        if batch_update is None:
            return
        for row in batch_update.removed:
            self._rows.pop(row, None)
        for row, params, _prompt, output_token_ids in batch_update.added:
            self._rows.pop(row, None)
            asked = params.extra_args or {}
            if SEED_ARGUMENT in asked:
                filters = tuple(asked[FILTERS_ARGUMENT]) if FILTERS_ARGUMENT in asked else None
                offset = asked.get(OFFSET_ARGUMENT, 0)
                self._rows[row] = _Seeded(asked[SEED_ARGUMENT], filters, offset, output_token_ids)
        for source, target, direction in batch_update.moved:
            moved, replaced = self._rows.pop(source, None), self._rows.pop(target, None)
            if moved is not None:
                self._rows[target] = moved
            if replaced is not None and direction is MoveDirectionality.SWAP:
                self._rows[source] = replaced

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Mask excluded tokens and add the seeds' noise, in place."""
        if not self._rows:
            return logits
        rows = sorted(self._rows)
        seeds = [self._rows[row].seed for row in rows]
        positions = [self._rows[row].offset + len(self._rows[row].output_token_ids) for row in rows]
        mask_excluded(logits, {row: its.filters for row, its in self._rows.items() if its.filters is not None})
        add_gumbel_noise(logits, rows, seeds, positions)
        return logits
