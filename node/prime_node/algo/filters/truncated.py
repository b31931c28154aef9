"""Filter of rollouts that ended at the length limit, whose reward says little (DAPO's overlong filtering, arXiv 2503.14476).

They count in their group's advantages, as with TRL's `mask_truncated_completions`.
"""

from __future__ import annotations

from prime_node.algo.filters.base import FilterInputs
from prime_protocol.rollout import FinishReason


def ended_truncated(inputs: FilterInputs) -> list[bool]:
    """Flag rollouts that did not stop by themselves."""
    return [completion.finish is FinishReason.LENGTH for completion in inputs.group.completions]
