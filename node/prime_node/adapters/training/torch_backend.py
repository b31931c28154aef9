"""The train backend on torch: any causal language model of Hugging Face with full attention, on one process or on many.

The model computes with exactly the published weights, rounded to bf16 by default; AdamW works on fp32 masters (masters.py).
With adapters these are the merged weights (lora.py). Logprobs are defined as in the engines: over the whole vocabulary
at the run's temperature (at 1 if that is 0), without the noise.

A step is forward and backward over packed passes (algo/shares.py), one after another, then clipping and the optimizer. The loss
is divided by counts of the whole batch, so the split into passes and ranks changes nothing but rounding.

With `ranks` every method is a collective: all ranks must call it alike. leading_backend.py makes rank 0 lead the others.

Letters: N predictions, S distinct places that they are read from.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from prime_node.adapters.engines.torch_weights import to_weights
from prime_node.adapters.models.lora import LoraSettings, MergedWeights, is_published, published
from prime_node.adapters.models.policy_build import build_policy
from prime_node.adapters.models.pretrained_model import pretrained_weights
from prime_node.adapters.training import committed_state, train_state
from prime_node.adapters.training.critic import Critic
from prime_node.adapters.training.kept_policies import KeptPolicies
from prime_node.adapters.training.masters import Masters, round_in_place
from prime_node.adapters.training.passes import Passes
from prime_node.adapters.training.policy_scores import PolicyScores
from prime_node.adapters.training.ranks import ALONE, Ranks
from prime_node.adapters.training.shard_copies import ShardCopies
from prime_node.adapters.training.sharding import PLAIN, Placement, dealt, gathered, local_rows
from prime_node.adapters.training.torch_batch import Tallies, credible, drift, loss_inputs
from prime_node.adapters.training.torch_optimizers import make_optimizer, set_learning_rate
from prime_node.adapters.training.train_state import SavedState
from prime_node.algo.losses import LOG_RATIO_ABS
from prime_node.algo.shares import Packing, PackingSettings, RankShare, shares
from prime_node.broadcast.publish.encoder import WholeCopy
from prime_node.ports.train_backend import (
    CommittedTensors,
    CriticSettings,
    CriticStats,
    KeptPolicy,
    Loss,
    LossNeed,
    OptimizerSettings,
    PackedBatch,
    PolicyCopy,
    StepStats,
    TrainingDiverged,
)
from prime_node.ports.train_samples import TopLogprobs, TrainSample
from prime_protocol.adapters import INTEGERS
from prime_protocol.codec import DTYPES as DTYPE_BYTES
from prime_protocol.errors import LocalError
from prime_protocol.training_state import TrainingTensor
from prime_protocol.weights import Weights

log = logging.getLogger(__name__)


class TorchBackend:
    """Implementation of ports.train_backend.TrainBackend."""

    def __init__(
        self,
        model_folder: Path,
        weights: Weights | None = None,
        *,
        seed: int = 0,
        temperature: float = 1.0,
        published_dtype: str = "bf16",
        packing: Packing = Packing.TREE,
        row_tokens: int = 128,
        micro_batch_tokens: int = 16_384,
        device: str = "cpu",
        threads: int | None = None,
        ranks: Ranks = ALONE,
        placement: Placement = PLAIN,
        lora: LoraSettings | None = None,
        critic: CriticSettings | None = None,
        on_pass: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        """Build a model of `model_folder`'s config.json with these weights, or with weights drawn by `seed`.

        `row_tokens` and `micro_batch_tokens` bound one forward pass (algo.shares); `threads` sets torch's for the process;
        `on_pass` gets how many passes of a share are done, and their number. Raises LocalError.
        """
        if threads is not None:
            torch.set_num_threads(threads)
        self._device = torch.device(device)
        self._published_dtype = published_dtype
        self._ranks, self._placement, self._lora = ranks, placement, lora
        self._policy = build_policy(
            model_folder,
            weights,
            seed=seed,
            temperature=temperature or 1.0,
            device=self._device,
            ranks=ranks,
            placement=placement,
            published_dtype=published_dtype,
            lora=lora,
        )
        self._passes = Passes(self._policy, self._device, ranks, placement, on_pass)
        self.packing = PackingSettings(
            packing,
            row_tokens=row_tokens,
            micro_batch_tokens=micro_batch_tokens,
            quadratic_tokens=6 * int(self._policy.model.config.hidden_size),
        )
        if lora is None or not lora.alone:
            frozen = (parameter for parameter in self._policy.parameters() if not parameter.requires_grad)
            round_in_place(frozen, dtype=published_dtype)
        trained = {name: each for name, each in self._policy.model.named_parameters() if each.requires_grad}
        self._unit_log2 = None if lora is None else lora.unit_log2
        self._masters = Masters(trained, dtype=published_dtype, unit_log2=self._unit_log2)
        self._merged = MergedWeights(self._policy.model)
        self._merged.merge()
        self._num_parameters = sum(int(parameter.numel()) for parameter in self._policy.parameters())
        self.sequence_tokens_max: int = getattr(self._policy.model.config, "max_position_embeddings", None) or 2**62
        """Number of positions of the model, under whatever name its config has it."""
        is_bf16 = lora is None and published_dtype == "bf16"
        self._kept = KeptPolicies(trained, dtype=torch.bfloat16 if is_bf16 else torch.float32)
        self._saved = SavedState({}, is_copy=True)
        """State that may not be written yet: nothing changes its tensors without `before_change`."""
        self.scores = PolicyScores(
            self._policy, self._passes, self._kept, self._merged, lambda: self._saved.before_change()
        )
        self.new_optimizer(OptimizerSettings())
        self._critic = None
        if critic is not None:
            own = weights if critic.initial_weights is None else pretrained_weights(critic.initial_weights)
            self._critic = Critic(
                model_folder, own, critic, seed=seed, device=self._device, ranks=ranks, placement=placement
            )

    def new_optimizer(self, settings: OptimizerSettings) -> None:
        self._settings = settings
        self._optimizer = make_optimizer(list(self._masters.tensors.values()), settings)

    def pack(self, samples: Sequence[TrainSample]) -> PackedBatch:
        """Pack samples. It reads no weights, so any thread may call it. Raises LocalError."""
        return PackedBatch(self.shares(samples))

    def shares(self, samples: Sequence[TrainSample] | PackedBatch) -> Sequence[RankShare]:
        """Return what each rank computes of a batch. Pure. Raises LocalError."""
        if isinstance(samples, PackedBatch):
            return samples.shares
        longest = max(
            (len(sample.prompt_token_ids) + len(sample.completion_token_ids) for sample in samples), default=0
        )
        if longest > self.sequence_tokens_max:
            raise LocalError(
                f"a sequence of {longest:,} tokens is longer than the model's max_position_embeddings = "
                f"{self.sequence_tokens_max:,}; lower the run's prompt_tokens_max or completion_tokens_max"
            )
        return shares(samples, self.packing, ranks=self._ranks.count)

    def train_step(self, samples: Sequence[TrainSample] | PackedBatch, loss: Loss, *, lr: float) -> StepStats:
        return self.train_share(self.shares(samples)[self._ranks.rank], loss, lr)

    def train_share(self, share: RankShare, loss: Loss, lr: float) -> StepStats:
        """Compute this rank's part of a step."""
        if share.num_tokens == 0:
            return StepStats(loss=0.0, grad_norm=0.0, num_tokens=0, log_ratio_abs=0.0, metrics={})
        began_s = time.perf_counter()
        denominator = loss.denominator(num_tokens=share.num_tokens, num_sequences=share.num_sequences)
        loss_sum = 0.0
        tallies = Tallies()
        for one in self._passes.of(share):
            logprobs_N, entropies_N, top_NK = self.scores.with_tops(
                one, entropy_gradient=LossNeed.ENTROPY in loss.needs
            )
            if not one.places:
                torch.autograd.backward(logprobs_N.sum() * 0.0)
                continue
            entropy_N = entropies_N if LossNeed.ENTROPY in loss.needs else None
            inputs, masked = credible(loss_inputs(logprobs_N, one.samples, entropy_N, top_NK), one.samples)
            outputs = loss(inputs)
            torch.autograd.backward(outputs.loss / denominator)
            loss_sum += outputs.loss.item()
            tallies.add(masked)
            tallies.add(outputs.metrics)
            tallies.add(drift(inputs, entropies_N.detach()))
        reduced_s = time.perf_counter()
        grad_norm = self._optimizer_step(lr)
        ended_s = time.perf_counter()
        means = tallies.means(self._ranks)
        return StepStats(
            loss=self._ranks.sum([loss_sum])[0] / denominator,
            grad_norm=grad_norm,
            num_tokens=share.num_tokens,
            log_ratio_abs=means.pop(LOG_RATIO_ABS, 0.0),
            metrics=means,
            work={
                "packing_share": share.packing_share,
                "balance_share": share.balance_share,
                "sharing_ratio": share.sharing_ratio,
                "num_computed_tokens": share.computed_tokens,
                "ranks": self._ranks.count,
                "model_flops": 6.0 * self._num_parameters * share.computed_tokens,
                "passes_seconds": reduced_s - began_s,
                "optimizer_seconds": ended_s - reduced_s,
                **self._memory(),
            },
        )

    def logprobs(self, samples: Sequence[TrainSample], of: KeptPolicy | None = None) -> list[list[float]]:
        return self.scores.logprobs(self.shares(samples)[self._ranks.rank], len(samples), of)

    def score_norms(self, samples: Sequence[TrainSample]) -> list[list[float]]:
        """Return 1 - 2 pi + the sum of pi^2 over the vocabulary for every completion token."""
        return self.scores.norms(self.shares(samples)[self._ranks.rank], len(samples))

    def top_logprobs(
        self, samples: Sequence[TrainSample], count: int, of: KeptPolicy | None = None
    ) -> list[TopLogprobs]:
        return self.scores.top_logprobs(self.shares(samples)[self._ranks.rank], len(samples), count, of)

    def keep_policy(self, which: KeptPolicy) -> None:
        self._kept.keep(which)

    def begin_critic(self) -> None:
        """Give the critic the policy's weights, if there is one. Adapted weights are not: the critic keeps the base's."""
        if self._critic is not None and self._lora is None:
            self._saved.before_change()
            self._critic.begin(self._policy.model)

    def values(self, samples: Sequence[TrainSample]) -> list[list[float]]:
        return self.share_values(self.shares(samples)[self._ranks.rank], len(samples))

    def share_values(self, share: RankShare, num_samples: int) -> list[list[float]]:
        """Return the critic's values of the whole batch, on every rank."""
        assert self._critic is not None, "Recipe.of refuses values without a critic"
        return self._critic.values(share, num_samples)

    def train_critic(self, samples: Sequence[TrainSample], *, lr: float) -> CriticStats:
        return self.train_critic_share(self.shares(samples)[self._ranks.rank], lr)

    def train_critic_share(self, share: RankShare, lr: float) -> CriticStats:
        """Compute this rank's part of a step of the critic."""
        assert self._critic is not None, "Recipe.of refuses values without a critic"
        return self._critic.train(share, lr, self._saved.before_change)

    def snapshot(self) -> Weights:
        """Return the whole weights, gathered tensor by tensor and only on rank 0: for models that one host can hold."""
        if self._ranks.mesh is None:
            return to_weights(self._published(), dtype=self._wire_dtype)
        return gathered(self._published(), self._ranks, dtype=self._wire_dtype)

    def copy(self) -> PolicyCopy:
        """Copy the policy for the publisher, on a single process."""
        assert self._ranks.mesh is None, "on several ranks rank 0 publishes: use LeadingBackend.copy"
        return WholeCopy(self.snapshot())

    def take_copy(self, number: int, copies: ShardCopies) -> None:
        """Copy this rank's rows for the publisher."""
        copies.take(number, self._published(), dtype=self._wire_dtype)

    def copy_of(self, weights: Weights) -> PolicyCopy:
        """Wrap other weights for the publisher, on a single process."""
        assert self._ranks.mesh is None, "on several ranks rank 0 publishes: use LeadingBackend.copy_of"
        return WholeCopy(weights)

    def take_rows(self, number: int, copies: ShardCopies, weights: Weights | None) -> None:
        """Store this rank's rows of another policy of the same tensors, which the first rank distributes one tensor at a time."""
        counts = [len(rows) if self._ranks.copy == 0 else 0 for _, rows in self._published()]
        copies.put(number, dealt(weights, counts, self._ranks))

    @property
    def published_bytes(self) -> int:
        """Size of all tensors of one policy."""
        return DTYPE_BYTES[self._wire_dtype] * sum(
            int(tensor.numel())
            for name, tensor in self._policy.model.named_parameters()
            if is_published(name, self._lora)
        )

    def shared_tensors(self) -> dict[str, Tensor] | None:
        """Return the parameters, for an engine that computes with the same memory; None if this process lacks whole weights."""
        if self._ranks.count > 1 or self._placement.offload or self._lora is not None:
            return None
        return {name: local_rows(tensor)[0].detach() for name, tensor in self._policy.model.named_parameters()}

    def save(self, folder: Path) -> Callable[[], None]:
        """Return a function that writes the present state. A step that would change it before waits or copies it."""
        settings = json.dumps(asdict(self._settings)).encode()
        reference = self._kept.tensors(KeptPolicy.REFERENCE)
        self._saved = train_state.current_train_state(self._parts(), self._ranks, note=settings, reference=reference)
        return train_state.writer(self._saved, folder, self._ranks)

    def load(self, folder: Path) -> None:
        """Restore the training state. Raises LocalError."""
        settings = json.loads(train_state.note_of(folder, self._ranks))
        self.new_optimizer(OptimizerSettings(**{**settings, "betas": tuple(settings["betas"])}))
        self._saved.before_change()
        train_state.restore_train_state(self._masters.tensors, self._optimizer, folder, self._ranks)
        self._kept.put(KeptPolicy.REFERENCE, train_state.stored_reference(self._kept.room, folder, self._ranks))
        self._round()
        critic = self._critic
        if critic is not None and train_state.holds(folder, "critic."):
            train_state.restore_train_state(critic.tensors, critic.optimizer, folder, self._ranks, prefix="critic.")
        elif critic is not None:
            if self._ranks.rank == 0:
                log.warning("the checkpoint %s has no critic: a new one begins", folder)
            if not critic.has_own_weights:
                self.begin_critic()

    @property
    def numerics(self) -> str:
        """Return the name of this process's arithmetic."""
        return committed_state.numerics_of(self._device, self._placement, self._ranks, self.packing)

    def commit(self, path: Path) -> CommittedTensors:
        """Write the whole training state to a file."""
        state = committed_state.tensors_of(self._parts(), self._kept.tensors(KeptPolicy.REFERENCE))
        return committed_state.write_state(state, path, self._ranks)

    def restore(self, path: Path, tensors: Sequence[TrainingTensor]) -> None:
        """Take over a training state from such a file. Raises LocalError."""
        self._saved.before_change()
        state = committed_state.read_state(path, tensors)
        self._kept.put(KeptPolicy.REFERENCE, committed_state.put_tensors(state, self._parts(), self._kept.room()))
        self._round()

    def _parts(self) -> committed_state.Parts:
        parts: dict[str, Any] = {"": (self._masters.tensors, self._optimizer)}
        if self._critic is not None:
            parts["critic."] = (self._critic.tensors, self._critic.optimizer)
        return parts

    def _round(self) -> None:
        """Make the model compute with the masters' new values."""
        self._masters.round()
        self._merged.merge()

    @property
    def _wire_dtype(self) -> str:
        return self._published_dtype if self._unit_log2 is None else INTEGERS

    def _published(self) -> Iterator[tuple[str, Tensor]]:
        return published(self._policy.model, self._lora)

    def _optimizer_step(self, lr: float) -> float:
        norm = self._passes.clipped_norm(self._settings.grad_norm_max)
        self._masters.take_gradients()
        if not norm < float("inf"):
            self._optimizer.zero_grad()
            raise TrainingDiverged(
                f"the gradient's norm is {norm}; lower the learning rate and resume from the last checkpoint"
            )
        set_learning_rate(self._optimizer, lr)
        self._saved.before_change()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._round()
        return norm

    def _memory(self) -> dict[str, float]:
        """Return the peak memory of this rank's device since the last step."""
        if self._device.type != "cuda":
            return {}
        peak = float(torch.cuda.max_memory_allocated(self._device))
        torch.cuda.reset_peak_memory_stats(self._device)
        return {"device_memory_bytes_max": peak}


def make_backend(ranks: Ranks, *, initial_weights: str | None, device: str, **settings: Any) -> TorchBackend:
    """Make a rank's backend from TorchBackend's own settings, on this rank's GPU if there are several.

    `initial_weights`: a folder or a hub's model name, of which each rank reads its own rows. Raises LocalError.
    """
    here = f"{device}:{torch.cuda.current_device()}" if device == "cuda" else device
    weights = None if initial_weights is None else pretrained_weights(initial_weights)
    return TorchBackend(weights=weights, ranks=ranks, device=here, **settings)
