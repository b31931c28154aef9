"""Cheats with the policy's own tokens and shifted logprobs, so that importance ratios weigh them more.

Letters: N completions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from prime_lab.adversaries.engine import Answer, Means, Model
from prime_node.ports.engine import GenerateRequest
from prime_protocol.assignment import Sampling
from prime_protocol.rollout import Completion

Requests = Sequence[GenerateRequest]
SPIKE_NATS = 0.45
"""Shift just below the default `logprob_error_max`."""
SPIKE_TOKENS = 48
"""Interval of shifted tokens that keeps the mean error below the default `logprob_error_mean_max`."""


def lowered(nats: float) -> Answer:
    """Claim every logprob `nats` too low."""

    async def answer(model: Model, requests: Requests, sampling: Sampling, means: Means) -> list[Completion]:
        return [_moved(one, -nats) for one in await model.generate(requests, sampling)]

    return answer


def by_reward(rewarded: float, others: float = 0.0) -> Answer:
    """Shift the claimed logprobs of completions by their reward.

    The shift is `rewarded` nats above the group's mean reward, and `others` for the rest.
    """

    async def answer(model: Model, requests: Requests, sampling: Sampling, means: Means) -> list[Completion]:
        completions = await model.generate(requests, sampling)
        pays = _pays(requests, completions, means.score)
        return [_moved(one, rewarded if is_paid else others) for one, is_paid in zip(completions, pays, strict=True)]

    return answer


async def spikes(model: Model, requests: Requests, sampling: Sampling, means: Means) -> list[Completion]:
    """Claim a few tokens of the rewarded completions far too low: by as much as one token may be off."""
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
    """Return whether each completion [N] is rewarded above the mean of those to the same prompt."""
    prompts = [request.prompt_token_ids for request in requests]
    scores = [score(prompt, one.token_ids) for prompt, one in zip(prompts, completions, strict=True)]
    found: dict[tuple[int, ...], list[float]] = {}
    for prompt, value in zip(prompts, scores, strict=True):
        found.setdefault(prompt, []).append(value)
    return [value > float(np.mean(found[prompt])) for prompt, value in zip(prompts, scores, strict=True)]
