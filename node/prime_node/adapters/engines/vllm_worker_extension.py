"""Extension of vLLM's worker: weights and proofs by remote call, temperatures by request, and exit with its owner."""

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

from prime_node.adapters.engines.queued_rows import QueuedRows
from prime_node.adapters.engines.torch_weights import TORCH_DTYPES

OWNER_SETTING = "prime_owner_pid"
"""Key of vLLM's additional_config: the process that started the engine."""
SEED_ARGUMENT = "prime_seed"
"""Key of SamplingParams.extra_args for the seed. Requests without it get plain greedy decoding."""
OFFSET_ARGUMENT = "prime_offset"
"""Key for the number of completion tokens in the prompt, if the request resumes a completion."""
FILTERS_ARGUMENT = "prime_filters"
"""Key for (top_p, top_k, min_p), if they restrict the allowed tokens."""
TEMPERATURE_ARGUMENT = "prime_temperature"
"""Key for the divisor of the request's logits. Requests without it get 1."""
PROOFS_ARGUMENT = "prime_proofs"
"""Key for the name of a completion that must commit to its hidden states. It stays the same when the completion is resumed."""

TensorPlace = tuple[str, str, list[int], int]
"""(name, dtype, shape, offset in bytes) of a tensor in the shared memory."""


class WorkerExtension:
    """Mixin for vLLM's worker class (`worker_extension_cls`); its methods are called with `collective_rpc`.

    vLLM does not call the constructor of this mixin: attributes are created on first use.
    """

    rank: int
    """Rank of this worker. All ranks of tensor parallelism have the same hidden states; the first makes the proofs."""
    model_runner: Any
    """Model runner of vLLM, of version 1 or 2."""
    prime_rows: QueuedRows | None = None
    """Rows for proofs."""
    prime_batch: Any = None
    """Batch that a runner of version 2 samples for at present. It hands it on and keeps none."""

    def prime_die_with(self, owner: int) -> None:
        """Call die_with, for engines without the processor that would call it."""
        die_with(owner)

    def prime_load(self, shared_memory: str, places: list[TensorPlace]) -> None:
        """Replace weights by those in the memory behind a path. Layers of which it has none keep theirs.

        On a CPU vLLM packs the weights of linear layers and discards the originals. Only reload_weights recreates them;
        model.load_weights does not.
        """
        _unpack_experts(self.model_runner.get_model())
        with Path(shared_memory).open("rb") as file:
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self.model_runner.reload_weights(weights_iterator=_tensors(memory, places), is_checkpoint_format=True)

    def prime_lengths(self) -> dict[str, int]:
        """Return the number of tokens sampled so far for each running request, by vLLM's names for the requests."""
        if not _is_v2(self.model_runner):
            return {name: len(request.output_token_ids) for name, request in self.model_runner.requests.items()}
        states = self.model_runner.req_states
        totals_S = states.total_len.gpu.tolist()
        return {name: totals_S[slot] - int(states.prompt_len.np[slot]) for name, slot in states.req_id_to_index.items()}

    def prime_watch_logits(self) -> None:
        """Divide each request's logits by its temperature, before vLLM takes logprobs of them and before the noise is added.

        The temperature is a request's own: a swap samples the probe while completions of the run are interrupted or wait.
        Their inputs are exactly the hidden states that tokens are chosen from, one row per request, outside of any captured
        graph: so this function also stores the rows for proofs.
        """
        model = self.model_runner.get_model()
        compute = type(model).compute_logits
        rows = self.prime_rows = self.prime_rows or QueuedRows()
        if _is_v2(self.model_runner):
            self._note_batches()

        def compute_scaled(hidden_BD: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor | None:
            names, positions, temperatures = self._completions()
            if self.rank == 0 and any(names):  # vLLM's warm-up and prompts' logprobs compute logits without requests
                rows.add(names, positions, hidden_BD)
            logits: torch.Tensor | None = compute(model, hidden_BD, *args, **kwargs)
            return None if logits is None else _divided(logits, temperatures)

        model.compute_logits = compute_scaled

    def prime_take_proofs(self, lengths: list[tuple[str, int]], forgotten: list[str]) -> list[bytes | None]:
        """Return the proofs of completions by name and number of tokens, None for those that need more time. Never waits.

        `forgotten`: names whose proofs are no longer needed. Ask again, with the same lengths, for what is missing.
        """
        if self.rank != 0:
            return [None] * len(lengths)
        rows = self.prime_rows = self.prime_rows or QueuedRows()
        rows.drop(forgotten)
        return rows.take(lengths)

    def _note_batches(self) -> None:
        sample = type(self.model_runner).sample

        def sample_noted(hidden: torch.Tensor, batch: Any, *args: Any, **kwargs: Any) -> Any:
            self.prime_batch = batch
            try:
                return sample(self.model_runner, hidden, batch, *args, **kwargs)
            finally:
                self.prime_batch = None

        self.model_runner.sample = sample_noted

    def _completions(self) -> tuple[list[str | None], list[int], list[float]]:
        """Return, for each row of the batch, its completion's name, the token's position, and the temperature.

        The name is None unless the completion commits to its hidden states.
        """
        names: list[str | None] = []
        positions, temperatures = [], []
        if not _is_v2(self.model_runner):
            for request_id in self.model_runner.input_batch.req_ids:
                request = self.model_runner.requests[request_id]
                asked = request.sampling_params.extra_args or {}
                names.append(asked.get(PROOFS_ARGUMENT))
                positions.append(asked.get(OFFSET_ARGUMENT, 0) + len(request.output_token_ids))
                temperatures.append(asked.get(TEMPERATURE_ARGUMENT, 1.0))
        elif self.prime_batch is not None:
            batch, asked_of = self.prime_batch, _asked_of_slots(self.model_runner.sampler)
            prompts = self.model_runner.req_states.prompt_len.np
            # Row n is of request n, and chooses the token after its first seq_len tokens.
            for slot, seq_len in zip(
                batch.idx_mapping_np.tolist(), batch.seq_lens_cpu_upper_bound.tolist(), strict=False
            ):
                name, offset, temperature = asked_of[slot]
                position = seq_len - int(prompts[slot])
                names.append(name if position >= 0 else None)  # below 0 a part of the prompt is missing
                positions.append(offset + position)
                temperatures.append(temperature)
        return names, positions, temperatures


def _is_v2(runner: Any) -> bool:
    return hasattr(runner, "req_states")


def _asked_of_slots(sampler: Any) -> dict[int, tuple[str | None, int, float]]:
    """Return `asked` of the SlotSampler, which is found by that attribute: its module imports this one."""
    (found,) = (one.asked for one in sampler.logits_processors if hasattr(one, "asked"))
    asked: dict[int, tuple[str | None, int, float]] = found
    return asked


def _divided(logits_BV: torch.Tensor, temperatures: list[float]) -> torch.Tensor:
    """Return the logits over their rows' temperatures, 1 where there are no requests (vLLM's warm-up)."""
    distinct = set(temperatures) or {1.0}
    if len(distinct) == 1:
        return logits_BV.float() / distinct.pop()
    return logits_BV.float() / torch.tensor(temperatures, device=logits_BV.device)[:, None]


def require_greedy(sampling_params: Any) -> None:
    """Check that a request with a seed uses temperature 0. Raises ValueError if not."""
    if SEED_ARGUMENT in (sampling_params.extra_args or {}) and sampling_params.temperature != 0.0:
        raise ValueError(f"{SEED_ARGUMENT} needs temperature=0: the noise is in the logits already")


def _unpack_experts(model: torch.nn.Module) -> None:
    """Make vLLM pack the experts' weights again on a CPU, where it packs them only when it first gets them.

    It would take later ones for packed already. A layer without its kernel counts as new. On a GPU captured graphs hold the
    kernel, and nothing is packed in this way.
    """
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None and next(module.parameters()).device.type == "cpu":
            method.moe_kernel = None


def _tensors(memory: mmap.mmap, places: list[TensorPlace]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield views of the memory, which stays mapped as long as one of them lives."""
    for name, dtype, shape, offset in places:
        count = torch.Size(shape).numel()
        flat = torch.frombuffer(memory, dtype=TORCH_DTYPES[dtype], count=count, offset=offset)
        yield name, flat.reshape(shape)


def die_with_owner(vllm_config: Any) -> None:
    """Call die_with for the process that started the engine, if the engine was given one."""
    owner = (vllm_config.additional_config or {}).get(OWNER_SETTING)
    if owner is not None:
        die_with(owner)


def die_with(owner: int) -> None:
    """Make this process end as soon as process `owner` has ended for any reason.

    vLLM's engine process waits for messages forever if its parent is killed. A pidfd becomes readable when its process ends;
    the kernel's own PR_SET_PDEATHSIG would fire when the *thread* that started the engine ends.
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
