"""Settings of the curriculum: which problems are drawn how often, and which groups reach the trainer."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from prime_node.coordinator.state.curriculum import Curriculum, Example, Pool

UNSEEN_WEIGHT = 1.0
"""Weight of a problem without a result, as in prime-rl."""


class DifficultyPool(BaseModel):
    """Pool of a sampler: problems up to a mean reward, and how often they are drawn."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    threshold: float = Field(allow_inf_nan=False)
    """Largest mean reward of a problem's last group in this pool. The pool with the largest threshold takes what is above too."""
    weight: float = Field(ge=0.0, allow_inf_nan=False)
    """Chance of a problem relative to one without a result, whose weight is 1."""


_POOLS = {
    "hard": DifficultyPool(threshold=0.25, weight=0.2),
    "normal": DifficultyPool(threshold=0.75, weight=1.0),
    "easy": DifficultyPool(threshold=1.0, weight=0.2),
}


class TaskSampler(BaseModel):
    """How problems are drawn, with prime-rl's names."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: Literal["standard", "difficulty_pool"] = "standard"
    """`standard`: all problems alike. `difficulty_pool`: by the weight of the pool of a problem's last group."""
    pools: dict[str, DifficultyPool] = Field(default_factory=dict)
    """Pools by name, in any order, for `difficulty_pool`. Empty: those of prime-rl, hard up to 0.25 (weight 0.2), normal up to
    0.75 (weight 1) and easy (weight 0.2)."""

    @model_validator(mode="before")
    @classmethod
    def _has_no_seed(cls, data: Any) -> Any:
        if isinstance(data, dict) and "seed" in data:
            raise ValueError("seed: the assignment secret of the coordinator determines the draws; leave it out")
        return data

    @model_validator(mode="after")
    def _makes_sense(self) -> TaskSampler:
        if self.type == "standard" and self.pools:
            raise ValueError('pools need the type "difficulty_pool"')
        if len({pool.threshold for pool in self.pools.values()}) != len(self.pools):
            raise ValueError("each pool needs another threshold")
        if not any(pool.weight > 0.0 for pool in self.upwards.values()):
            raise ValueError("at least one pool needs a weight above 0")
        return self

    @cached_property
    def upwards(self) -> dict[str, DifficultyPool]:
        """Pools by name, the one with the smallest threshold first."""
        return dict(sorted((self.pools or _POOLS).items(), key=lambda item: item[1].threshold))

    @property
    def weight_max(self) -> float:
        """Largest weight of any problem."""
        return max(UNSEEN_WEIGHT, *(pool.weight for pool in self.upwards.values()))

    def name_of(self, reward_mean: float) -> str:
        """Return the name of the pool of a problem by its last group's mean reward."""
        return next((name for name, pool in self.upwards.items() if reward_mean <= pool.threshold), [*self.upwards][-1])


class AdvantageRangeGate(BaseModel):
    """Gate for groups whose advantages, rewards less their mean, are all in a range: they do not reach the trainer (prime-rl)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: Literal["advantage_range"] = "advantage_range"
    """Kind of the gate."""
    reject_min: float = 0.0
    """Smallest advantage of the range."""
    reject_max: float = 0.0
    """Largest advantage of the range. 0 to 0 rejects groups of equal rewards."""

    @model_validator(mode="after")
    def _ordered(self) -> AdvantageRangeGate:
        if self.reject_min > self.reject_max:
            raise ValueError("reject_min must not be above reject_max")
        return self

    def admits(self, rewards: Sequence[float]) -> bool:
        """Return whether any advantage is outside of the range. The advantages of equal rewards are exactly 0."""
        mean = rewards[0] if len(set(rewards)) == 1 else statistics.fmean(rewards)
        return not all(self.reject_min <= reward - mean <= self.reject_max for reward in rewards)


class CurriculumConfig(BaseModel):
    """Selection of problems. Without thresholds and filtering, all problems are used."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    easy_threshold: float | None = Field(default=None, ge=0.0, le=1.0)
    """Mean reward of a group at or above which its problem is not asked again."""
    hard_threshold: float | None = Field(default=None, ge=0.0, le=1.0)
    """Mean reward of a group at or below which its problem is not asked again."""
    easy_fraction: float = Field(default=0.0, ge=0.0, le=1.0)
    """Share of the easy pool, drawn at random, that returns to use at each start of the coordinator."""
    hard_fraction: float = Field(default=0.0, ge=0.0, le=1.0)
    """The same share of the hard pool."""
    online_difficulty_filtering: bool = False
    """Whether to drop groups whose rewards are all 0 or all 1, and to sample another problem instead."""
    sampler: TaskSampler = TaskSampler()
    """How problems are drawn."""
    gates: dict[str, AdvantageRangeGate] = Field(default_factory=dict)
    """Gates by name; a group that any of them rejects is dropped too."""
    oversampling_factor: float = Field(default=2.0, ge=1.0)
    """Maximum of the groups generated for a step, as a multiple of those that it trains on. Beyond it, no group is dropped."""

    @model_validator(mode="after")
    def _ordered(self) -> CurriculumConfig:
        low, high = self.hard_threshold, self.easy_threshold
        if low is not None and high is not None and low >= high:
            raise ValueError("hard_threshold must be below easy_threshold")
        if self.is_weighted and (low, high) != (None, None):
            raise ValueError(
                "easy_threshold and hard_threshold draw no pooled problem, the sampler difficulty_pool draws it less often; "
                "choose one, with a weight of 0 where no problem of a pool is drawn"
            )
        return self

    @property
    def is_on(self) -> bool:
        """Whether any selection of problems is on."""
        thresholds = (self.easy_threshold, self.hard_threshold)
        return self.online_difficulty_filtering or bool(self.gates) or self.is_weighted or thresholds != (None, None)

    @property
    def is_weighted(self) -> bool:
        """Whether problems are drawn by the weights of pools."""
        return self.sampler.type == "difficulty_pool"

    def pool_of(self, reward_mean: float) -> Pool:
        """Return the pool of a problem by its group's mean reward."""
        if self.easy_threshold is not None and reward_mean >= self.easy_threshold:
            return Pool.EASY
        if self.hard_threshold is not None and reward_mean <= self.hard_threshold:
            return Pool.HARD
        return Pool.NORMAL

    def weight_of(self, known: Example | None) -> float:
        """Return the weight with which a problem is drawn. `known` is its last result."""
        if known is None:
            return UNSEEN_WEIGHT
        if self.is_weighted:
            return self.sampler.upwards[self.sampler.name_of(known.reward_mean)].weight
        return UNSEEN_WEIGHT if known.pool is Pool.NORMAL else 0.0

    def shares(self, curriculum: Curriculum) -> dict[str, float]:
        """Return the share of known problems in each pool, as `pool/ENVIRONMENT/POOL`."""
        if self.is_weighted:
            return curriculum.shares(tuple(self.sampler.upwards), lambda known: self.sampler.name_of(known.reward_mean))
        return curriculum.shares(tuple(Pool), lambda known: known.pool)

    def filtered_as(self, rewards: Sequence[float]) -> Pool | None:
        """Return the pool for which a group with these rewards is dropped; None if it is kept."""
        mean = statistics.fmean(rewards)
        is_extreme = not 0.0 < mean < 1.0
        is_rejected = any(not gate.admits(rewards) for gate in self.gates.values())
        if not is_rejected and not (self.online_difficulty_filtering and is_extreme):
            return None
        if is_extreme:
            return Pool.HARD if mean <= 0.0 else Pool.EASY
        return self.pool_of(mean)
