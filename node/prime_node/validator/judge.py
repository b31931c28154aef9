"""From a bundle's bytes to a verdict with rewards. No I/O but the scorer's forward pass.

The order is the one of SPEC.md, "Checks": (1) framing and signature, (2) body, (3) the assignment, (4) a forward pass of
exactly the lease's policy, (5) logprobs and seeds, (6) rewards, computed here from the tokens. The first that fails decides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from prime_node.ports.engine import Scorer, ScoreRequest
from prime_node.ports.environment import Environment, Tokenizer
from prime_protocol.assignment import Lease
from prime_protocol.envelope import PayloadType, parse_json
from prime_protocol.errors import PeerError
from prime_protocol.parcel import open_parcel
from prime_protocol.rollout import FinishReason, RolloutHeader, Rollouts, parse_body
from prime_protocol.run_spec import PinnedRun
from prime_protocol.verdict import RejectReason, Verdict
from prime_protocol.verify import check_assignment, judge, measure


@dataclass(frozen=True, slots=True)
class Judgement:
    """What goes back to the coordinator."""

    verdict: Verdict
    num_tokens: int = 0
    """Completion tokens of an accepted bundle, for the worker's credit."""
    rewards: tuple[float, ...] = ()
    measured: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OpenedBundle:
    """A bundle that passed every check that needs no model."""

    header: RolloutHeader
    rollouts: Rollouts
    lease: Lease


def open_bundle(parcel: bytes, lease: Lease, run: PinnedRun) -> OpenedBundle | Judgement:
    """(1) to (3): everything that the lease alone can decide."""
    bounds = run.spec.limits
    try:
        opened = open_parcel(parcel, body_bytes_max=bounds.rollout_bytes_max)  # (1)
        payload = opened.envelope.verify(PayloadType.ROLLOUT, trusted=(lease.worker,))
        header = parse_json(payload, RolloutHeader)
        rollouts = parse_body(header, opened.check_body(header), bounds)  # (2)
    except PeerError as error:
        return Judgement(Verdict.refuse(RejectReason.MALFORMED, str(error)))
    verdict = check_assignment(header, rollouts, lease, vocab_size=run.spec.vocab_size)  # (3)
    return OpenedBundle(header, rollouts, lease) if verdict.accepted else Judgement(verdict)


async def judge_bundle(
    bundle: OpenedBundle,
    scorer: Scorer,
    *,
    run: PinnedRun,
    environments: Mapping[str, Environment],
    tokenizer: Tokenizer,
) -> Judgement:
    """(4) to (6). `scorer` holds the lease's policy."""
    lease, rollouts = bundle.lease, bundle.rollouts
    prefill = await scorer.prefill(score_requests(bundle), lease.sampling)  # (4)
    measured = measure(rollouts, prefill)
    verdict = judge(measured, run.spec.checks)  # (5)
    if not verdict.accepted:
        return Judgement(verdict, measured=asdict(measured))
    rewards = score_rollouts(bundle, environments, tokenizer)  # (6)
    return Judgement(verdict, rollouts.num_tokens, tuple(rewards), asdict(measured))


def score_requests(bundle: OpenedBundle) -> list[ScoreRequest]:
    """The bundle's completions with their prompts, in the bundle's order."""
    prompts = [group.prompt_token_ids for group in bundle.lease.groups for _ in group.seeds]
    completions = bundle.rollouts.completions()
    seeds = bundle.rollouts.seeds_N.tolist()
    return [
        ScoreRequest(prompt, completion.token_ids, seed)
        for prompt, completion, seed in zip(prompts, completions, seeds, strict=True)
    ]


def score_rollouts(
    bundle: OpenedBundle, environments: Mapping[str, Environment], tokenizer: Tokenizer
) -> Sequence[float]:
    """Rewards in the bundle's order, from the tokens alone."""
    problems = [group.problem for group in bundle.lease.groups for _ in group.seeds]
    return [
        environments[problem.environment].score(
            problem.index, tokenizer.decode(list(completion.token_ids)), finished=completion.finish is FinishReason.STOP
        )
        for problem, completion in zip(problems, bundle.rollouts.completions(), strict=True)
    ]
