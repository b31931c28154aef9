"""The seeded choice for vLLM's V2 model runner: one kernel, nothing read on the host, so that steps can be scheduled ahead.

As in vllm_seeded_sampler, requests use temperature 0, excluded tokens are masked, and the noise is added; vLLM takes the reported
logprob from logits without either. V2 keeps requests in slots, and passes the slot and the position in the sequence of each row
of logits as tensors on the device. So seeds and first positions are tensors by slot, and the kernel of triton_noise reads both.

The worker extension reads `asked`, because V2 does not keep the parameters of its requests.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm import SamplingParams
from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, LogitsProcessor, LogitsProcRequestState

from prime_node.adapters.engines.torch_nucleus import TokenFilters, mask_excluded
from prime_node.adapters.engines.triton_noise import UNSEEDED, add_noise_of_slots
from prime_node.adapters.engines.vllm_worker_extension import (
    FILTERS_ARGUMENT,
    OFFSET_ARGUMENT,
    PROOFS_ARGUMENT,
    SEED_ARGUMENT,
    TEMPERATURE_ARGUMENT,
    die_with_owner,
    require_greedy,
)


class SlotSampler(LogitsProcessor):
    """Logits processor for vLLM's V2 runner. Its state maps slots to seeds."""

    def __init__(self, vllm_config: Any, req_states: LogitsProcRequestState) -> None:
        slots, device = req_states.max_num_reqs, req_states.device
        self._prompt_len = req_states.prompt_len
        self._seeds = StagedWriteTensor(slots, dtype=torch.int64, device=device)
        self._firsts = StagedWriteTensor(slots, dtype=torch.int64, device=device)
        self._seeds.gpu.fill_(UNSEEDED)
        self._seeded: set[int] = set()
        self._filters: dict[int, TokenFilters] = {}
        self.asked: dict[int, tuple[str | None, int, float]] = {}
        """Slot -> (name of its completion if that commits to its hidden states, completion tokens in its prompt, temperature)."""
        die_with_owner(vllm_config)

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Check that a request with a seed uses temperature 0. Raises ValueError if not."""
        require_greedy(sampling_params)

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """Replace the slot's state. Return whether the request has a seed."""
        asked = sampling_params.extra_args or {}
        seed, offset = asked.get(SEED_ARGUMENT, UNSEEDED), asked.get(OFFSET_ARGUMENT, 0)
        self.asked[req_idx] = asked.get(PROOFS_ARGUMENT), offset, asked.get(TEMPERATURE_ARGUMENT, 1.0)
        self._seeds.stage_write_elem(req_idx, seed)
        # The row of the prompt's last token chooses the first token after it.
        self._firsts.stage_write_elem(req_idx, int(self._prompt_len.np[req_idx]) - 1 - offset)
        self._filters.pop(req_idx, None)
        if FILTERS_ARGUMENT in asked:
            self._filters[req_idx] = tuple(asked[FILTERS_ARGUMENT])
        if seed == UNSEEDED:
            self._seeded.discard(req_idx)
            return False
        self._seeded.add(req_idx)
        return True

    def apply_staged_writes(self) -> None:
        """Copy the new slots' state to the device."""
        self._seeds.apply_write()
        self._firsts.apply_write()

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        """Mask excluded tokens and add the seeds' noise, in place."""
        slots = ctx.idx_mapping_np.tolist()
        if self._seeded.isdisjoint(slots):
            return logits
        filtered = {row: self._filters[slot] for row, slot in enumerate(slots) if slot in self._filters}
        assert not filtered or len(logits) == len(slots), "one row for each request: no speculative decoding"
        mask_excluded(logits, filtered)
        add_noise_of_slots(logits, ctx.expanded_idx_mapping, ctx.pos, self._seeds.gpu, self._firsts.gpu)
        return logits
