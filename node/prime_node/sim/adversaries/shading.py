"""Cheats whose tokens are the policy's own and whose claimed logprobs are moved, so that importance ratios learn more from them.

Letters: N completions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from prime_node.ports.engine import GenerateRequest
from prime_node.sim.adversaries.engine import Answer, Means, Model
from prime_protocol.assignment import Sampling
from prime_protocol.rollout import Completion

Requests = Sequence[GenerateRequest]
SPIKE_NATS = 0.45
"""Just below the default `logprob_error_max`."""
SPIKE_TOKENS = 48
"""One token in so many, so that the mean error stays below the default `logprob_error_mean_max`."""


def lowered(nats: float) -> Answer:
    """Every claimed logprob is so far below the truth."""

    async def answer(model: Model, requests: Requests, sampling: Sampling, means: Means) -> list[Completion]:
        return [_moved(one, -nats) for one in await model.generate(requests, sampling)]

    return answer


def by_reward(rewarded: float, others: float = 0.0) -> Answer:
    """The claimed logprobs of completions above their group's mean are moved by so many nats, and those of the others."""

    async def answer(model: Model, requests: Requests, sampling: Sampling, means: Means) -> list[Completion]:
        completions = await model.generate(requests, sampling)
        pays = _pays(requests, completions, means.score)
        return [_moved(one, rewarded if is_paid else others) for one, is_paid in zip(completions, pays, strict=True)]

    return answer


async def spikes(model: Model, requests: Requests, sampling: Sampling, means: Means) -> list[Completion]:
    """A few tokens of the rewarded completions are claimed far too low: by as much as one token may be off."""
    completions = await model.generate(requests, sampling)
    pays = _pays(requests, completions, means.score)
    return [
        replace(
            one,
            logprobs=tuple(
                value - SPIKE_NATS * (is_paid and means.rng.random() < 1 / SPIKE_TOKENS) for value in one.logprobs
            ),
        )
        for one, is_paid in zip(completions, pays, strict=True)
    ]


def _moved(completion: Completion, nats: float) -> Completion:
    return replace(completion, logprobs=tuple(min(0.0, value + nats) for value in completion.logprobs))


def _pays(
    requests: Requests, completions: Sequence[Completion], score: Callable[[tuple[int, ...], tuple[int, ...]], float]
) -> list[bool]:
    """Whether each completion [N] is rewarded above the mean of those to the same prompt."""
    prompts = [request.prompt_token_ids for request in requests]
    scores = [score(prompt, one.token_ids) for prompt, one in zip(prompts, completions, strict=True)]
    found: dict[tuple[int, ...], list[float]] = {}
    for prompt, value in zip(prompts, scores, strict=True):
        found.setdefault(prompt, []).append(value)
    return [value > float(np.mean(found[prompt])) for prompt, value in zip(prompts, scores, strict=True)]
