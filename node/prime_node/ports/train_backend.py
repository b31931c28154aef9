"""The training engine: a model with its optimizer, on one or many devices, and the loss that it computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from prime_node.ports.train_samples import TopLogprobs, TrainSample
from prime_protocol.errors import LocalError
from prime_protocol.manifest import BasePolicy, Encoding, PartEntry, TensorEntry
from prime_protocol.training_state import TrainingTensor
from prime_protocol.weights import Weights


class AggregationKind(StrEnum):
    """Aggregation of token losses over a batch. verl's names are accepted too."""

    TOKEN_MEAN = "token_mean"
    """Mean over trained tokens: long completions weigh more."""
    SEQUENCE_MEAN = "sequence_mean"
    """Mean over completions: a token of a long one weighs less."""
    CONSTANT_LENGTH = "constant_length"
    """Sum divided by a constant: every token weighs the same in every batch, whatever their number."""
    PROMPT_MEAN = "prompt_mean"
    """Mean over prompts of the mean over the tokens of their completions."""
    SEQUENCE_SUM = "sequence_sum"
    """Sum over tokens divided by the number of completions."""
    TOKEN_SUM = "token_sum"
    """Sum over tokens: the learning rate is that of one token."""

    @classmethod
    def _missing_(cls, value: object) -> AggregationKind | None:
        return _VERL_NAMES.get(str(value))


class DivisionKind(StrEnum):
    """Counts by which the sum of a batch's losses is divided."""

    BATCH = "batch"
    """Those of the whole batch: a mode weighs by its tokens or sequences."""
    MODE = "mode"
    """Each training mode by its own: a mode's mean does not depend on what else is in the batch."""


class LossNeed(StrEnum):
    """Value of a token that a loss asks for, and that is computed only then."""

    REFERENCE_LOGPROBS = "reference_logprobs"
    """Logprobs under the reference policy: one more forward pass."""
    ENTROPY = "entropy"
    """Entropy of the trained policy, with its gradient."""
    VALUES = "values"
    """The critic's value of the state before each token; the trainer must have a critic."""
    SELECTED = "selected"
    """Tokens that the loss itself chose among all of the optimizer step: one more forward pass."""


class KeptPolicy(StrEnum):
    """An earlier policy that the backend keeps, to compute logprobs under it."""

    PROXIMAL = "proximal"
    REFERENCE = "reference"


_VERL_NAMES = {
    "token-mean": AggregationKind.TOKEN_MEAN,
    "seq-mean-token-mean": AggregationKind.SEQUENCE_MEAN,
    "seq-mean-token-sum-norm": AggregationKind.CONSTANT_LENGTH,
    "seq-mean-token-sum": AggregationKind.SEQUENCE_SUM,
    "token-sum": AggregationKind.TOKEN_SUM,
}


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """Optimizer configuration.

    The default is AdamW, as in Loshchilov and Hutter (arXiv 1711.05101). The learning rate comes with each step.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    grad_norm_max: float = 1.0
    """Global norm to which gradients are clipped."""
    moments: str = "fp32"
    """Type of AdamW's two running means: fp32 or 8bit."""
    import_path: str | None = None
    """Custom optimizer, "package.module.Class". The AdamW settings above, except the norm, are then unused."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the custom optimizer besides the parameters."""


@dataclass(frozen=True, slots=True)
class CriticSettings:
    """Configuration of a critic."""

    optimizer: OptimizerSettings = OptimizerSettings()
    cliprange_value: float | None = 0.5
    """Distance from its old value beyond which a new value gets no gradient towards the return; None: no bound."""
    initial_weights: str | None = None
    """Folder or hub's name of its first weights; None: the policy's."""


@dataclass(frozen=True, slots=True)
class CriticStats:
    """Result of one optimizer step of the critic."""

    loss: float
    grad_norm: float
    """Global norm before clipping."""
    metrics: Mapping[str, float]
    """Means over the trainable tokens."""


@dataclass(frozen=True, slots=True)
class StepStats:
    """Result of one optimizer step."""

    loss: float
    grad_norm: float
    """Global norm before clipping."""
    num_tokens: int
    """Trainable tokens of the whole batch."""
    log_ratio_abs: float
    """Mean |trainer logprob - inference logprob| in nats over sampled trainable tokens, before the step."""
    metrics: Mapping[str, float]
    """Means over the trainable tokens to which they apply, named by the loss."""
    work: Mapping[str, float] = field(default_factory=dict)
    """Execution statistics: packing, balance of the ranks, seconds of the phases, memory."""


class Loss(Protocol):
    """The backend's view of algo.losses.Objective.

    A backend calls it once for each micro-batch of whole sequences, divides the result by `denominator` of the counts
    over all micro-batches and ranks, and calls backward. So gradients are summed over ranks, never averaged.
    """

    @property
    def needs(self) -> frozenset[LossNeed]:
        """Return what the loss asks for besides the samples' own values."""

    def __call__(self, inputs: Any) -> Any:
        """Map algo.losses.LossInputs to algo.losses.LossSum: a scalar, and [2] (sum, number of tokens) of each metric."""

    def denominator(self, *, num_tokens: int, num_sequences: int) -> float:
        """Return the divisor for the whole batch, from its trainable tokens and its sequences with at least one."""

    def choose(
        self, advantages: Sequence[float], logprobs: Sequence[float], log_ratios: Sequence[float], *, seed: int
    ) -> set[int]:
        """Return the places of the tokens that a loss with LossNeed.SELECTED treats differently.

        The values are of all trainable tokens of mode rl of an optimizer step: advantage, log pi, log(pi / pi_prox).
        """

    @property
    def normalizes_weights(self) -> bool:
        """Return whether samples of mode rl need `TrainSample.weight_mean`."""

    def mean_weight(
        self,
        proximal_N: npt.NDArray[np.float64],
        inference_N: npt.NDArray[np.float64],
        mask_N: npt.NDArray[np.bool_],
        lengths: Sequence[int],
    ) -> float:
        """Return it, from log pi_prox and log mu of an optimizer step; the mask is True on trainable tokens of mode rl."""


class PolicyCopy(Protocol):
    """One policy's weights for publication, whole or in shards. They never change.

    For the publisher: methods are heavy and may run in another thread than the backend's, one at a time, concurrently
    with later steps.
    """

    @property
    def raw_bytes(self) -> int:
        """Return the bytes of all tensors."""

    def tensors(self) -> tuple[TensorEntry, ...]:
        """Return the manifest's entries for the tensors."""

    def encode(
        self, base: tuple[BasePolicy, Any] | None, *, keep: Callable[[PartEntry, bytearray], object]
    ) -> tuple[Encoding, bytes]:
        """Encode alone (an anchor), or against an older copy by the same backend (a delta).

        Works as prime_protocol.checkpoint.encode_parts. `keep` gets each part in order. Returns the manifest's
        encoding, and the index.
        """

    def drop(self) -> None:
        """Release the copy. Idempotent."""


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Samples that `TrainBackend.pack` has divided among the ranks and packed, for one `train_step`."""

    shares: Sequence[Any]
    """Shares in the backend's own format, one for each rank."""


@dataclass(frozen=True, slots=True)
class CommittedTensors:
    """Content of a file of a training state, for its index (prime_protocol.training_state)."""

    tensors: tuple[TrainingTensor, ...]
    parts: tuple[PartEntry, ...]
    """Parts of the file, with their digests. Empty except on the first rank."""


class TrainBackend(Protocol):
    """A synchronous training engine.

    It is called from the trainer's own thread, unless a method says otherwise. Deterministic for a fixed seed, machine
    and number of threads and ranks.
    """

    @property
    def sequence_tokens_max(self) -> int:
        """Tokens of the longest sequence that the model can compute."""

    def new_optimizer(self, settings: OptimizerSettings) -> None:
        """Discard the optimizer's state and start with a fresh one: a new phase of training."""

    def pack(self, samples: Sequence[TrainSample]) -> PackedBatch:
        """Divide and pack samples ahead of their step, from any thread: it touches no weights.

        Raises LocalError if a sample is too long.
        """

    def train_step(self, samples: Sequence[TrainSample] | PackedBatch, loss: Loss, *, lr: float) -> StepStats:
        """Run forward, backward and one optimizer step on all samples, normalized as the loss says.

        Without trainable tokens nothing changes. Raises TrainingDiverged if the gradient is not finite, before any
        weight has changed.
        """

    def logprobs(self, samples: Sequence[TrainSample], of: KeptPolicy | None = None) -> list[list[float]]:
        """Return the logprobs (nats) of every completion token of every sample, as `train_step` computes them.

        `of`: a kept policy; the current weights stay. Raises LocalError if it was not kept.
        """

    def top_logprobs(
        self, samples: Sequence[TrainSample], count: int, of: KeptPolicy | None = None
    ) -> Sequence[TopLogprobs]:
        """Return the `count` likeliest tokens at every completion token of every sample; -1: the whole vocabulary."""

    def score_norms(self, samples: Sequence[TrainSample]) -> Sequence[Sequence[float]]:
        """Return 1 - 2 pi + the sum of pi^2 over the vocabulary for every completion token of every sample."""

    def keep_policy(self, which: KeptPolicy) -> None:
        """Keep the current policy, replacing the one kept before. Checkpoints contain the reference policy."""

    def snapshot(self) -> Weights:
        """Return a whole copy of the weights as published (bf16 by default), for an evaluation on this machine.

        With several ranks only the first one gets it; the others get an empty result.
        """

    def copy(self) -> PolicyCopy:
        """Return a copy for the publisher, in place: each rank copies only its shard before this returns."""

    def copy_of(self, weights: Weights) -> PolicyCopy:
        """Return an older policy's copy, of the same tensors, as if `copy` had been called then.

        Each rank gets its rows once.
        """

    def begin_critic(self) -> None:
        """Give the critic the policy's present weights and a new optimizer. Without a critic nothing happens."""

    def values(self, samples: Sequence[TrainSample]) -> Sequence[Sequence[float]]:
        """Return the critic's value of the state before every completion token of every sample."""

    def train_critic(self, samples: Sequence[TrainSample], *, lr: float) -> CriticStats:
        """Run one optimizer step of the critic towards the samples' returns.

        Raises TrainingDiverged if the gradient is not finite, before any weight has changed.
        """

    def save(self, folder: Path) -> Callable[[], None]:
        """Return a function that writes model, optimizer and RNG, as they are now, durably into the empty folder.

        The function may run once in another thread, concurrently with later steps but not with another `save`'s
        function. The caller completes the checkpoint by renaming the folder. Both raise LocalError or OSError.
        """

    def load(self, folder: Path) -> None:
        """Restore bit-exactly the state at `save`, the optimizer's settings included."""

    @property
    def numerics(self) -> str:
        """Return the name of the arithmetic: the same name computes the same bits."""

    def commit(self, path: Path) -> CommittedTensors:
        """Write all that the next step depends on to a file of raw tensors, in order of their names, and hash its parts.

        Nothing changes. Raises LocalError if an optimizer's state is not made of tensors.
        """

    def restore(self, path: Path, tensors: Sequence[TrainingTensor]) -> None:
        """Restore bit-exactly the state of a file from `commit`; `new_optimizer` was called before. Raises LocalError."""


class TrainingDiverged(LocalError):
    """Loss or gradient is NaN or infinite. The weights are still those before the step."""
