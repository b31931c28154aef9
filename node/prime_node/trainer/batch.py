"""From a step's groups to its training samples and metrics. Pure but for the log, so it runs ahead of the step."""

from __future__ import annotations

import logging
import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from prime_node.algo.filters import FilterInputs, flags
from prime_node.algo.trajectories import interleave
from prime_node.ports.train_backend import AggregationKind, PackedBatch, TrainBackend
from prime_node.ports.train_samples import Group, TrainingMode, TrainSample
from prime_node.trainer.credit import (
    Rollouts,
    TokenValues,
    no_costs,
    rollout_advantages,
    spread_over,
    token_advantages,
    token_returns,
    whitened_over_batch,
)
from prime_node.trainer.recipe import ProximalPolicy, Recipe
from prime_node.training_data.feed import StepBatch
from prime_protocol import step as step_rule
from prime_protocol.rollout import FinishReason

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Prepared:
    """The samples of one step, and metrics over all of its rollouts, filtered ones included."""

    samples: tuple[TrainSample, ...]
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """Input of one optimizer step."""

    groups: Sequence[Group]
    rollouts: Rollouts
    """Their samples before advantages and filters."""
    prepared: Prepared | None
    """None if the advantages need values that only the trainer's weights give."""
    packed: PackedBatch | None
    """Packed samples; None if they still lack logprobs of another policy."""


@dataclass(frozen=True, slots=True)
class ReadyBatch:
    """A batch that was prepared ahead of its step."""

    minis: tuple[MiniBatch, ...]
    seconds: float
    """Seconds for the preparation, in parallel to an earlier step if there was one."""


def ready_batch(
    batch: StepBatch,
    recipe: Recipe,
    backend: TrainBackend,
    *,
    minis: int,
    now_s: Callable[[], float],
    hint_of: Callable[[Group], tuple[int, ...]] = lambda group: (),
) -> ReadyBatch:
    """Prepare a batch as far as possible without the weights, in a thread, while an earlier step trains.

    A batch that has lost groups still gives at most `minis` mini-batches; one without groups gives an empty one. Samples that
    are longer than the model's positions are left out, with a warning. `hint_of` returns the prompt under which the policy
    teaches itself a group. Raises LocalError.
    """
    began_s, made = now_s(), []
    size = max(1, math.ceil(len(batch.groups) / minis))
    for start in range(0, max(1, len(batch.groups)), size):
        groups = batch.groups[start : start + size]
        rollouts = _fitting(samples_of(groups, recipe, hint_of), backend.sequence_tokens_max, step=batch.step)
        if recipe.credits_by_weights:
            made.append(MiniBatch(groups, rollouts, None, None))
            continue
        prepared = prepare(groups, recipe, step=batch.step, rollouts=rollouts)
        is_whole = (
            recipe.proximal is ProximalPolicy.CURRENT and not recipe.needs_reference and not recipe.looks_at_tokens
        )
        is_whole = is_whole and not any(sample.mode in _TAUGHT for sample in prepared.samples)
        made.append(MiniBatch(groups, rollouts, prepared, backend.pack(prepared.samples) if is_whole else None))
    return ReadyBatch(tuple(made), now_s() - began_s)


def _fitting(rollouts: Rollouts, tokens_max: int, *, step: int) -> Rollouts:
    """Leave out samples that the model cannot compute: workers decide how long they are, within the run's limits."""

    def fits(one: TrainSample) -> bool:
        return len(one.prompt_token_ids) + len(one.completion_token_ids) <= tokens_max

    every = [sample for completions in rollouts for samples in completions for sample in samples]
    if left_out := sum(not fits(sample) for sample in every):
        log.warning("step %d: %d samples are longer than the model's %d positions", step, left_out, tokens_max)
    return [[tuple(filter(fits, samples)) for samples in completions] for completions in rollouts]


_TAUGHT = (TrainingMode.OPD, TrainingMode.OPSD)


def samples_of(
    groups: Sequence[Group], recipe: Recipe, hint_of: Callable[[Group], tuple[int, ...]] = lambda group: ()
) -> list[list[list[TrainSample]]]:
    """Return the samples of each completion of each group, without advantages."""
    found = []
    for group in groups:
        mode = recipe.mode_of(group.environment)
        hint = hint_of(group) if mode is TrainingMode.OPSD else ()
        # Mode sft uses no sampler's logprobs, so a false claim changes nothing.
        claim_nats_max = recipe.claim_nats_max if group.claimed and mode is not TrainingMode.SFT else math.inf
        numbers = range(len(group.completions))
        samples = [_samples(group, number, mode=mode, claim_nats_max=claim_nats_max) for number in numbers]
        found.append([[_hinted(sample, hint, group) for sample in its] for its in samples] if hint else samples)
    return found


def _hinted(sample: TrainSample, hint: tuple[int, ...], group: Group) -> TrainSample:
    """Add the teacher's prompt: the hint itself, or before a prompt that belongs to a conversation."""
    return replace(sample, teacher_prompt_token_ids=hint + sample.prompt_token_ids if group.turns else hint)


def prepare(
    groups: Sequence[Group],
    recipe: Recipe,
    *,
    step: int,
    rollouts: Rollouts | None = None,
    costs: TokenValues | None = None,
    values: Mapping[str, TokenValues] = MappingProxyType({}),
) -> Prepared:
    """Compute advantages inside each group, then apply the filters; the order of the rollouts stays.

    `rollouts` are the groups' samples, if they were made before; `costs` and `values`, further inputs of the advantage by name,
    are of the same sampled tokens.
    """
    rollouts = samples_of(groups, recipe) if rollouts is None else rollouts
    if costs is None and recipe.advantage.discounts:
        costs = no_costs(rollouts)
    columns: dict[str, TokenValues] = {}
    if costs is not None:
        raw = token_advantages(groups, recipe, costs, values)
        columns["advantages"] = whitened_over_batch(groups, recipe, raw)
        if "values" in values:
            columns["values"] = values["values"]
            columns["returns"] = token_returns(groups, recipe, costs, values["values"], raw)
    advantages = rollout_advantages(groups, recipe) if costs is None else _seen_by_filters(columns["advantages"])
    samples: list[list[TrainSample]] = []
    counts: Counter[str] = Counter({_count_name(its.name, its.enforce): 0 for its in recipe.filters})
    for index, group in enumerate(groups):
        samples.append([])
        found = flags(recipe.filters, FilterInputs(group, advantages[index], recipe.vocab_size))
        is_masked = group.masked or (False,) * len(group.completions)
        for number, (value, flag, masked) in enumerate(zip(advantages[index], found, is_masked, strict=True)):
            if masked:
                counts["filtered_stale"] += 1
                continue
            if flag is not None:
                counts[_count_name(flag.name, flag.enforce)] += 1
            if flag is None or not flag.enforce:
                its = [replace(sample, advantage=value) for sample in rollouts[index][number]]
                for name, column in columns.items():
                    its = spread_over(its, column[index][number], name)
                samples[-1] += its
    if recipe.aggregation is AggregationKind.PROMPT_MEAN:
        samples = prompt_weighed(samples)
    if recipe.divides_by_mode:
        samples = mode_weighed(samples, recipe.aggregation)
    chosen = tuple(sample for prompt in samples for sample in prompt)
    num_flat = sum(len(set(group.rewards)) < 2 for group in groups)
    return Prepared(chosen, {**_metrics(groups, step), "num_flat_groups": num_flat, **counts})


def _seen_by_filters(tokens: TokenValues) -> list[tuple[float, ...]]:
    """Return of each rollout the advantage furthest from 0 among its tokens; 0 without tokens."""
    return [tuple(rollout[int(np.abs(rollout).argmax())] if rollout else 0.0 for rollout in group) for group in tokens]


def prompt_weighed(prompts: Sequence[Sequence[TrainSample]]) -> list[list[TrainSample]]:
    """Return the samples of one optimizer step by prompt, with their factors of the aggregation prompt_mean."""
    tokens = [sum(sample.num_trained for sample in prompt) for prompt in prompts]
    num_prompts = sum(count > 0 for count in tokens)
    return [
        [replace(sample, loss_weight=sum(tokens) / max(1, num_prompts * count)) for sample in prompt]
        for prompt, count in zip(prompts, tokens, strict=True)
    ]


def _samples(group: Group, number: int, *, mode: TrainingMode, claim_nats_max: float) -> list[TrainSample]:
    """Return the samples of one rollout: one, or several if its turns do not fit into one."""
    rules: dict[str, Any] = {"mode": mode, "claim_nats_max": claim_nats_max}
    if not group.turns:
        completion = group.completions[number]
        return [TrainSample(group.prompt_token_ids, completion.token_ids, completion.logprobs, 0.0, **rules)]
    return [
        TrainSample(one.prompt_token_ids, one.completion_token_ids, one.logprobs, 0.0, loss_mask=one.loss_mask, **rules)
        for one in interleave(group.turns[number])
    ]


def mode_weighed(prompts: Sequence[Sequence[TrainSample]], kind: AggregationKind) -> list[list[TrainSample]]:
    """Return the samples of one optimizer step by prompt, with factors that divide each mode's losses by its own count."""
    counts: Counter[TrainingMode] = Counter()
    for prompt in prompts:
        found: Counter[TrainingMode] = Counter()
        for sample in prompt:
            found[sample.mode] += sample.num_trained if kind in _BY_TOKENS else sample.num_trained > 0
        if kind is AggregationKind.PROMPT_MEAN:
            found = Counter({mode: count > 0 for mode, count in found.items()})
        counts += found
    total = sum(counts.values())
    if kind is AggregationKind.TOKEN_SUM or not total:
        return [list(prompt) for prompt in prompts]
    return [
        [replace(one, loss_weight=one.loss_weight * total / max(1, counts[one.mode])) for one in prompt]
        for prompt in prompts
    ]


_BY_TOKENS = (AggregationKind.TOKEN_MEAN, AggregationKind.PROMPT_MEAN)


def _turns(groups: Sequence[Group]) -> dict[str, float]:
    """Return metrics of multi-turn rollouts."""
    episodes = [turns for group in groups for turns in group.turns]
    if not episodes:
        return {}
    numbers = [len(turns) for turns in episodes]
    return {"turns_mean": sum(numbers) / len(numbers), "turns_max": max(numbers)}


def _count_name(name: str, enforce: bool) -> str:
    """Return the metric's name: `filtered_*` rollouts were removed, `flagged_*` ones were not."""
    return f"{'filtered' if enforce else 'flagged'}_{name}"


def _metrics(groups: Sequence[Group], step: int) -> dict[str, float]:
    if not groups:  # there is no mean of anything
        return dict.fromkeys(("num_groups", "num_rollouts", "num_workers", "num_stale_groups", "num_stale_rollouts"), 0)
    rewards = [reward for group in groups for reward in group.rewards]
    completions = [completion for group in groups for completion in group.completions]
    lags = [step_rule.lag(step, version) for group in groups for version in group.policy_versions]
    return {
        "num_groups": len(groups),
        "num_rollouts": len(rewards),
        "num_workers": len({group.worker for group in groups}),
        "reward_mean": sum(rewards) / len(rewards),
        "reward_std": statistics.pstdev(rewards),
        "completion_tokens_mean": sum(len(completion.token_ids) for completion in completions) / len(completions),
        "completion_tokens_max": max(len(completion.token_ids) for completion in completions),
        "finished_share": sum(c.finish is FinishReason.STOP for c in completions) / len(completions),
        "lag_mean": sum(lags) / len(lags),
        "lag_max": max(lags),
        **{f"lag/{lag}": count for lag, count in sorted(Counter(lags).items())},
        "num_stale_groups": sum(any(step > version for version in group.policy_versions) for group in groups),
        "num_stale_rollouts": sum(lag > 0 for lag in lags),
        **_partial(groups),
        **_turns(groups),
        **_by_environment(groups),
    }


def _partial(groups: Sequence[Group]) -> dict[str, float]:
    """Return verl's metrics of completions that several policies sampled."""
    spans = [span for group in groups for span in group.policies_spanned or (0,) * len(group.completions)]
    num_partial = sum(span > 0 for span in spans)
    return {
        "fully_async/partial/total_partial_num": num_partial,
        "fully_async/partial/partial_ratio": num_partial / len(spans),
        "fully_async/partial/max_partial_span": max(spans),
    }


def _by_environment(groups: Sequence[Group]) -> dict[str, float]:
    """Return `name/environment` metrics if there are several environments."""
    names = sorted({group.environment for group in groups})
    found: dict[str, float] = {}
    for name in names if len(names) > 1 else ():
        here = [group for group in groups if group.environment == name]
        rewards = [reward for group in here for reward in group.rewards]
        lengths = [len(completion.token_ids) for group in here for completion in group.completions]
        found |= {
            f"num_rollouts/{name}": len(rewards),
            f"reward_mean/{name}": sum(rewards) / len(rewards),
            f"reward_std/{name}": statistics.pstdev(rewards),
            f"completion_tokens_mean/{name}": sum(lengths) / len(lengths),
            f"completion_tokens_max/{name}": max(lengths),
        }
    return found
