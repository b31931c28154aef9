"""Filter of text that the policy itself finds improbable. The settings choose one of two rules.

a token (arXiv 2510.02387, section 5.2): id > token_id_threshold and logprob < -log(vocabulary) - logprob_offset:
    a rare token, less probable than a blind guess
threshold, nats: the mean logprob of the whole completion is below it
"""

from __future__ import annotations

import math
import statistics

from prime_node.algo.filters.base import FilterInputs
from prime_protocol.rollout import Completion


def gibberish(
    inputs: FilterInputs,
    *,
    threshold: float | None = None,
    token_id_threshold: int = 100_000,
    logprob_offset: float = 2.0,
) -> list[bool]:
    """Flag completions by the second rule if `threshold` is given, else by the first."""
    completions = inputs.group.completions
    if threshold is not None:
        return [
            bool(completion.logprobs) and statistics.fmean(completion.logprobs) < threshold
            for completion in completions
        ]
    logprob_min = -math.log(inputs.vocab_size) - logprob_offset
    return [_has_absurd_token(completion, token_id_threshold, logprob_min) for completion in completions]


def _has_absurd_token(completion: Completion, token_id_max: int, logprob_min: float) -> bool:
    pairs = zip(completion.token_ids, completion.logprobs, strict=True)
    return any(token > token_id_max and logprob < logprob_min for token, logprob in pairs)
