"""What the trainer must remember beside weights and optimizer to go on as if nothing had happened.

The data position is all here: the coordinator gives the same batch for the same step, and the order of the supervised
problems is a function of seed and step.
"""

from __future__ import annotations

from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field

from prime_protocol.digest import Digest


class Phase(StrEnum):
    """What the next step is."""

    SFT = "sft"
    """Supervised, on the environments' own answers."""
    RL = "rl"
    """Reinforcement learning on accepted rollouts."""


class TrainerState(BaseModel):
    """Example: TrainerState(run=..., phase=Phase.RL, step=3, sft_step=140, optimizer_steps=143) holds policy 3."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    run: Digest
    phase: Phase = Phase.SFT
    step: int = Field(default=0, ge=0)
    """The next step to train, which is the version of the policy at hand."""
    sft_step: int = Field(default=0, ge=0)
    """Supervised steps done."""
    optimizer_steps: int = Field(default=0, ge=0)
    """All optimizer steps done, for the manifest's provenance. A step whose rollouts all fell out takes none."""
    stale_groups: int = Field(default=0, ge=0)
    """Groups trained on so far that an older policy than their step's had begun."""
    stale_rollouts: int = Field(default=0, ge=0)
    """Completions likewise."""
    lr_multiplier: float = Field(default=1.0, gt=0.0, le=1.0)
    """Of the damping."""
    batch: Digest | None = None
    """The batch that made the policy at hand; None for policy 0."""

    def updated(self, **changes: object) -> TrainerState:
        return self.model_copy(update=changes)
