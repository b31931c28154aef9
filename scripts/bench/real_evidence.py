"""What a judge's measurements of a real model amount to: bundles rejected, lives banned, tokens until a cheat is caught.

Lives are resampled from measured completions, in bundles of GROUP. All statistics of a run's default checks count: those of the
calibration, and those that need none. The latter count here token by token, also where completions begin alike.

Letters: C completions, T tokens, W workers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import islice

import numpy as np
import numpy.typing as npt
from real_samples import FAULT, GROUP, REWARD, Measured

from prime_node.validator.alternatives import evidence_of_lives, tokens_until_ban
from prime_node.validator.calibrating import Errors
from prime_protocol import close_flips, excess_flips, shading
from prime_protocol.calibration import evidence_of
from prime_protocol.check_policy import EVIDENCE_MAX, CheckPolicy
from prime_protocol.evidence import Moments
from prime_protocol.verify import judge, outer, summary, verdict_on

Floats = npt.NDArray[np.float64]
Arrays = Mapping[str, npt.NDArray[np.floating]]
LIVES = 200
"""Workers that are resampled to count tokens."""
CLAIMED = ("logprob", "norm", "square", "apart", "rise")
"""Statistics that a cheat with the right logprobs leaves at 0."""


def halves(measured: Measured) -> tuple[Measured, Measured]:
    """Return every other bundle in each half."""
    bundles = bundles_of(measured)
    return _joined(bundles[::2]), _joined(bundles[1::2])


def bundles_of(measured: Measured) -> list[Measured]:
    """Split into leases of GROUP completions. Proofs belong to completions in order, one for each 32 tokens begun."""
    lengths_C = np.concatenate(measured.errors.lengths)
    sizes = {"proof": -(-lengths_C // 32)}
    values = {name: np.concatenate(parts) for name, parts in measured.errors.values.items()}
    split = {name: _split(all_values, sizes.get(name, lengths_C)) for name, all_values in values.items()}
    further = {
        name: each if name in (REWARD, FAULT) else _split(each, lengths_C) for name, each in measured.further.items()
    }
    found = []
    for number in range(len(lengths_C) // GROUP):
        part = slice(number * GROUP, (number + 1) * GROUP)
        errors = Errors()
        errors.add({name: parts[number] for name, parts in split.items()}, lengths_C[part])
        own = {name: each[number] for name, each in further.items() if name not in (REWARD, FAULT)}
        own |= {REWARD: further[REWARD][part], FAULT: further[FAULT][number : number + 1]}
        refused = None if measured.is_refused_C is None else measured.is_refused_C[part]
        found.append(Measured(errors, refused, own))
    return found


def _split(values: npt.NDArray[np.floating], sizes_C: npt.NDArray[np.integer]) -> list[npt.NDArray[np.floating]]:
    return np.split(values, np.cumsum(sizes_C.reshape(-1, GROUP).sum(1))[:-1])


def _joined(bundles: list[Measured]) -> Measured:
    errors = Errors()
    for bundle in bundles:
        errors.add_arrays(bundle.errors.arrays())
    further = {name: np.concatenate([bundle.further[name] for bundle in bundles]) for name in bundles[0].further}
    refused = [bundle.is_refused_C for bundle in bundles if bundle.is_refused_C is not None]
    return Measured(errors, np.concatenate(refused) if refused else None, further)


def uncalibrated(measured: Measured, *, is_rescored: bool = False) -> dict[str, Floats]:
    """Return log e [C, stakes] of the statistics that need no calibration; 0 where a cheat's right claims decide."""
    lengths_C = np.concatenate(measured.errors.lengths)
    firsts_C = np.cumsum(lengths_C) - lengths_C
    margin_T, flip_T = (np.concatenate(measured.errors.values[name]) for name in ("margin", "flip"))
    apart_T, rise_T = (measured.further[name].astype(np.float64) for name in ("apart", "rise"))
    signs = [(sign, stake) for sign in (1.0, -1.0) for stake in shading.STAKES]
    of_T = {
        excess_flips.EXCESS_FLIPS: [
            np.log1p(stake * (flip_T - np.minimum(apart_T + excess_flips.SLACK, 0.9 / stake)))
            for stake in excess_flips.STAKES
        ],
        close_flips.CLOSE_FLIPS: [
            np.log(close_flips.close_bets(margin_T, apart_T, stake)) for stake in close_flips.STAKES
        ],
        shading.SHADING: [shading.bets(sign * rise_T, stake) for sign, stake in signs],
    }
    found = {
        name: np.stack([np.add.reduceat(each_T, firsts_C) for each_T in parts], axis=1) for name, parts in of_T.items()
    }
    classes_C = shading.reward_classes(measured.further[REWARD].reshape(-1, GROUP).tolist())[:, None]
    pays = np.log1p(np.array([stake for _, stake in signs]) * shading.REWARD_SLACK)
    found[shading.SHADING_BY_REWARD] = np.concatenate(
        [found[shading.SHADING] * (classes_C == each) - pays * (classes_C != 0) for each in (1, -1)], axis=1
    )
    return {name: each * (not is_rescored) for name, each in found.items()}


def rejected(measured: Measured, policy: CheckPolicy, classes: tuple[str, str], num: int) -> int:
    """Return how many of `num` resampled bundles a validator rejects."""
    lengths_C = np.concatenate(measured.errors.lengths)
    split = {
        name: np.split(np.concatenate(values), np.cumsum(-(-lengths_C // 32) if name == "proof" else lengths_C)[:-1])
        for name, values in measured.errors.values.items()
    }
    assert policy.calibration is not None
    rng, found = np.random.default_rng(1), 0
    for _ in range(num):
        drawn = rng.integers(0, len(lengths_C), GROUP)
        bundle = {name: np.concatenate([parts[index] for index in drawn]) for name, parts in split.items()}
        evidence = evidence_of(bundle, policy.calibration, worker=classes[0], validator=classes[1])
        found += not verdict_on(summary(bundle), evidence, policy).accepted
    return found


def banned(
    measured: Measured, moments: Mapping[str, Moments], others: Mapping[str, Floats], *, lives: int, bundles: int
) -> int:
    """Return how many resampled lives end with a ban, by the calibration and by `others` of `uncalibrated`."""
    is_banned = np.zeros(lives, bool)
    found = evidence_of_lives(measured.errors, moments, workers=lives, others=others)
    for _, evidence_W in islice(found, bundles):
        is_banned |= evidence_W >= math.log(EVIDENCE_MAX)
    return int(is_banned.sum())


def tokens_until_caught(
    measured: Measured, moments: Mapping[str, Moments], *, is_rescored: bool, group: int = GROUP, share: float = 0.5
) -> float:
    """Return the tokens until this share of LIVES is banned, or those of one bundle if as many are rejected with a strike before.

    The latter are those that the cheap checks reject, and those with a gross error: no calibration is needed for either.
    """
    bundles = bundles_of(measured)
    others = uncalibrated(measured, is_rescored=is_rescored)
    needed = tokens_until_ban(
        measured.errors, moments, is_rescored=is_rescored, group=group, others=others, workers=LIVES, share=share
    )
    if np.mean([_is_gross(each, is_rescored=is_rescored) for each in bundles]) > share:
        return min(needed, float(np.quantile([each.errors.num_tokens for each in bundles], share)))
    return needed


def _is_gross(bundle: Measured, *, is_rescored: bool) -> bool:
    if bundle.further[FAULT].any():
        return True
    found = {name: np.concatenate(values) for name, values in bundle.errors.values.items()}
    found["stop"] = bundle.further["stop"]
    if is_rescored:
        found |= {name: np.zeros_like(found[name]) for name in CLAIMED if name in found}
    return not judge(summary(found), outer(CheckPolicy())).accepted
