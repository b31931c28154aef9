"""Cheats that save work: a smaller model's tokens, and custom samplers over any model's logits.

Letters: B completions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from prime_lab.adversaries.engine import Answer, Logits, Means, Model, TokenIds, rescored
from prime_node.ports.engine import GenerateRequest
from prime_protocol.assignment import Sampling
from prime_protocol.noise import gumbel_noise
from prime_protocol.rollout import Completion, FinishReason
from prime_protocol.weights import Weights

Floats = npt.NDArray[np.float32]
Requests = Sequence[GenerateRequest]


def base(means: Means) -> Weights:
    """Load the model with which the run began."""
    assert means.base is not None
    return means.base


async def smaller(model: Model, requests: Requests, sampling: Sampling, means: Means) -> list[Completion]:
    """Sample from a smaller model, with that model's logprobs."""
    assert means.small is not None
    return await means.small.generate(requests, sampling)


async def smaller_rescored(model: Model, requests: Requests, sampling: Sampling, means: Means) -> list[Completion]:
    """Sample from a smaller model and rescore with the right one.

    No comparison of logprobs or hidden states can detect it.
    """
    return await rescored(model, requests, await smaller(model, requests, sampling, means), sampling)


def escalating(nats: float) -> Answer:
    """Sample from the smaller model; if its two best tokens are within `nats`, use the right one.

    The claimed numbers are right.
    """

    async def answer(model: Model, requests: Requests, sampling: Sampling, means: Means) -> list[Completion]:
        assert means.logits is not None
        assert means.small_logits is not None
        right, small = means.logits, means.small_logits

        def choose(sequences: Sequence[TokenIds], noise_BV: Floats) -> list[int]:
            noisy_BV = small(sequences) / sampling.temperature + noise_BV
            best_B2 = np.sort(noisy_BV, axis=1)[:, -2:]
            unsure = np.flatnonzero(best_B2[:, 1] - best_B2[:, 0] < nats)
            if len(unsure):
                asked = right([sequences[row] for row in unsure])
                noisy_BV[unsure] = asked / sampling.temperature + noise_BV[unsure]
            return [int(token) for token in noisy_BV.argmax(axis=1)]

        return await rescored(
            model, requests, sample_cheaply(choose, requests, sampling, vocab_size=means.vocab_size), sampling
        )

    return answer


def nucleus(top_p: float) -> Answer:
    """Sample from the right model with the assigned noise, restricted to the nucleus.

    The nucleus is the smallest set of tokens with the share `top_p` of the probability.
    """

    async def answer(model: Model, requests: Requests, sampling: Sampling, means: Means) -> list[Completion]:
        assert means.logits is not None
        logits: Logits = means.logits

        def choose(sequences: Sequence[TokenIds], noise_BV: Floats) -> list[int]:
            scaled_BV = logits(sequences) / sampling.temperature
            order_BV = np.argsort(-scaled_BV, axis=1)
            sorted_BV = np.take_along_axis(scaled_BV, order_BV, axis=1)
            shares_BV = np.exp(sorted_BV - sorted_BV[:, :1])
            before_BV = np.cumsum(shares_BV, axis=1) - shares_BV
            left_out_BV = before_BV > top_p * shares_BV.sum(axis=1, keepdims=True)
            np.put_along_axis(scaled_BV, order_BV, np.where(left_out_BV, -np.inf, sorted_BV), axis=1)
            return [int(token) for token in (scaled_BV + noise_BV).argmax(axis=1)]

        return await rescored(
            model, requests, sample_cheaply(choose, requests, sampling, vocab_size=means.vocab_size), sampling
        )

    return answer


def sample_cheaply(
    choose: Callable[[Sequence[TokenIds], Floats], list[int]],
    requests: Requests,
    sampling: Sampling,
    *,
    vocab_size: int,
    begun: Sequence[TokenIds] | None = None,
) -> list[Completion]:
    """Sample token by token, without a cache.

    `choose` gets the unfinished sequences and their noise [B, V]; logprobs stay 0. `begun` holds the first tokens of
    each completion.
    """
    chosen: list[TokenIds] = [() for _ in requests] if begun is None else list(begun)
    stops = set(sampling.stop_token_ids)
    for position in range(min(map(len, chosen)), sampling.completion_tokens_max):
        rows = [row for row, ids in enumerate(chosen) if len(ids) == position and not stops.intersection(ids)]
        if not rows:
            continue
        noise_BV = gumbel_noise([requests[row].seed for row in rows], [position] * len(rows), vocab_size)
        tokens = choose([requests[row].prompt_token_ids + chosen[row] for row in rows], noise_BV)
        for row, token in zip(rows, tokens, strict=True):
            chosen[row] += (token,)
    return [
        Completion(ids, (0.0,) * len(ids), FinishReason.STOP if ids[-1] in stops else FinishReason.LENGTH)
        for ids in chosen
    ]
