"""The training engine: a model with its optimizer, on one device or on many; and what it is fed.

Letters: N completion tokens, one sequence's or many sequences' one after another.
"""

from __future__ import annotations

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
    """The accepted rollouts of one prompt, as the feed gives them: checked, with rewards by a validator.

    Example: Group(17, (72, 105), (completion, other), (1.0, 0.0), policy_versions=(3, 3), worker="12D3...").
    """

    slot: int
    prompt_token_ids: tuple[int, ...]
    completions: tuple[Completion, ...]
    rewards: tuple[float, ...]
    """One for each completion."""
    policy_versions: tuple[int, ...]
    """The policy that the staleness of each completion is counted from: the one leased, unless the schedule says otherwise."""
    worker: str
    """Key id of whoever sampled them."""
    environment: str = ""
    """The name, in the RunSpec, of what the prompt is a problem of."""
    masked: tuple[bool, ...] = ()
    """Completions that are too old to learn from; empty where none is. They count in the advantages."""
    turns: tuple[tuple[Turn, ...], ...] = ()
    """Of each rollout, whose completion is all of its answers then. Empty: each is one answer to the prompt."""
    policies_spanned: tuple[int, ...] = ()
    """From the policy of each completion's first token to that of its last; empty where none spans any."""


class TrainingMode(StrEnum):
    """What a sample teaches. One batch may hold several."""

    RL = "rl"
    """By its advantage: the loss that the settings name."""
    OPD = "opd"
    """By a teacher's logprobs of the student's own tokens: on-policy distillation."""
    SFT = "sft"
    """As a reference to imitate."""


class AggregationKind(StrEnum):
    """What a batch's loss is the mean of. verl's names are understood as well."""

    TOKEN_MEAN = "token_mean"
    """Every trained token counts the same: long completions weigh more."""
    SEQUENCE_MEAN = "sequence_mean"
    """Every completion counts the same: a token of a long one counts less."""
    CONSTANT_LENGTH = "constant_length"
    """Every token counts the same, in each batch, however many there are."""

    @classmethod
    def _missing_(cls, value: object) -> AggregationKind | None:
        return _VERL_NAMES.get(str(value))


_VERL_NAMES = {
    "token-mean": AggregationKind.TOKEN_MEAN,
    "seq-mean-token-mean": AggregationKind.SEQUENCE_MEAN,
    "seq-mean-token-sum-norm": AggregationKind.CONSTANT_LENGTH,
}


@dataclass(frozen=True, slots=True)
class TrainSample:
    """One sequence to train on. Example: TrainSample((1, 2), (3, 4), (-0.1, -0.2), advantage=0.5).

    What has one value for each completion token may be empty where the sample has none of it.
    """

    prompt_token_ids: tuple[int, ...]
    completion_token_ids: tuple[int, ...]
    inference_logprobs: tuple[float, ...]
    """Nats, of the policy that sampled each completion token; zeros where the mode needs none (sft)."""
    advantage: float
    mode: TrainingMode = TrainingMode.RL
    loss_mask: tuple[bool, ...] = ()
    """False on completion tokens that are not trained: what an environment said between two turns. Empty: all are trained."""
    teacher_logprobs: tuple[float, ...] = ()
    """Nats, of the teacher; mode `opd` needs them."""
    prox_logprobs: tuple[float, ...] = ()
    """Nats, of the proximal policy. Empty: it is the policy that the step begins with."""

    @property
    def num_trained(self) -> int:
        """Trainable tokens."""
        return sum(self.loss_mask) if self.loss_mask else len(self.completion_token_ids)


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """By default AdamW, as in Loshchilov and Hutter (arXiv 1711.05101). The learning rate comes with each step."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    grad_norm_max: float = 1.0
    """Gradients are scaled down to this global norm."""
    import_path: str | None = None
    """An optimizer of one's own, "package.module.Class"; then the AdamW settings above, but for the norm, are not used."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """What it takes beside the parameters."""


@dataclass(frozen=True, slots=True)
class StepStats:
    """What one optimizer step did."""

    loss: float
    grad_norm: float
    """Before clipping."""
    num_tokens: int
    """Trainable tokens of the whole batch."""
    log_ratio_abs: float
    """Mean over trainable tokens that were sampled of |trainer logprob - inference logprob|, nats, before the step."""
    metrics: Mapping[str, float]
    """Means over the trainable tokens that they concern, as the loss names them."""
    work: Mapping[str, float] = field(default_factory=dict)
    """How it was computed: packing, balance of the ranks, seconds of the phases, memory."""


class Loss(Protocol):
    """algo.losses.Objective, which is what a backend works with.

    A backend calls it once for each micro-batch of whole sequences, divides the result by `denominator` of the counts over all
    micro-batches and ranks, and calls backward. So gradients are summed over ranks, never averaged.
    """

    def __call__(self, inputs: Any) -> Any:
        """algo.losses.LossInputs -> algo.losses.LossSum: a scalar, and [2] (sum, number of tokens) of each metric."""
        ...

    def denominator(self, *, num_tokens: int, num_sequences: int) -> float:
        """Of the whole batch: its trainable tokens, and its sequences that have at least one."""
        ...


class PolicyCopy(Protocol):
    """One policy's weights as they are published, whole or in shards. They never change.

    For the publisher: methods are heavy and may run in another thread than the backend's, one at a time, beside later steps.
    """

    @property
    def raw_bytes(self) -> int:
        """Of all tensors."""
        ...

    def tensors(self) -> tuple[TensorEntry, ...]:
        """What a manifest says about them."""
        ...

    def encode(
        self, base: tuple[BasePolicy, Any] | None, *, keep: Callable[[PartEntry, bytearray], object]
    ) -> tuple[Encoding, bytes]:
        """Alone (an anchor), or against an older copy by the same backend (a delta), as prime_protocol.checkpoint.encode_parts.

        `keep` gets each part in order. Returns what a manifest says, and the index.
        """
        ...

    def drop(self) -> None:
        """It is needed no more. Idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Samples that `TrainBackend.pack` has divided among the ranks and packed, for one `train_step`."""

    shares: Sequence[Any]
    """The backend's own kind, one for each rank."""


class TrainBackend(Protocol):
    """Synchronous: it is called from the trainer's own thread, but for what says otherwise.

    Deterministic for a fixed seed, machine and number of threads and ranks.
    """

    def new_optimizer(self, settings: OptimizerSettings) -> None:
        """Forget the optimizer's state and begin with a fresh one: a new phase of training."""
        ...

    def pack(self, samples: Sequence[TrainSample]) -> PackedBatch:
        """Ahead of its step and from any thread: it touches no weights. Raises LocalError where a sample is too long."""
        ...

    def train_step(self, samples: Sequence[TrainSample] | PackedBatch, loss: Loss, *, lr: float) -> StepStats:
        """Forward, backward and one optimizer step on all samples of the batch, divided as the loss says.

        Without trainable tokens nothing changes. Raises TrainingDiverged where the gradient is not finite, before any weight has
        changed.
        """
        ...

    def logprobs(self, samples: Sequence[TrainSample]) -> list[list[float]]:
        """Nats of every completion token of every sample, as `train_step` sees them."""
        ...

    def keep_proximal(self) -> None:
        """Remember the weights at hand as those of the proximal policy, instead of any before."""
        ...

    def proximal_logprobs(self, samples: Sequence[TrainSample]) -> Sequence[Sequence[float]]:
        """Nats of every completion token of every sample under the weights that were kept. The weights at hand stay."""
        ...

    def snapshot(self) -> Weights:
        """The weights as they are published (bf16 by default), copied and whole: for an evaluation on this machine.

        On several ranks the first one alone has them; the others get none.
        """
        ...

    def copy(self) -> PolicyCopy:
        """The same for the publisher, left where they are: each rank copies its shard, and nothing else, before it returns."""
        ...

    def copy_of(self, weights: Weights) -> PolicyCopy:
        """An older policy's copy, of the same tensors, as if `copy` had been called then: each rank gets its rows, once."""
        ...

    def save(self, folder: Path) -> Callable[[], None]:
        """Copy model, optimizer and RNG; returns what writes the copy into the empty folder, durably.

        That may run in another thread, once, beside later steps, and not beside that of another `save`. The caller makes the
        checkpoint whole by renaming the folder. Both raise LocalError or OSError.
        """
        ...

    def load(self, folder: Path) -> None:
        """Continue bit-exactly where `save` was called, the optimizer's settings included."""
        ...


class TrainingDiverged(LocalError):
    """Loss or gradient is NaN or infinite. The weights are still those of before the step."""
