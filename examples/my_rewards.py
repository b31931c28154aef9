"""A reward function of one's own. examples/own_reward.toml names it: reward = "my_rewards:score"."""

from __future__ import annotations

from typing import Any


def score(completion: str, answer: str, info: dict[str, Any]) -> dict[str, float]:
    """Return the share of the answer that the completion begins with. `info` has the problem's other fields.

    A plain number is enough; of a dict only "reward" counts.
    """
    got = completion.strip()
    right = 0
    while right < min(len(got), len(answer)) and got[right] == answer[right]:
        right += 1
    return {"reward": right / max(len(got), len(answer), 1), "right": right}
