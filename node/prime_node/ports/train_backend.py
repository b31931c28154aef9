"""The training engine: a model with its optimizer, on one or many devices, and its inputs.

Letters: N completion tokens, of one sequence or of many sequences concatenated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from prime_protocol.errors import LocalError
from prime_protocol.manifest import BasePolicy, Encoding, PartEntry, TensorEntry
from prime_protocol.rollout import Completion
from prime_protocol.turns import Turn
from prime_protocol.weights import Weights


@dataclass(frozen=True, slots=True)
class Group:
    """The accepted rollouts of one prompt, as the feed delivers them: verified, with a validator's rewards.

    Example: Group(17, (72, 105), (completion, other), (1.0, 0.0), policy_versions=(3, 3), worker="12D3...").
    """

    slot: int
    prompt_token_ids: tuple[int, ...]
    completions: tuple[Completion, ...]
    rewards: tuple[float, ...]
    """Rewards, one for each completion."""
    policy_versions: tuple[int, ...]
    """Policy from which each completion's staleness counts: the leased one, unless the schedule says otherwise."""
    worker: str
    """Key id of the worker that sampled them."""
    environment: str = ""
    """Name, in the RunSpec, of the prompt's environment."""
    masked: tuple[bool, ...] = ()
    """Completions that are too old to train on; empty if none is. They count in the advantages."""
    turns: tuple[tuple[Turn, ...], ...] = ()
    """Turns of each rollout, whose completion is then the concatenation of its answers. Empty: each rollout is one
    answer to the prompt."""
    claimed: bool = False
    """Whether the logprobs are the worker's claim; otherwise a validator computed them."""
    policies_spanned: tuple[int, ...] = ()
    """Policy versions between each completion's first and last token, 0 if one sampled it; empty if none spans any."""


class TrainingMode(StrEnum):
    """Training signal of a sample. One batch may mix modes."""

    RL = "rl"
    """Reinforcement learning: the advantage, by the loss that the settings name."""
    OPD = "opd"
    """On-policy distillation: a teacher's logprobs of the student's own tokens."""
    SFT = "sft"
    """Supervised fine-tuning: a reference to imitate."""


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


class LossNeed(StrEnum):
    """Value of a token that a loss asks for, and that is computed only then."""

    REFERENCE_LOGPROBS = "reference_logprobs"
    """Logprobs under the reference policy: one more forward pass."""
    ENTROPY = "entropy"
    """Entropy of the trained policy, with its gradient."""


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
class TrainSample:
    """One sequence to train on. Example: TrainSample((1, 2), (3, 4), (-0.1, -0.2), advantage=0.5).

    Per-token fields may be empty if the sample does not use them.
    """

    prompt_token_ids: tuple[int, ...]
    completion_token_ids: tuple[int, ...]
    inference_logprobs: tuple[float, ...]
    """Logprobs (nats) of each completion token under the policy that sampled it; zeros if the mode needs none (sft)."""
    advantage: float
    mode: TrainingMode = TrainingMode.RL
    loss_mask: tuple[bool, ...] = ()
    """Mask, False on completion tokens that are not trained, such as an environment's text between two turns. Empty:
    all are trained."""
    teacher_logprobs: tuple[float, ...] = ()
    """Logprobs (nats) under the teacher; mode `opd` needs them."""
    prox_logprobs: tuple[float, ...] = ()
    """Logprobs (nats) under the proximal policy. Empty: that is the policy at the start of the step."""
    reference_logprobs: tuple[float, ...] = ()
    """Logprobs (nats) under the reference policy, for a loss that needs them."""
    prompt_weight: float = 1.0
    """Factor of the aggregation prompt_mean: trainable tokens of the batch / (its prompts x those of this prompt)."""
    claim_nats_max: float = math.inf
    """Distance (nats) of `inference_logprobs` from the trainer's beyond which a token is not trained. Infinite unless
    they are a worker's claim."""

    @property
    def num_trained(self) -> int:
        """Return the number of trainable tokens."""
        return sum(self.loss_mask) if self.loss_mask else len(self.completion_token_ids)


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
        ...

    def __call__(self, inputs: Any) -> Any:
        """Map algo.losses.LossInputs to algo.losses.LossSum: a scalar, and [2] (sum, number of tokens) of each metric."""
        ...

    def denominator(self, *, num_tokens: int, num_sequences: int) -> float:
        """Return the divisor for the whole batch, from its trainable tokens and its sequences with at least one."""
        ...


class PolicyCopy(Protocol):
    """One policy's weights for publication, whole or in shards. They never change.

    For the publisher: methods are heavy and may run in another thread than the backend's, one at a time, concurrently
    with later steps.
    """

    @property
    def raw_bytes(self) -> int:
        """Return the bytes of all tensors."""
        ...

    def tensors(self) -> tuple[TensorEntry, ...]:
        """Return the manifest's entries for the tensors."""
        ...

    def encode(
        self, base: tuple[BasePolicy, Any] | None, *, keep: Callable[[PartEntry, bytearray], object]
    ) -> tuple[Encoding, bytes]:
        """Encode alone (an anchor), or against an older copy by the same backend (a delta).

        Works as prime_protocol.checkpoint.encode_parts. `keep` gets each part in order. Returns the manifest's
        encoding, and the index.
        """
        ...

    def drop(self) -> None:
        """Release the copy. Idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Samples that `TrainBackend.pack` has divided among the ranks and packed, for one `train_step`."""

    shares: Sequence[Any]
    """Shares in the backend's own format, one for each rank."""


class TrainBackend(Protocol):
    """A synchronous training engine.

    It is called from the trainer's own thread, unless a method says otherwise. Deterministic for a fixed seed, machine
    and number of threads and ranks.
    """

    @property
    def sequence_tokens_max(self) -> int:
        """Tokens of the longest sequence that the model can compute."""
        ...

    def new_optimizer(self, settings: OptimizerSettings) -> None:
        """Discard the optimizer's state and start with a fresh one: a new phase of training."""
        ...

    def pack(self, samples: Sequence[TrainSample]) -> PackedBatch:
        """Divide and pack samples ahead of their step, from any thread: it touches no weights.

        Raises LocalError if a sample is too long.
        """
        ...

    def train_step(self, samples: Sequence[TrainSample] | PackedBatch, loss: Loss, *, lr: float) -> StepStats:
        """Run forward, backward and one optimizer step on all samples, normalized as the loss says.

        Without trainable tokens nothing changes. Raises TrainingDiverged if the gradient is not finite, before any
        weight has changed.
        """
        ...

    def logprobs(self, samples: Sequence[TrainSample]) -> list[list[float]]:
        """Return the logprobs (nats) of every completion token of every sample, as `train_step` computes them."""
        ...

    def keep_policy(self, which: KeptPolicy) -> None:
        """Keep the current policy, replacing the one kept before. Checkpoints contain the reference policy."""
        ...

    def kept_logprobs(self, samples: Sequence[TrainSample], which: KeptPolicy) -> Sequence[Sequence[float]]:
        """Return the logprobs (nats) of every completion token under the kept policy. The current weights stay."""
        ...

    def snapshot(self) -> Weights:
        """Return a whole copy of the weights as published (bf16 by default), for an evaluation on this machine.

        With several ranks only the first one gets it; the others get an empty result.
        """
        ...

    def copy(self) -> PolicyCopy:
        """Return a copy for the publisher, in place: each rank copies only its shard before this returns."""
        ...

    def copy_of(self, weights: Weights) -> PolicyCopy:
        """Return an older policy's copy, of the same tensors, as if `copy` had been called then.

        Each rank gets its rows once.
        """
        ...

    def save(self, folder: Path) -> Callable[[], None]:
        """Return a function that writes model, optimizer and RNG, as they are now, durably into the empty folder.

        The function may run once in another thread, concurrently with later steps but not with another `save`'s
        function. The caller completes the checkpoint by renaming the folder. Both raise LocalError or OSError.
        """
        ...

    def load(self, folder: Path) -> None:
        """Restore bit-exactly the state at `save`, the optimizer's settings included."""
        ...


class TrainingDiverged(LocalError):
    """Loss or gradient is NaN or infinite. The weights are still those before the step."""
