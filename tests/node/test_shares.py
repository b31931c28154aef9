"""Balancing and packing of a batch: every sample once, equal work, and a clear error for long sequences."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tests.node.rank_jobs import samples

from prime_node.algo.shares import Packing, PackingSettings, balance, batch_counts, sequence_cost, shares
from prime_node.ports.train_samples import TrainSample


def sample(prompt: int, completion: int) -> TrainSample:
    return TrainSample((prompt,) * 5, (7,) * completion, (-1.0,) * completion, 1.0)


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(1, 300)), max_size=40),
    st.integers(1, 5),
    st.sampled_from(Packing),
)
def test_every_sample_is_in_one_rank_s_share_once(lengths: list[tuple[int, int]], ranks: int, packing: Packing) -> None:
    batch = [sample(prompt, completion) for prompt, completion in lengths]
    settings = PackingSettings(packing, row_tokens=64, micro_batch_tokens=400)
    found = shares(batch, settings, ranks=ranks)
    assert sorted(place for share in found for one in share.passes for place in one.places) == list(range(len(batch)))
    for share in found:
        assert (share.num_tokens, share.num_sequences) == batch_counts(batch)
        assert len(share.passes) <= share.num_passes
        assert 0.0 <= share.packing_share <= 1.0
        assert 0.0 <= share.balance_share <= 1.0 + 1e-9
        for one in share.passes:
            assert [batch[place] for place in one.places] == list(one.samples)
            assert len(one.packed.targets_N) == sum(len(each.completion_token_ids) for each in one.samples)


@given(st.lists(st.integers(1, 2_000), min_size=1, max_size=60), st.integers(1, 8))
def test_no_rank_has_more_than_four_thirds_of_the_least_that_any_split_needs(lengths: list[int], ranks: int) -> None:
    """Graham 1969; the bound on the best split is the mean or the most expensive sequence."""
    batch = [sample(number, length) for number, length in enumerate(lengths)]
    costs = [sequence_cost(5 + length, quadratic_tokens=500) for length in lengths]
    loads = [sum(costs[index] for index in share) for share in balance(batch, ranks, quadratic_tokens=500)]
    second = sorted(costs, reverse=True)[ranks] if len(costs) > ranks else 0.0
    best = max(sum(costs) / ranks, max(costs), 2 * second)
    assert max(loads) <= (4 / 3) * best + 1e-9


def test_one_prompt_s_completions_stay_together_unless_ranks_would_idle() -> None:
    together = [sample(prompt, 10) for prompt in (1, 1, 2, 2)]
    assert balance(together, 2, quadratic_tokens=100) == [[0, 1], [2, 3]]
    alone = [sample(1, 10) for _ in range(4)]
    assert [len(share) for share in balance(alone, 2, quadratic_tokens=100)] == [2, 2]


def test_a_sequence_that_is_longer_than_a_pass_has_one_of_its_own() -> None:
    """Before, it ended the trainer at each start: a worker decides how long its completions are."""
    settings = PackingSettings(Packing.SEQUENCES, micro_batch_tokens=100)
    (share,) = shares([sample(1, 10), sample(1, 100), sample(1, 10)], settings, ranks=1)
    assert [one.places for one in share.passes] == [(1,), (0, 2)]


def test_ragged_lengths_fill_their_passes() -> None:
    batch = samples(64, longest=60)
    (share,) = shares(batch, PackingSettings(Packing.SEQUENCES, micro_batch_tokens=256), ranks=1)
    assert share.packing_share == 1.0
    assert len(share.passes) <= 1.2 * sum(len(one.packed.token_ids) for one in share.passes) / 256 + 1
    balanced = shares(batch, PackingSettings(Packing.SEQUENCES, micro_batch_tokens=256), ranks=4)
    assert balanced[0].balance_share > 0.9
