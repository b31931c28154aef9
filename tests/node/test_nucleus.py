"""top-p, top-k and min-p with assigned randomness: the reference, the tensor version, and the validator's view."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from prime_lab.filter_reference import choice_of, margins_of, slack_of
from prime_node.adapters.engines import torch_nucleus
from prime_node.adapters.engines.token_scores import score_tokens
from prime_protocol.assignment import Sampling
from prime_protocol.noise import gumbel_noise

FILTERS: list[dict[str, Any]] = [
    {"top_p": 0.9},
    {"top_p": 0.999},
    {"top_k": 1},
    {"top_k": 20},
    {"top_k": 500},
    {"min_p": 0.1},
    {"top_p": 0.8, "top_k": 40, "min_p": 0.02},
]


def sampling_with(temperature: float = 1.0, **filters: Any) -> Sampling:
    return Sampling(temperature=temperature, completion_tokens_max=8, stop_token_ids=(3,), **filters)


def logits_of(num_rows: int, vocab_size: int, *, spread: float = 3.0, seed: int = 0) -> np.ndarray:
    """Return logits with ties, as bf16 has them."""
    return np.round(np.random.default_rng(seed).normal(0, spread, (num_rows, vocab_size)), 1).astype(np.float32)


def test_filters_keep_what_their_names_say() -> None:
    logits = np.log(np.array([[0.5, 0.25, 0.15, 0.06, 0.04]]))
    kept: Any = lambda **filters: (slack_of(logits, sampling_with(**filters))[0] >= 0).tolist()  # noqa: E731
    assert kept(top_p=0.7) == kept(top_k=2) == kept(min_p=0.4) == [True, True, False, False, False]
    assert kept(top_p=0.8) == [True, True, True, False, False]
    assert kept(top_p=0.8, top_k=2) == kept(top_p=0.6, min_p=0.01) == [True, True, False, False, False]
    assert kept() == [True] * 5


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize(("vocab_size", "spread"), [(264, 3.0), (4_099, 3.0), (4_099, 0.3)])
def test_torch_and_numpy_agree(filters: dict[str, Any], vocab_size: int, spread: float) -> None:
    sampling, rows = sampling_with(**filters), 40
    logits = logits_of(rows, vocab_size, spread=spread)
    assert sampling.filters is not None
    expected, found = (
        slack_of(logits, sampling),
        torch_nucleus.torch_slack_of(torch.from_numpy(logits), *sampling.filters),
    )
    near = np.abs(expected) > 1e-5  # at the very edge the two may round to different sides
    assert np.array_equal((expected >= 0)[near], (found.numpy() >= 0)[near])
    assert np.allclose(expected, found.numpy(), atol=2e-4)
    seeds, positions = list(range(rows)), [0] * rows
    noise = gumbel_noise(seeds, positions, vocab_size)
    scores = score_tokens(torch.from_numpy(logits), seeds, positions, sampling)
    tokens = choice_of(logits, noise, sampling)
    assert scores.choice().tolist() == tokens.tolist()
    others = np.random.default_rng(1).integers(0, vocab_size, rows)
    for chosen in (tokens, others):
        margins = scores.margins(torch.from_numpy(chosen)).numpy()
        assert np.allclose(margins, margins_of(logits, noise, chosen, sampling), atol=2e-4)


def test_the_tail_of_a_large_vocabulary_is_not_sorted_and_comes_out_the_same() -> None:
    logits = torch.from_numpy(logits_of(3, 20_000, spread=1.0))
    full = slack_of(logits.numpy(), sampling_with(top_p=0.95))
    assert np.allclose(torch_nucleus.torch_slack_of(logits, 0.95, 0, 0.0).numpy(), full, atol=2e-4)
    assert (full == -1).any(), "some of it is far outside"


@pytest.mark.parametrize("filters", FILTERS)
def test_honest_noise_moves_the_edge_and_costs_no_more_than_the_noise(filters: dict[str, Any]) -> None:
    """Worker and validator differ by 0.01 nats: choices that differ for that reason have margins of that size, not full ones."""
    sampling, rows = sampling_with(**filters), 1_000
    logits = np.random.default_rng(0).normal(0, 2, (rows, 600))
    noise = gumbel_noise(list(range(rows)), [0] * rows, 600)
    moved = logits + np.random.default_rng(1).uniform(-0.01, 0.01, logits.shape)
    margins = margins_of(moved, noise, choice_of(logits, noise, sampling), sampling)
    assert margins.max() <= 0.0401, "two scores, and those above them, moved by at most 0.01 each way"
    assert (margins > 0).mean() < 0.05


@pytest.mark.parametrize(
    ("worker", "run"),
    [
        ({}, {"top_p": 0.9}),
        ({"top_p": 0.9}, {}),
        ({"top_p": 0.95}, {"top_p": 0.8}),
        ({"top_k": 50}, {"top_k": 5}),
        ({"top_k": 5}, {"top_k": 50}),
        ({"min_p": 0.2}, {"min_p": 0.02}),
        ({"temperature": 0.8, "top_p": 0.9}, {"top_p": 0.9}),
        ({"temperature": 0.0}, {"top_p": 0.9}),
    ],
)
def test_other_filters_or_another_temperature_than_assigned_are_seen(worker: Any, run: Any) -> None:
    """Among 300 tokens, many have a margin that no honest noise explains."""
    rows = 300
    logits = np.random.default_rng(0).normal(0, 2, (rows, 600))
    noise = gumbel_noise(list(range(rows)), [0] * rows, 600)
    theirs, ours = sampling_with(**worker), sampling_with(**run)
    scaled = logits / (theirs.temperature or 1.0)
    tokens = choice_of(scaled, noise if theirs.temperature else 0 * noise, theirs)
    margins = margins_of(logits / ours.temperature, noise, tokens, ours)
    assert (margins > 0.25).mean() > 0.03


def test_greedy_choice_is_never_filtered() -> None:
    assert sampling_with(temperature=0.0, top_k=3).filters is None
    scores = score_tokens(torch.tensor([[1.0, 2.0, 2.5]]), [0], [0], sampling_with(temperature=0.0, top_p=0.1))
    assert scores.choice().tolist() == [2]


# The end of a completion


def test_a_stop_token_counts_by_itself_where_it_is_chosen_and_where_it_is_passed_over() -> None:
    rows = 200
    logits = torch.from_numpy(np.random.default_rng(3).normal(0, 1, (rows, 12)).astype(np.float32))
    logits[:, 3] += 2
    scores = score_tokens(logits, list(range(rows)), [0] * rows, sampling_with())
    honest = scores.choice()
    assert scores.stop_margins(honest, (3,)).max() == 0
    forged = torch.full_like(honest, 3)
    assert torch.equal(scores.stop_margins(forged, (3,)), scores.margins(forged))
    second = scores.noisy_NV.topk(2, dim=1).indices[:, 1]
    skipped = scores.stop_margins(second, (3,))
    assert (skipped[honest == 3] > 0).all()
    neither = (honest != 3) & (second != 3)
    assert skipped[neither].max() <= scores.margins(second)[neither].max()
    assert (skipped[neither] < scores.margins(second)[neither]).all(), "another token is a matter of its margin alone"
    assert scores.stop_margins(honest, ()).max() == 0
    beyond = scores.stop_margins(honest, (3, 2**24, 2**31 - 1))  # before, an IndexError ended the validator
    assert torch.equal(beyond, scores.stop_margins(honest, (3,)))
    assert scores.stop_margins(honest, (2**24,)).max() == 0
