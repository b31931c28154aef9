"""`cooler` and `looser`: what they are, where they are left out, and what they detect in the noise of bf16."""

from __future__ import annotations

import math
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from prime_lab.filter_reference import choice_of, cooler_of, looser_of, margins_of
from prime_node.adapters.engines.token_scores import Judged, judge_tokens, prefill_of
from prime_node.validator.alternatives import evidence_of_lives, tokens_until_ban
from prime_node.validator.calibrating import Errors
from prime_protocol.assignment import Sampling
from prime_protocol.check_policy import EVIDENCE_MAX
from prime_protocol.evidence import Moments
from prime_protocol.noise import gumbel_noise
from prime_protocol.verify import COOLER, LOOSE

VOCAB, LENGTH = 300, 32
NOISE = 0.06
"""Nats by which two engines' logits differ, as in bf16."""


def sampling_with(temperature: float = 1.0, **filters: Any) -> Sampling:
    return Sampling(temperature=temperature, completion_tokens_max=LENGTH, stop_token_ids=(3,), **filters)


def judged_of(logits: np.ndarray, tokens: np.ndarray, sampling: Sampling, *, seeded: bool = True) -> Judged:
    """Judge by a head whose logits are the hidden states."""
    head = SimpleNamespace(vocab_size=logits.shape[1], logits=lambda hidden: hidden)
    rows = len(logits)
    seeds = list(range(rows)) if seeded else [None] * rows
    hidden, chosen = torch.from_numpy(logits), torch.from_numpy(tokens)
    return judge_tokens(head, hidden, chosen, seeds, [0] * rows, sampling, keep_hidden=False)


def logits_of(rows: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 2.5, (rows, VOCAB)).astype(np.float32)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_cooler_is_the_margin_less_that_at_a_lower_temperature(temperature: float) -> None:
    rows, sampling = 200, sampling_with(temperature)
    logits = logits_of(rows, 1)
    noise = gumbel_noise(list(range(rows)), [0] * rows, VOCAB)
    tokens = choice_of(logits / (temperature * COOLER), noise, sampling)
    tokens[::3] = 7
    prefill = prefill_of([judged_of(logits, tokens, sampling)])
    colder = margins_of(logits / (COOLER * temperature), noise, tokens, sampling)
    assert prefill.cooler_T is not None
    assert np.allclose(prefill.cooler_T, prefill.margins_T - colder, atol=1e-4)
    assert np.allclose(prefill.cooler_T, cooler_of(logits / temperature, noise, tokens), atol=1e-4)
    assert prefill.cooler_T.min() < 0 < prefill.cooler_T.max()


def test_looser_is_a_likelihood_ratio_of_larger_errors_to_smaller_ones() -> None:
    rows = 200
    logits = logits_of(rows, 3)
    scores = logits + gumbel_noise(list(range(rows)), [0] * rows, VOCAB)
    tokens = np.argsort(scores, axis=1)[:, -2]
    found = prefill_of([judged_of(logits, tokens, sampling_with())]).looser_T
    assert found is not None
    assert np.allclose(found, looser_of(scores, tokens), atol=2e-3)
    behind = scores[0] - scores[0].max()
    small, large = (np.exp(behind / scale) / np.exp(behind / scale).sum() for scale in LOOSE)
    assert found[0] == pytest.approx(math.log(large[tokens[0]] / small[tokens[0]]), abs=2e-3)
    right = prefill_of([judged_of(logits, scores.argmax(axis=1), sampling_with())]).looser_T
    assert right is not None
    assert right.max() <= 1e-6, "what the scores choose never counts against a worker"


@pytest.mark.parametrize(
    ("sampling", "seeded"), [(sampling_with(top_p=0.9), True), (sampling_with(0.0), True), (sampling_with(), False)]
)
def test_both_are_left_out_where_the_seeds_do_not_decide_alone(sampling: Sampling, seeded: bool) -> None:
    logits = logits_of(4, 2)
    prefill = prefill_of([judged_of(logits, logits.argmax(axis=1), sampling, seeded=seeded)])
    assert prefill.cooler_T is None
    assert prefill.looser_T is None


@cache
def errors_at(temperature: float, seed: int, completions: int, noise: float = NOISE) -> Errors:
    """Errors of a worker with noisy logits at this temperature, in a run at 1."""
    rows = completions * LENGTH
    logits = logits_of(rows, seed)
    theirs = logits + np.random.default_rng(seed + 1).normal(0, noise, logits.shape)
    gumbel = gumbel_noise(list(range(rows)), [0] * rows, VOCAB)
    tokens = choice_of(theirs / temperature, gumbel, sampling_with())
    prefill = prefill_of([judged_of(logits, tokens, sampling_with())])
    assert prefill.cooler_T is not None
    assert prefill.looser_T is not None
    found = {"margin": prefill.margins_T, "flip": (prefill.margins_T > 0).astype(np.float32)}
    errors = Errors()
    errors.add(found | {"cooler": prefill.cooler_T, "looser": prefill.looser_T}, np.full(completions, LENGTH, np.int32))
    return errors


@pytest.fixture(scope="module")
def moments() -> dict[str, Moments]:
    """Calibrated on 6,400 tokens."""
    return errors_at(1.0, seed=10, completions=200).moments()


def test_a_slightly_lower_temperature_is_detected_several_times_sooner(moments: dict[str, Moments]) -> None:
    colder = errors_at(COOLER, seed=20, completions=100)
    without = {name: one for name, one in moments.items() if name != "cooler"}
    with_it = tokens_until_ban(colder, moments, is_rescored=True)
    assert with_it <= 1_500
    assert with_it <= tokens_until_ban(colder, without, is_rescored=True) / 3


def test_choices_of_other_weights_are_detected_sooner(moments: dict[str, Moments]) -> None:
    """Logits that are off by 2.3 times as much as honest ones, as those of int8 weights are, and claims that are right."""
    other = errors_at(1.0, seed=40, completions=100, noise=2.3 * NOISE)
    without = {name: one for name, one in moments.items() if name != "looser"}
    with_it = tokens_until_ban(other, moments, is_rescored=True)
    assert with_it <= 0.8 * tokens_until_ban(other, without, is_rescored=True)


def test_honest_noise_is_no_evidence_however_long_it_lasts(moments: dict[str, Moments]) -> None:
    """50 lives of 200 bundles, looked at after each."""
    honest = errors_at(1.0, seed=30, completions=200)
    highest = np.zeros(50)
    lives = evidence_of_lives(honest, moments, workers=50)
    for _ in range(200):
        _, evidence_W = next(lives)
        highest = np.maximum(highest, evidence_W)
    assert (highest >= math.log(20)).mean() <= 1 / 20
    assert highest.max() < math.log(EVIDENCE_MAX)
