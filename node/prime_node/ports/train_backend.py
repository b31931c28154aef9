"""The training engine: a model with its optimizer, on one device or on many.

Letters: B sequences, T tokens of a packed row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from prime_protocol.weights import Weights


@dataclass(frozen=True, slots=True)
class TrainSample:
    """One sequence to train on. Example: TrainSample((1, 2), (3, 4), (-0.1, -0.2), advantage=0.5)."""

    prompt_token_ids: tuple[int, ...]
    completion_token_ids: tuple[int, ...]
    inference_logprobs: tuple[float, ...]
    """Nats, of the policy that sampled each completion token; zeros where the mode needs none (sft)."""
    advantage: float


@dataclass(frozen=True, slots=True)
class StepStats:
    """What one optimizer step did."""

    loss: float
    grad_norm: float
    """Before clipping."""
    num_tokens: int
    """Trainable tokens of the whole batch."""
    metrics: Mapping[str, float]
    """Means over trainable tokens, as the loss names them."""


Loss = Callable[..., Any]
"""algo.losses: see there."""


class TrainBackend(Protocol):
    """Synchronous: it is called from the trainer's own thread. Deterministic for a fixed seed, machine and number of threads."""

    def train_step(self, samples: Sequence[TrainSample], loss: Loss, *, lr: float) -> StepStats:
        """Forward, backward and one optimizer step. The loss is divided by the batch's total of trainable tokens."""
        ...

    def snapshot(self) -> Weights:
        """The weights as they are published (bf16 by default), copied: later steps do not change them."""
        ...

    def save(self, folder: Path) -> None:
        """Model, optimizer and RNG into an empty folder. The caller makes it durable by renaming it."""
        ...

    def load(self, folder: Path) -> None:
        """Continue bit-exactly where `save` was called."""
        ...
