"""Measure honest error: one engine samples, another verifies, both honestly. `calibrate_statistics` then allows their difference.

Leases resemble those of a run: groups of completions that share a prompt, in small and in large batches, since kernels
differ with the batch size. Completions run to their length limit, so that late positions are measured too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from prime_node.ports.engine import Engine, GenerateRequest, Scorer, ScoreRequest
from prime_protocol.assignment import GroupAssignment, Lease, Problem, Sampling
from prime_protocol.calibration import PairMoments
from prime_protocol.evidence import Moments, calibrate_statistics
from prime_protocol.noise import SEED_MAX
from prime_protocol.proof import num_proofs
from prime_protocol.rollout import Rollouts, rollouts_for
from prime_protocol.verify import LIKELIHOOD_RATIOS, statistics

GROUP = 8
"""Completions of one prompt."""
GROUPS = (1, 8)
"""Groups of a small lease, and of a large one."""
POWERS = (0.25, 1.0, 3.0, 6.0)
"""Values of lambda * cap: nats that a token at the cap adds, before its moment is subtracted."""
CAPS = {"margin": 0.5, "flip": 1.0, "proof": 16.0}
"""Caps of statistics whose scale is known."""
SHARES = frozenset({"flip"})
"""Statistics that are 0 or 1."""
CAP_OVER_TAIL = 4.0
"""Cap of the other statistics, as a multiple of their honest 99.9 % quantile."""
CAP_MIN = 0.01
"""Lower bound of a cap. Two engines may agree to the last bits here and still differ on other machines of the same class."""
SPREAD = 1.25
"""Factor by which the error of other machines and policies may exceed the measured one. `norm` hardly depends on policy and
prompts: 0.051 for bf16 of a model of 135 M parameters, on two sets of prompts."""
HEADROOM = 1.25
"""Factor on log M0, by which errors may be more frequent than measured. Both factors decide what stays hidden: with 2 and 2
instead, int8 weights of that model take fifty times as many tokens to detect."""
RATIO_CAP = 4.0
"""Largest number of nats that a token adds to a likelihood ratio."""


@dataclass(slots=True)
class Errors:
    """Statistics of honest tokens of one pair of engines, by name, completion after completion."""

    values: dict[str, list[npt.NDArray[np.float32]]] = field(default_factory=dict)
    lengths: list[npt.NDArray[np.int32]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Return the number of measured tokens."""
        return int(sum(lengths.sum() for lengths in self.lengths))

    def add(self, found: dict[str, npt.NDArray[np.float32]], lengths_C: npt.NDArray[np.int32]) -> None:
        """Add the statistics of a lease's tokens, and the lengths [C] of its completions."""
        for name, values in found.items():
            self.values.setdefault(name, []).append(values)
        self.lengths.append(lengths_C)

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
            if name == "logprob":
                continue  # `norm` detects the same sooner, and each additional statistic weakens the others
            values = np.concatenate(parts) * (1.0 if name in SHARES else SPREAD)
            cap = CAPS.get(name) or max(CAP_OVER_TAIL * float(np.quantile(values, 0.999)), CAP_MIN)
            found[name] = calibrate_statistics(
                values,
                cap=cap,
                lambdas=[power / cap for power in POWERS],
                lengths=proofs_C if name == "proof" else lengths_C,
                headroom=HEADROOM,
            )
        return found


def make_leases(
    rng: np.random.Generator,
    *,
    num_tokens: int,
    vocab_size: int,
    prompt_tokens_max: int,
    completion_tokens_max: int,
    temperature: float = 1.0,
) -> list[Lease]:
    """Make leases over random prompts, alternately small and large, with about `num_tokens` completion tokens in all."""
    sampling = Sampling(temperature=temperature, completion_tokens_max=completion_tokens_max, stop_token_ids=())
    leases: list[Lease] = []
    while num_tokens > 0:
        num_groups = GROUPS[len(leases) % len(GROUPS)]
        groups = tuple(_group(rng, slot, vocab_size, prompt_tokens_max) for slot in range(num_groups))
        leases.append(local_lease(groups, sampling))
        num_tokens -= num_groups * GROUP * completion_tokens_max
    return leases


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


def _group(rng: np.random.Generator, slot: int, vocab_size: int, prompt_tokens_max: int) -> GroupAssignment:
    prompt = rng.integers(0, vocab_size, rng.integers(1, prompt_tokens_max + 1)).tolist()
    seeds = rng.integers(0, SEED_MAX, GROUP, endpoint=True).tolist()
    problem = Problem(environment="calibration", index=0)
    return GroupAssignment(slot=slot, problem=problem, prompt_token_ids=tuple(prompt), seeds=tuple(seeds))


async def sample_honestly(engine: Engine, leases: Sequence[Lease]) -> list[Rollouts]:
    """Return what an honest worker would upload for each lease. The engine holds the policy."""
    return [rollouts_for(lease, await engine.generate(_generate_requests(lease), lease.sampling)) for lease in leases]


async def measure_pair(scorer: Scorer, leases: Sequence[Lease], sampled: Sequence[Rollouts]) -> Errors:
    """Return the errors that a validator with this scorer would measure. The scorer holds the same policy."""
    errors = Errors()
    for lease, rollouts in zip(leases, sampled, strict=True):
        requests = _score_requests(lease, rollouts)
        found = dict(statistics(rollouts, await scorer.prefill(requests, lease.sampling)))
        # A stop margin is never above its token's margin, whose moments cover it. Without stop tokens it is 0
        # everywhere here: as a bound of its own it would ban workers for the smallest stop margin.
        found.pop("stop", None)
        for name in ("apart", "rise"):  # they need no moments
            found.pop(name)
        errors.add(found, rollouts.lengths_N)
    return errors


async def choice_moments(scorer: Scorer, leases: Sequence[Lease], sampled: Sequence[Rollouts]) -> dict[str, Moments]:
    """Return the bounds on unseeded engines' token choices, measured on seeded ones, whose tokens have the same distribution.

    Under the validator's own probabilities p, a likelihood ratio q / p has mean 1. An honest engine samples from a
    slightly different p'. The mean is then 1 + E[(1 - p / p') q / p], where the claimed logprob shows the token's p /
    p'. So E|(1 - p / p') q / p| bounds how much the engines' difference can raise it, whatever the policy and its
    randomness.
    """
    found: dict[str, list[npt.NDArray[np.float64]]] = {name: [] for name in LIKELIHOOD_RATIOS}
    for lease, rollouts in zip(leases, sampled, strict=True):
        requests = [replace(request, seed=None, hidden=False) for request in _score_requests(lease, rollouts)]
        prefill = await scorer.prefill(requests, lease.sampling)
        statistics_ = statistics(rollouts, prefill)
        apart_T = np.abs(np.expm1(prefill.logprobs_T.astype(np.float64) - rollouts.logprobs_T))
        for name in LIKELIHOOD_RATIOS:
            ratios_T = np.exp(np.minimum(statistics_[name].astype(np.float64), RATIO_CAP))
            found[name].append(np.log1p(SPREAD * apart_T * ratios_T))
    lengths_C = np.concatenate([rollouts.lengths_N for rollouts in sampled])
    moments = {}
    for name, parts in found.items():
        raised_T = np.concatenate(parts)
        cap = max(CAP_OVER_TAIL * float(np.quantile(raised_T, 0.999)), CAP_MIN)
        slack = calibrate_statistics(raised_T, cap=cap, lambdas=[1.0], lengths=lengths_C, headroom=HEADROOM)
        moments[name] = slack.model_copy(update={"cap": RATIO_CAP})
    return moments


def pair_of(engine: Engine, scorer: Scorer, moments: Mapping[str, Moments]) -> PairMoments:
    """Return the moments of a pair of engines, as the run's calibration holds them."""
    return PairMoments(
        worker=engine.info.calibration_class, validator=scorer.info.calibration_class, moments=dict(moments)
    )


def _score_requests(lease: Lease, rollouts: Rollouts) -> list[ScoreRequest]:
    return [
        ScoreRequest(request.prompt_token_ids, completion.token_ids, request.seed, hidden=True)
        for request, completion in zip(_generate_requests(lease), rollouts.completions(), strict=True)
    ]


def _generate_requests(lease: Lease) -> list[GenerateRequest]:
    return [
        GenerateRequest(group.prompt_token_ids, seed, proofs=True) for group in lease.groups for seed in group.seeds
    ]
