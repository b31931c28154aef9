"""Shaded logprobs: delay until they are detected, and how near honest workers of any engine come to a ban.

    python scripts/bench/shading.py [--quick] [--json]

Tokens are simulated, two choices each: a worker samples by p' and claims p' (honest) or moves it; the validator computes p, which
differs by the class of engine. Sums are those of prime_protocol/shading.py, folded as the coordinator folds them (checked
against it), over bundles of one group of 8; a ban is at 1e5. Rewards are right or wrong, and lean towards texts that the
validator finds likelier than the worker, so that their chances of a reward differ. Honest workers are weighed by the two
statistics alone, cheats by these and nine that show nothing.

Letters: W workers, N completions of a bundle, T tokens of a completion, K entries of a statistic.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from checks import Check, Output, at_most

from prime_protocol.check_policy import EVIDENCE_MAX
from prime_protocol.evidence import Sums, folded, log_evidence
from prime_protocol.shading import (
    REWARD_SLACK,
    SHADING,
    SHADING_BY_REWARD,
    STAKES,
    bets,
    by_reward_sums,
    reward_classes,
    rises,
    shading_sums,
)

SIZE = 8
SILENT = 9
"""Other statistics of a run, which these cheats do not change."""
ENTRIES = 2 * len(STAKES)
"""Entries of `shading`; its other statistic has twice as many."""
LIMIT = math.log(EVIDENCE_MAX)
Floats = npt.NDArray[np.float64]
Odds = Callable[[np.random.Generator, Floats], Floats]
"""From the worker's log odds of each token to the validator's."""


def normal(sd: float) -> Odds:
    return lambda rng, odds: odds + sd * rng.standard_normal(odds.shape)


def heavy(rng: np.random.Generator, odds: Floats) -> Floats:
    """Errors of bf16 against fp32: small, with a long tail."""
    return odds + 0.008 * rng.standard_t(3, odds.shape)


def flatter(rng: np.random.Generator, odds: Floats) -> Floats:
    """The worker's probabilities are flatter than the validator's, all in the same direction, as coarse weights may make them."""
    return 1.02 * odds + 0.005 * rng.standard_normal(odds.shape)


ENGINES: dict[str, Odds] = {
    "the same engine": normal(1e-6),
    "bf16 beside fp32": heavy,
    "unknown, coarse": normal(0.03),
    "unknown, flatter": flatter,
    "bf16 of a real model": normal(0.065),
    "noisy, 0.15 nats": normal(0.15),
}
LEAN = {"bf16 of a real model": 8.0, "noisy, 0.15 nats": 1.5}
"""Strength with which rewards follow the validator's likelihood: chances of a reward differ by over half of REWARD_SLACK.
By engine; ..."""
LEAN_OTHERS = 60.0
"""... for those of small errors."""


@dataclass
class Wealths:
    """Evidence of W workers at once: what evidence.updated keeps, [W, K]."""

    log_wealth: Floats
    num_bundles: int = 0

    @classmethod
    def of(cls, num: int, entries: int) -> Wealths:
        return cls(np.full((num, entries), -np.inf))

    def add(self, log_e: Floats) -> Floats:
        """log of the mean over K of M_t, [W]."""
        self.num_bundles += 1
        bundle = self.num_bundles
        self.log_wealth = np.logaddexp(self.log_wealth, -math.log(bundle) - math.log(bundle + 1)) + log_e
        each = np.logaddexp(self.log_wealth, -math.log(bundle + 1))
        together: Floats = np.logaddexp.reduce(each, axis=1) - math.log(each.shape[1])
        return together


@dataclass
class Bundles:
    """One bundle of each of W workers."""

    claimed: Floats  # [W, N, T] nats
    trusted: Floats
    rewards: Floats  # [W, N]


def draw(rng: np.random.Generator, engine: str, workers: int, tokens: int) -> Bundles:
    """Return bundles sampled from the worker's odds, before any claim is changed."""
    shape = (workers, SIZE, tokens)
    odds = 2.0 * rng.standard_normal(shape)
    theirs = ENGINES[engine](rng, odds)
    is_first = rng.random(shape) < 1 / (1 + np.exp(-odds))
    claimed = -np.logaddexp(0.0, np.where(is_first, -odds, odds))
    trusted = -np.logaddexp(0.0, np.where(is_first, -theirs, theirs))
    base = 1.5 * rng.standard_normal((workers, 1))
    lean = np.clip(LEAN.get(engine, LEAN_OTHERS) * rises(claimed, trusted).sum(axis=2), -4.0, 4.0)
    chance = 1 / (1 + np.exp(-base - lean))
    return Bundles(claimed, trusted, (rng.random((workers, SIZE)) < chance).astype(np.float64))


def log_es(found: Bundles) -> tuple[Floats, Floats]:
    """Return the two statistics' evidence on each worker's bundle: [W, ENTRIES] and [W, 2 * ENTRIES]."""
    mean = found.rewards.mean(axis=1, keepdims=True)
    classes = np.sign(found.rewards - mean) * ((found.rewards != found.rewards[:, :1]).any(axis=1, keepdims=True))
    rises_WNT = rises(found.claimed, found.trusted)
    of_completion = np.stack(
        [bets(sign * rises_WNT, stake).sum(axis=2) for sign in (1.0, -1.0) for stake in STAKES],
        axis=2,
    )
    paid = np.abs(classes).sum(axis=1, keepdims=True) * np.log1p(np.array(2 * STAKES) * REWARD_SLACK)
    by_reward = [(of_completion * (classes == each)[:, :, None]).sum(axis=1) - paid for each in (1.0, -1.0)]
    return of_completion.sum(axis=1), np.concatenate(by_reward, axis=1)


def check_against_the_protocol() -> None:
    """Check that the values for many at once are those that prime_protocol computes for one."""
    rng = np.random.default_rng(5)
    whole, parts, wealth = (
        Wealths.of(1, ENTRIES),
        Wealths.of(1, 2 * ENTRIES),
        folded({}, {}, statistics=(SHADING, SHADING_BY_REWARD)),
    )
    for _ in range(5):
        found = draw(rng, "bf16 beside fp32", 1, 16)
        mine = [each.add(log_e) for each, log_e in zip((whole, parts), log_es(found), strict=True)]
        rises_T = rises(found.claimed.ravel(), found.trusted.ravel())
        classes = reward_classes([found.rewards[0].tolist()])
        sums: dict[str, Sums] = {
            SHADING: shading_sums(rises_T),
            SHADING_BY_REWARD: by_reward_sums(rises_T, np.repeat(np.arange(SIZE), 16), classes),
        }
        wealth = folded(wealth, sums, statistics=tuple(wealth))
    ours = np.logaddexp(*mine)[0] - math.log(2)
    assert abs(ours - log_evidence(wealth)) < 1e-4, (ours, log_evidence(wealth))


def chances_differ(engine: str, tokens: int) -> float:
    """By how much the chances of a reward above the group's mean differ between worker and validator, measured."""
    found = draw(np.random.default_rng(3), engine, 5_000, tokens)
    is_paid = found.rewards > found.rewards.mean(axis=1, keepdims=True)
    return float(np.mean(is_paid * np.expm1((found.trusted - found.claimed).sum(axis=2))))


def honest(engine: str, workers: int, rollouts: int, tokens: int, seed: int) -> Floats:
    """The highest evidence that each of the workers ever has, nats."""
    rng = np.random.default_rng(seed)
    whole, parts, highest = Wealths.of(workers, ENTRIES), Wealths.of(workers, 2 * ENTRIES), np.zeros(workers)
    for _ in range(rollouts // SIZE):
        one, other = log_es(draw(rng, engine, workers, tokens))
        highest = np.maximum(highest, np.logaddexp(whole.add(one), parts.add(other)) - math.log(2))
    return highest


def needed(engine: str, nats: tuple[float, float], workers: int, tokens: int, rollouts_max: int, seed: int) -> Floats:
    """Audited rollouts until a ban, where claims are moved by `nats`: in rewarded completions, in others. inf beyond the most."""
    rng = np.random.default_rng(seed)
    whole, parts, found = Wealths.of(workers, ENTRIES), Wealths.of(workers, 2 * ENTRIES), np.full(workers, np.inf)
    for bundle in range(1, rollouts_max // SIZE + 1):
        bundles = draw(rng, engine, workers, tokens)
        is_paid = bundles.rewards > bundles.rewards.mean(axis=1, keepdims=True)
        bundles.claimed += np.where(is_paid, *nats)[:, :, None]
        one, other = log_es(bundles)
        evidence = np.logaddexp(np.logaddexp(whole.add(one), parts.add(other)), math.log(SILENT))
        is_new = (evidence - math.log(SILENT + 2) >= LIMIT) & np.isinf(found)
        found[is_new] = SIZE * bundle
    return found


CHEATS = {
    "0.1 low where rewarded": (-0.1, 0.0),
    "0.05 low where rewarded": (-0.05, 0.0),
    "0.02 low where rewarded": (-0.02, 0.0),
    "0.05 low where rewarded, 0.05 high elsewhere": (-0.05, 0.05),
    "0.05 low where not rewarded": (0.0, -0.05),
    "all 0.0095 low": (-0.0095, -0.0095),
}
BARRED = ("0.1 low where rewarded", "0.05 low where rewarded")
TOKENS = (16, 64, 256)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter lives")
    parser.add_argument("--json", action="store_true", help="print the checks as JSON and nothing else")
    arguments = parser.parse_args()
    output = Output(as_json=arguments.json)
    check_against_the_protocol()
    workers, rollouts = (50, 2_000) if arguments.quick else (200, 20_000)
    cheats, tokens = (21, TOKENS[:2]) if arguments.quick else (61, TOKENS)
    lives = {name: honest(name, workers, rollouts, 16, seed) for seed, name in enumerate(ENGINES)}
    table = {
        (cheat, name, length): np.quantile(needed(name, nats, cheats, length, 512, 9), (0.5, 0.95), method="higher")
        for cheat, nats in CHEATS.items()
        for name in ENGINES
        for length in tokens
    }
    hurt = sum(int((each >= LIMIT).sum()) for each in lives.values())
    at_ten = float(np.mean([each >= math.log(10) for each in lives.values()]))
    checks = [
        at_most(f"honest workers banned, of {len(lives)} x {workers}, {rollouts} rollouts each", hurt, 0),
        at_most("honest workers ever at 10, share", at_ten, 0.1),
    ]
    differ = {name: chances_differ(name, 16) for name in ENGINES}
    most = max(differ.values())
    name, bar = "chances of a reward differ between engines, the most", f"above 0, <= {REWARD_SLACK:g}"
    checks.append(Check(name, most, bar, 0 < most <= REWARD_SLACK))
    for cheat in BARRED:
        worst = max(float(high) for (name, _, _), (_, high) in table.items() if name == cheat)
        name = f"{cheat}: audited rollouts until a ban, 95 of 100, the worst of all engines and lengths"
        checks.append(at_most(name, worst, 64))
    print("| claims | " + " | ".join(f"{name}, {length} tokens" for name in ENGINES for length in tokens) + " |")
    print("|---" * (1 + len(ENGINES) * len(tokens)) + "|")
    for cheat in CHEATS:
        cells = (
            " / ".join(f"{each:.0f}" for each in table[cheat, name, length]) for name in ENGINES for length in tokens
        )
        print(f"| {cheat} | " + " | ".join(cells) + " |")
    for name, each in lives.items():
        share = (each >= math.log(10)).mean()
        print(
            f"honest, {name}: highest evidence of {workers} workers {each.max():.1f} nats, ever at 10: {share:.1%}, "
            f"chances of a reward differ by {differ[name]:.4f}"
        )
    return output.finish(checks)


if __name__ == "__main__":
    raise SystemExit(main())
