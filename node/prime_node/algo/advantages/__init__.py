"""Advantages, one a file: from the rewards of a group to the weight of each rollout's gradient."""

from __future__ import annotations

from collections.abc import Mapping

from prime_node.algo.advantages.base import Advantage, AdvantageInputs
from prime_node.algo.advantages.group_mean import group_mean
from prime_node.algo.registry import choose, import_object

__all__ = ["ADVANTAGES", "Advantage", "AdvantageInputs", "find_advantage"]

ADVANTAGES: Mapping[str, Advantage] = {"group_mean": group_mean}


def find_advantage(name: str, *, import_path: str | None = None) -> Advantage:
    """By name, or one's own by import path. Raises LocalError."""
    if import_path is not None:
        found: Advantage = import_object(import_path)
        return found
    return choose("advantage", name, ADVANTAGES)
