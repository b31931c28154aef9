"""From rewards to the advantages of rollouts and of their tokens. Pure.

A rollout's sampled tokens are the trainable tokens of all of its samples, in order: several turns may be several samples.

Advantages are whitened over the groups of one optimizer step:

    A' = (A - mean) / sqrt(variance + 1e-8)        over the sampled tokens: a rollout counts once for each of its tokens

The variance is the sample's, as in verl's `masked_whiten`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, compress, islice, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from prime_node.algo.advantages import inputs_of
from prime_node.ports.train_samples import Group, TrainingMode, TrainSample
from prime_node.trainer.recipe import Recipe


def whitened_tokens(rollouts: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return the advantages of each rollout's tokens, whitened together."""
    values_T = np.fromiter(chain.from_iterable(rollouts), np.float64)
    white = _whitened(values_T, np.ones(len(values_T))).tolist()
    ends = np.cumsum([0, *map(len, rollouts)]).tolist()
    return [white[start:end] for start, end in pairwise(ends)]


def whitened(groups: Sequence[Sequence[float]], tokens: Sequence[Sequence[int]]) -> list[tuple[float, ...]]:
    """Return the advantages of each group, whitened together. `tokens` are the rollouts' numbers of tokens."""
    values_R = np.fromiter(chain.from_iterable(groups), np.float64)
    left = iter(_whitened(values_R, np.fromiter(chain.from_iterable(tokens), np.float64)).tolist())
    return [tuple(next(left) for _ in advantages) for advantages in groups]


def _whitened(values_N: npt.NDArray[np.float64], counts_N: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the values with mean 0 and deviation 1, each counted so often. The sums are exact, whatever their order."""
    assert len(values_N) == len(counts_N), "one number of tokens for each rollout"
    total = counts_N.sum()
    if total < 2:
        return np.zeros_like(values_N)
    apart_N = values_N - math.fsum((values_N * counts_N).tolist()) / total
    variance = math.fsum((np.square(apart_N) * counts_N).tolist()) / (total - 1)
    white_N: npt.NDArray[np.float64] = apart_N / math.sqrt(variance + 1e-8)
    return white_N


Rollouts = Sequence[Sequence[Sequence[TrainSample]]]
"""Samples of each completion of each group."""
TokenValues = Sequence[Sequence[Sequence[float]]]
"""One value for each sampled token of each completion of each group."""


def rollout_advantages(groups: Sequence[Group], recipe: Recipe) -> list[tuple[float, ...]]:
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


def token_advantages(
    groups: Sequence[Group], recipe: Recipe, costs: TokenValues, values: Mapping[str, TokenValues]
) -> list[list[list[float]]]:
    """Return the advantages of each rollout's sampled tokens. `costs`: what each token costs; `values`: further inputs."""
    return [
        recipe.advantage.of_tokens(inputs_of(group), costs[index], **{name: its[index] for name, its in values.items()})
        if recipe.mode_of(group.environment) is TrainingMode.RL
        else [[1.0] * len(tokens) for tokens in costs[index]]
        for index, group in enumerate(groups)
    ]


def token_returns(
    groups: Sequence[Group], recipe: Recipe, costs: TokenValues, values: TokenValues, advantages: TokenValues
) -> list[list[list[float]]]:
    """Return what a critic learns of each sampled token. `advantages` are those before any whitening."""
    return [
        recipe.advantage.returns_of_tokens(inputs_of(group), *its)
        for group, *its in zip(groups, costs, values, advantages, strict=True)
    ]


def whitened_over_batch(
    groups: Sequence[Group], recipe: Recipe, found: Sequence[Sequence[Sequence[float]]]
) -> list[list[Sequence[float]]]:
    """Return the advantages of tokens, whitened over the batch if the advantage is."""
    result = [list(completions) for completions in found]
    if recipe.advantage.is_whitened:
        chosen = [
            (index, number)
            for index, group in enumerate(groups)
            if recipe.mode_of(group.environment) is TrainingMode.RL
            for number in range(len(found[index]))
        ]
        white = whitened_tokens([found[index][number] for index, number in chosen])
        for (index, number), tokens in zip(chosen, white, strict=True):
            result[index][number] = tokens
    return result


def no_costs(rollouts: Rollouts) -> list[list[list[float]]]:
    """Return a cost of 0 for each sampled token."""
    return [
        [[0.0] * sum(sample.num_trained for sample in samples) for samples in completions] for completions in rollouts
    ]


def spread_over(samples: Sequence[TrainSample], values: Sequence[float], name: str = "advantages") -> list[TrainSample]:
    """Give a rollout's samples these values of its sampled tokens, in a field of this name; other tokens get 0."""
    left = iter(values)
    fields: list[dict[str, Any]] = [{name: _placed(sample, left)} for sample in samples]
    return [replace(sample, **its) for sample, its in zip(samples, fields, strict=True)]


def sampled(sample: TrainSample, values: Sequence[float]) -> list[float]:
    """Return those of a sample's values, one for each completion token, that belong to sampled tokens."""
    return [*compress(values, sample.loss_mask)] if sample.loss_mask else [*values]


def _placed(sample: TrainSample, left: Iterator[float]) -> tuple[float, ...]:
    mine = tuple(islice(left, sample.num_trained))
    if not sample.loss_mask:
        return mine
    placed_N = np.zeros(len(sample.loss_mask))
    placed_N[np.array(sample.loss_mask)] = mine
    return tuple(placed_N.tolist())
