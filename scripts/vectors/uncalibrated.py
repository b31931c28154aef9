"""Golden vectors of statistics that need no calibration. See make_vectors.py."""

from __future__ import annotations

import numpy as np

from prime_protocol.close_flips import close_flip_sums, contexts_of
from prime_protocol.errors import ErrorCode
from prime_protocol.evidence import BundleEvidence, ComparedRewards
from prime_protocol.excess_flips import apart, flip_sums
from prime_protocol.reward_ranks import rank_sums
from prime_protocol.shading import by_reward_sums, reward_classes, rises, shading_sums
from vectors.folder import Folder, fields

Groups = list[tuple[list[float], list[float]]]
Completions = list[tuple[tuple[int, ...], tuple[int, ...]]]


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


def compared(folder: Folder) -> None:
    """Add evidence with the rewards of its ranks."""
    groups = (ComparedRewards(mine=(1.0, 0.5), trusted=(0.0, 0.5)), ComparedRewards(mine=(0.0,), trusted=(0.25,)))
    sums = rank_sums([(one.mine, one.trusted) for one in groups])
    evidence = fields(BundleEvidence(worker="a", validator="b", sums=sums, compared=groups))
    folder.cases(
        "compared",
        [
            {"name": "two groups", "evidence": evidence, "expect": len(groups)},
            {
                "name": "not told",
                "evidence": {key: evidence[key] for key in ("worker", "validator", "sums")},
                "expect": 0,
            },
            *(
                {"name": name, "evidence": evidence | changed, "error": ErrorCode.MALFORMED}
                for name, changed in [
                    ("a group less", {"compared": evidence["compared"][:1]}),
                    ("another reward", {"compared": [evidence["compared"][0], {"mine": [0.5], "trusted": [0.25]}]}),
                    ("no sums", {"sums": {}}),
                ]
            ),
        ],
    )


def excess_flips(folder: Folder) -> None:
    cases = {
        "no flip, equal logprobs": ([0, 0], [-1.0, -0.25], [-1.0, -0.25]),
        "a flip that nothing explains": ([0, 1, 0], [-1.0, -2.0, 0.0], [-1.0, -2.0, 0.0]),
        "a flip that is explained": ([0, 1], [-1.0, -2.0], [-1.0, -2.5]),
        "claims too high and too low": ([0, 0, 1], [-1.0, -1.0, -3.0], [-1.5, -0.5, -2.9]),
        "further apart than counts": ([0, 1], [-0.5, -9.0], [-9.0, -0.5]),
    }
    folder.cases(
        "excess_flips",
        [
            {
                "name": name,
                "flips": flips,
                "claimed": claimed,
                "recomputed": recomputed,
                "expect": flip_sums(np.array(flips), apart(np.array(claimed), np.array(recomputed))).log_e,
            }
            for name, (flips, claimed, recomputed) in cases.items()
        ],
    )


def close_flips(folder: Folder) -> None:
    apart_from: Completions = [((1,), (5, 6, 7))]
    cases: dict[str, tuple[Completions, list[float], list[float], list[float]]] = {
        "no flip, equal logprobs": (apart_from, [0.0, 0.0, 0.0], [-1.0, -0.25, -0.5], [-1.0, -0.25, -0.5]),
        "a flip that nothing explains": (apart_from, [0.0, 0.02, 0.0], [-1.0, -2.0, 0.0], [-1.0, -2.0, 0.0]),
        "a margin that rounding explains": (apart_from, [0.0, 0.00005, 0.0], [-1.0, -2.0, 0.0], [-1.0, -2.0, 0.0]),
        "flips at claims from close to far": (
            apart_from,
            [0.02, 0.02, 0.02],
            [-1.0, -2.0, -0.5],
            [-1.00001, -2.0005, -0.6],
        ),
        "claims too high and too low without a flip": (
            apart_from,
            [0.0, 0.0, 0.0],
            [-1.0, -2.0, -0.5],
            [-1.00001, -1.995, -9.0],
        ),
        "a flip after tokens that another completion shares": (
            [((1,), (5, 6)), ((1,), (5, 7)), ((2,), (5,))],
            [0.0, 0.0, 0.0, 0.02, 0.0],
            [-1.0, -2.0, -1.0, -0.5, -1.0],
            [-1.0, -2.0, -1.0, -0.5, -1.0],
        ),
    }
    folder.cases(
        "close_flips",
        [
            {
                "name": name,
                "completions": completions,
                "margins": margins,
                "claimed": claimed,
                "recomputed": recomputed,
                "expect": close_flip_sums(
                    np.array(margins), apart(np.array(claimed), np.array(recomputed)), contexts_of(completions)
                ).log_e,
            }
            for name, (completions, margins, claimed, recomputed) in cases.items()
        ],
    )


def shaded(folder: Folder) -> None:
    cases: dict[str, tuple[list[float], list[float], list[int], list[list[float]]]] = {
        "equal logprobs": ([-1.0, -0.25], [-1.0, -0.25], [0, 1], [[1.0, 0.0]]),
        "too low where it is rewarded": ([-1.1, -0.35, -0.5], [-1.0, -0.25, -0.5], [0, 0, 1], [[1.0, 0.0]]),
        "too high where it is not": ([-1.0, -0.25, -0.4], [-1.0, -0.25, -0.5], [0, 1, 2], [[1.0, 0.5, 0.0]]),
        "a group whose rewards are alike": ([-1.1, -0.35], [-1.0, -0.25], [0, 1], [[1.0, 1.0]]),
        "two groups": ([-1.1, -0.3, -0.2, -0.9], [-1.0, -0.25, -0.2, -1.0], [0, 1, 2, 3], [[1.0, 0.0], [0.0, 3.0]]),
        "further apart than counts": ([-9.0, -0.5], [-0.5, -9.0], [0, 1], [[1.0, 0.0]]),
    }
    folder.cases(
        "shading",
        [
            {
                "name": name,
                "claimed": claimed,
                "recomputed": recomputed,
                "owners": owners,
                "rewards": rewards,
                "expect": {
                    "shading": shading_sums(rises(np.array(claimed), np.array(recomputed))).log_e,
                    "shading_by_reward": by_reward_sums(
                        rises(np.array(claimed), np.array(recomputed)), np.array(owners), reward_classes(rewards)
                    ).log_e,
                },
            }
            for name, (claimed, recomputed, owners, rewards) in cases.items()
        ],
    )
