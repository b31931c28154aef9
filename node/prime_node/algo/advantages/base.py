"""Inputs and outputs of an advantage: one group of rollouts, of any size. Groups may have lost some of theirs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from prime_node.algo.trajectories import interleave
from prime_node.ports.train_samples import Group
from prime_protocol.rollout import FinishReason


@dataclass(frozen=True, slots=True)
class RolloutView(Mapping[str, Any]):
    """One rollout, as attributes or by names as in verifiers: `r.reward` is `r["reward"]`.

    Example: RolloutView(reward=1.0, completion_ids=(7, 8), completion_logprobs=(-0.1, -0.2)).
    """

    reward: float
    completion_ids: tuple[int, ...] = ()
    completion_logprobs: tuple[float, ...] = ()
    """Logprobs (nats) under the policy that sampled."""
    prompt_ids: tuple[int, ...] = ()
    is_truncated: bool = False
    """Whether it ended at the length limit."""
    num_turns: int = 1
    """Requests to the model."""
    tool_response_len: int = 0
    """Tokens of the environment between the turns."""
    environment: str = ""
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    """Further rewards by name, for an advantage that asks for them."""

    @property
    def completion_len(self) -> int:
        """Return the number of tokens that the model sampled."""
        return len(self.completion_ids)

    def __getitem__(self, name: str) -> Any:
        if name not in _NAMES:
            raise KeyError(f"a rollout has no {name!r}; it has {', '.join(_NAMES)}")
        return getattr(self, name)

    def __iter__(self) -> Iterator[str]:
        return iter(_NAMES)

    def __len__(self) -> int:
        return len(_NAMES)


_NAMES = (*(each.name for each in fields(RolloutView)), "completion_len")


@dataclass(frozen=True, slots=True)
class AdvantageInputs:
    """One group. Example: AdvantageInputs((RolloutView(1.0), RolloutView(0.0)))."""

    rollouts: tuple[RolloutView, ...]
    greedy_reward: float | None = None
    """Reward of a greedy completion of the same prompt, if the advantage needs it and it could be scored."""

    @property
    def rewards(self) -> tuple[float, ...]:
        """Return the rewards, in the order of the rollouts."""
        return tuple(rollout.reward for rollout in self.rollouts)

    @property
    def is_flat(self) -> bool:
        """Return whether all rewards are equal, so that no rollout is preferred."""
        return len(set(self.rewards)) < 2

    def with_rewards(self, rewards: Sequence[float]) -> AdvantageInputs:
        """Return the same group with other rewards."""
        rollouts = tuple(
            replace(rollout, reward=reward) for rollout, reward in zip(self.rollouts, rewards, strict=True)
        )
        return replace(self, rollouts=rollouts)


@dataclass(frozen=True, slots=True)
class AdvantageOutputs:
    """One advantage for each rollout, in order. Example: AdvantageOutputs([0.5, -0.5])."""

    advantages: Sequence[float]


AdvantageFunction = Callable[..., AdvantageOutputs]
"""(AdvantageInputs, **settings) -> AdvantageOutputs."""


def inputs_of(group: Group) -> AdvantageInputs:
    """Return the advantage's view of a group."""
    turns = group.turns or [()] * len(group.completions)
    parts: Sequence[Mapping[str, float]] = group.reward_parts or [{}] * len(group.completions)
    return AdvantageInputs(
        tuple(
            RolloutView(
                reward=reward,
                completion_ids=completion.token_ids,
                completion_logprobs=completion.logprobs,
                prompt_ids=group.prompt_token_ids,
                is_truncated=completion.finish is FinishReason.LENGTH,
                num_turns=len(its) or 1,
                tool_response_len=sum(not trained for sample in interleave(its) for trained in sample.loss_mask),
                environment=group.environment,
                reward_parts=more,
            )
            for completion, reward, its, more in zip(group.completions, group.rewards, turns, parts, strict=True)
        ),
        greedy_reward=group.greedy_reward,
    )
