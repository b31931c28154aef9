"""Cheats that hold the right weights, or claim to, and answer with other tokens or numbers.

Most of them rescore: they claim the logprobs that the right policy has for the wrong tokens, since any comparison of
logprobs detects a cheat that does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from prime_lab.adversaries.engine import Answer, Means, Model, rescored
from prime_node.ports.engine import GenerateRequest
from prime_node.worker.cheats import cut_completion
from prime_protocol.assignment import Sampling
from prime_protocol.noise import SEED_MAX
from prime_protocol.rollout import Completion, FinishReason

CANDIDATES = 4
"""Candidates of best-of-n."""

Requests = Sequence[GenerateRequest]


def with_sampling(**changes: float) -> Answer:
    """Sample with other parameters than the run's."""

    async def answer(model: Model, requests: Requests, sampling: Sampling, means: Means) -> list[Completion]:
        completions = await model.generate(requests, sampling.model_copy(update=changes))
        return await rescored(model, requests, completions, sampling)

    return answer


async def best_of_n(model: Model, requests: Requests, sampling: Sampling, means: Means) -> list[Completion]:
    """Sample several times and keep the best reward; the logprobs are the policy's own, so only the seed is wrong."""
    drawn = [
        await model.generate([replace(one, seed=(one.seed + turn) & SEED_MAX) for one in requests], sampling)
        for turn in range(CANDIDATES)
    ]
    return [
        max(candidates, key=lambda one: means.score(request.prompt_token_ids, one.token_ids))
        for request, candidates in zip(requests, zip(*drawn, strict=True), strict=True)
    ]


async def prompt_swap(model: Model, requests: Requests, sampling: Sampling, means: Means) -> list[Completion]:
    """Answer the lease's next prompt, claimed for this one."""
    prompts = list(dict.fromkeys(one.prompt_token_ids for one in requests))
    following = dict(zip(prompts, [*prompts[1:], prompts[0][::-1]], strict=True))
    swapped = [replace(one, prompt_token_ids=following[one.prompt_token_ids]) for one in requests]
    return await rescored(model, requests, await model.generate(swapped, sampling), sampling)


async def padded(model: Model, requests: Requests, sampling: Sampling, means: Means) -> list[Completion]:
    """Continue after the end, to be credited with more tokens."""
    completions = await model.generate(requests, sampling)
    return [
        replace(
            one,
            token_ids=one.token_ids + one.token_ids[-1:],
            logprobs=one.logprobs + one.logprobs[-1:],
            proofs=one.proofs,
        )
        if len(one.token_ids) < sampling.completion_tokens_max
        else one
        for one in completions
    ]


async def forged_stop(model: Model, requests: Requests, sampling: Sampling, means: Means) -> list[Completion]:
    """Send the first half and then a stop token that the assigned randomness did not choose."""
    stop = sampling.stop_token_ids[0]
    completions = []
    for one in await model.generate(requests, sampling):
        kept = cut_completion(one, len(one.token_ids) // 2).token_ids
        completions.append(Completion((*kept, stop), (0.0,) * (len(kept) + 1), FinishReason.STOP))
    return await rescored(model, requests, completions, sampling)


async def forged_logprobs(model: Model, requests: Requests, sampling: Sampling, means: Means) -> list[Completion]:
    """Claim lower logprobs than the true ones: a loss with importance ratios weighs these tokens more."""
    return [
        replace(one, logprobs=tuple(value - 0.5 for value in one.logprobs))
        for one in await model.generate(requests, sampling)
    ]


def poison(nats: float) -> Answer:
    """Poison the policy so that it learns to stop early.

    Half of a group stops one token early, half is empty: all of it is wrong, and rewards prefer the former. `nats`: how
    far below the truth the former's claimed logprobs are, to weigh more.
    """

    async def answer(model: Model, requests: Requests, sampling: Sampling, means: Means) -> list[Completion]:
        stop = sampling.stop_token_ids[0]
        drafts = []
        for place, one in enumerate(await model.generate(requests, sampling)):
            kept = tuple(token for token in one.token_ids if token != stop)[:-1] if place % 2 else ()
            drafts.append(Completion((*kept, stop), (0.0,) * (len(kept) + 1), FinishReason.STOP))
        return [
            replace(one, logprobs=tuple(value - nats for value in one.logprobs)) if place % 2 else one
            for place, one in enumerate(await rescored(model, requests, drafts, sampling))
        ]

    return answer


async def handing_out(model: Model, requests: Requests, sampling: Sampling, means: Means) -> list[Completion]:
    """Answer honestly, and share the answers with an accomplice."""
    means.mailbox[:] = await model.generate(requests, sampling)
    return list(means.mailbox)


async def handed(model: Model, requests: Requests, sampling: Sampling, means: Means) -> list[Completion]:
    """Send the accomplice's answers to other prompts instead of any work, rescored by the right model."""
    if not means.mailbox:
        return await model.generate(requests, sampling)
    taken = [means.mailbox[place % len(means.mailbox)] for place in range(len(requests))]
    return await rescored(model, requests, taken, sampling)


async def refiled(model: Model, requests: Requests, sampling: Sampling, means: Means) -> list[Completion]:
    """Send the completions of another lease's seeds, as kept by uploads.Framing; without any, the honest ones."""
    kept, means.mailbox[:] = list(means.mailbox), []
    honest = await model.generate(requests, sampling)
    if not kept:
        return honest
    return await rescored(model, requests, [*kept, *honest[len(kept) :]][: len(honest)], sampling)


def partly(share: float, cheat: Answer) -> Answer:
    """Cheat in this share of the completions only, chosen by their seeds, independently of earlier requests."""

    async def answer(model: Model, requests: Requests, sampling: Sampling, means: Means) -> list[Completion]:
        chosen = [np.random.default_rng(request.seed).random() < share for request in requests]
        honest = await model.generate(requests, sampling)
        forged = iter(
            await cheat(model, [r for r, is_one in zip(requests, chosen, strict=True) if is_one], sampling, means)
        )
        return [next(forged) if is_one else one for one, is_one in zip(honest, chosen, strict=True)]

    return answer


def in_whole_leases(share: float, cheat: Answer) -> Answer:
    """Cheat in this share of the leases, in all of their completions.

    A rarely audited worker bets on not being audited.
    """

    async def answer(model: Model, requests: Requests, sampling: Sampling, means: Means) -> list[Completion]:
        cheats = np.random.default_rng(requests[0].seed).random() < share
        return await (cheat(model, requests, sampling, means) if cheats else model.generate(requests, sampling))

    return answer
