"""Forward passes for completions that span several policies.

If the run's swap makes a worker recompute keys and values, each span is verified by its own policy over everything
before it: one forward pass for each policy, up to the end of its spans. If the cache is kept, they are verified as that
mixture.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from prime_node.ports.engine import Scorer, ScoreRequest, Spans
from prime_protocol.assignment import Sampling
from prime_protocol.rollout import Rollouts
from prime_protocol.schedule import SwapPolicy
from prime_protocol.verify import Prefill
from prime_protocol.weights import Weights


def spans_of(rollouts: Rollouts) -> list[Spans]:
    """Return the spans of each completion, in the bundle's order."""
    found: list[list[tuple[int, int]]] = [[] for _ in range(len(rollouts))]
    for index, version, num_tokens in rollouts.spans_S3.tolist():
        found[index].append((version, num_tokens))
    return [tuple(spans) for spans in found]


def policies_of(rollouts: Rollouts) -> list[int]:
    """Return every policy that sampled a token, ascending."""
    return sorted(set(rollouts.spans_S3[:, 1].tolist()))


async def prefill_spans(
    scorer: Scorer,
    requests: Sequence[ScoreRequest],
    spans: Sequence[Spans],
    sampling: Sampling,
    policies: Mapping[int, Weights],
    *,
    swap: SwapPolicy,
) -> Prefill:
    """Compute a trusted forward pass of every token, by the policy that sampled it.

    The scorer holds the newest policy afterwards.
    """
    if swap is SwapPolicy.KEEP_KV:
        return await scorer.prefill_mixed(requests, spans, sampling, policies)
    starts = np.cumsum([0, *(len(request.completion_token_ids) for request in requests)]).tolist()
    whole: dict[str, npt.NDArray[Any]] = {}
    for version in sorted(policies):
        parts = [(index, *_part(spans[index], version)) for index in range(len(requests))]
        parts = [(index, first, end) for index, first, end in parts if first < end]
        if not parts:
            continue
        await scorer.load(policies[version], policy_version=version)
        found = await scorer.prefill([_until(requests[index], end) for index, _, end in parts], sampling)
        place = 0
        for index, first, end in parts:
            target = slice(starts[index] + first, starts[index] + end)
            for name, values in found.arrays().items():
                merged = whole.setdefault(name, np.empty((starts[-1], *values.shape[1:]), values.dtype))
                merged[target] = values[place + first : place + end]
            place += end
    return Prefill(**whole)


def _part(spans: Spans, version: int) -> tuple[int, int]:
    """Return where a policy's tokens begin and end in a completion; equal if it has none."""
    first = 0
    for each, num_tokens in spans:
        if each == version:
            return first, first + num_tokens
        first += num_tokens
    return 0, 0


def _until(request: ScoreRequest, end: int) -> ScoreRequest:
    return replace(request, completion_token_ids=request.completion_token_ids[:end])
