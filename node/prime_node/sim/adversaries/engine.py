"""An engine that does not do what it is asked, around a real one.

Two kinds of functions make a cheat: one chooses the weights that are loaded, one answers a request for completions. Both get
`Means`: what a cheat has at hand beside an honest worker's parts.
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
"""Policies that a cheat remembers."""


Logits = Callable[[Sequence[TokenIds]], npt.NDArray[np.float32]]
"""What a model would choose the next token of each sequence by: [B, V]."""


Model = SamplingScorer
"""Whoever wants to claim the right numbers for the wrong tokens has to score them as well."""


@dataclass
class Means:
    """What a cheat has at hand."""

    seen: list[Weights] = field(default_factory=list)
    """Policies that it was shown, oldest first; a test may put older ones in front."""
    kept: Weights | None = None
    """The policy that it never swaps."""
    base: Weights | None = None
    """The model that the run began with."""
    small: Model | None = None
    """A smaller model, loaded already."""
    logits: Logits | None = None
    """Of the policy that it should sample from."""
    small_logits: Logits | None = None
    """Of the smaller model."""
    vocab_size: int = 0
    score: Callable[[TokenIds, TokenIds], float] = lambda prompt, completion: 0.0
    """The reward of a completion, as it works it out from prompt and tokens."""
    mailbox: list[Completion] = field(default_factory=list)
    """Completions that accomplices hand to each other."""
    overheard: list[bytes] = field(default_factory=list)
    """Bundles of an accomplice."""
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    is_trusted: Callable[[], bool] = lambda: True
    """Whether it has been honest for long enough to begin: a sleeper waits until it is audited seldom."""


ChooseWeights = Callable[[Means], Weights]
"""What is loaded instead of the policy, which is `means.seen[-1]`."""
Answer = Callable[[Model, Sequence[GenerateRequest], Sampling, Means], Awaitable[list[Completion]]]
"""Completions for the requests, by whatever means."""


class DishonestEngine:
    """Implements ports.engine.Engine. It believes itself to hold the right policy, as a real cheat would say that it does."""

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
        """`claims`: the engine that it says it is. `honest_loads`: policies that it serves as it should first."""
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
        return self._claims or self._engine.info

    async def load(self, weights: Weights, *, policy_version: int) -> None:
        self._means.seen.append(weights)
        del self._means.seen[:-SEEN_MAX]
        self._loads += 1
        if self._weights is not None and self._cheats:
            weights = self._weights(self._means)
        await self._engine.load(weights, policy_version=policy_version)

    async def generate(self, requests: Sequence[GenerateRequest], sampling: Sampling) -> list[Completion]:
        if self._answer is None or not self._cheats:
            return await self._engine.generate(requests, sampling)
        return await self._answer(self._engine, requests, sampling, self._means)  # type: ignore[arg-type]

    async def close(self) -> None:
        await self._engine.close()

    @property
    def _cheats(self) -> bool:
        return self._loads > self._honest_loads and self._means.is_trusted()


async def rescored(
    model: Model, requests: Sequence[GenerateRequest], completions: Sequence[Completion], sampling: Sampling
) -> list[Completion]:
    """The same tokens with the logprobs and proofs that `model` has for them: the liar's prefill."""
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
