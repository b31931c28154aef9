"""The trainer's state besides weights and optimizer, for an exact resumption.

It holds the whole data position: the coordinator gives the same batch for the same step, and the order of the
supervised problems is a function of seed and step.
"""

from __future__ import annotations

from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field

from prime_protocol.digest import Digest


class Phase(StrEnum):
    """Phase of the next step."""

    SFT = "sft"
    """Supervised training, on the environments' own answers."""
    RL = "rl"
    """Reinforcement learning on accepted rollouts."""


class TrainerState(BaseModel):
    """The trainer's state.

    Example: TrainerState(run=..., phase=Phase.RL, step=3, sft_step=140, optimizer_steps=143) holds policy 3.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    run: Digest
    phase: Phase = Phase.SFT
    step: int = Field(default=0, ge=0)
    """Next step to train, which is also the version of the current policy."""
    sft_step: int = Field(default=0, ge=0)
    """Supervised steps done."""
    optimizer_steps: int = Field(default=0, ge=0)
    """Number of optimizer steps done, for the manifest's provenance. A step whose rollouts were all filtered out takes none."""
    critic_steps: int = Field(default=0, ge=0)
    """Number of optimizer steps of the critic."""
    critic_since: int | None = Field(default=None, ge=0)
    """Step at which the critic began; None without a critic."""
    stale_groups: int = Field(default=0, ge=0)
    """Groups trained on so far with a completion of an older policy than their step's."""
    stale_rollouts: int = Field(default=0, ge=0)
    """Completions trained on so far of an older policy than their step's."""
    lr_multiplier: float = Field(default=1.0, gt=0.0, le=1.0)
    """Multiplier of the damping."""
    lr: float | None = Field(default=None, ge=0.0)
    """Learning rate of the last optimizer step; None before the first step of the reinforcement learning."""
    kl_coef: float | None = Field(default=None, ge=0.0)
    """Coefficient of the divergence in the reward; None before the first step that has one."""
    reference_step: int | None = Field(default=None, ge=0)
    """Version of the reference policy; None if none is kept."""
    batch: Digest | None = None
    """Batch that made the current policy; None for policy 0."""

    def updated(self, **changes: object) -> TrainerState:
        """Return a copy with these fields changed."""
        return self.model_copy(update=changes)
