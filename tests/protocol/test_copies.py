"""Fingerprints: copies and near-copies share them, and texts that may repeat by chance have none."""

from __future__ import annotations

import numpy as np
import pytest

from prime_protocol.assignment import Sampling
from prime_protocol.copies import fingerprints, is_repetitive
from prime_protocol.rollout import Rollouts

SAMPLING = Sampling(completion_tokens_max=1_024, stop_token_ids=())


def rollouts(*completions: np.ndarray, nats: float = 1.5) -> Rollouts:
    """Return completions in which every token is this surprising."""
    lengths = np.array([len(completion) for completion in completions], np.int32)
    tokens = np.concatenate(completions).astype(np.int32)
    none = np.zeros(0, np.int64)
    logprobs = np.full(len(tokens), -nats, np.float32)
    return Rollouts(tokens, logprobs, lengths, none.astype(np.uint8), none, none, none.astype(np.int32).reshape(0, 3))


def text(seed: int, length: int = 400) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 5_000, length)


def marks(completion: np.ndarray, nats: float = 1.5) -> set[str]:
    return {mark for _, mark in fingerprints(rollouts(completion, nats=nats), SAMPLING)}


def test_a_copy_has_the_same_fingerprints_and_another_text_none_of_them() -> None:
    assert len(marks(text(0))) == 4
    assert marks(text(0)) == marks(text(0).copy())
    assert not marks(text(0)) & set().union(*(marks(text(seed)) for seed in range(1, 50)))


@pytest.mark.parametrize("place", [0, 100, 399])
def test_a_changed_token_and_a_shift_hide_only_what_they_touch(place: int) -> None:
    changed = text(0).copy()
    changed[place] += 1
    assert marks(text(0)) & marks(changed)
    shifted = np.concatenate([text(7, 5), text(0)])
    assert marks(text(0)) & marks(shifted)


def test_a_long_part_of_a_text_is_recognised() -> None:
    shared = sum(bool(marks(text(seed)) & marks(text(seed)[:300])) for seed in range(20))
    assert shared >= 18


def test_sure_and_short_texts_have_none() -> None:
    assert marks(text(0), nats=0.01) == set()
    assert marks(text(0, 60)) == set()


def test_a_sure_text_is_recognised_by_its_longer_windows() -> None:
    assert len(marks(text(0), nats=0.25)) == 2


def test_nothing_is_compared_where_sampling_is_greedy() -> None:
    assert fingerprints(rollouts(text(0)), SAMPLING.model_copy(update={"temperature": 0.0})) == ()


def test_two_completions_of_one_bundle_must_differ() -> None:
    assert is_repetitive(fingerprints(rollouts(text(0), text(1), text(0)), SAMPLING))
    assert not is_repetitive(fingerprints(rollouts(text(0), text(1)), SAMPLING))
    looped = np.tile(text(0, 100), 4)
    assert not is_repetitive(fingerprints(rollouts(looped, text(1)), SAMPLING)), "saying it twice oneself is no copy"


def test_the_fingerprint_is_the_one_of_the_specification() -> None:
    assert min(marks(text(0))) == "0070e87a8f0927b93a3ee5f2"
