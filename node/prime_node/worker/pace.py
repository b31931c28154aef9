"""The measured speed of generation, and how much work to request at that speed."""

from __future__ import annotations

from collections import deque
from collections.abc import Coroutine
from typing import Any

from prime_node.patience import unless
from prime_node.ports.clock import Clock
from prime_node.ports.engine import Engine, GenerateRequest
from prime_protocol import limits
from prime_protocol.run_spec import PinnedRun, RunSpec
from prime_protocol.telemetry import Speed

ROLLOUTS = 16
PROMPT_TOKENS = 16
TOKENS_MAX = 16
"""Tokens of each completion. Some hundred tokens in all: an instant on a GPU."""


async def rehearse(
    engine: Engine, spec: RunSpec, pace: GenerationPace, *, clock: Clock, too_long: Coroutine[Any, Any, object]
) -> None:
    """Report to `pace` how fast the engine samples the policy that it holds, to size the first lease for this machine.

    The prompts are fixed: real ones are not known before they are leased. Nothing is uploaded. If `too_long` finishes first,
    the reported speed is an upper bound.
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


SHARE_OF_LEASE = 0.4
"""Largest share of a lease's time that the requested work may take. The rest is for queueing and for the upload."""
LEASE_MARGIN = 1.3
"""Safety factor: work is assumed to take this much longer than measured."""
ROUND_TRIPS_OF_LEASE = 50
"""Longest lease, in round trips to the coordinator, during which the next one is fetched. The wait for it costs a fiftieth of
the engine's time then, as much as a lease that is queued behind long completions (`scripts/bench/overlap.py`)."""


class GenerationPace:
    """Measured speed of generation: an EWMA. A rehearsal's value counts until real work replaces it."""

    def __init__(self) -> None:
        self.tokens_per_s = 0.0
        self._tokens, self._engine_s = 0.0, 0.0
        """Tokens and seconds of the last leases, older ones with less weight."""
        self._seconds_per_rollout: float | None = None
        self._is_rehearsed = False
        self._lease_s: float | None = None
        self._round_trips_s: deque[float] = deque(maxlen=8)

    def rehearsed(self, *, tokens: int, seconds: float, rollout_tokens: int) -> None:
        """Record a rehearsal: tokens in seconds. A rollout has at most `rollout_tokens`."""
        self.tokens_per_s = tokens / max(seconds, 1e-6)
        self._seconds_per_rollout, self._is_rehearsed = rollout_tokens / self.tokens_per_s, True

    def claim(self, *, download_bytes_per_s: float) -> Speed | None:
        """Return the claimed speed, for a coordinator that has not measured any yet."""
        if self._seconds_per_rollout is None:
            return None
        return Speed(
            rollout_ms=min(max(1, round(self._seconds_per_rollout * 1_000)), limits.CLAIMED_MS_MAX),
            tokens_per_s=min(round(self.tokens_per_s), limits.CLAIMED_TOKENS_PER_S_MAX),
            download_bytes_per_s=min(round(download_bytes_per_s), limits.CLAIMED_BYTES_PER_S_MAX),
        )

    def measured(self, *, rollouts: int, tokens: int, seconds: float, engine_s: float | None = None) -> None:
        """Record a finished lease: how long it took, among those generated side by side.

        `engine_s`: the part of `seconds` since another lease was finished; None if it was alone.
        """
        seconds = max(seconds, 1e-6)
        self._lease_s = seconds if self._lease_s is None else self._lease_s + 0.3 * (seconds - self._lease_s)
        engine_s = seconds if engine_s is None else engine_s
        self._tokens, self._engine_s = 0.7 * self._tokens + tokens, 0.7 * self._engine_s + engine_s
        self.tokens_per_s = self._tokens / max(self._engine_s, 1e-6)
        if self._seconds_per_rollout is None or self._is_rehearsed:
            self._is_rehearsed = False
            self._seconds_per_rollout = seconds / rollouts
        else:
            self._seconds_per_rollout += 0.3 * (seconds / rollouts - self._seconds_per_rollout)

    def asked(self, seconds: float) -> None:
        """Record how long a granted request for a lease took. The coordinator may have held some of them open."""
        self._round_trips_s.append(seconds)

    @property
    def fetches_ahead(self) -> bool:
        """Whether leases are so short that the next one is best fetched meanwhile; False before the first measurements."""
        if self._lease_s is None or not self._round_trips_s:
            return False
        return self._lease_s < ROUND_TRIPS_OF_LEASE * min(self._round_trips_s)

    def fits(self, num_rollouts: int, *, seconds_left: float) -> bool:
        """Return whether the work can be finished in time. Before the first measurement: try it."""
        if self._seconds_per_rollout is None or self._is_rehearsed:
            return seconds_left > 0
        return num_rollouts * self._seconds_per_rollout * LEASE_MARGIN < seconds_left

    def doubt(self) -> None:
        """Halve the estimate after a lease was handed back because of it: it may have been bad luck."""
        if self._seconds_per_rollout is not None:
            self._seconds_per_rollout /= 2

    def rollouts_max(self, run: PinnedRun, *, wanted: int, leases_ahead: int = 0) -> int:
        """Return how many completions to request: no more than fit after the leases ahead, at least one group."""
        if self._seconds_per_rollout is None:
            return wanted
        share = min(SHARE_OF_LEASE, 1.0 / (LEASE_MARGIN * (leases_ahead + 1)))
        fitting = int(run.spec.lease_seconds * share / self._seconds_per_rollout)
        return max(min(wanted, fitting), min(wanted, run.spec.rollouts_per_group))
