"""Assignment of samples to ranks: equal work for all, prompts kept together. Pure, so that every rank decides the same.

A sequence of T tokens costs T for the linear layers and T * T / (2 * quadratic_tokens) for causal attention.
quadratic_tokens is the length at which both cost the same; for a dense transformer about 6 * hidden size.

The samples of one prompt share its tokens' computation, so they stay together unless that alone would leave ranks idle.
Groups are assigned, the most expensive first, to the least loaded rank (Graham's longest-processing-time rule: at most
4/3 of the optimum).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

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
