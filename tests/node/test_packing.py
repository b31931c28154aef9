"""Packed rows hold every distinct prefix once, and every trained token sees exactly its own sequence."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prime_node.algo.packing import PackedRows, pack
from prime_node.ports.train_samples import TrainSample


def sample(prompt: str, completion: str) -> TrainSample:
    return TrainSample(tuple(prompt.encode()), tuple(completion.encode()), (-1.0,) * len(completion), advantage=1.0)


def contexts(packed: PackedRows) -> list[tuple[bytes, int]]:
    """For each prediction, return the tokens that it sees in order of positions, and the token that it predicts."""
    trunk, width = packed.trunk_tokens, packed.subtree_end_RW.shape[1]
    found = []
    for source, target in zip(packed.sources_N.tolist(), packed.targets_N.tolist(), strict=True):
        if source < trunk:
            seen = list(range(source + 1))
        else:
            row, place = divmod(source - trunk, width)
            ends = packed.subtree_end_RW[row]
            below = [trunk + row * width + j for j in range(place + 1) if place < ends[j]]
            seen = [*range(trunk), *below]
        assert packed.positions[seen].tolist() == list(range(len(seen)))
        found.append((bytes(packed.token_ids[seen].tolist()), target))
    return found


def expected_contexts(samples: list[TrainSample], packed: PackedRows) -> list[tuple[bytes, int]]:
    return [
        (bytes(samples[i].prompt_token_ids + samples[i].completion_token_ids[:n]), samples[i].completion_token_ids[n])
        for i in packed.samples
        for n in range(len(samples[i].completion_token_ids))
    ]


texts = st.text(alphabet="ab", min_size=1, max_size=6)
batches = st.lists(
    st.tuples(st.sampled_from(["", "common "]), texts, texts).map(lambda t: sample(t[0] + t[1], t[2])), max_size=25
)


@settings(deadline=None)
@given(batches, st.integers(1, 20), st.integers(1, 60))
def test_every_sampled_token_is_trained_once_in_exactly_its_context(
    samples: list[TrainSample], row_tokens: int, micro_batch_tokens: int
) -> None:
    packs = pack(samples, row_tokens=row_tokens, micro_batch_tokens=micro_batch_tokens)
    assert sorted(index for packed in packs for index in packed.samples) == list(range(len(samples)))
    for packed in packs:
        assert contexts(packed) == expected_contexts(samples, packed)


def test_a_shared_prefix_is_computed_once() -> None:
    samples = [sample("spell: sun>", "nus."), sample("spell: sun>", "nux."), sample("spell: hat>", "tah.")]
    (packed,) = pack(samples, row_tokens=64, micro_batch_tokens=1_000)
    assert bytes(packed.token_ids[: packed.trunk_tokens].tolist()) == b"spell: "
    below = len("hat>tah") + len("sun>nu") + len("s") + len("x")
    assert packed.num_distinct == packed.trunk_tokens + below
    assert packed.subtree_end_RW.shape == (1, below)


def test_completions_that_are_alike_cost_one() -> None:
    once = pack([sample("ab", "cd")], row_tokens=8, micro_batch_tokens=100)
    often = pack([sample("ab", "cd")] * 8, row_tokens=8, micro_batch_tokens=100)
    assert often[0].num_distinct == once[0].num_distinct
    assert len(often[0].targets_N) == 8 * 2


def test_a_group_longer_than_a_row_is_split_and_its_prompt_repeated() -> None:
    samples = [sample("x" * 5, letter * 6) for letter in "abcdef"] + [sample("y" * 5, "zz")]
    (packed,) = pack(samples, row_tokens=16, micro_batch_tokens=1_000)
    assert packed.trunk_tokens == 0
    assert packed.subtree_end_RW.shape[0] == 4
    assert contexts(packed) == expected_contexts(samples, packed)


def test_what_fills_a_row_to_its_end_shares_it() -> None:
    apart, group = [sample("aaaa", "xy"), sample("bbbb", "xy")], [sample("bbb", "xyz"), sample("bbb", "xzz")]
    (packed,) = pack(apart, row_tokens=10, micro_batch_tokens=100)
    assert packed.subtree_end_RW.shape == (1, 10)
    (packed,) = pack([apart[0], *group], row_tokens=6, micro_batch_tokens=100)
    assert (packed.subtree_end_RW.shape, packed.num_distinct) == ((2, 6), 5 + 6), "the prompt is not repeated"


def test_a_sample_longer_than_the_wished_row_makes_the_rows_longer() -> None:
    samples = [sample("p" * 30, "abc"), sample("q", "d")]
    (packed,) = pack(samples, row_tokens=4, micro_batch_tokens=1_000)
    assert packed.subtree_end_RW.shape[1] == 32


def test_padding_sees_itself_alone() -> None:
    samples = [sample("aaaa", "bbb"), sample("cccc", "ddd"), sample("e", "f")]
    (packed,) = pack(samples, row_tokens=6, micro_batch_tokens=1_000)
    width = packed.subtree_end_RW.shape[1]
    used = packed.num_distinct - packed.trunk_tokens
    alone = packed.subtree_end_RW == np.arange(1, width + 1)
    assert alone.sum() >= packed.subtree_end_RW.size - used
    assert used < packed.subtree_end_RW.size


def test_a_small_micro_batch_makes_more_passes_of_the_same_rows() -> None:
    samples = [sample(f"common {letter}", "xyz") for letter in "abcdefgh"]
    whole = pack(samples, row_tokens=3, micro_batch_tokens=1_000)
    parts = pack(samples, row_tokens=3, micro_batch_tokens=20)
    assert len(whole) == 1
    assert len(parts) > 1
    assert all(len(part.token_ids) <= 20 for part in parts)


def test_nothing_packs_to_nothing() -> None:
    assert pack([], row_tokens=8, micro_batch_tokens=8) == []


@pytest.mark.parametrize("prompt", ["a", "ab"])
def test_a_single_sample_keeps_a_token_of_its_own(prompt: str) -> None:
    samples = [sample(prompt, "c")]
    (packed,) = pack(samples, row_tokens=8, micro_batch_tokens=8)
    assert packed.trunk_tokens == len(prompt) - 1
    assert contexts(packed) == expected_contexts(samples, packed)
