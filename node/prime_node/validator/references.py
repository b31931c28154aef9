"""Trusted rollouts to compare unseeded rollouts' rewards with (prime_protocol/reward_ranks.py).

A secret of this process and the bundle's digest decide which groups are sampled, and by which seeds, so no worker can
predict it at upload. All are sampled from one policy, the bundle's. Each reference serves one comparison only;
otherwise the ranks of an honest worker would not be uniformly random.

For the same reason the choice of groups is made before anything is sampled, and depends on neither its completions nor
the references. To drop slow comparisons would be to drop long answers, and length correlates with reward. A comparison
that has begun is finished.

Concurrency: references are sampled for one bundle after another, a limited number of tokens at a time, in turns with
forward passes. A forward pass waits for one such turn at most.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from blake3 import blake3

from prime_node.ports.clock import Clock
from prime_node.ports.engine import Engine, GenerateRequest
from prime_protocol.assignment import Lease, Sampling
from prime_protocol.noise import SEED_MAX
from prime_protocol.rollout import Completion, FinishReason
from prime_protocol.run_spec import RunSpec

log = logging.getLogger(__name__)

References = Mapping[int, Sequence[Completion]]
"""References for a bundle, by the group's index in the lease: as many as the worker's completions."""
Chosen = Mapping[int, Sequence[GenerateRequest]]
"""Requests for references, by the group's index, in an unpredictable order."""
Generate = Callable[[Sequence[GenerateRequest], Sampling], Awaitable[list[Completion]]]

TURN_TOKENS = 64
"""Tokens sampled of each of a group's completions before forward passes get a turn."""
BOUND_FACTOR = 3.0
"""Bound on the time of references, as a multiple of their tokens at the measured pace. Forward passes come between, and
long texts are slower than short ones."""
WAIT_SHARE_MAX = 0.5
"""Largest share of a bundle's time to deadline that it may have to wait for turns of references."""
PROBE_TOKENS_MAX = 8
PROBE_SHARE = 0.05
"""Share of the engine's time spent on measuring its pace."""


@dataclass(frozen=True, slots=True)
class ReferenceComparison:
    """A planned comparison, not sampled yet."""

    chosen: Chosen
    bound_s: float


@dataclass(slots=True)
class ReferencePace:
    """Measured sampling speed of an engine, and its backlog."""

    step_s: float = 0.0
    """Seconds for one token of each of a group's completions."""
    backlog_s: float = 0.0
    """Sum of `bound_s` over everything not sampled yet."""
    _known_until_s: float = field(default=-math.inf)

    async def measure(self, lease: Lease, engine: Engine, clock: Clock) -> None:
        """Measure the pace with a few tokens that are discarded.

        No stop token ends them, so the time does not depend on their text.
        """
        started_s = clock.monotonic_s()
        if started_s < self._known_until_s:
            return
        num = max(1, min(PROBE_TOKENS_MAX, lease.sampling.completion_tokens_max // 16))
        largest = max(lease.groups, key=lambda group: (len(group.seeds), len(group.prompt_token_ids)))
        probe = lease.sampling.model_copy(update={"completion_tokens_max": num, "stop_token_ids": ()})
        await engine.generate([GenerateRequest(largest.prompt_token_ids, seed) for seed in largest.seeds], probe)
        ended_s = clock.monotonic_s()
        self.step_s = (ended_s - started_s) / num
        self._known_until_s = ended_s + (ended_s - started_s) / PROBE_SHARE

    def planned(self, chosen: Chosen, *, tokens_max: int, left_s: float, turns_max: int) -> ReferenceComparison | None:
        """Plan as many groups as can be sampled in time, after the backlog, even if no completion ends early.

        Returns None if there are none, or if `turns_max` turns would delay other bundles for too long.
        """
        group_s = BOUND_FACTOR * self.step_s * tokens_max
        turns_s = self.step_s * min(tokens_max, TURN_TOKENS) * turns_max
        num = sum((count + 1) * group_s <= left_s - self.backlog_s for count in range(len(chosen)))
        if not num or turns_s > WAIT_SHARE_MAX * left_s:
            return None
        return ReferenceComparison(dict(list(chosen.items())[:num]), num * group_s)


@dataclass(slots=True)
class Comparisons:
    """A validator's comparisons: planned before forward passes, and sampled for one bundle at a time."""

    secret: bytes = field(default_factory=functools.partial(secrets.token_bytes, 32), repr=False)
    """Secret that makes unpredictable which groups are compared, and with which seeds."""
    pace: ReferencePace = field(default_factory=ReferencePace)
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock, repr=False)

    async def plan(
        self,
        bundle: str,
        lease: Lease,
        *,
        spec: RunSpec,
        engine: Engine,
        clock: Clock,
        deadline_ms: int,
        turns_max: int,
    ) -> ReferenceComparison | None:
        """Plan which groups of a bundle are compared; None if none. Call it while holding the engine exclusively."""
        chosen = choose_groups(lease, spec=spec, bundle=bundle, secret=self.secret)
        if not chosen:
            return None
        await self.pace.measure(lease, engine, clock)
        left_s = (deadline_ms - clock.now_ms()) / 1_000
        tokens_max = lease.sampling.completion_tokens_max
        planned = self.pace.planned(chosen, tokens_max=tokens_max, left_s=left_s, turns_max=turns_max)
        if (num := len(planned.chosen) if planned else 0) < len(chosen):
            log.warning(
                "bundle %s: compares rewards of %d of %d groups; there is no time for more before its deadline",
                bundle[:12], num, len(chosen),
            )  # fmt: skip
        return planned

    def begin(self, comparison: ReferenceComparison) -> None:
        """Add a comparison to the backlog: later plans come after it."""
        self.pace.backlog_s += comparison.bound_s

    async def sample(self, comparison: ReferenceComparison, sampling: Sampling, generate: Generate) -> References:
        """Sample the references of a comparison that has begun. Raises whatever `generate` does."""
        try:
            async with self._turn:
                return await sample_references(comparison.chosen, sampling, generate)
        finally:
            self.pace.backlog_s -= comparison.bound_s


def choose_groups(lease: Lease, *, spec: RunSpec, bundle: str, secret: bytes) -> Chosen:
    """Choose the groups to compare. Groups of multi-turn environments are never compared."""
    turns_max = {one.name: one.turns_max for one in spec.environments}
    drawn: dict[int, tuple[int, list[GenerateRequest]]] = {}
    for index, group in enumerate(lease.groups):
        size = len(group.seeds)
        stream = blake3(f"{bundle}\0{index}".encode(), key=secret).digest(length=8 * (1 + size))
        draw, *seeds = (int.from_bytes(stream[8 * i : 8 * i + 8], "big") for i in range(1 + size))
        if draw < spec.checks.reference_share * 2**64 and turns_max[group.problem.environment] == 1:
            drawn[index] = draw, [GenerateRequest(group.prompt_token_ids, seed & SEED_MAX) for seed in seeds]
    return {index: drawn[index][1] for index in sorted(drawn, key=lambda index: drawn[index][0])}


async def sample_references(chosen: Chosen, sampling: Sampling, generate: Generate) -> References:
    """Sample references with `generate`, from the policy that sampled the bundle; each call is one turn."""
    return {index: await _sample_group(requests, sampling, generate) for index, requests in chosen.items()}


async def _sample_group(
    requests: Sequence[GenerateRequest], sampling: Sampling, generate: Generate
) -> list[Completion]:
    """Sample a group's references in pieces.

    Each piece continues the previous ones with seeds of its own, which gives the same distribution.
    """
    found = [Completion((), (), FinishReason.LENGTH) for _ in requests]
    for begin in range(0, sampling.completion_tokens_max, TURN_TOKENS):
        unfinished = [index for index, one in enumerate(found) if one.finish is FinishReason.LENGTH]
        if not unfinished:
            break
        num = min(TURN_TOKENS, sampling.completion_tokens_max - begin)
        asked = [
            replace(
                requests[index],
                prompt_token_ids=(*requests[index].prompt_token_ids, *found[index].token_ids),
                seed=(requests[index].seed + begin) & SEED_MAX,
            )
            for index in unfinished
        ]
        pieces = await generate(asked, sampling.model_copy(update={"completion_tokens_max": num}))
        for index, piece in zip(unfinished, pieces, strict=True):
            so_far = found[index]
            found[index] = Completion(
                so_far.token_ids + piece.token_ids, so_far.logprobs + piece.logprobs, piece.finish
            )
    return found
