"""From a bundle's bytes to a verdict with rewards. The scorer's forward pass is the only I/O.

The order: framing and signature, body, assignment, a forward pass of exactly the lease's policy, logprobs and seeds,
prompts, rendered here, rewards, computed here from the tokens, copies within the bundle. The first failing check decides.
prime_protocol/verify.py numbers the checks of the content. Prompts are rendered by the rule of the coordinator (envs/source.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice

import numpy as np
import numpy.typing as npt

from prime_node.envs.episodes import CutShort, WrongContext
from prime_node.envs.source import is_leasable, prompt_of
from prime_node.ports.engine import Scorer, ScoreRequest, require_finite
from prime_node.ports.environment import Environment, EnvironmentGone, EnvironmentSilent, Tokenizer, graded_together
from prime_node.training_data.staleness import versions_of
from prime_node.validator.references import ReferenceComparison, References
from prime_node.validator.scoring import Scored, score_references, score_rollouts
from prime_node.validator.spans import policies_of, prefill_spans, spans_of
from prime_protocol.assignment import GroupAssignment, Lease
from prime_protocol.calibration import evidence_of
from prime_protocol.close_flips import CLOSE_FLIPS, close_flip_sums, contexts_of
from prime_protocol.copies import fingerprints, is_repetitive
from prime_protocol.digest import digest_of
from prime_protocol.envelope import PayloadType, parse_json
from prime_protocol.errors import RemoteError
from prime_protocol.evidence import BundleEvidence, ComparedRewards
from prime_protocol.excess_flips import EXCESS_FLIPS, flip_sums
from prime_protocol.limits import COMPARED_REWARDS_MAX, Limits
from prime_protocol.parcel import open_parcel
from prime_protocol.reward_ranks import rank_sums
from prime_protocol.rollout import RolloutHeader, Rollouts, parse_body
from prime_protocol.run_spec import PinnedRun, RunSpec
from prime_protocol.shading import SHADING, SHADING_BY_REWARD, by_reward_sums, reward_classes, rises, shading_sums
from prime_protocol.turns import episodes_of
from prime_protocol.verdict import RejectReason, Verdict
from prime_protocol.verify import (
    OF_SEEDS,
    Prefill,
    Statistics,
    check_assignment,
    require_proofs,
    require_seeded,
    statistics,
    summary,
    verdict_on,
)
from prime_protocol.weights import Weights

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LeaseFault:
    """Reason why the bundle of a lease is unverifiable. It is no fault of the worker."""

    detail: str
    unscored: tuple[int, ...] = ()
    """Indices of the rollouts whose problem the environment failed to render; the coordinator draws other problems then."""


async def lease_fault(
    lease: Lease, environments: Mapping[str, Environment], tokenizer: Tokenizer, limits: Limits
) -> LeaseFault | None:
    """Return why a lease's prompts are not those of its problems, or None. It renders each problem, in a thread."""
    failed: list[int] = []
    detail, first = "", 0
    for group in lease.groups:
        environment = environments.get(group.problem.environment)
        if environment is None:
            return _logged(LeaseFault(f"slot {group.slot}: the run has no environment {group.problem.environment}"))
        try:
            prompt = await asyncio.to_thread(prompt_of, environment, group.problem.index, tokenizer)
        except Exception as error:  # third-party code: whatever it raises, the validator continues
            log.warning("%s: rendering failed", _named(group), exc_info=True)
            detail = f"{_named(group)}: no prompt: {type(error).__name__}"
            failed += range(first, first + len(group.seeds))
            if isinstance(error, EnvironmentGone | EnvironmentSilent):
                break  # the next one may take as long
        else:
            if prompt != group.prompt_token_ids:
                return _logged(
                    LeaseFault(
                        f"{_named(group)}: the coordinator leased another prompt than this validator renders; "
                        "compare their model files and versions of the environment"
                    )
                )
            if not is_leasable(prompt, limits):
                return _logged(
                    LeaseFault(f"{_named(group)}: its prompt has {len(prompt)} tokens, which the run forbids")
                )
        first += len(group.seeds)
    return LeaseFault(detail, tuple(failed)) if failed else None


def _named(group: GroupAssignment) -> str:
    return f"slot {group.slot}, environment {group.problem.environment}, problem {group.problem.index}"


def _logged(fault: LeaseFault) -> LeaseFault:
    log.error("the coordinator's lease is wrong: %s", fault.detail)
    return fault


OTHER_LEASE = "the coordinator sent another lease to this validator than the one that the bundle's header names"


@dataclass(frozen=True, slots=True)
class Judgement:
    """Result of verifying a bundle, for the coordinator."""

    verdict: Verdict
    num_tokens: int = 0
    """Completion tokens of an accepted bundle, for the worker's credit."""
    rewards: tuple[float, ...] = ()
    measured: Mapping[str, float] = field(default_factory=dict)
    versions: tuple[tuple[int, int], ...] = ()
    """Value of CheckResultRequest.versions."""
    unscored: tuple[int, ...] = ()
    evidence: BundleEvidence | None = None
    """Evidence of its tokens against the worker."""
    logprobs_T: npt.NDArray[np.float32] | None = None
    """Validator's own logprobs [T] of an audited bundle, which the trainer uses instead of the claimed ones."""
    comparison: ReferenceComparison | None = None
    """Reference groups that the validator will sample to compare the bundle's rewards with. Not sent, like the next field."""
    references: References | None = None
    """Sampled references."""
    fingerprints: tuple[tuple[int, str], ...] = ()
    """Slots of an accepted bundle, each with the fingerprint of a text that does not occur twice by chance."""


@dataclass(frozen=True, slots=True)
class OpenedBundle:
    """A bundle that passed every check that needs no model."""

    header: RolloutHeader
    rollouts: Rollouts
    lease: Lease

    @property
    def is_unseeded(self) -> bool:
        """Return whether its tokens were chosen by unassigned randomness. A greedy choice needs none."""
        return not self.header.engine.seeded and self.lease.sampling.temperature > 0.0

    @property
    def is_sampled_whole(self) -> bool:
        """Return whether its tokens were sampled from the whole distribution that the claimed logprobs describe."""
        return self.lease.sampling.temperature > 0.0 and self.lease.sampling.filters is None


def open_bundle(
    parcel: bytes, lease: Lease, run: PinnedRun, *, newest_policy: int | None = None
) -> OpenedBundle | Judgement:
    """Run checks (1) to (3), which need only the lease.

    `newest_policy` is the newest policy that a span may name (check_assignment).
    """
    bounds = run.spec.limits
    try:
        opened = open_parcel(parcel, body_bytes_max=bounds.rollout_bytes_max)  # (1)
        payload = opened.envelope.verify(PayloadType.ROLLOUT, trusted=(lease.worker,))
        header = parse_json(payload, RolloutHeader)
        rollouts = parse_body(header, opened.check_body(header), bounds)  # (2)
        require_proofs(rollouts, run.spec.checks)
    except RemoteError as error:
        return Judgement(Verdict.refuse(RejectReason.MALFORMED, str(error)))
    if header.lease_digest != digest_of(lease.model_dump_json().encode()):
        log.error("bundle of lease %s: %s", lease.lease_id[:12], OTHER_LEASE)
        return Judgement(Verdict.refuse(RejectReason.UNVERIFIABLE, OTHER_LEASE))
    newest = newest_policy if run.spec.schedule.swap.spans_policies else None
    vocab_size = run.spec.vocab_size
    try:
        require_seeded(header, run.spec.checks)
        verdict = check_assignment(  # (3)
            header, rollouts, lease, vocab_size=vocab_size, newest_policy=newest, turns=run.spec
        )
    except RemoteError as error:
        return Judgement(Verdict.refuse(RejectReason.MALFORMED, str(error)))
    return OpenedBundle(header, rollouts, lease) if verdict.accepted else Judgement(verdict)


async def prove_bundle(
    bundle: OpenedBundle, scorer: Scorer, *, run: PinnedRun, policies: Mapping[int, Weights] | None = None
) -> Judgement:
    """Run checks (4) and (5). An accepted bundle has no rewards yet.

    Raises EngineMismatch if a policy cannot be loaded, or the forward pass is not finite.
    """
    if policies is None:
        (judgement,) = await prove_bundles([bundle], scorer, run=run)
        return judgement
    spans, swap = spans_of(bundle.rollouts), run.spec.schedule.swap
    requests = score_requests(bundle)
    prefill = await prefill_spans(scorer, requests, spans, bundle.lease.sampling, policies, swap=swap)
    return judgement_of(bundle, prefill, run=run, judged_by=scorer.info.calibration_class)


async def prove_bundles(bundles: Sequence[OpenedBundle], scorer: Scorer, *, run: PinnedRun) -> list[Judgement]:
    """Run checks (4) and (5) on bundles of one policy and one BatchKey by one call of the scorer.

    Raises EngineMismatch if the forward pass is not finite.
    """
    requests = [score_requests(bundle) for bundle in bundles]
    whole = await scorer.prefill([one for each in requests for one in each], bundles[0].lease.sampling)
    judged_by = scorer.info.calibration_class
    prefills = whole.split([bundle.rollouts.num_tokens for bundle in bundles])
    return [
        judgement_of(bundle, prefill, run=run, judged_by=judged_by)
        for bundle, prefill in zip(bundles, prefills, strict=True)
    ]


def judgement_of(bundle: OpenedBundle, prefill: Prefill, *, run: PinnedRun, judged_by: str) -> Judgement:
    """Return the result of (4) and (5), given the forward pass by a validator of class `judged_by`.

    Raises EngineMismatch if that pass is not finite.
    """
    found = statistics(bundle.rollouts, require_finite(prefill))  # (4)
    evidence = evidence_in(bundle, found, run, judged_by=judged_by)
    measured = summary(found)
    return Judgement(
        verdict_on(measured, evidence, run.spec.checks),
        measured=asdict(measured),
        evidence=evidence,
        logprobs_T=prefill.logprobs_T,
    )  # (5)


def evidence_in(
    bundle: OpenedBundle, found: Statistics, run: PinnedRun, *, judged_by: str, calibration: int | None = None
) -> BundleEvidence | None:
    """Return the evidence in a bundle's statistics, measured by a validator of class `judged_by`.

    `calibration` is the version of the run's calibration; by default the newest known one. None if the run uses no
    statistics. Raises RemoteError if the version is not known.
    """
    version = run.calibrations.version if calibration is None else calibration
    checks = run.checks_at(version)
    if not checks.statistics:
        return None
    weighed = {name: values for name, values in found.items() if not (bundle.is_unseeded and name in OF_SEEDS)}
    worker = bundle.header.engine.calibration_class
    evidence = BundleEvidence(worker=worker, validator=judged_by, sums={})
    if checks.calibration is not None:
        evidence = evidence_of(weighed, checks.calibration, worker=worker, validator=judged_by)
    if version:
        evidence = evidence.model_copy(update={"calibration": version})
    if not bundle.is_sampled_whole:
        return evidence
    sums = dict(evidence.sums)
    if checks.flips_explained and not bundle.is_unseeded:
        sums[EXCESS_FLIPS] = flip_sums(found["flip"], found["apart"])
    if checks.close_flips_seen and not bundle.is_unseeded:
        contexts_T = contexts_of([(one.prompt_token_ids, one.completion_token_ids) for one in score_requests(bundle)])
        sums[CLOSE_FLIPS] = close_flip_sums(found["margin"], found["apart"], contexts_T)
    if checks.shading_seen:
        sums[SHADING] = shading_sums(found["rise"].astype(np.float64))
    return evidence.model_copy(update={"sums": sums})


async def reward_bundle(
    bundle: OpenedBundle,
    *,
    run: PinnedRun,
    environments: Mapping[str, Environment],
    tokenizer: Tokenizer,
    proven: Judgement | None = None,
    is_wanted: Callable[[], bool] = lambda: True,
) -> Judgement:
    """Run checks (6) and (7): compute an accepted bundle's rewards, and look for texts that its completions share.

    Compare the lease's prompts with its problems' first. `proven` is the result of (4) and (5), if the bundle was audited.
    Raises NotWanted as soon as `is_wanted` says no.
    """
    lease, rollouts = bundle.lease, bundle.rollouts
    so_far, spec = proven or Judgement(Verdict.accept()), run.spec
    if (fault := await lease_fault(lease, environments, tokenizer, spec.limits)) is not None:
        verdict, evidence = Verdict.refuse(RejectReason.UNVERIFIABLE, fault.detail), so_far.evidence
        weighed = evidence if fault.unscored else None  # a wrong lease tells nothing about its worker
        return replace(so_far, verdict=verdict, unscored=fault.unscored, evidence=weighed)
    try:
        with graded_together():
            scored = await score_rollouts(lease, rollouts, environments, tokenizer, spec=spec, is_wanted=is_wanted)
    except WrongContext as error:
        reason = RejectReason.INCOMPLETE if isinstance(error, CutShort) else RejectReason.WRONG_CONTEXT
        return replace(so_far, verdict=Verdict.refuse(reason, str(error)))
    if not scored.enough:
        verdict = Verdict.refuse(RejectReason.UNVERIFIABLE, scored.fault)
        return replace(so_far, verdict=verdict, unscored=scored.unscored)
    if (references := so_far.references) is not None:
        with graded_together():  # not with the worker's answers
            trusted = await score_references(lease, references, environments, tokenizer, spec=spec)
        assert so_far.evidence is not None, "a run that compares rewards weighs every bundle that it audits"
        so_far = replace(so_far, evidence=await with_ranks(so_far.evidence, lease, scored, trusted, spec=spec))
    if so_far.evidence is not None and so_far.logprobs_T is not None and spec.checks.shading_seen:
        so_far = replace(so_far, evidence=with_shading(so_far.evidence, bundle, scored, so_far.logprobs_T))
    marks = fingerprints(rollouts, lease.sampling)
    if is_repetitive(marks):  # (7)
        detail = "two of its completions contain the same long text, which independent sampling does not produce"
        return replace(so_far, verdict=Verdict.refuse(RejectReason.COPIED, detail))
    spread = {} if scored.spread_mean is None else {"reward_spread_mean": scored.spread_mean}
    return replace(
        so_far,
        measured={**so_far.measured, **spread},
        num_tokens=rollouts.num_tokens,
        rewards=scored.rewards,
        fingerprints=tuple((int(rollouts.slots_N[index]), mark) for index, mark in marks),
        versions=() if policies_of(rollouts) == [lease.policy_version] else _versions_of_groups(bundle),
        unscored=scored.unscored,
    )


async def with_ranks(
    evidence: BundleEvidence, lease: Lease, scored: Scored, trusted: Mapping[int, Sequence[float]], *, spec: RunSpec
) -> BundleEvidence:
    """Add to the evidence how the bundle's rewards rank among trusted ones.

    The comparison is by group, over the same prompts; the compared rewards are added too.
    """
    mine = _by_group(lease, scored)
    pairs = [(mine[index], rewards) for index, rewards in trusted.items()]
    sums = await asyncio.to_thread(rank_sums, pairs)  # takes a while with many rewards
    is_public = (
        spec.checks.references_public and sum(len(mine) + len(other) for mine, other in pairs) <= COMPARED_REWARDS_MAX
    )
    compared = (
        [ComparedRewards(mine=tuple(mine), trusted=tuple(other)) for mine, other in pairs] if is_public and sums else ()
    )
    return evidence.model_copy(update={"sums": {**evidence.sums, **sums}, "compared": tuple(compared)})


def with_shading(
    evidence: BundleEvidence, bundle: OpenedBundle, scored: Scored, logprobs_T: npt.NDArray[np.float32]
) -> BundleEvidence:
    """Add to the evidence how claimed and recomputed logprobs [T] differ between rewarded and unrewarded rollouts."""
    if not bundle.is_sampled_whole:
        return evidence
    rollouts, left_out = bundle.rollouts, set(scored.unscored)
    rewarded = [index for index in range(len(scored.rewards)) if index not in left_out]
    places = {index: place for place, index in enumerate(rewarded)}
    owners_T = np.repeat(rollouts.rollout_numbers, rollouts.lengths_N)
    is_kept_T = ~np.isin(owners_T, list(left_out))
    classes = reward_classes(_by_group(bundle.lease, scored))
    sums = by_reward_sums(
        rises(rollouts.logprobs_T, logprobs_T)[is_kept_T],
        np.array([places[index] for index in owners_T[is_kept_T].tolist()], np.int64),
        classes,
    )
    return evidence.model_copy(update={"sums": {**evidence.sums, SHADING_BY_REWARD: sums}})


def _by_group(lease: Lease, scored: Scored) -> list[list[float]]:
    """Return the rewards of each group, without those that could not be scored."""
    left_out, first = set(scored.unscored), 0
    found: list[list[float]] = []
    for group in lease.groups:
        indices = range(first, first + len(group.seeds))
        found.append([scored.rewards[index] for index in indices if index not in left_out])
        first += len(group.seeds)
    return found


def _versions_of_groups(bundle: OpenedBundle) -> tuple[tuple[int, int], ...]:
    """Return for each group the oldest policy of its tokens and the oldest of its completions' last tokens."""
    versions = iter(versions_of(bundle.rollouts, start=bundle.lease.policy_version))
    groups = [list(islice(versions, len(group.seeds))) for group in bundle.lease.groups]
    return tuple((min(each.oldest for each in group), min(each.end for each in group)) for group in groups)


def score_requests(bundle: OpenedBundle) -> list[ScoreRequest]:
    """Return the bundle's completions with their prompts, in order.

    Hidden states are requested if the bundle commits to them.
    """
    turns = [turn for turns in episodes_of(bundle.rollouts, bundle.lease) for turn in turns]
    seeds: list[int | None] = bundle.rollouts.seeds_N.tolist()
    if bundle.is_unseeded:
        seeds = [None] * len(seeds)
    hidden = bundle.rollouts.proofs_CB is not None
    return [
        ScoreRequest(turn.prompt_token_ids, turn.completion.token_ids, seed, hidden=hidden)
        for turn, seed in zip(turns, seeds, strict=True)
    ]
