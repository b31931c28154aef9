"""Share of honest workers that all rules for strikes and bans together hurt, each over a long life.

    python scripts/bench/honest_lives.py [--quick] [--json]

Per class of engine, 200 workers of 20,000 rollouts each, in bundles of one group of 8. Tokens are simulated: a worker samples by
Gumbel noise from logits, and a validator's logits differ by noise with the tails of Student's t of 3 degrees or of a normal
distribution, up to 1 nat, and with a scale of each completion's own. Margins, flips, claimed and recomputed logprobs follow.
Proofs' distances have a gamma distribution. Rewards lean towards what the validator finds likelier.

The scale of each class's noise comes from a measured table. For a pair of configs/calibration.json it is the largest mean error
that its moments of `logprob` and `proof` allow, judged by that table. For bf16 of a real model of 135 M parameters it is the
measured spread of logits (0.065 nats), judged by a table that `prime-node calibrate` would make of 32,768 such tokens. Two such
engines are judged without a calibration too, and two without seeds. A worker is hurt if its evidence ever reaches 1e5, or if a
bundle of its own is a strike: by its own evidence, or beyond the outer thresholds.

Sums are those of prime_protocol, folded for all workers at once as evidence.folded folds them, which is checked in each run.

Letters: C completions, T tokens, V tokens to choose from, W workers, N completions of a bundle, K entries of all statistics.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from checks import Check, Output, at_most
from shading import LIMIT, SIZE

from prime_node.cli.shipped import shipped_calibration
from prime_node.validator.calibrating import CAP_MIN, CAP_OVER_TAIL, HEADROOM, RATIO_CAP, SPREAD, Errors
from prime_protocol.calibration import BUNDLES_OF_A_LIFE
from prime_protocol.check_policy import CheckPolicy
from prime_protocol.close_flips import CLOSE_FLIPS, close_bets
from prime_protocol.close_flips import STAKES as CLOSE_STAKES
from prime_protocol.evidence import Moments, Sums, calibrate_statistics, folded, log_evidence
from prime_protocol.excess_flips import EXCESS_FLIPS
from prime_protocol.excess_flips import SLACK as FLIP_SLACK
from prime_protocol.excess_flips import STAKES as FLIP_STAKES
from prime_protocol.reward_ranks import RATES, REWARD_RANKS, rank_sums
from prime_protocol.shading import REWARD_SLACK, SHADING, SHADING_BY_REWARD, STAKES, bets
from prime_protocol.verify import (
    COOLER,
    FLATTER,
    LIKELIHOOD_RATIOS,
    LOOSE,
    OF_SEEDS,
    SHARPER,
    SPREAD_MIN,
    Measured,
    judge,
    outer,
)

Floats = npt.NDArray[np.float64]
TOKENS, CHOICES = 16, 8
REAL_SCALE, REAL_PROOF, REAL_TOKENS = 0.065, 1.65, 32_768
SHIPPED_SLACK = 4.0
"""Factor by which the moments of the shipped calibration exceed measured ones, at a small lambda."""
ERROR_MAX = 1.0
"""Nats, of a logit's noise. The largest honest error of a logprob that was ever measured is 0.7."""
SEEDED = (*OF_SEEDS, EXCESS_FLIPS, CLOSE_FLIPS)
LEAN_MAX, LEAN_VARIANCE = 60.0, 0.1
"""Rewards follow what the validator finds likelier as strongly as keeps chances of a reward within about REWARD_SLACK."""


@dataclass(frozen=True)
class Kind:
    """An honest class of engine, judged by one validator."""

    name: str
    scale: float
    """Nats, of a logit's noise."""
    proof: float
    """Mean distance of its proofs, steps of bf16."""
    is_heavy: bool
    moments: Mapping[str, Moments]
    """Empty: no calibration."""
    seeded: bool = True


@dataclass
class Pool:
    """Completions that lives are drawn from."""

    log_e: dict[str, Floats] = field(default_factory=dict)
    """[C, K of each statistic]"""
    of_class: Floats = field(default_factory=lambda: np.zeros(0))
    """[C, 2 * len(STAKES)] what `shading_by_reward` adds for a completion in a class."""
    rise: Floats = field(default_factory=lambda: np.zeros(0))
    """[C] nats by which the validator finds it likelier."""
    measured: Floats = field(default_factory=lambda: np.zeros(0))
    """[C, 5] mean and largest error, share of flips, largest margin, proof."""


def tokens_of(kind: Kind, num: int, rng: np.random.Generator) -> dict[str, Floats]:
    """Each [C, T], but `proof` [C]."""
    shape = (num, TOKENS, CHOICES)
    mine = 2.0 * rng.standard_normal(shape)
    own_scale = kind.scale * np.exp(0.4 * rng.standard_normal((num, 1, 1)) - 0.08)
    noise = rng.standard_t(3, shape) if kind.is_heavy else rng.standard_normal(shape)
    theirs = mine + np.clip(own_scale * noise, -ERROR_MAX, ERROR_MAX)
    gumbel = rng.gumbel(size=shape)
    chosen = (mine + gumbel).argmax(axis=2)[..., None]
    noisy = theirs + gumbel
    log_p = theirs - np.logaddexp.reduce(theirs, axis=2, keepdims=True)

    def of_chosen(values: Floats) -> Floats:
        return np.take_along_axis(values, chosen, axis=2)[..., 0]

    claimed = of_chosen(mine) - np.logaddexp.reduce(mine, axis=2)
    found = {"margin": noisy.max(axis=2) - of_chosen(noisy), "claimed": claimed, "trusted": of_chosen(log_p)}
    found["flip"] = (found["margin"] > 0).astype(np.float64)
    found["logprob"] = np.abs(claimed - found["trusted"])
    chances = np.exp(log_p)
    squares = 1 - 2 * np.exp(found["trusted"]) + np.square(chances).sum(axis=2)
    found["norm"] = found["logprob"] / np.sqrt(np.maximum(squares, 0.0) + SPREAD_MIN**2)
    found["square"] = np.square(found["norm"])
    colder = theirs / COOLER + gumbel
    found["cooler"] = found["margin"] - (colder.max(axis=2) - of_chosen(colder))
    small, large = (of_chosen(noisy) / scale - np.logaddexp.reduce(noisy / scale, axis=2) for scale in LOOSE)
    found["looser"] = large - small
    for name, temperature in zip(LIKELIHOOD_RATIOS, (SHARPER, FLATTER), strict=True):
        tempered = log_p / temperature
        tempered -= np.logaddexp.reduce(tempered, axis=2, keepdims=True)
        found[name] = of_chosen(tempered - log_p)
    found["proof"] = np.minimum(kind.proof * rng.gamma(4.0, 0.25, num), 16.0)
    return found


def pool_of(kind: Kind, num: int, seed: int) -> Pool:
    parts = [_part(kind, min(5_000, num - first), seed + first) for first in range(0, num, 5_000)]
    return Pool(
        {name: np.concatenate([part.log_e[name] for part in parts]) for name in parts[0].log_e},
        *(np.concatenate([getattr(part, name) for part in parts]) for name in ("of_class", "rise", "measured")),
    )


def _part(kind: Kind, num: int, seed: int) -> Pool:
    found = tokens_of(kind, num, np.random.default_rng(seed))
    log_e = {}
    for name, moments in kind.moments.items():
        if name in (SEEDED if not kind.seeded else LIKELIHOOD_RATIOS):
            continue
        values = np.minimum(found[name].reshape(num, -1), moments.cap)
        rates, taken = np.array(moments.lambdas), np.array(moments.log_moments)
        log_e[name] = values.sum(axis=1)[:, None] * rates - values.shape[1] * taken
    apart = np.abs(np.expm1(found["trusted"] - found["claimed"]))
    if kind.seeded:
        explained = [found["flip"] - np.minimum(apart + FLIP_SLACK, 0.9 / stake) for stake in FLIP_STAKES]
        each = [np.log1p(stake * one).sum(axis=1) for stake, one in zip(FLIP_STAKES, explained, strict=True)]
        log_e[EXCESS_FLIPS] = np.stack(each, axis=1)
        closely = [np.log(close_bets(found["margin"], apart, stake)).sum(axis=1) for stake in CLOSE_STAKES]
        log_e[CLOSE_FLIPS] = np.stack(closely, axis=1)
    rises = np.expm1(found["trusted"] - found["claimed"])
    of_class = [bets(sign * rises, stake).sum(axis=1) for sign in (1.0, -1.0) for stake in STAKES]
    log_e[SHADING] = np.stack(of_class, axis=1)
    measured = [found["logprob"].mean(axis=1), found["logprob"].max(axis=1), found["flip"].mean(axis=1)]
    measured += [found["margin"].max(axis=1), found["proof"]]
    if not kind.seeded:
        measured[2] = measured[3] = np.zeros(num)
    rise = (found["trusted"] - found["claimed"]).sum(axis=1)
    return Pool(log_e, log_e[SHADING], rise, np.stack(measured, axis=1))


def _ranks() -> Floats:
    """Return the reward ranks' evidence: [rewarded of the worker's, rewarded of the trusted, K]."""
    groups = [(1.0,) * rewarded + (0.0,) * (SIZE - rewarded) for rewarded in range(SIZE + 1)]
    return np.array(
        [
            [np.concatenate([sums.log_e for sums in rank_sums([(mine, other)]).values()]) for other in groups]
            for mine in groups
        ]
    )


RANKS = _ranks()


@dataclass
class Lived:
    highest: Floats
    """[W] nats of evidence."""
    strikes: npt.NDArray[np.int64]
    """[W] bundles rejected by thresholds."""
    chances_differ: float
    checked: float
    """Nats by which the first worker's evidence differs from what evidence.folded gives."""


def live(kind: Kind, pool: Pool, workers: int, rollouts: int, seed: int) -> Lived:
    """Return the lives of `workers`, drawn from the pool."""
    rng = np.random.default_rng(seed)
    names = list(pool.log_e)
    widths = [pool.log_e[name].shape[1] for name in names]
    all_log_e = np.concatenate([pool.log_e[name] for name in names], axis=1)
    names += [SHADING_BY_REWARD] + ([] if kind.seeded else list(REWARD_RANKS))
    widths += [4 * len(STAKES)] + ([] if kind.seeded else [len(RATES)] * 2)
    statistics = (*names, *(name for name in kind.moments if name not in names))
    ends = np.cumsum(widths)
    policy, own = outer(CheckPolicy()), len(pool.log_e) - 1
    each_pays = np.log1p(np.array(2 * STAKES) * REWARD_SLACK)
    lean = min(LEAN_MAX, LEAN_VARIANCE / max(float(pool.rise.var()), 1e-12))
    wealth, highest = np.full((workers, ends[-1]), -np.inf), np.zeros(workers)
    strikes, differ, one = np.zeros(workers, np.int64), 0.0, folded({}, {}, statistics=statistics)
    checked = 0.0
    for bundle in range(1, rollouts // SIZE + 1):
        drawn = rng.integers(0, len(pool.rise), (workers, SIZE))
        base, rise = 1.5 * rng.standard_normal((workers, 1)), pool.rise[drawn]
        chance = 1 / (1 + np.exp(-base - np.clip(lean * rise, -4.0, 4.0)))
        rewards = rng.random((workers, SIZE)) < chance
        above, below = _classes(rewards)
        paid = (above | below).sum(axis=1, keepdims=True) * each_pays
        differ += float((above * np.expm1(rise)).mean())
        parts = [all_log_e[drawn].sum(axis=1)]
        parts += [(pool.of_class[drawn] * which[..., None]).sum(axis=1) - paid for which in (above, below)]
        if not kind.seeded:
            trusted = (rng.random((workers, SIZE)) < 1 / (1 + np.exp(-base))).sum(axis=1)
            parts.append(RANKS[rewards.sum(axis=1), trusted])
        log_e = np.concatenate(parts, axis=1)
        wealth = np.logaddexp(wealth, -math.log(bundle) - math.log(bundle + 1)) + log_e
        each = np.logaddexp(wealth, -math.log(bundle + 1))
        of_statistic = [
            np.logaddexp.reduce(part, axis=1) - math.log(part.shape[1]) for part in np.split(each, ends[:-1], axis=1)
        ]
        silent = [np.zeros(workers)] * (len(statistics) - len(names))
        evidence = np.logaddexp.reduce(np.stack([*of_statistic, *silent]), axis=0) - math.log(len(statistics))
        highest = np.maximum(highest, evidence)
        strikes += _strikes(kind, policy, log_e[:, : ends[own]], ends[:own], pool.measured[drawn])
        if bundle <= 50:
            split = np.split(log_e[0], ends[:-1])
            sums = {name: Sums(num_tokens=1, log_e=tuple(part)) for name, part in zip(names, split, strict=True)}
            one = folded(one, sums, statistics=statistics)
            checked = max(checked, abs(log_evidence(one) - float(evidence[0])))
    return Lived(highest, strikes, differ / (rollouts // SIZE), checked)


def _classes(rewards: npt.NDArray[np.bool_]) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Which of the rewards [W, N], 0 or 1, are above their group's mean, and which below."""
    mixed = rewards.any(axis=1, keepdims=True) & ~rewards.all(axis=1, keepdims=True)
    return rewards & mixed, ~rewards & mixed


def _strikes(
    kind: Kind, policy: CheckPolicy, log_e: Floats, ends: npt.NDArray[np.integer], measured: Floats
) -> npt.NDArray[np.int64]:
    """[W] 1 where verify.verdict_on gives a strike; `judge` is asked for those bundles alone that come within half of a bound."""
    mean, largest = measured.mean(axis=1), measured.max(axis=1)
    numbers = [mean[:, 0], largest[:, 1], mean[:, 2], mean[:, 4], largest[:, 4], largest[:, 3]]
    found = np.zeros(len(measured), np.int64)
    if kind.moments:
        logs = np.stack(
            [np.logaddexp.reduce(part, axis=1) - math.log(part.shape[1]) for part in np.split(log_e, ends, axis=1)]
        )
        alone = np.logaddexp.reduce(logs, axis=0) - math.log(len(logs))
        found += alone >= math.log(BUNDLES_OF_A_LIFE * policy.evidence_max)
    bounds = [policy.logprob_error_mean_max, policy.logprob_error_max, policy.seed_flips_share_max]
    bounds += [policy.proof_error_mean_max, policy.proof_error_max, policy.seed_margin_max]
    near = np.any([each > bound / 2 for each, bound in zip(numbers, bounds, strict=True)], axis=0)
    for worker in np.flatnonzero(near).tolist():
        found[worker] |= not judge(Measured(*(float(each[worker]) for each in numbers)), policy).accepted
    return found


def kinds() -> list[Kind]:
    """Return the kinds of every table, with its calibration, without one, and without seeds."""
    found = []
    for pair in shipped_calibration().pairs:
        allowed = {
            name: pair.moments[name].log_moments[0] / pair.moments[name].lambdas[0] / SHIPPED_SLACK
            for name in ("logprob", "proof")
        }
        name = f"{pair.worker} judged by {pair.validator}".replace("/cpu", "")
        unit = tokens_of(Kind("", 1e-3, 1.0, True, {}), 2_000, np.random.default_rng(1))["logprob"].mean()
        found.append(Kind(name, 1e-3 * allowed["logprob"] / float(unit), allowed["proof"], True, pair.moments))
    real = Kind("bf16 of a real model", REAL_SCALE, REAL_PROOF, False, {})
    found.append(Kind(real.name, real.scale, real.proof, False, calibrated(real)))
    bare = [
        Kind(f"{each.name}, no calibration", each.scale, each.proof, each.is_heavy, {}) for each in (found[-3], real)
    ]
    unseeded = [
        Kind(f"{each.name}, unseeded", each.scale, each.proof, each.is_heavy, each.moments, seeded=False)
        for each in (found[-3], found[-1])
    ]
    return [*found, *bare, *unseeded]


def calibrated(kind: Kind) -> dict[str, Moments]:
    """Return the moments that `prime-node calibrate` would give for such an engine."""
    num = REAL_TOKENS // TOKENS
    found, errors = tokens_of(kind, num, np.random.default_rng(2)), Errors()
    names = ("margin", "flip", "norm", "square", "cooler", "looser", "proof")
    values = {name: found[name].ravel().astype(np.float32) for name in names}
    lengths = np.full(num, TOKENS, np.int32)
    errors.add(values, lengths)
    moments = errors.moments()
    apart = np.abs(np.expm1(found["trusted"] - found["claimed"]))
    for name in LIKELIHOOD_RATIOS:  # as calibrating.choice_moments
        raised = np.log1p(SPREAD * apart * np.exp(np.minimum(found[name], RATIO_CAP))).ravel()
        cap = max(CAP_OVER_TAIL * float(np.quantile(raised, 0.999)), CAP_MIN)
        slack = calibrate_statistics(raised, cap=cap, lambdas=[1.0], lengths=lengths, headroom=HEADROOM)
        moments[name] = slack.model_copy(update={"cap": RATIO_CAP})
    return moments


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter lives, under a minute")
    parser.add_argument("--json", action="store_true", help="print the checks as JSON and nothing else")
    options = parser.parse_args()
    output = Output(as_json=options.json)
    workers, rollouts, size = (50, 2_000, 10_000) if options.quick else (200, 20_000, 100_000)
    rows: list[tuple[Kind, Pool, Lived]] = []
    began = time.perf_counter()
    for number, kind in enumerate(kinds()):
        pool = pool_of(kind, size, 10**6 * number)
        rows.append((kind, pool, live(kind, pool, workers, rollouts, number)))
        print(_row(*rows[-1]), flush=True)
    seconds = time.perf_counter() - began
    banned = sum(int((lived.highest >= LIMIT).sum()) for _, _, lived in rows)
    hurt = sum(int(((lived.highest >= LIMIT) | (lived.strikes > 0)).sum()) for _, _, lived in rows)
    at_ten = max(float((lived.highest >= math.log(10)).mean()) for _, _, lived in rows)
    differ = max(lived.chances_differ for _, _, lived in rows)
    apart = max(lived.checked for _, _, lived in rows)
    name = f"honest workers hurt, of {len(rows)} x {workers}, {rollouts} rollouts each"
    print(f"{seconds:.0f} s")
    slack = f"above 0, <= {REWARD_SLACK:g}"
    checks = [
        at_most(name, hurt, 0),
        at_most("of them banned by evidence", banned, 0),
        at_most("honest workers ever at 10, the most of any class, share", at_ten, 0.1),
        at_most("nats between these sums and evidence.folded", apart, 1e-6),
        Check("chances of a reward differ between engines, the most", differ, slack, 0 < differ <= REWARD_SLACK),
    ]
    return output.finish(checks)


def _row(kind: Kind, pool: Pool, lived: Lived) -> str:
    error, flips = pool.measured[:, 0].mean(), pool.measured[:, 2].mean()
    return (
        f"{kind.name}: error {error:.2g} nats, flips {flips:.2%}; banned {int((lived.highest >= LIMIT).sum())} of "
        f"{len(lived.highest)}, ever at 10 {(lived.highest >= math.log(10)).mean():.1%}, highest {lived.highest.max():.2f} nats; "
        f"strikes {lived.strikes.sum()}; chances differ by {lived.chances_differ:.4f}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
