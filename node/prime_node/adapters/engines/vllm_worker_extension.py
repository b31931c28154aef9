"""Runs inside vLLM's worker: weights, temperature and proofs by remote call, and an end with the process that started it."""

from __future__ import annotations

import mmap
import os
import select
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from prime_node.adapters.engines.hidden_rows import HiddenRows

SEED_ARGUMENT = "prime_seed"
"""Key of SamplingParams.extra_args. Requests without it get plain greedy decoding."""
OFFSET_ARGUMENT = "prime_offset"
"""The same: tokens of the completion that are in the prompt, because it goes on where it was cut."""
FILTERS_ARGUMENT = "prime_filters"
"""The same: (top_p, top_k, min_p) where not every token may be chosen."""
PROOFS_ARGUMENT = "prime_proofs"
"""The same: the completion's name, if it is to commit to its hidden states. It stays when the completion goes on elsewhere."""

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

TensorPlace = tuple[str, str, list[int], int]
"""(name, dtype, shape, offset in bytes) of a tensor in the shared memory."""


class WorkerExtension:
    """Mixed into vLLM's worker class (`worker_extension_cls`); its methods are called with `collective_rpc`."""

    model_runner: Any
    """vLLM's."""
    prime_rows: HiddenRows | None = None
    """Made with the first use; vLLM mixes this class in without calling its constructor."""

    def prime_die_with(self, owner: int) -> None:
        """See die_with, for engines without the processor that would call it."""
        die_with(owner)

    def prime_load(self, shared_memory: str, places: list[TensorPlace]) -> None:
        """Replace all weights by those in the memory behind a path.

        reload_weights and not model.load_weights: on a CPU vLLM packs the weights of linear layers and throws the
        originals away, and only the former makes them again.
        """
        _unpack_experts(self.model_runner.get_model())
        with Path(shared_memory).open("rb") as file:
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self.model_runner.reload_weights(weights_iterator=_tensors(memory, places), is_checkpoint_format=True)

    def prime_lengths(self) -> dict[str, int]:
        """Tokens sampled so far of each request that is in work, by vLLM's own names for them."""
        return {name: len(request.output_token_ids) for name, request in self.model_runner.requests.items()}

    def prime_set_temperature(self, temperature: float) -> None:
        """Divide all logits from here on, before vLLM takes logprobs of them and before the noise is added.

        What they are computed from are exactly the hidden states that tokens are chosen from, one row a request, outside of any
        captured graph: so this is also where rows for proofs are taken.
        """
        model = self.model_runner.get_model()
        compute = type(model).compute_logits
        rows = self.prime_rows = self.prime_rows or HiddenRows()

        def compute_scaled(hidden_BD: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor | None:
            self._keep(rows, hidden_BD)
            logits: torch.Tensor | None = compute(model, hidden_BD, *args, **kwargs)
            return None if logits is None else logits.float() / temperature

        # Always from the class, so that a second call replaces the first instead of wrapping it.
        model.compute_logits = compute_scaled

    def prime_take_proofs(self, lengths: list[tuple[str, int]], forgotten: list[str]) -> list[bytes]:
        """Of completions by their names and numbers of tokens. `forgotten`: names that nobody will ask for."""
        rows = self.prime_rows = self.prime_rows or HiddenRows()
        rows.drop(forgotten)
        taken = rows.take(dict(lengths))
        return [taken[name] for name, _ in lengths]

    def _keep(self, rows: HiddenRows, hidden_BD: torch.Tensor) -> None:
        names: list[str | None] = []
        positions = []
        for request_id in self.model_runner.input_batch.req_ids:
            request = self.model_runner.requests[request_id]
            asked = request.sampling_params.extra_args or {}
            names.append(asked.get(PROOFS_ARGUMENT))
            positions.append(asked.get(OFFSET_ARGUMENT, 0) + len(request.output_token_ids))
        if any(names):  # vLLM's warm-up computes logits of nothing in particular
            rows.add(names, positions, hidden_BD)


def _unpack_experts(model: torch.nn.Module) -> None:
    """On a CPU vLLM packs the weights of experts too, but when it first has them alone: later ones would be taken for packed.
    Without its kernel a layer counts as new. On a GPU captured graphs hold the kernel, and nothing is packed so.
    """
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None and next(module.parameters()).device.type == "cpu":
            method.moe_kernel = None


def _tensors(memory: mmap.mmap, places: list[TensorPlace]) -> Iterator[tuple[str, torch.Tensor]]:
    """Views of the memory, which stays mapped as long as one of them lives."""
    for name, dtype, shape, offset in places:
        count = torch.Size(shape).numel()
        flat = torch.frombuffer(memory, dtype=TORCH_DTYPES[dtype], count=count, offset=offset)
        yield name, flat.reshape(shape)


def die_with(owner: int) -> None:
    """End this process as soon as process `owner` has ended, however that happened.

    vLLM's engine process waits for messages for ever when its parent is killed. A pidfd becomes readable when its process
    ends; the kernel's own PR_SET_PDEATHSIG would fire when the *thread* that started the engine ends.
    """
    try:
        descriptor = os.pidfd_open(owner)
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGKILL)
        return

    ended = select.poll()
    ended.register(descriptor, select.POLLIN)

    def wait() -> None:
        ended.poll()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="die-with-owner", daemon=True).start()
