"""Logprobs of other policies for a step's samples, and advantages that need them.

Synchronous: the calls belong into the trainer's thread, because they use the weights.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any

import numpy as np
import numpy.typing as npt

from prime_node.algo.advantages import TokenNeed
from prime_node.algo.kl_control import KlControlKind
from prime_node.algo.losses.base import LOG_RATIO_MAX
from prime_node.algo.losses.penalty import kl_values
from prime_node.ports.train_backend import KeptPolicy, TrainBackend
from prime_node.ports.train_samples import TrainingMode, TrainSample
from prime_node.trainer.batch import MiniBatch, Prepared, prepare
from prime_node.trainer.credit import TokenValues, sampled
from prime_node.trainer.recipe import KlInReward, ProximalPolicy, Recipe


@dataclass(frozen=True, slots=True)
class Credited:
    """The samples of one optimizer step with advantages that needed the weights."""

    prepared: Prepared
    numbers: Mapping[str, float]
    kl_coef: float | None
    """Adapted coefficient of the divergence in the reward for the next one; None if it is fixed."""


def credited(
    mini: MiniBatch, recipe: Recipe, backend: TrainBackend, *, step: int, kl_coef: float | None, keeps: bool
) -> Credited:
    """Return the samples of a mini-batch. `keeps`: whether the proximal policy is kept, rather than the current one."""
    flat = [sample for completions in mini.rollouts for samples in completions for sample in samples]
    rule, numbers = recipe.kl_in_reward, {}
    costs = [[0.0] * sample.num_trained for sample in flat]
    if rule is not None:
        is_adaptive = rule.control.kind is KlControlKind.ADAPTIVE
        coef = kl_coef if is_adaptive and kl_coef is not None else rule.kl_coef
        flat = [*with_reference(with_proximal(flat, recipe, backend, keeps=keeps), backend)]
        divergences = _divergences(flat, backend, rule)
        costs = [[coef * value for value in its] for its in divergences]
        current_kl, count = _mean_of_rollouts(mini, _by_rollout(mini, divergences))
        numbers = {"reward_kl_penalty": current_kl, "reward_kl_penalty_coeff": coef}
        kl_coef = rule.control.after(coef, current_kl, count) if is_adaptive else None
    if greedy := [group.greedy_reward for group in mini.groups if group.greedy_reward is not None]:
        numbers = {**numbers, "greedy_reward_mean": statistics.fmean(greedy)}
    values = {}
    if TokenNeed.SCORE_NORMS in recipe.advantage.needs:
        norms = [sampled(sample, its) for sample, its in zip(flat, backend.score_norms(flat), strict=True)]
        values["score_norms"] = _by_rollout(mini, norms)
    if recipe.needs_values:
        found = [sampled(sample, its) for sample, its in zip(flat, backend.values(flat), strict=True)]
        values["values"] = _by_rollout(mini, found)
    left = iter(flat)
    rollouts = [[[next(left) for _ in samples] for samples in completions] for completions in mini.rollouts]
    prepared = prepare(mini.groups, recipe, step=step, rollouts=rollouts, costs=_by_rollout(mini, costs), values=values)
    return Credited(prepared, numbers, kl_coef)


def for_critic(samples: Sequence[TrainSample]) -> list[TrainSample]:
    """Return the samples that the critic learns from."""
    return [sample for sample in samples if sample.mode is TrainingMode.RL and sample.returns]


def with_selected(
    samples: Sequence[TrainSample], recipe: Recipe, backend: TrainBackend, *, seed: int
) -> Sequence[TrainSample]:
    """Mark the tokens that the loss chooses among the trainable tokens of mode rl, without those of incredible claims."""
    if not samples:
        return samples
    tokens = [_tokens_of(*pair) for pair in zip(samples, backend.logprobs(samples), strict=True)]
    is_open_N, now_N, advantages_N, log_ratios_N = map(np.concatenate, zip(*tokens, strict=True))
    places = np.flatnonzero(is_open_N)
    chosen = recipe.loss.choose(
        advantages_N[places].tolist(), now_N[places].tolist(), log_ratios_N[places].tolist(), seed=seed
    )
    marks_N = np.zeros(len(is_open_N), np.bool_)
    marks_N[places[[*chosen]]] = True
    left = iter(marks_N.tolist())
    return [replace(sample, selected=tuple(islice(left, len(sample.completion_token_ids)))) for sample in samples]


def with_weight_mean(samples: Sequence[TrainSample], recipe: Recipe, backend: TrainBackend) -> Sequence[TrainSample]:
    """Give the samples of mode rl the mean of their importance weights, without those of incredible claims."""
    if not samples:
        return samples
    now = backend.logprobs(samples)
    before = [sample.prox_logprobs or its for sample, its in zip(samples, now, strict=True)]
    mean = recipe.loss.mean_weight(
        _column(before),
        _column(sample.inference_logprobs for sample in samples),
        np.concatenate([_tokens_of(*pair)[0] for pair in zip(samples, now, strict=True)]),
        [len(sample.completion_token_ids) for sample in samples],
    )
    return [replace(one, weight_mean=mean) if one.mode is TrainingMode.RL else one for one in samples]


def _column(values: Iterable[Sequence[float]]) -> npt.NDArray[np.float64]:
    return np.fromiter(chain.from_iterable(values), np.float64)


def _tokens_of(sample: TrainSample, logprobs: Sequence[float]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return of each token whether the loss may choose it, its logprob, its advantage and its clamped log rho."""
    num = len(sample.completion_token_ids)
    now_N = np.array(logprobs, np.float64)
    is_open_N = np.array(sample.loss_mask or (True,) * num, np.bool_) & (sample.mode is TrainingMode.RL)
    if not math.isinf(sample.claim_nats_max):
        is_open_N &= np.abs(now_N - np.array(sample.inference_logprobs)) <= sample.claim_nats_max
    advantages_N = np.array(sample.advantages or (sample.advantage,) * num, np.float64)
    before_N = np.array(sample.prox_logprobs) if sample.prox_logprobs else now_N
    return is_open_N, now_N, advantages_N, np.clip(now_N - before_N, -LOG_RATIO_MAX, LOG_RATIO_MAX)


def with_proximal(
    samples: Sequence[TrainSample], recipe: Recipe, backend: TrainBackend, *, keeps: bool
) -> Sequence[TrainSample]:
    """Add the proximal policy's logprobs, unless it is the policy at the start of the optimizer step."""
    if all(sample.prox_logprobs for sample in samples):
        return samples
    if recipe.proximal is ProximalPolicy.ROLLOUT:
        return [replace(sample, prox_logprobs=sample.inference_logprobs) for sample in samples]
    return _with_kept(samples, backend, KeptPolicy.PROXIMAL, "prox_logprobs") if keeps else samples


def with_reference(samples: Sequence[TrainSample], backend: TrainBackend) -> Sequence[TrainSample]:
    """Add the reference policy's logprobs."""
    if all(sample.reference_logprobs for sample in samples):
        return samples
    return _with_kept(samples, backend, KeptPolicy.REFERENCE, "reference_logprobs")


def _with_kept(
    samples: Sequence[TrainSample], backend: TrainBackend, which: KeptPolicy, field_name: str
) -> Sequence[TrainSample]:
    fields: list[dict[str, Any]] = [{field_name: tuple(found)} for found in backend.logprobs(samples, which)]
    return [replace(sample, **its) for sample, its in zip(samples, fields, strict=True)]


def _divergences(samples: Sequence[TrainSample], backend: TrainBackend, rule: KlInReward) -> list[list[float]]:
    """Return the divergence at each sampled token of each sample. Only mode rl has rewards."""
    old: Sequence[Sequence[float]] = [sample.prox_logprobs for sample in samples]
    if samples and not old[0]:
        old = backend.logprobs(samples)
    found = []
    for sample, logprobs in zip(samples, old, strict=True):
        ours, reference = sampled(sample, logprobs), sampled(sample, sample.reference_logprobs)
        values = kl_values(ours, reference, rule.estimator)
        found.append(values if sample.mode is TrainingMode.RL else [0.0] * len(values))
    return found


def _by_rollout(mini: MiniBatch, values: Iterable[Sequence[float]]) -> list[list[list[float]]]:
    """Return values of each sample's sampled tokens as values of each rollout's."""
    left = iter(values)
    return [
        [[*chain.from_iterable(islice(left, len(samples)))] for samples in completions] for completions in mini.rollouts
    ]


def _mean_of_rollouts(mini: MiniBatch, values: TokenValues) -> tuple[float, int]:
    """Return the mean over rollouts of mode rl of the mean over their tokens, and the number of those with tokens."""
    means = [
        statistics.fmean(tokens)
        for completions, its in zip(mini.rollouts, values, strict=True)
        for samples, tokens in zip(completions, its, strict=True)
        if tokens and samples[0].mode is TrainingMode.RL
    ]
    return (statistics.fmean(means) if means else 0.0), len(means)
