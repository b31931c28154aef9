"""Inference. An Engine samples (worker), a Scorer judges by one forward pass (validator, evaluation).

Letters: B requests, T completion tokens in all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from prime_protocol.assignment import Sampling
from prime_protocol.rollout import Completion, EngineInfo
from prime_protocol.schedule import SwapPolicy
from prime_protocol.verify import Prefill
from prime_protocol.weights import Weights

Spans = tuple[tuple[int, int], ...]
"""(policy version, number of tokens) of one completion, in order."""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One completion to sample. Example: GenerateRequest((72, 105), seed=7)."""

    prompt_token_ids: tuple[int, ...]
    seed: int
    """The assigned randomness: tokens are argmax(logits / temperature + noise.gumbel_noise(seed, position))."""
    proofs: bool = False
    """Whether the completion commits to its hidden states (`Completion.proofs`), alike for all requests of a call."""


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """One finished completion to judge."""

    prompt_token_ids: tuple[int, ...]
    completion_token_ids: tuple[int, ...]
    seed: int | None
    """None, alike for all requests of a call: nobody assigned one, and what may be expected of a choice is wanted instead
    (`Prefill.expected_T`)."""
    hidden: bool = False
    """Whether the last hidden states are wanted too (`Prefill.hidden_TD`), alike for all requests of a call."""


class Engine(Protocol):
    """Samples completions. One policy at a time; `load` and `generate` are never called at once."""

    @property
    def info(self) -> EngineInfo:
        """What a rollout says about the software that made it."""
        ...

    async def load(self, weights: Weights, *, policy_version: int) -> None:
        """Swap to other weights (all of them, verified by the caller). Idempotent.

        Raises EngineMismatch where the engine's logprobs on a probe prompt are not those of the weights afterwards:
        upstream engines have had updates that silently did nothing (verl #7495, NeMo-RL #3839).
        """
        ...

    async def generate(self, requests: Sequence[GenerateRequest], sampling: Sampling) -> list[Completion]:
        """One completion for each request, in their order.

        Logprobs are taken at the sampling temperature, without the noise, over the whole vocabulary. Temperature 0 is
        greedy: no noise, logprobs at temperature 1. A cancelled call leaves the engine usable. Not retried by the engine:
        the same request gives the same tokens but for rare numerical ties.
        """
        ...

    async def close(self) -> None:
        """Free processes and memory. Idempotent."""
        ...


@runtime_checkable
class SwappingEngine(Engine, Protocol):
    """An engine that can change its policy while it generates."""

    @property
    def swaps(self) -> frozenset[SwapPolicy]:
        """What it can do with unfinished completions, of those that let one span policies."""
        ...

    async def update(self, weights: Weights, *, policy_version: int, swap: SwapPolicy) -> None:
        """Swap to other weights at the next token; `generate` goes on, and `Completion.spans` says which policy sampled what.

        The last token before the cut is forwarded by the new weights. Returns when the swap is done; with nothing under way
        it is a `load`. Raises EngineMismatch, and so does the `generate` under way.
        """
        ...


class Scorer(Protocol):
    """Judges completions by one forward pass over prompt and completion."""

    @property
    def info(self) -> EngineInfo:
        """Which software judges, for calibration."""
        ...

    async def load(self, weights: Weights, *, policy_version: int) -> None:
        """Swap to other weights. Idempotent."""
        ...

    async def prefill(self, requests: Sequence[ScoreRequest], sampling: Sampling) -> Prefill:
        """Logprobs and margins of all T completion tokens, in the requests' order.

        A request whose prompt begins with the prompt and the completion of the one before it goes on where that one ended: the
        turns of a rollout share one forward pass.

        margin = max over tokens of (logit / temperature + noise) minus the same for the chosen token; exactly 0.0 where
        the chosen token is the best. Temperature 0: without noise, logprobs at temperature 1.
        """
        ...

    async def prefill_mixed(
        self,
        requests: Sequence[ScoreRequest],
        spans: Sequence[Spans],
        sampling: Sampling,
        policies: Mapping[int, Weights],
    ) -> Prefill:
        """The same for completions whose policy changed under way with the keys and values kept (SwapPolicy.KEEP_KV).

        Each span is forwarded by its own policy, which sees what those before it left in the cache. Loads the policies in
        ascending order, so the newest one is held afterwards.
        """
        ...

    async def close(self) -> None:
        """Free memory. Idempotent."""
        ...


class SamplingScorer(Engine, Scorer, Protocol):
    """A scorer that can sample from the policy that it holds, too."""


class EngineMismatch(Exception):
    """The engine does not compute what its weights say. The worker must not upload until a swap succeeds."""
