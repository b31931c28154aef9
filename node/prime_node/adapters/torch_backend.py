"""The train backend on torch, for one process: any causal language model of Hugging Face with full attention.

Weights are fp32 and stay so: AdamW, gradient clipping and the forward pass work on them, and `snapshot` rounds a copy to bf16.
Workers sample with fp32 arithmetic on the rounded weights, so the logprobs here differ a little from theirs even for
the same policy (0.003 nats on average in the demo). That is what the importance ratio is for; where it must not be, compute
on the snapshot. Logprobs are taken as the engines take them: over the whole vocabulary at the run's temperature (at 1 where
that is 0), without the noise.

A step is forward and backward over packed rows (algo/packing.py), one micro-batch after another, then clipping and AdamW. The
loss is divided by counts of the whole batch, so the split into micro-batches changes nothing but rounding.

Letters: N predictions, S distinct places that they are read from, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from prime_node.adapters import tree_attention
from prime_node.adapters.model_config import config_at_fault, read_model_config, require_memory
from prime_node.adapters.torch_batch import Tallies, batch_counts, loss_inputs
from prime_node.adapters.torch_weights import copy_into, to_weights
from prime_node.algo.losses import LOG_RATIO_ABS
from prime_node.algo.packing import PackedRows, pack
from prime_node.ports.train_backend import Loss, OptimizerSettings, StepStats, TrainingDiverged, TrainSample
from prime_protocol.weights import Weights

_STATE_FILE = "backend.pt"
BYTES_PER_PARAMETER = 4 * 4
"""fp32: the weight, its gradient and AdamW's two moments."""


class TorchBackend:
    """Implements ports.train_backend.TrainBackend."""

    def __init__(
        self,
        model_folder: Path,
        weights: Weights | None = None,
        *,
        seed: int = 0,
        temperature: float = 1.0,
        published_dtype: str = "bf16",
        row_tokens: int = 128,
        micro_batch_tokens: int = 16_384,
        device: str = "cpu",
        threads: int | None = None,
    ) -> None:
        """A model of `model_folder`'s config.json with these weights, or with weights drawn by `seed`.

        `row_tokens` and `micro_batch_tokens` bound one forward pass (algo.packing.pack); `threads` sets torch's for the process.
        """
        if threads is not None:
            torch.set_num_threads(threads)
        torch.manual_seed(seed)
        self._device = torch.device(device)
        self._temperature = temperature or 1.0
        self._published_dtype = published_dtype
        self._row_tokens = row_tokens
        self._micro_batch_tokens = micro_batch_tokens
        self._model = _build_model(model_folder, self._device).to(self._device)
        if weights is not None:
            copy_into(self._model.named_parameters(), weights)
        self.new_optimizer(OptimizerSettings())

    def new_optimizer(self, settings: OptimizerSettings) -> None:
        self._settings = settings
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(),
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=True,
        )

    def train_step(self, samples: Sequence[TrainSample], loss: Loss, *, lr: float) -> StepStats:
        num_tokens, num_sequences = batch_counts(samples)
        if num_tokens == 0:
            return StepStats(loss=0.0, grad_norm=0.0, num_tokens=0, log_ratio_abs=0.0, metrics={})
        denominator = loss.denominator(num_tokens=num_tokens, num_sequences=num_sequences)
        loss_sum = 0.0
        tallies = Tallies()
        for packed in self._pack(samples):
            inputs = loss_inputs(self._logprobs(packed), [samples[index] for index in packed.samples])
            outputs = loss(inputs)
            torch.autograd.backward(outputs.loss / denominator)
            loss_sum += outputs.loss.item()
            tallies.add(outputs.metrics)
        grad_norm = self._optimizer_step(lr)
        means = tallies.means()
        return StepStats(
            loss=loss_sum / denominator,
            grad_norm=grad_norm,
            num_tokens=num_tokens,
            log_ratio_abs=means.pop(LOG_RATIO_ABS, 0.0),
            metrics=means,
        )

    def logprobs(self, samples: Sequence[TrainSample]) -> list[list[float]]:
        """Nats of every completion token of every sample, as `train_step` sees them."""
        result: list[list[float]] = [[] for _ in samples]
        with torch.no_grad():
            for packed in self._pack(samples):
                values = self._logprobs(packed).tolist()
                start = 0
                for index in packed.samples:
                    end = start + len(samples[index].completion_token_ids)
                    result[index] = values[start:end]
                    start = end
        return result

    def snapshot(self) -> Weights:
        return to_weights(self._model.named_parameters(), dtype=self._published_dtype)

    def save(self, folder: Path) -> None:
        torch.save(
            {
                "model": self._model.state_dict(),
                "optimizer": self._optimizer.state_dict(),
                "settings": asdict(self._settings),
                "rng": torch.get_rng_state(),
            },
            folder / _STATE_FILE,
        )

    def load(self, folder: Path) -> None:
        state = torch.load(folder / _STATE_FILE, map_location=self._device, weights_only=True)
        self._model.load_state_dict(state["model"])
        self.new_optimizer(OptimizerSettings(**state["settings"]))
        self._optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"].cpu())

    def _pack(self, samples: Sequence[TrainSample]) -> list[PackedRows]:
        return pack(samples, row_tokens=self._row_tokens, micro_batch_tokens=self._micro_batch_tokens)

    def _logprobs(self, packed: PackedRows) -> Tensor:
        """[N] nats of the predictions."""
        sources_S, row_of_N = np.unique(packed.sources_N, return_inverse=True)
        logits_SV = self._model(
            input_ids=self._to_device(packed.token_ids)[None],
            position_ids=self._to_device(packed.positions)[None],
            use_cache=False,
            logits_to_keep=self._to_device(sources_S),
            tree=tree_attention.TreeLayout.of(packed, device=self._device, dtype=torch.float32),
        ).logits[0]
        logprobs_SV = (logits_SV.float() / self._temperature).log_softmax(-1)
        chosen_N: Tensor = logprobs_SV[self._to_device(row_of_N), self._to_device(packed.targets_N)]
        return chosen_N

    def _optimizer_step(self, lr: float) -> float:
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._settings.grad_norm_max).item()
        if not norm < float("inf"):
            self._optimizer.zero_grad()
            raise TrainingDiverged(
                f"the gradient's norm is {norm}; lower the learning rate, and go on from the last checkpoint"
            )
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self._optimizer.zero_grad()
        return norm

    def _to_device(self, array: npt.NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array).to(self._device)


def _build_model(folder: Path, device: torch.device) -> Any:
    """The architecture of config.json, with pretrained weights where the folder has them. Raises LocalError.

    transformers has no types, so the model is Any: a PreTrainedModel with a causal head.
    """
    config = read_model_config(folder)
    require_memory(folder, config, bytes_per_parameter=BYTES_PER_PARAMETER, device=device)
    auto: Any = AutoModelForCausalLM
    how = {"dtype": torch.float32, "attn_implementation": tree_attention.NAME, "trust_remote_code": False}
    has_weights = any(folder.glob("*.safetensors"))
    with config_at_fault(folder):
        model = auto.from_pretrained(folder, **how) if has_weights else auto.from_config(config, **how)
    return model.train()
