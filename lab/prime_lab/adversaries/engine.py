"""A dishonest engine around a real one.

Two kinds of functions make a cheat: one chooses the weights to load, one answers a request for completions. Both get
`Means`: a cheat's resources besides an honest worker's parts.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from prime_node.ports.engine import Engine, GenerateRequest, SamplingScorer, ScoreRequest
from prime_node.worker.cheats import CheatMemory, DishonestEngine
from prime_protocol.assignment import Sampling
from prime_protocol.proof import build_proofs
from prime_protocol.rollout import Completion, EngineInfo
from prime_protocol.weights import Weights

TokenIds = tuple[int, ...]

Logits = Callable[[Sequence[TokenIds]], npt.NDArray[np.float32]]
"""Function that returns a model's logits [B, V] for the next token of each sequence."""


Model = SamplingScorer
"""Model of a cheat: to claim the right numbers for the wrong tokens, it must score them too."""


@dataclass
class Means(CheatMemory):
    """The resources of a cheat. A test may prepend older policies to `seen`."""

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
    is_trusted: Callable[[], bool] = lambda: True
    """Function that returns whether it may begin to cheat: a sleeper waits until it is rarely audited."""


ChooseWeights = Callable[[Means], Weights]
"""Function that chooses the weights to load instead of the policy, which is `means.seen[-1]`."""
Answer = Callable[[Model, Sequence[GenerateRequest], Sampling, Means], Awaitable[list[Completion]]]
"""Function that returns completions for the requests, by any means."""


class AdversaryEngine(DishonestEngine[Means]):
    """A dishonest engine that may claim to be another one, and that may wait until it is trusted."""

    def __init__(
        self,
        engine: Engine,
        means: Means,
        *,
        weights: ChooseWeights | None,
        answer: Answer | None,
        claims: EngineInfo | None,
        honest_loads: int,
    ) -> None:
        """Wrap an engine. `claims`: the engine that it claims to be."""
        # The engines of tests are scorers too, as Answer needs.
        super().__init__(engine, means, weights=weights, answer=answer, honest_loads=honest_loads)  # type: ignore[arg-type]
        self._claims = claims

    @property
    def info(self) -> EngineInfo:
        """Return the claimed engine, or the real one."""
        return self._claims or super().info

    @property
    def _cheats(self) -> bool:
        return super()._cheats and self._memory.is_trusted()


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
