"""Golden vectors of what rewards say beside trusted ones. See make_vectors.py."""

from __future__ import annotations

from prime_protocol.reward_ranks import rank_sums
from vectors.folder import Folder

Groups = list[tuple[list[float], list[float]]]


def ranks(folder: Folder) -> None:
    cases: dict[str, Groups] = {
        "all above": [([3.0, 4.0], [1.0, 2.0])],
        "all equal": [([1.0, 1.0, 1.0], [1.0, 1.0])],
        "ties": [([0.0, 1.0, 1.0, 1.0], [0.0, 0.0, 1.0])],
        "two groups of other sizes": [([0.5, 0.25, 0.75], [0.5]), ([-1.0], [2.0, 7.5])],
        "a group without references": [([0.9], []), ([0.1], [0.2])],
        "nothing to compare": [([], [1.0])],
    }
    folder.cases(
        "reward_ranks",
        [
            {"name": name, "groups": groups, "expect": {key: sums.log_e for key, sums in rank_sums(groups).items()}}
            for name, groups in cases.items()
        ],
    )
