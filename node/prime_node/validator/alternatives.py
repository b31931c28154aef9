"""What a calibration can tell apart: tokens of dishonest work until evidence under its moments would ban.

The engine that samples also plays the cheats. A cheat by sampling, or one that has its tokens rescored, claims the right
logprobs, so that only its choices of tokens show. Hidden-state proofs are left out: they only add to the evidence.

Letters: C completions, K lambdas of all statistics, W resampled workers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np
import numpy.typing as npt

from prime_node.ports.engine import Engine
from prime_node.validator.calibrating import GROUP, Errors, sample_honestly
from prime_protocol.assignment import Lease
from prime_protocol.check_policy import EVIDENCE_MAX
from prime_protocol.evidence import Moments
from prime_protocol.rollout import Rollouts
from prime_protocol.weights import Weights

CLAIMS = frozenset({"norm", "square"})
"""Statistics of the claimed logprobs."""
CHOICES = frozenset({"margin", "flip", "cooler", "looser"})
"""Statistics of the chosen tokens."""
TOKENS_MAX = 200_000
"""Tokens after which a cheat counts as not seen."""
WORKERS = 24
"""Resampled dishonest workers, of which the median is taken."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Alternative:
    """Dishonest work that a calibration is tried on."""

    name: str
    sampling: Mapping[str, float] = field(default_factory=dict)
    """Settings of Sampling that differ from the run's."""
    change: Callable[[Weights], Weights] | None = None
    """Weights to sample with, given the right ones."""


async def sample_alternative(
    engine: Engine, weights: Weights, leases: Sequence[Lease], alternative: Alternative
) -> list[Rollouts]:
    """Return what such a cheat uploads for each lease. The engine holds the right weights before and after."""
    update = dict(alternative.sampling)
    changed = [lease.model_copy(update={"sampling": lease.sampling.model_copy(update=update)}) for lease in leases]
    if alternative.change is None:
        return await sample_honestly(engine, changed)
    await engine.load(alternative.change(weights), policy_version=1)
    sampled = await sample_honestly(engine, changed)
    await engine.load(weights, policy_version=0)
    return sampled


def tokens_until_ban(
    errors: Errors,
    moments: Mapping[str, Moments],
    *,
    is_rescored: bool,
    group: int = GROUP,
    others: Mapping[str, Floats] | None = None,
    workers: int = WORKERS,
    share: float = 0.5,
) -> float:
    """Return the tokens until evidence bans this share of workers of such completions; infinite above TOKENS_MAX.

    Bundles of `group` completions are resampled from `errors`. With `is_rescored` the claims are right, whatever was claimed.
    `others`: log e [C, stakes] of each completion in statistics that need no moments, by name.
    """
    lives = evidence_of_lives(errors, moments, workers=workers, is_rescored=is_rescored, group=group, others=others)
    needed_W = np.full(workers, math.inf)
    for tokens_W, evidence_W in lives:
        is_new = (evidence_W >= math.log(EVIDENCE_MAX)) & np.isinf(needed_W)
        needed_W = np.where(is_new, tokens_W, needed_W)
        if np.isfinite(needed_W).sum() > share * workers or tokens_W.min() > TOKENS_MAX:
            break
    return float(np.quantile(needed_W, share, method="lower"))


def evidence_of_lives(
    errors: Errors,
    moments: Mapping[str, Moments],
    *,
    workers: int,
    is_rescored: bool = False,
    group: int = GROUP,
    others: Mapping[str, Floats] | None = None,
) -> Iterator[tuple[Floats, Floats]]:
    """Yield the tokens [W] and the nats of evidence [W] after each bundle of endless lives of such completions."""
    lengths_C = np.concatenate(errors.lengths)
    seen = [name for name in (*CHOICES, *CLAIMS) if name in moments and name in errors.values]
    parts = [_log_e(errors, name, moments[name], lengths_C, is_silent=is_rescored and name in CLAIMS) for name in seen]
    parts += (others or {}).values()
    widths = [part.shape[1] for part in parts]
    log_e_CK = np.concatenate(parts, axis=1)
    rng = np.random.default_rng(0)
    wealth_WK = np.full((workers, log_e_CK.shape[1]), -math.inf)
    tokens_W = np.zeros(workers)
    silent = math.log((len(moments) + len(others or {})) / len(parts))
    for bundle in count(1):
        drawn = rng.integers(0, len(lengths_C), (workers, group))
        tokens_W = tokens_W + lengths_C[drawn].sum(axis=1)
        wealth_WK = np.logaddexp(wealth_WK, -math.log(bundle) - math.log(bundle + 1)) + log_e_CK[drawn].sum(axis=1)
        each = np.split(wealth_WK, np.cumsum(widths)[:-1], axis=1)
        yield tokens_W, _log_mean(np.stack([_log_mean(part) for part in each], axis=1)) - silent


def in_words(needed: Mapping[str, float]) -> str:
    """Return one sentence on which alternatives are detected after how many tokens, soonest first."""
    found = sorted((tokens, name) for name, tokens in needed.items() if math.isfinite(tokens))
    unseen = [name for name, tokens in needed.items() if math.isinf(tokens)]
    parts = [f"{name}: after {float(f'{tokens:.2g}'):,.0f} tokens" for tokens, name in found]
    return "; ".join(parts + ([f"not seen in {TOKENS_MAX:,}: {', '.join(unseen)}"] if unseen else []))


def _log_e(
    errors: Errors, name: str, moments: Moments, lengths_C: npt.NDArray[np.integer], *, is_silent: bool
) -> Floats:
    """Return log e [C, lambdas] of one statistic for each completion."""
    capped_T = np.minimum(np.concatenate(errors.values[name]).astype(np.float64), moments.cap)
    sums_C = np.add.reduceat(capped_T, np.cumsum(lengths_C) - lengths_C) * (not is_silent)
    return np.outer(sums_C, moments.lambdas) - np.outer(lengths_C, moments.log_moments)


def _log_mean(logs: Floats) -> Floats:
    found: Floats = np.logaddexp.reduce(logs, axis=1) - math.log(logs.shape[1])
    return found
