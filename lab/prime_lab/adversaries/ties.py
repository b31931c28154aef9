"""Cheats by near ties: honest engines differ, so a validator allows a few tokens that are nearly the seed's choice.

A cheat that spends that allowance on purpose can choose between some continuations, and all numbers that it claims are
right.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from prime_lab.adversaries.cheap import Floats, sample_cheaply
from prime_lab.adversaries.engine import Means, Model, TokenIds, rescored
from prime_node.ports.engine import GenerateRequest
from prime_protocol.assignment import Sampling
from prime_protocol.noise import gumbel_noise
from prime_protocol.rollout import Completion

FLIPS_SHARE, MARGIN, STOP_MARGIN = 0.03, 1.9, 0.45
"""Values slightly below the default thresholds of a run."""


async def near_ties(
    model: Model, requests: Sequence[GenerateRequest], sampling: Sampling, means: Means
) -> list[Completion]:
    """Take the runner-up once, in as many completions as may differ, if that improves the completion's reward."""
    assert means.logits is not None
    logits = means.logits
    honest = await model.generate(requests, sampling)
    flips_max = int(FLIPS_SHARE * sum(len(one.token_ids) for one in honest))
    places = [row for row, one in enumerate(honest) for _ in one.token_ids]
    found_TV = logits([requests[row].prompt_token_ids + prefix for row, prefix in _prefixes(honest)])
    positions = [position for one in honest for position in range(len(one.token_ids))]
    noise_TV = gumbel_noise([requests[row].seed for row in places], positions, means.vocab_size)
    chosen = np.array([token for one in honest for token in one.token_ids])
    rows, begun = [], []
    for index, (row, prefix) in enumerate(_prefixes(honest)):
        runner_up = _runner_up(found_TV[index] / sampling.temperature + noise_TV[index], chosen[index], sampling)
        if runner_up is not None:
            rows.append(row)
            begun.append((*prefix, runner_up))
    if not rows or not flips_max:
        return honest

    def choose(sequences: Sequence[TokenIds], noise_BV: Floats) -> list[int]:
        return [int(token) for token in (logits(sequences) / sampling.temperature + noise_BV).argmax(axis=1)]

    others = sample_cheaply(choose, [requests[row] for row in rows], sampling, vocab_size=means.vocab_size, begun=begun)
    gains = [
        means.score(requests[row].prompt_token_ids, other.token_ids)
        - means.score(requests[row].prompt_token_ids, honest[row].token_ids)
        for row, other in zip(rows, others, strict=True)
    ]
    answers = dict(enumerate(honest))
    for place in np.argsort(-np.array(gains), kind="stable").tolist():
        if flips_max and gains[place] > 0 and answers[rows[place]] is honest[rows[place]]:
            answers[rows[place]] = others[place]
            flips_max -= 1
    return await rescored(model, requests, list(answers.values()), sampling)


def _prefixes(completions: Sequence[Completion]) -> Iterator[tuple[int, TokenIds]]:
    """Iterate over (index of the completion, tokens before the next one), token by token."""
    for row, one in enumerate(completions):
        for position in range(len(one.token_ids)):
            yield row, one.token_ids[:position]


def _runner_up(score_V: Floats, chosen: int, sampling: Sampling) -> int | None:
    """Return the second-best token if a validator would accept it."""
    best, second = np.argsort(score_V)[[-1, -2]].tolist()
    margin = score_V[best] - score_V[second]
    at_the_end = best in sampling.stop_token_ids or second in sampling.stop_token_ids
    is_near = best == chosen and margin < (STOP_MARGIN if at_the_end else MARGIN)
    return int(second) if is_near else None
