"""Inference: an Engine samples (worker); a Scorer verifies by one forward pass (validator, evaluation).

Letters: B requests, T completion tokens in all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from prime_protocol.assignment import Sampling
from prime_protocol.errors import TransientFault
from prime_protocol.rollout import Completion, EngineInfo
from prime_protocol.schedule import SwapPolicy
from prime_protocol.verify import Prefill
from prime_protocol.weights import Weights

Spans = tuple[tuple[int, int], ...]
"""Pairs of (policy version, number of tokens) of one completion, in order."""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One completion to sample. Example: GenerateRequest((72, 105), seed=7)."""

    prompt_token_ids: tuple[int, ...]
    seed: int
    """Assigned randomness: tokens are argmax(logits / temperature + noise.gumbel_noise(seed, position))."""
    proofs: bool = False
    """Whether the completion commits to its hidden states (`Completion.proofs`). All requests of a call agree on it."""


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """One finished completion to score."""

    prompt_token_ids: tuple[int, ...]
    completion_token_ids: tuple[int, ...]
    seed: int | None
    """Assigned seed. None, for all requests of a call alike, if none was assigned; the result then holds
    `Prefill.expected_T`, the expected statistics of a token choice."""
    hidden: bool = False
    """Whether to return the last hidden states too (`Prefill.hidden_TD`). All requests of a call agree on it."""


class Engine(Protocol):
    """Sampler of completions. It holds one policy at a time.

    `load` is never called concurrently with another method; `generate` only as BatchingEngine and SwappingEngine allow.
    """

    @property
    def info(self) -> EngineInfo:
        """Return the software's identity, which each rollout carries."""

    async def load(self, weights: Weights, *, policy_version: int) -> None:
        """Swap to other weights (all of them, verified by the caller). Idempotent.

        Raises EngineMismatch if the engine's logprobs on a probe prompt then differ from those of the weights: upstream
        engines have had updates that silently did nothing (verl #7495, NeMo-RL #3839).
        """

    async def generate(self, requests: Sequence[GenerateRequest], sampling: Sampling) -> list[Completion]:
        """Return one completion for each request, in order.

        Logprobs are taken at the sampling temperature, without the noise, over the whole vocabulary. Temperature 0 is
        greedy: no noise, logprobs at temperature 1. A cancelled call leaves the engine usable. The engine does not
        retry: the same request gives the same tokens, except for rare numerical ties.
        """

    async def close(self) -> None:
        """Free processes and memory. Idempotent."""


@runtime_checkable
class SwappingEngine(Engine, Protocol):
    """An engine that can change its policy while it generates."""

    @property
    def swaps(self) -> frozenset[SwapPolicy]:
        """Return the swap policies that let a completion span policies and that this engine supports."""

    async def update(self, weights: Weights, *, policy_version: int, swap: SwapPolicy) -> None:
        """Swap to other weights at the next token while `generate` continues.

        `Completion.spans` records which policy sampled which tokens. The new weights forward the last token before the
        swap. Returns when the swap is done; with nothing in progress it is a `load`. Raises EngineMismatch, and so does
        the `generate` in progress.
        """


def swapping_engine(engine: Engine, swap: SwapPolicy) -> SwappingEngine | None:
    """Return the engine if it can change its policy in this way while it generates, else None."""
    return engine if isinstance(engine, SwappingEngine) and swap in engine.swaps else None


@runtime_checkable
class BatchingEngine(Engine, Protocol):
    """An engine that can compute several calls of `generate` side by side, each answered as soon as it is complete."""

    @property
    def batches(self) -> bool:
        """Return whether it does. If not, `generate` must not be called while another call is in progress."""

    async def wait_for_room(self) -> None:
        """Wait until it computes fewer completions than it can."""


@runtime_checkable
class ThreadedEngine(Engine, Protocol):
    """An engine whose number of processors can change while it is loaded."""

    def set_threads(self, threads: int) -> None:
        """Compute with this many threads from the next call of `generate` or `load` on."""


class Scorer(Protocol):
    """Verifier of completions, by one forward pass over prompt and completion."""

    @property
    def info(self) -> EngineInfo:
        """Return the identity of the scoring software, for calibration."""

    async def load(self, weights: Weights, *, policy_version: int) -> None:
        """Swap to other weights. Idempotent."""

    async def prefill(self, requests: Sequence[ScoreRequest], sampling: Sampling) -> Prefill:
        """Return logprobs and margins of all T completion tokens, in the order of the requests.

        A request whose prompt begins with the previous request's prompt and completion continues from there: the turns
        of a rollout share one forward pass.

        margin = max over tokens of (logit / temperature + noise) minus the same for the chosen token; exactly 0.0 if
        the chosen token is the best. Temperature 0: without noise, logprobs at temperature 1.
        """

    async def prefill_mixed(
        self,
        requests: Sequence[ScoreRequest],
        spans: Sequence[Spans],
        sampling: Sampling,
        policies: Mapping[int, Weights],
    ) -> Prefill:
        """Score completions whose policy changed during generation with keys and values kept (SwapPolicy.KEEP_KV).

        Each span is forwarded by its own policy, which sees the cache that the earlier policies left. Loads the
        policies in ascending order, so the newest one is held afterwards.
        """

    async def close(self) -> None:
        """Free memory. Idempotent."""


class SamplingScorer(Engine, Scorer, Protocol):
    """A scorer that can also sample from its policy."""


class EngineMismatch(Exception):
    """The engine does not compute what its weights imply. The worker must not upload until a swap succeeds."""


class EngineDied(EngineMismatch):
    """The engine's processes ended. The next `load` starts new ones."""


class EngineFault(TransientFault):
    """The engine fails again and again, so its process ends: memory, or a driver that a new process finds in order."""


def require_finite(prefill: Prefill) -> Prefill:
    """Return a forward pass. Raises EngineMismatch if a value of it is not finite."""
    if wrong := prefill.non_finite():
        raise EngineMismatch(f"this machine's own {', '.join(wrong)} of a forward pass are not all finite numbers")
    return prefill
