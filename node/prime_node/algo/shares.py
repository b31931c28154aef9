"""From a batch to each rank's share: balanced, packed, counted. Pure, so it may run ahead of the step and anywhere.

A sequence of T tokens costs T for the linear layers and T * T / (2 * quadratic_tokens) for causal attention.
quadratic_tokens is the length at which both cost the same; for a dense transformer about 6 * hidden size.

The samples of one prompt share its tokens' computation, so they stay together unless that alone would leave ranks idle.
Groups are assigned, the most expensive first, to the least loaded rank (Graham's longest-processing-time rule: at most
4/3 of the optimum).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby

from prime_node.algo.packing import PackedRows, PackedSequences, pack, pack_sequences
from prime_node.ports.train_samples import TrainSample


def sequence_cost(num_tokens: int, *, quadratic_tokens: int) -> float:
    """Return the cost in tokens of linear layers.

    Example: sequence_cost(1_000, quadratic_tokens=1_000) is 1500.
    """
    return num_tokens + num_tokens * num_tokens / (2 * quadratic_tokens)


def balance(samples: Sequence[TrainSample], ranks: int, *, quadratic_tokens: int) -> list[list[int]]:
    """Return the indices of the samples for each rank, every one once, in ascending order."""
    costs = [
        sequence_cost(
            len(sample.prompt_token_ids) + len(sample.completion_token_ids), quadratic_tokens=quadratic_tokens
        )
        for sample in samples
    ]
    fair = sum(costs) / ranks
    by_prompt = sorted(range(len(samples)), key=lambda index: (samples[index].prompt_token_ids, index))
    bundles: list[list[int]] = []
    for _, members in groupby(by_prompt, key=lambda index: samples[index].prompt_token_ids):
        bundle: list[int] = []
        for index in members:
            if bundle and sum(costs[member] for member in bundle) + costs[index] > fair:
                bundles.append(bundle)
                bundle = []
            bundle.append(index)
        bundles.append(bundle)
    loads = [0.0] * ranks
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for bundle in sorted(bundles, key=lambda bundle: (-sum(costs[index] for index in bundle), bundle)):
        rank = loads.index(min(loads))
        loads[rank] += sum(costs[index] for index in bundle)
        shares[rank] += bundle
    return [sorted(share) for share in shares]


Packed = PackedRows | PackedSequences


class Packing(StrEnum):
    """Method of packing sequences into a forward pass."""

    TREE = "tree"
    """Shared prefixes once: for short sequences with common beginnings, such as those of one prompt. Masks take a row's
    square."""
    SEQUENCES = "sequences"
    """Concatenation, each sequence by itself: for long ones."""


@dataclass(frozen=True, slots=True)
class PackingSettings:
    """Packing method and sizes. Example: PackingSettings(Packing.SEQUENCES, micro_batch_tokens=32_768)."""

    packing: Packing = Packing.TREE
    row_tokens: int = 128
    """Tokens of a tree's row."""
    micro_batch_tokens: int = 16_384
    """Tokens of one forward pass."""
    quadratic_tokens: int = 4_096
    """Length at which attention costs as much as the linear layers, for the balance of ranks."""


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward and backward pass of one rank."""

    packed: Packed
    samples: tuple[TrainSample, ...]
    """Samples, in the order of its predictions."""
    places: tuple[int, ...]
    """Positions of these samples in the batch."""


@dataclass(frozen=True, slots=True)
class RankShare:
    """One rank's part of one step, and the counts of the whole step."""

    passes: tuple[Pass, ...]
    num_passes: int
    """Passes of the rank with the most: the others join its collectives with empty ones."""
    num_tokens: int
    """Trainable tokens of the whole batch."""
    num_sequences: int
    """Sequences of the whole batch with any trainable token."""
    computed_tokens: int
    """Computed tokens of all ranks, without padding, shared prefixes once."""
    packing_share: float
    """Share of non-padding tokens among those that all ranks compute."""
    balance_share: float
    """Mean over ranks of their work, divided by the largest. The rest to 1 is idle time."""
    sharing_ratio: float
    """Tokens of all sequences / tokens computed for them; above 1 if prefixes are shared."""


def batch_counts(samples: Sequence[TrainSample]) -> tuple[int, int]:
    """Return the number of trainable tokens, and of sequences with any."""
    trained = [sample.num_trained for sample in samples]
    return sum(trained), sum(count > 0 for count in trained)


def shares(samples: Sequence[TrainSample], settings: PackingSettings, *, ranks: int) -> list[RankShare]:
    """Return one share for each rank; every sample is in exactly one. Raises LocalError if one is too long."""
    everything = [list(range(len(samples)))]
    chosen = everything if ranks == 1 else balance(samples, ranks, quadratic_tokens=settings.quadratic_tokens)
    passes = [_passes([samples[index] for index in members], members, settings) for members in chosen]
    num_tokens, num_sequences = batch_counts(samples)
    loads = [sum(_cost(one, settings) for one in rank) for rank in passes]
    computed = sum(len(one.packed.token_ids) for rank in passes for one in rank)
    distinct = sum(one.packed.num_distinct for rank in passes for one in rank)
    whole = sum(len(sample.prompt_token_ids) + len(sample.completion_token_ids) - 1 for sample in samples)
    return [
        RankShare(
            passes=rank,
            num_passes=max(map(len, passes)),
            num_tokens=num_tokens,
            num_sequences=num_sequences,
            computed_tokens=distinct,
            packing_share=distinct / max(1, computed),
            balance_share=sum(loads) / max(1e-9, len(loads) * max(loads)),
            sharing_ratio=whole / max(1, distinct),
        )
        for rank in passes
    ]


def _passes(samples: Sequence[TrainSample], places: Sequence[int], settings: PackingSettings) -> tuple[Pass, ...]:
    packs: Sequence[Packed]
    if settings.packing is Packing.TREE:
        packs = pack(samples, row_tokens=settings.row_tokens, micro_batch_tokens=settings.micro_batch_tokens)
    else:
        packs = pack_sequences(samples, micro_batch_tokens=settings.micro_batch_tokens)
    return tuple(
        Pass(
            packed,
            tuple(samples[index] for index in packed.samples),
            tuple(places[index] for index in packed.samples),
        )
        for packed in packs
    )


def _cost(one: Pass, settings: PackingSettings) -> float:
    """Return the cost as `sequence_cost` does. A tree's rows are computed whole, its trunk again for each of them."""
    quadratic = settings.quadratic_tokens
    if isinstance(one.packed, PackedSequences):
        return sum(sequence_cost(length, quadratic_tokens=quadratic) for length in one.packed.lengths)
    rows, width = one.packed.subtree_end_RW.shape
    return float(len(one.packed.token_ids) + rows * width * (one.packed.trunk_tokens + width) / quadratic)
