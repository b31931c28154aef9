"""The training engine: a model with its optimizer, on one device or on many; and what it is fed.

Letters: N completion tokens, one sequence's or many sequences' one after another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from prime_protocol.errors import LocalError
from prime_protocol.rollout import Completion
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
    """The oldest policy that sampled a token of each completion."""
    worker: str
    """Key id of whoever sampled them."""


@dataclass(frozen=True, slots=True)
class TrainSample:
    """One sequence to train on. Example: TrainSample((1, 2), (3, 4), (-0.1, -0.2), advantage=0.5)."""

    prompt_token_ids: tuple[int, ...]
    completion_token_ids: tuple[int, ...]
    inference_logprobs: tuple[float, ...]
    """Nats, of the policy that sampled each completion token; zeros where the mode needs none (sft)."""
    advantage: float


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """AdamW, as in Loshchilov and Hutter (arXiv 1711.05101). The learning rate comes with each step."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    grad_norm_max: float = 1.0
    """Gradients are scaled down to this global norm."""


@dataclass(frozen=True, slots=True)
class StepStats:
    """What one optimizer step did."""

    loss: float
    grad_norm: float
    """Before clipping."""
    num_tokens: int
    """Trainable tokens of the whole batch."""
    log_ratio_abs: float
    """Mean over trainable tokens of |trainer logprob - inference logprob|, nats, before the step."""
    metrics: Mapping[str, float]
    """Means over trainable tokens, as the loss names them."""


class Loss(Protocol):
    """One of algo.losses: sums a loss over trainable tokens."""

    @property
    def token_wise(self) -> bool:
        """True where each token's loss depends on that token alone: then one call may take many sequences at once."""
        ...

    def __call__(self, inputs: Any) -> Any:
        """algo.losses.LossInputs -> algo.losses.LossOutputs."""
        ...


class TrainBackend(Protocol):
    """Synchronous: it is called from the trainer's own thread. Deterministic for a fixed seed, machine and number of threads."""

    def new_optimizer(self, settings: OptimizerSettings) -> None:
        """Forget the optimizer's state and begin with a fresh one: a new phase of training."""
        ...

    def train_step(self, samples: Sequence[TrainSample], loss: Loss, *, lr: float) -> StepStats:
        """Forward, backward and one optimizer step. The loss is divided by the batch's total of trainable tokens.

        Without samples nothing changes. Raises TrainingDiverged, before any weight has changed, where the gradient is not finite.
        """
        ...

    def snapshot(self) -> Weights:
        """The weights as they are published (bf16 by default), copied: later steps do not change them."""
        ...

    def save(self, folder: Path) -> None:
        """Model, optimizer and RNG into an empty folder. The caller makes it durable by renaming it."""
        ...

    def load(self, folder: Path) -> None:
        """Continue bit-exactly where `save` was called, the optimizer's settings included."""
        ...


class TrainingDiverged(LocalError):
    """Loss or gradient is NaN or infinite. The weights are still those of before the step."""
