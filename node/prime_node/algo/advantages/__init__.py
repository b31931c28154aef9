"""Advantages, one a file: from the rewards of a group to the weight of each rollout's gradient."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from prime_node.algo.advantages.base import (
    AdvantageFunction,
    AdvantageInputs,
    AdvantageOutputs,
    RolloutView,
    inputs_of,
)
from prime_node.algo.advantages.group_mean import group_mean
from prime_node.algo.advantages.leave_one_out import leave_one_out
from prime_node.algo.advantages.length_penalty import LengthCost, shaped_rewards
from prime_node.algo.advantages.max_rl import max_rl
from prime_node.algo.advantages.normalized import normalized
from prime_node.algo.advantages.opo import opo
from prime_node.algo.advantages.overlong import OverlongPenalty
from prime_node.algo.advantages.reinforce_plus_plus import reinforce_plus_plus
from prime_node.algo.registry import find_by_name, import_object
from prime_protocol.errors import LocalError

__all__ = [
    "ADVANTAGES",
    "Advantage",
    "AdvantageInputs",
    "AdvantageOutputs",
    "LengthCost",
    "OverlongPenalty",
    "RolloutView",
    "find_advantage",
    "inputs_of",
]

ADVANTAGES: Mapping[str, AdvantageFunction] = {
    "default": group_mean,
    "group_mean": group_mean,
    "leave_one_out": leave_one_out,
    "max_rl": max_rl,
    "normalized": normalized,
    "opo": opo,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": group_mean,
}
"""Advantages by name. `default` is prime-rl's name of the group mean."""

WHITENED = frozenset({"reinforce_plus_plus", "reinforce_plus_plus_baseline"})
"""Advantages that are whitened over the batch unless the settings say otherwise."""


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

    def __call__(self, inputs: AdvantageInputs) -> tuple[float, ...]:
        """Return one advantage for each rollout. Raises LocalError if a custom function returns anything else."""
        if self.overlong is not None:
            inputs = self.overlong.shaped(inputs)
        if self.length_cost is not None:
            inputs = inputs.with_rewards(shaped_rewards(inputs, self.length_cost, self.length_weights))
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
) -> Advantage:
    """Find an advantage by name, or a custom one by `import_path` ("package.module.function"). Raises LocalError.

    `whiten` None: as the algorithm of this name does.
    """
    settings = dict(kwargs or {})
    function = find_by_name("advantage", name, ADVANTAGES) if import_path is None else import_object(import_path)
    try:
        inspect.signature(function).bind(None, **settings)
    except TypeError as error:
        raise LocalError(f"advantage {import_path or name}: {error}") from None
    is_whitened = import_path is None and name in WHITENED if whiten is None else whiten
    weights = dict(length_weights or {})
    return Advantage(import_path or name, function, settings, length_cost, weights, overlong, is_whitened)
