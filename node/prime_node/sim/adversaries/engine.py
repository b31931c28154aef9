"""A dishonest engine around a real one.

Two kinds of functions make a cheat: one chooses the weights to load, one answers a request for completions. Both get
`Means`: a cheat's resources besides an honest worker's parts.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from prime_node.ports.engine import Engine, GenerateRequest, SamplingScorer, ScoreRequest
from prime_protocol.assignment import Sampling
from prime_protocol.proof import build_proofs
from prime_protocol.rollout import Completion, EngineInfo
from prime_protocol.weights import Weights

log = logging.getLogger(__name__)

TokenIds = tuple[int, ...]
SEEN_MAX = 16
"""Number of policies that a cheat remembers."""


Logits = Callable[[Sequence[TokenIds]], npt.NDArray[np.float32]]
"""Function that returns a model's logits [B, V] for the next token of each sequence."""


Model = SamplingScorer
"""Model of a cheat: to claim the right numbers for the wrong tokens, it must score them too."""


@dataclass
class Means:
    """The resources of a cheat."""

    seen: list[Weights] = field(default_factory=list)
    """Policies that it was given, oldest first; a test may prepend older ones."""
    kept: Weights | None = None
    """Policy that it never swaps."""
    base: Weights | None = None
    """Model with which the run began."""
    small: Model | None = None
    """Smaller model, already loaded."""
    logits: Logits | None = None
    """Logits of the policy that it should sample from."""
    small_logits: Logits | None = None
    """Logits of the smaller model."""
    vocab_size: int = 0
    score: Callable[[TokenIds, TokenIds], float] = lambda prompt, completion: 0.0
    """Function that computes the reward of a completion from prompt and tokens."""
    mailbox: list[Completion] = field(default_factory=list)
    """Completions that accomplices share."""
    overheard: list[bytes] = field(default_factory=list)
    """Bundles of an accomplice."""
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    is_trusted: Callable[[], bool] = lambda: True
    """Function that returns whether it may begin to cheat: a sleeper waits until it is rarely audited."""


ChooseWeights = Callable[[Means], Weights]
"""Function that chooses the weights to load instead of the policy, which is `means.seen[-1]`."""
Answer = Callable[[Model, Sequence[GenerateRequest], Sampling, Means], Awaitable[list[Completion]]]
"""Function that returns completions for the requests, by any means."""


class DishonestEngine:
    """Implementation of ports.engine.Engine that cheats. It reports the right policy, as a real cheat would."""

    def __init__(
        self,
        engine: Engine,
        *,
        weights: ChooseWeights | None = None,
        answer: Answer | None = None,
        means: Means | None = None,
        claims: EngineInfo | None = None,
        honest_loads: int = 0,
    ) -> None:
        """Wrap an engine. `claims`: the engine that it claims to be.

        `honest_loads`: number of policies that it serves honestly first.
        """
        self._engine = engine
        self._weights = weights
        self._answer = answer
        self._means = means or Means()
        self._claims = claims
        self._honest_loads = honest_loads
        self._loads = 0
        log.warning("this worker cheats: it is meant to be found out")

    @property
    def info(self) -> EngineInfo:
        """Return the claimed engine, or the real one."""
        return self._claims or self._engine.info

    async def load(self, weights: Weights, *, policy_version: int) -> None:
        """Load the weights that the cheat chooses instead."""
        self._means.seen.append(weights)
        del self._means.seen[:-SEEN_MAX]
        self._loads += 1
        if self._weights is not None and self._cheats:
            weights = self._weights(self._means)
        await self._engine.load(weights, policy_version=policy_version)

    async def generate(self, requests: Sequence[GenerateRequest], sampling: Sampling) -> list[Completion]:
        """Answer by the cheat's function, once it has begun to cheat."""
        if self._answer is None or not self._cheats:
            return await self._engine.generate(requests, sampling)
        return await self._answer(self._engine, requests, sampling, self._means)  # type: ignore[arg-type]

    async def close(self) -> None:
        """Close the real engine."""
        await self._engine.close()

    @property
    def _cheats(self) -> bool:
        return self._loads > self._honest_loads and self._means.is_trusted()


async def rescored(
    model: Model, requests: Sequence[GenerateRequest], completions: Sequence[Completion], sampling: Sampling
) -> list[Completion]:
    """Return the same tokens with `model`'s logprobs and proofs for them: the cheat's prefill."""
    asked = [
        ScoreRequest(r.prompt_token_ids, c.token_ids, r.seed, hidden=r.proofs)
        for r, c in zip(requests, completions, strict=True)
    ]
    prefill = await model.prefill(asked, sampling)
    cuts = np.cumsum([len(one.token_ids) for one in completions])[:-1]
    claimed = [
        replace(one, logprobs=tuple(np.minimum(part, 0.0).tolist()))
        for one, part in zip(completions, np.split(prefill.logprobs_T, cuts), strict=True)
    ]
    if prefill.hidden_TD is None:
        return claimed
    return [
        replace(one, proofs=build_proofs(part, [len(part)]).tobytes())
        for one, part in zip(claimed, np.split(prefill.hidden_TD, cuts), strict=True)
    ]
