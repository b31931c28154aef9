"""Advantages: from the rewards of a group to the weight of each rollout's gradient."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

from prime_node.algo.advantages.base import (
    AdvantageFunction,
    AdvantageInputs,
    AdvantageOutputs,
    RolloutView,
    inputs_of,
)
from prime_node.algo.advantages.of_groups import (
    VERDICT,
    gdpo,
    group_mean,
    grpo_passk,
    leave_one_out,
    max_rl,
    normalized,
    opo,
    part_names,
    reinforce_plus_plus,
)
from prime_node.algo.advantages.of_tokens import (
    TokenAdvantageFunction,
    TokenInputs,
    TokenNeed,
    discounted_sums,
    gae,
    optimal_token_baseline,
    reinforce_plus_plus_tokens,
    remax,
)
from prime_node.algo.advantages.shaping import LengthCost, OverlongPenalty, shaped_rewards
from prime_node.algo.registry import find_by_name, import_object
from prime_protocol.errors import LocalError

__all__ = [
    "ADVANTAGES",
    "TOKEN_ADVANTAGES",
    "Advantage",
    "AdvantageInputs",
    "AdvantageOutputs",
    "KlCredit",
    "LengthCost",
    "OverlongPenalty",
    "RolloutView",
    "TokenInputs",
    "TokenNeed",
    "find_advantage",
    "inputs_of",
]

ADVANTAGES: Mapping[str, AdvantageFunction] = {
    "default": group_mean,
    "gdpo": gdpo,
    "group_mean": group_mean,
    "grpo_passk": grpo_passk,
    "leave_one_out": leave_one_out,
    "max_rl": max_rl,
    "normalized": normalized,
    "opo": opo,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": group_mean,
}
"""Advantages by name. `default` is prime-rl's name of the group mean."""

TOKEN_ADVANTAGES: Mapping[str, TokenAdvantageFunction] = {
    "gae": gae,
    "optimal_token_baseline": optimal_token_baseline,
    "reinforce_plus_plus": reinforce_plus_plus_tokens,
    "remax": remax,
}
"""Advantages that may differ between the tokens of a rollout, by name."""

WHITENED = frozenset({"gae", "gdpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"})
"""Advantages that are whitened over the batch unless the settings say otherwise."""


class KlCredit(StrEnum):
    """Place where a divergence in the reward counts, with an advantage of one value a rollout."""

    ROLLOUT = "rollout"
    """In the rollout's reward, before the baseline: verl."""
    RETURN = "return"
    """In the advantages of its token and of those before it, after the baseline: OpenRLHF."""
    TOKEN = "token"
    """In its token's advantage alone, after the baseline: NeMo-RL's and slime's REINFORCE++."""


@dataclass(frozen=True, slots=True)
class Advantage:
    """An advantage with its settings, and the reward shaping before it."""

    name: str
    function: AdvantageFunction
    settings: Mapping[str, Any] = field(default_factory=dict)
    length_cost: LengthCost | None = None
    length_weights: Mapping[str, float] = field(default_factory=dict)
    overlong: OverlongPenalty | None = None
    is_whitened: bool = False
    """Whether the batch's advantages are then whitened together."""
    by_token: TokenAdvantageFunction | None = None
    """The same for each token, where the reward differs between tokens; None: it counts as `kl_credit` says."""
    token_settings: Mapping[str, Any] = field(default_factory=dict)
    kl_credit: KlCredit = KlCredit.ROLLOUT

    @property
    def needs(self) -> frozenset[TokenNeed]:
        """Return what the advantages of tokens need from the trainer's weights."""
        return frozenset(getattr(self.by_token, "token_needs", ()))

    def __call__(self, inputs: AdvantageInputs) -> tuple[float, ...]:
        """Return one advantage for each rollout. Raises LocalError if a custom function returns anything else."""
        return self._of(self._shaped(inputs))

    def of_tokens(
        self, inputs: AdvantageInputs, costs: Sequence[Sequence[float]], **values: Sequence[Sequence[float]]
    ) -> list[list[float]]:
        """Return the advantage of each token of each rollout. Raises LocalError.

        `costs`: what each token costs; `values`: what `needs` names.
        """
        shaped = self._shaped(inputs)
        if self.by_token is not None:
            found = self.by_token(TokenInputs(shaped, costs, **values), **self.token_settings)
            return [list(tokens) for tokens in found]
        if self.kl_credit is KlCredit.ROLLOUT:
            rewards = [reward - math.fsum(its) for reward, its in zip(shaped.rewards, costs, strict=True)]
            same = self._of(shaped.with_rewards(rewards))
            return [[value] * len(its) for value, its in zip(same, costs, strict=True)]
        gamma = 1.0 if self.kl_credit is KlCredit.RETURN else 0.0
        return [
            [value - cost for cost in discounted_sums(its, gamma)]
            for value, its in zip(self._of(shaped), costs, strict=True)
        ]

    def returns_of_tokens(
        self,
        inputs: AdvantageInputs,
        costs: Sequence[Sequence[float]],
        values: Sequence[Sequence[float]],
        advantages: Sequence[Sequence[float]],
    ) -> list[list[float]]:
        """Return what a critic learns of each token: value plus advantage with gae, else the rewards from the token on."""
        if TokenNeed.VALUES in self.needs:
            return [np.add(*pair).tolist() for pair in zip(values, advantages, strict=True)]
        rewarded = TokenInputs(self._shaped(inputs), costs)
        return [discounted_sums(rewarded.rewards(index), 1.0) for index in range(len(costs))]

    @property
    def reward_parts(self) -> frozenset[str]:
        """Return the names of the further rewards that it compares."""
        if self.function is not gdpo:
            return frozenset()
        return frozenset(part_names(str(self.settings.get("gdpo_reward_keys", VERDICT)))) - {VERDICT}

    @property
    def discounts(self) -> bool:
        """Return whether the advantages of a rollout's tokens differ even without costs."""
        return float(self.token_settings.get("gamma", 1.0)) != 1.0

    def _shaped(self, inputs: AdvantageInputs) -> AdvantageInputs:
        if self.overlong is not None:
            inputs = self.overlong.shaped(inputs)
        if self.length_cost is not None:
            inputs = inputs.with_rewards(shaped_rewards(inputs, self.length_cost, self.length_weights))
        return inputs

    def _of(self, inputs: AdvantageInputs) -> tuple[float, ...]:
        found = tuple(float(value) for value in self.function(inputs, **self.settings).advantages)
        if len(found) != len(inputs.rollouts) or not all(map(math.isfinite, found)):
            raise LocalError(
                f"advantage {self.name}: expected {len(inputs.rollouts)} finite numbers, one a rollout; got {found[:8]}"
            )
        return found


def find_advantage(
    name: str,
    *,
    import_path: str | None = None,
    kwargs: Mapping[str, Any] | None = None,
    length_cost: LengthCost | None = None,
    length_weights: Mapping[str, float] | None = None,
    overlong: OverlongPenalty | None = None,
    whiten: bool | None = None,
    kl_credit: KlCredit = KlCredit.ROLLOUT,
) -> Advantage:
    """Find an advantage by name, or a custom one by `import_path` ("package.module.function"). Raises LocalError.

    `whiten` None: as the algorithm of this name does.
    """
    settings = dict(kwargs or {})
    by_token = TOKEN_ADVANTAGES.get(name) if import_path is None else None
    if by_token is remax and (length_cost is not None or overlong is not None):
        raise LocalError(
            "advantage remax: length_penalty and overlong_buffer change the rewards that it compares with a greedy completion's; "
            "leave them out, or use leave_one_out"
        )
    known = {**dict.fromkeys(TOKEN_ADVANTAGES, group_mean), **ADVANTAGES}  # unused where tokens always differ
    function = find_by_name("advantage", name, known) if import_path is None else import_object(import_path)
    token_settings = {} if by_token is None else settings
    if by_token is not None:
        settings = {}
    try:
        inspect.signature(by_token or function).bind(None, **settings, **token_settings)
    except TypeError as error:
        raise LocalError(f"advantage {import_path or name}: {error}") from None
    if function is gdpo:
        gdpo(AdvantageInputs(()), **settings)  # refuses bad keys and weights
    return Advantage(
        import_path or name,
        function,
        settings,
        length_cost,
        dict(length_weights or {}),
        overlong,
        is_whitened=import_path is None and name in WHITENED if whiten is None else whiten,
        by_token=by_token,
        token_settings=token_settings,
        kl_credit=kl_credit,
    )
