"""A rehearsal: sample a few tokens before the first lease, to size it for this machine.

The prompts are fixed: real ones are not known before they are leased. Nothing is uploaded.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from prime_node.patience import unless
from prime_node.ports.clock import Clock
from prime_node.ports.engine import Engine, GenerateRequest
from prime_node.worker.pace import GenerationPace
from prime_protocol.run_spec import RunSpec

ROLLOUTS = 16
PROMPT_TOKENS = 16
TOKENS_MAX = 16
"""Tokens of each completion. Some hundred tokens in all: an instant on a GPU."""


async def rehearse(
    engine: Engine, spec: RunSpec, pace: GenerationPace, *, clock: Clock, too_long: Coroutine[Any, Any, object]
) -> None:
    """Report to `pace` how fast the engine samples the policy that it holds.

    If `too_long` finishes first, the reported speed is an upper bound.
    """
    tokens = min(TOKENS_MAX, spec.sampling.completion_tokens_max)
    sampling = spec.sampling.model_copy(update={"completion_tokens_max": tokens})
    prompt = tuple(place % spec.vocab_size for place in range(1, 1 + min(PROMPT_TOKENS, spec.limits.prompt_tokens_max)))
    requests = [GenerateRequest(prompt, seed, proofs=spec.checks.proofs) for seed in range(ROLLOUTS)]

    async def sampled() -> tuple[int, float]:
        await engine.generate(requests[:1], sampling)  # exclude one-time compilation and allocation
        began_s = clock.monotonic_s()
        completions = await engine.generate(requests, sampling)
        return sum(len(one.token_ids) for one in completions), clock.monotonic_s() - began_s

    began_s = clock.monotonic_s()
    found = await unless(too_long, sampled())
    num_tokens, seconds = found or (ROLLOUTS * tokens, clock.monotonic_s() - began_s)
    pace.rehearsed(
        tokens=num_tokens, seconds=seconds, rollout_tokens=spec.turns_max * spec.sampling.completion_tokens_max
    )
