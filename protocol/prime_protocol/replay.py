"""What a RunSpec promises to those who re-execute its training. SPEC.md, section 25."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from prime_protocol import limits
from prime_protocol.digest import Digest
from prime_protocol.envelope import WireModel


class BundleAccess(StrEnum):
    """Who may read the bundles that were trained on."""

    PUBLIC = "public"
    """Anyone: each is a public blob."""
    AUDITORS = "auditors"
    """Auditor keys of the run, by signed requests. Without such a key, no one but the run's own roles."""

    @classmethod
    def _missing_(cls, value: object) -> BundleAccess | None:
        """Read "none", which runs have that were made before auditors could be named."""
        return cls.AUDITORS if value == "none" else None


class ReplayPolicy(WireModel):
    """Promise that training steps can be re-executed. Example: ReplayPolicy(recipe="af13...", state_every=10)."""

    recipe: Digest
    """Digest of the recipe, a public blob: the trainer's settings that its weights depend on, and digests of its own code."""
    state_every: int = Field(default=10, ge=1, le=limits.STEP_MAX)
    """k: the trainer commits to its whole training state at each policy whose version k divides, and publishes the state."""
    state_days: float = Field(default=7.0, gt=0.0, le=limits.REPLAY_DAYS_MAX)
    """Days for which published training states are kept."""
    bundle_days: float = Field(default=7.0, gt=0.0, le=limits.REPLAY_DAYS_MAX)
    """Days for which bundles are kept for their readers."""
    bundles: BundleAccess = BundleAccess.PUBLIC
    """Who may read the bundles."""
    bytes_max: int = Field(default=0, ge=0, le=limits.COUNT_MAX, exclude_if=lambda value: value == 0)
    """Bytes of these bundles and training states above which those of the oldest policies go before their days are over. 0: no
    such bound. The newest training state stays, and what a re-execution from it on needs."""
