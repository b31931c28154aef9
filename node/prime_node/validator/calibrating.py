"""Measure honest error: one engine samples, another verifies, both honestly. `calibrate_statistics` then allows their difference.

Leases resemble those of a run: groups of completions that share a prompt, in small and in large batches, since kernels
differ with the batch size. A series of leases is determined by its prompts and a seed, so a measurement can be resumed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from prime_node.ports.engine import Engine, GenerateRequest, Scorer, ScoreRequest, require_finite
from prime_protocol.assignment import GroupAssignment, Lease, Problem, Sampling
from prime_protocol.digest import digest_of
from prime_protocol.evidence import Moments, calibrate_statistics
from prime_protocol.noise import SEED_MAX
from prime_protocol.proof import num_proofs
from prime_protocol.rollout import Rollouts, rollouts_for
from prime_protocol.verify import LIKELIHOOD_RATIOS, statistics

GROUP = 8
"""Completions of one prompt."""
GROUPS = (1, 8)
"""Groups of a small lease, and of a large one."""
LONG_EVERY, LONG_AT = 4, 2
"""Every fourth lease, a small one, has long completions, so that late positions are measured too."""
POWERS = (0.25, 1.0, 3.0, 6.0)
"""Values of lambda * cap: nats that a token at the cap adds, before its moment is subtracted."""
POWERS_OF = {"cooler": (0.5, 1.5, 3.0, 4.5), "looser": (1.5, 2.25, 3.0, 3.75), "square": (1.0, 2.0, 3.0, 4.0)}
"""The same for statistics that behave like logarithms of likelihood ratios: what few tokens show at most is little."""
CAPS = {"margin": 0.5, "flip": 1.0, "proof": 16.0, "cooler": 0.2, "looser": 3.0}
"""Caps of statistics whose scale is known."""
CAP_OVER_TAIL = 4.0
"""Cap of the other statistics, as a multiple of their honest 99.9 % quantile. `square` has that quantile itself as its cap."""
CAP_MIN = 0.01
"""Lower bound of a cap. Two engines may agree to the last bits here and still differ on other machines of the same class."""
SPREAD = 1.25
"""Factor by which the error of other machines and policies may exceed the measured one. `norm` hardly depends on policy and
prompts: 0.051 for bf16 of a model of 135 M parameters, on two sets of prompts."""
SPREADS = {"flip": 1.0, "square": SPREAD**2}
"""The same factor for a statistic that is a share, and for one that is a square."""
HEADROOM = 1.25
"""Factor on log M0, by which errors may be more frequent than measured. Both factors decide what stays hidden: with 2 and 2
instead, int8 weights of that model take fifty times as many tokens to detect."""
RATIO_CAP = 4.0
"""Largest number of nats that a token adds to a likelihood ratio."""


UNUSED = frozenset({"logprob", "norm"})
"""Statistics that get no moments: `square` detects the same sooner, and each additional one weakens the others."""


@dataclass(slots=True)
class Errors:
    """Statistics of honest tokens of one pair of engines, by name, completion after completion."""

    values: dict[str, list[npt.NDArray[np.float32]]] = field(default_factory=dict)
    lengths: list[npt.NDArray[np.int32]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Return the number of measured tokens."""
        return int(sum(lengths.sum() for lengths in self.lengths))

    def add(self, found: Mapping[str, npt.NDArray[np.float32]], lengths_C: npt.NDArray[np.int32]) -> None:
        """Add the statistics of a lease's tokens, and the lengths [C] of its completions."""
        for name, values in found.items():
            self.values.setdefault(name, []).append(values)
        self.lengths.append(lengths_C)

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return the statistics by name, and `lengths`: each one array."""
        found: dict[str, npt.NDArray[Any]] = {name: np.concatenate(parts) for name, parts in self.values.items()}
        return found | {"lengths": np.concatenate(self.lengths)}

    def add_arrays(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Add what `arrays` returned for another measurement of the same pair."""
        self.add({name: values for name, values in arrays.items() if name != "lengths"}, arrays["lengths"])

    def summary(self) -> str:
        """Return one line for a screen."""
        parts = []
        for name, values in self.values.items():
            all_values = np.concatenate(values)
            parts.append(f"{name} mean {all_values.mean(dtype=np.float64):.2g}, max {all_values.max():.2g}")
        return f"{self.num_tokens:,} tokens; " + "; ".join(parts)

    def moments(self) -> dict[str, Moments]:
        """Return the moments of each statistic."""
        lengths_C = np.concatenate(self.lengths)
        proofs_C = np.array([num_proofs([length]) for length in lengths_C.tolist()])
        found = {}
        for name, parts in self.values.items():
            if name in UNUSED:
                continue
            values = np.concatenate(parts)
            values = np.where(values > 0, values * SPREADS.get(name, SPREAD), values)
            cap = CAPS.get(name) or _cap_of(name, values)
            found[name] = calibrate_statistics(
                values,
                cap=cap,
                lambdas=[power / cap for power in POWERS_OF.get(name, POWERS)],
                lengths=proofs_C if name == "proof" else lengths_C,
                headroom=HEADROOM,
            )
        return found


def _cap_of(name: str, values: npt.NDArray[np.floating]) -> float:
    tail = float(np.quantile(values, 0.999))
    return max(tail, CAP_MIN**2) if name == "square" else max(CAP_OVER_TAIL * tail, CAP_MIN)


@dataclass(frozen=True, slots=True)
class LeaseSeries:
    """Endless series of leases over some prompts, alternately small and large. Equal fields give equal leases."""

    prompts: tuple[tuple[int, ...], ...]
    """Prompts, which the leases use in turn."""
    sampling: Sampling
    long_tokens_max: int = 0
    """Length limit of completions in every fourth lease; 0: the same as in the others."""
    seed: int = 0

    @property
    def digest(self) -> str:
        """Digest of everything that determines the series."""
        fields = (self.prompts, self.sampling.model_dump(mode="json"), self.long_tokens_max, self.seed)
        return digest_of(json.dumps(fields).encode())

    @property
    def context_tokens_max(self) -> int:
        """Tokens of the longest prompt with the longest completion."""
        return max(map(len, self.prompts)) + max(self.sampling.completion_tokens_max, self.long_tokens_max)

    def lease(self, number: int) -> Lease:
        """Return one lease, counted from 0."""
        rng = np.random.default_rng([self.seed, number])
        rounds, place = divmod(number, len(GROUPS))
        first = rounds * sum(GROUPS) + sum(GROUPS[:place])
        groups = tuple(
            _group(rng, slot, self.prompts[(first + slot) % len(self.prompts)]) for slot in range(GROUPS[place])
        )
        if self.long_tokens_max and number % LONG_EVERY == LONG_AT:
            return local_lease(groups, self.sampling.model_copy(update={"completion_tokens_max": self.long_tokens_max}))
        return local_lease(groups, self.sampling)

    def first(self, num_tokens: int) -> list[Lease]:
        """Return the first leases, with at least `num_tokens` completion tokens if no completion stops early."""
        leases: list[Lease] = []
        while num_tokens > 0:
            leases.append(self.lease(len(leases)))
            num_tokens -= len(leases[-1].groups) * GROUP * leases[-1].sampling.completion_tokens_max
        return leases


def random_prompts(count: int, *, vocab_size: int, tokens_max: int, seed: int) -> tuple[tuple[int, ...], ...]:
    """Return prompts of 1 to `tokens_max` random tokens."""
    rng = np.random.default_rng(seed)
    return tuple(tuple(rng.integers(0, vocab_size, rng.integers(1, tokens_max + 1)).tolist()) for _ in range(count))


def local_lease(groups: tuple[GroupAssignment, ...], sampling: Sampling) -> Lease:
    """Return a lease of no run, for engines that are measured on this machine."""
    return Lease.model_construct(
        run="",
        lease_id="",
        worker="",
        step=0,
        policy_version=0,
        policy_digest="",
        groups=groups,
        sampling=sampling,
        issued_at_ms=0,
        expires_at_ms=0,
    )


def _group(rng: np.random.Generator, slot: int, prompt: tuple[int, ...]) -> GroupAssignment:
    seeds = tuple(rng.integers(0, SEED_MAX, GROUP, endpoint=True).tolist())
    problem = Problem(environment="calibration", index=0)
    return GroupAssignment(slot=slot, problem=problem, prompt_token_ids=prompt, seeds=seeds)


async def sample_honestly(engine: Engine, leases: Sequence[Lease]) -> list[Rollouts]:
    """Return what an honest worker would upload for each lease. The engine holds the policy."""
    return [rollouts_for(lease, await engine.generate(_generate_requests(lease), lease.sampling)) for lease in leases]


async def measure_pair(scorer: Scorer, leases: Sequence[Lease], sampled: Sequence[Rollouts]) -> Errors:
    """Return the errors that a validator with this scorer would measure. The scorer holds the same policy."""
    errors = Errors()
    for lease, rollouts in zip(leases, sampled, strict=True):
        requests = _score_requests(lease, rollouts)
        found = dict(statistics(rollouts, require_finite(await scorer.prefill(requests, lease.sampling))))
        # A stop margin is never above its token's margin, whose moments cover it. Stop tokens are rare, or there are none
        # here: as a bound of its own it would ban workers for the smallest stop margin.
        found.pop("stop", None)
        for name in ("apart", "rise"):  # they need no moments
            found.pop(name)
        errors.add(found, rollouts.lengths_N)
    return errors


async def raised_choices(scorer: Scorer, leases: Sequence[Lease], sampled: Sequence[Rollouts]) -> Errors:
    """Return how much the engines' difference can raise each likelihood ratio of a token's choice, in nats.

    Unseeded engines are bounded by this. It is measured on seeded ones, whose tokens have the same distribution.

    Under the validator's own probabilities p, a likelihood ratio q / p has mean 1. An honest engine samples from a
    slightly different p'. The mean is then 1 + E[(1 - p / p') q / p], where the claimed logprob shows the token's p /
    p'. So E|(1 - p / p') q / p| bounds how much the engines' difference can raise it, whatever the policy and its
    randomness.
    """
    raised = Errors()
    for lease, rollouts in zip(leases, sampled, strict=True):
        requests = [replace(request, seed=None, hidden=False) for request in _score_requests(lease, rollouts)]
        prefill = require_finite(await scorer.prefill(requests, lease.sampling))
        found = statistics(rollouts, prefill)
        apart_T = np.abs(np.expm1(prefill.logprobs_T.astype(np.float64) - rollouts.logprobs_T))
        ratios = {name: np.exp(np.minimum(found[name].astype(np.float64), RATIO_CAP)) for name in LIKELIHOOD_RATIOS}
        added = {name: np.log1p(SPREAD * apart_T * ratios_T) for name, ratios_T in ratios.items()}
        raised.add({name: values.astype(np.float32) for name, values in added.items()}, rollouts.lengths_N)
    return raised


def choice_moments(raised: Errors) -> dict[str, Moments]:
    """Return the moments of unseeded engines' token choices."""
    moments = {}
    for name, parts in raised.values.items():
        raised_T = np.concatenate(parts)
        cap = max(CAP_OVER_TAIL * float(np.quantile(raised_T, 0.999)), CAP_MIN)
        lengths_C = np.concatenate(raised.lengths)
        slack = calibrate_statistics(raised_T, cap=cap, lambdas=[1.0], lengths=lengths_C, headroom=HEADROOM)
        moments[name] = slack.model_copy(update={"cap": RATIO_CAP})
    return moments


def _score_requests(lease: Lease, rollouts: Rollouts) -> list[ScoreRequest]:
    return [
        ScoreRequest(request.prompt_token_ids, completion.token_ids, request.seed, hidden=True)
        for request, completion in zip(_generate_requests(lease), rollouts.completions(), strict=True)
    ]


def _generate_requests(lease: Lease) -> list[GenerateRequest]:
    return [
        GenerateRequest(group.prompt_token_ids, seed, proofs=True) for group in lease.groups for seed in group.seeds
    ]
