"""From a step's groups to what is trained, and to what is logged. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prime_node.algo.advantages import Advantage, AdvantageInputs
from prime_node.algo.filters import Filter, FilterInputs, flags
from prime_node.ports.train_backend import Group, TrainSample
from prime_protocol import step as step_rule
from prime_protocol.rollout import FinishReason


@dataclass(frozen=True, slots=True)
class Prepared:
    """The samples of one step, and numbers over all of its rollouts, those that were filtered out included."""

    samples: tuple[TrainSample, ...]
    metrics: Mapping[str, float]


def prepare(groups: Sequence[Group], *, step: int, advantage: Advantage, filters: Mapping[str, Filter]) -> Prepared:
    """Advantages inside each group, then the filters; the order of the rollouts stays."""
    samples: list[TrainSample] = []
    filtered: Counter[str] = Counter(dict.fromkeys(filters, 0))
    num_flat = 0
    for group in groups:
        lengths = tuple(len(completion.token_ids) for completion in group.completions)
        advantages = tuple(advantage(AdvantageInputs(group.rewards, lengths)))
        num_flat += len(set(group.rewards)) < 2
        reasons = flags(filters, FilterInputs(group, advantages))
        for completion, value, reason in zip(group.completions, advantages, reasons, strict=True):
            if reason is not None:
                filtered[reason] += 1
                continue
            samples.append(TrainSample(group.prompt_token_ids, completion.token_ids, completion.logprobs, value))
    return Prepared(tuple(samples), _metrics(groups, step) | {"num_flat_groups": num_flat} | _named(filtered))


def _metrics(groups: Sequence[Group], step: int) -> dict[str, float]:
    rewards = [reward for group in groups for reward in group.rewards]
    completions = [completion for group in groups for completion in group.completions]
    lags = [step_rule.lag(step, version) for group in groups for version in group.policy_versions]
    return {
        "num_groups": len(groups),
        "num_rollouts": len(rewards),
        "num_workers": len({group.worker for group in groups}),
        "reward_mean": sum(rewards) / len(rewards),
        "completion_tokens_mean": sum(len(completion.token_ids) for completion in completions) / len(completions),
        "finished_share": sum(c.finish is FinishReason.STOP for c in completions) / len(completions),
        "lag_mean": sum(lags) / len(lags),
        "lag_max": max(lags),
    }


def _named(filtered: Mapping[str, int]) -> dict[str, float]:
    return {f"filtered_{name}": count for name, count in filtered.items()}
