"""From a step's groups to its training samples and metrics. Pure but for the log, so it runs ahead of the step."""

from __future__ import annotations

import logging
import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from prime_node.algo.advantages import inputs_of
from prime_node.algo.advantages.batch_whitening import whitened
from prime_node.algo.filters import FilterInputs, flags
from prime_node.algo.trajectories import interleave
from prime_node.ports.train_backend import Group, PackedBatch, TrainBackend, TrainingMode, TrainSample
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

    num_groups: int
    prepared: Prepared
    packed: PackedBatch | None
    """Packed samples; None if they still lack logprobs of another policy."""


@dataclass(frozen=True, slots=True)
class ReadyBatch:
    """A batch that was prepared ahead of its step."""

    minis: tuple[MiniBatch, ...]
    seconds: float
    """Seconds for the preparation, in parallel to an earlier step if there was one."""


def ready_batch(
    batch: StepBatch, recipe: Recipe, backend: TrainBackend, *, minis: int, now_s: Callable[[], float]
) -> ReadyBatch:
    """Prepare a batch as far as possible without the weights, in a thread, while an earlier step trains.

    A batch that has lost groups still gives at most `minis` mini-batches; one without groups gives an empty one. Samples that
    are longer than the model's positions are left out, with a warning. Raises LocalError.
    """
    began_s, made = now_s(), []
    size = max(1, math.ceil(len(batch.groups) / minis))
    for start in range(0, max(1, len(batch.groups)), size):
        groups = batch.groups[start : start + size]
        prepared = _fitting(prepare(groups, recipe, step=batch.step), backend.sequence_tokens_max, step=batch.step)
        is_whole = recipe.proximal is ProximalPolicy.CURRENT and not recipe.needs_reference
        is_whole = is_whole and not any(sample.mode is TrainingMode.OPD for sample in prepared.samples)
        made.append(MiniBatch(len(groups), prepared, backend.pack(prepared.samples) if is_whole else None))
    return ReadyBatch(tuple(made), now_s() - began_s)


def _fitting(prepared: Prepared, tokens_max: int, *, step: int) -> Prepared:
    """Leave out samples that the model cannot compute: workers decide how long they are, within the run's limits."""
    fitting = tuple(
        one for one in prepared.samples if len(one.prompt_token_ids) + len(one.completion_token_ids) <= tokens_max
    )
    if left_out := len(prepared.samples) - len(fitting):
        log.warning("step %d: %d samples are longer than the model's %d positions", step, left_out, tokens_max)
    return replace(prepared, samples=fitting)


def prepare(groups: Sequence[Group], recipe: Recipe, *, step: int) -> Prepared:
    """Compute advantages inside each group, then apply the filters; the order of the rollouts stays."""
    samples: list[list[TrainSample]] = []
    counts: Counter[str] = Counter({_count_name(its.name, its.enforce): 0 for its in recipe.filters})
    num_flat = 0
    for group, advantages in zip(groups, _advantages(groups, recipe), strict=True):
        samples.append([])
        mode = recipe.mode_of(group.environment)
        num_flat += len(set(group.rewards)) < 2
        found = flags(recipe.filters, FilterInputs(group, advantages, recipe.vocab_size))
        is_masked = group.masked or (False,) * len(group.completions)
        # Mode sft uses no sampler's logprobs, so a false claim changes nothing.
        claim_nats_max = recipe.claim_nats_max if group.claimed and mode is not TrainingMode.SFT else math.inf
        for number, (value, flag, masked) in enumerate(zip(advantages, found, is_masked, strict=True)):
            if masked:
                counts["filtered_stale"] += 1
                continue
            if flag is not None:
                counts[_count_name(flag.name, flag.enforce)] += 1
            if flag is None or not flag.enforce:
                samples[-1] += _samples(group, number, advantage=value, mode=mode, claim_nats_max=claim_nats_max)
    if recipe.is_prompt_mean:
        samples = prompt_weighed(samples)
    chosen = tuple(sample for prompt in samples for sample in prompt)
    return Prepared(chosen, {**_metrics(groups, step), "num_flat_groups": num_flat, **counts})


def _advantages(groups: Sequence[Group], recipe: Recipe) -> list[tuple[float, ...]]:
    """Return the advantages of each group. Only mode rl has rewards; in the other modes every rollout counts the same."""
    views = [inputs_of(group) for group in groups]
    is_rl = [recipe.mode_of(group.environment) is TrainingMode.RL for group in groups]
    found = [
        recipe.advantage(view) if rewarded else (1.0,) * len(view.rollouts)
        for view, rewarded in zip(views, is_rl, strict=True)
    ]
    if recipe.advantage.is_whitened:
        chosen = [index for index, rewarded in enumerate(is_rl) if rewarded]
        tokens = [[rollout.completion_len for rollout in views[index].rollouts] for index in chosen]
        for index, values in zip(chosen, whitened([found[index] for index in chosen], tokens), strict=True):
            found[index] = values
    return found


def prompt_weighed(prompts: Sequence[Sequence[TrainSample]]) -> list[list[TrainSample]]:
    """Return the samples of one optimizer step by prompt, with their factors of the aggregation prompt_mean."""
    tokens = [sum(sample.num_trained for sample in prompt) for prompt in prompts]
    num_prompts = sum(count > 0 for count in tokens)
    return [
        [replace(sample, prompt_weight=sum(tokens) / max(1, num_prompts * count)) for sample in prompt]
        for prompt, count in zip(prompts, tokens, strict=True)
    ]


def _samples(
    group: Group, number: int, *, advantage: float, mode: TrainingMode, claim_nats_max: float
) -> list[TrainSample]:
    """Return the samples of one rollout: one, or several if its turns do not fit into one."""
    rules: dict[str, Any] = {"mode": mode, "claim_nats_max": claim_nats_max}
    if not group.turns:
        completion = group.completions[number]
        return [TrainSample(group.prompt_token_ids, completion.token_ids, completion.logprobs, advantage, **rules)]
    return [
        TrainSample(
            one.prompt_token_ids, one.completion_token_ids, one.logprobs, advantage, loss_mask=one.loss_mask, **rules
        )
        for one in interleave(group.turns[number])
    ]


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
