"""From signed bytes to groups: the coordinator's accepted data is verified again before training.

(1) the coordinator signed the batch, for this run and step, and it names each slot of the step at most once. What it says of
    one bundle is the same in all its groups, and its prompts are within the run's bounds;
(2) a bundle has the digest that the batch names, is signed by the group's worker, and its body parses;
    if the batch names a validator's logprobs of it, they are signed by a validator, for this bundle, one for each token,
    and replace the claimed ones;
(3) header and batch agree on run, worker, step and policy;
(4) the group is in the bundle: its slot, its number of completions, one bounded reward each, and its tokens, turns and
    prompts are within the run's bounds (`content_fault`, `prompts_fault`);
(5) every policy that sampled a token is admitted at this step, by step.py.

The coordinator makes the batch, and its intake checks signatures with the functions used here. A fault there is a bug or an
intruder in the coordinator: it ends the trainer with an error that names the cause. Headers, bodies and policies come from
workers, and a validator's word may decide whether they are accepted and trained. Bytes can be lost on the coordinator's disk
after the batch was fixed. A group with such a fault is left out, with a warning: the batch is final, so the trainer would find
the same fault at each start. What is left out follows from the batch and the stored bytes alone.

Intake does not parse a body: a validator alone says that it fits the lease. So check (4) repeats what prime_protocol.verify needs
no seeds and no forward pass for. Its cost is linear in the group's bytes, and each prompt is bounded before any is expanded.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from prime_node.ports.train_samples import Group
from prime_node.training_data.staleness import masked, versions_of
from prime_protocol.digest import digest_of
from prime_protocol.envelope import Envelope, PayloadType, parse_json
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.key_ring import Role
from prime_protocol.limits import REWARD_MAX
from prime_protocol.parcel import open_logprobs, open_parcel
from prime_protocol.replies import BatchGroup, TrainBatch
from prime_protocol.rollout import RolloutHeader, Rollouts, parse_body
from prime_protocol.run_spec import PinnedRun, RunSpec
from prime_protocol.schedule import Selection
from prime_protocol.turns import Turn, episodes_behind, joined, turns_fault
from prime_protocol.verify import spans_ascend, termination_fault


def part_of(rollouts: Rollouts, members: range) -> Rollouts:
    """Return some of a bundle's rollouts, numbered from 0, without their proofs. `members` must be in the bundle."""
    first, last = np.searchsorted(rollouts.rollout_numbers, (members.start, members.stop)).tolist()
    completions = slice(first, last)
    ends_N = np.concatenate(([0], rollouts.lengths_N.cumsum(dtype=np.int64)))
    tokens = slice(int(ends_N[first]), int(ends_N[last]))
    spans = slice(*np.searchsorted(rollouts.spans_S3[:, 0], (first, last)).tolist())
    part = Rollouts(
        token_ids_T=rollouts.token_ids_T[tokens],
        logprobs_T=rollouts.logprobs_T[tokens],
        lengths_N=rollouts.lengths_N[completions],
        finish_N=rollouts.finish_N[completions],
        slots_N=rollouts.slots_N[completions],
        seeds_N=rollouts.seeds_N[completions],
        spans_S3=rollouts.spans_S3[spans] - np.array((first, 0, 0), np.int32),
    )
    if rollouts.turns_N3 is None:
        return part
    starts_N = np.concatenate(([0], rollouts.turns_N3[:, 2].cumsum(dtype=np.int64)))
    context = None if rollouts.context_P is None else rollouts.context_P[int(starts_N[first]) : int(starts_N[last])]
    rows = rollouts.turns_N3[completions] - np.array((members.start, 0, 0), np.int32)
    return replace(part, turns_N3=rows, context_P=context)


def content_fault(entry: BatchGroup, part: Rollouts, spec: RunSpec) -> str | None:
    """Return why a group's rollouts or rewards are not what the run asks for, or None. `part` is `part_of` its bundle."""
    if entry.problem.environment not in {environment.name for environment in spec.environments}:
        return f"the run has no environment {entry.problem.environment}"
    if (part.slots_N != entry.slot).any():
        return "its completions are of another slot"
    if not all(abs(reward) <= REWARD_MAX for reward in entry.rewards):  # false for NaN
        return f"a reward is above {REWARD_MAX:g} in magnitude"
    spans = spec.schedule.swap.spans_policies
    if not spans_ascend(part, oldest=entry.policy_version, newest=spec.max_steps if spans else entry.policy_version):
        return "its tokens are of other policies than the leased one"
    fault = turns_fault(part, [entry.problem.environment] * len(entry.rewards), spec)
    if fault is not None:
        return fault
    context_max = 0 if part.context_P is None else int(part.context_P.max(initial=0))
    if max(int(part.token_ids_T.max(initial=0)), context_max) >= spec.vocab_size:
        return f"a token id is not below {spec.vocab_size}"
    return termination_fault(part, spec.sampling)


def prompts_fault(entry: BatchGroup, episodes: Sequence[Sequence[Turn]], spec: RunSpec) -> str | None:
    """Return why the prompts of turns are not the group's, or None."""
    turns_max = {environment.name: environment.turns_max for environment in spec.environments}
    if turns_max[entry.problem.environment] > 1:
        return None
    is_own = all(turns[0].prompt_token_ids == entry.prompt_token_ids for turns in episodes)
    return None if is_own else "a prompt differs from the lease's"


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Bundle:
    """An opened bundle."""

    header: RolloutHeader | None
    """Verified header; None if the bytes are damaged or lost."""
    rollouts: Rollouts | None
    """Rollouts; None if the body cannot be read."""
    fault: str = ""
    """Fault that makes all of its groups unusable; empty if there is none."""


def open_batch(envelope: Envelope, run: PinnedRun, *, step: int, part: int = 0, kept: bool = False) -> TrainBatch:
    """Verify a batch: check (1). `kept`: a former key of the coordinator may have signed it. Raises RemoteError."""
    verify = run.keys.verify_kept if kept else run.keys.verify
    batch = parse_json(verify(envelope, PayloadType.BATCH, Role.COORDINATOR), TrainBatch)
    if batch.run != run.digest:
        raise RemoteError(
            ErrorCode.WRONG_RUN, f"batch {batch.step} belongs to run {batch.run[:12]}, not {run.digest[:12]}"
        )
    slots = [group.slot for group in batch.groups]
    in_order = run.spec.schedule.selection is Selection.IN_ORDER
    if (
        (batch.step, batch.part) != (step, part)
        or (in_order and any(run.spec.step_of(slot) != step for slot in slots))
        or any(run.spec.step_of(slot) >= run.spec.max_steps for slot in slots)
        or len(set(slots)) != len(slots)
    ):
        raise RemoteError(ErrorCode.MALFORMED, f"batch {batch.step} is not one of step {step}: slots {slots[:4]}...")
    _check_entries(batch, run)
    return batch


def _check_entries(batch: TrainBatch, run: PinnedRun) -> None:
    """Check that groups of one bundle name one worker and one parcel of logprobs, and that prompts are the run's.

    A bundle is opened once. If one group named a validator's logprobs and another none, the claimed ones could count as judged.
    """
    said: dict[str, tuple[str, str | None]] = {}
    for group in batch.groups:
        prompt, about = group.prompt_token_ids, (group.worker, group.logprobs)
        if said.setdefault(group.bundle, about) != about:
            raise RemoteError(
                ErrorCode.MALFORMED, f"batch {batch.step} names two workers or logprobs for bundle {group.bundle[:12]}"
            )
        if not 1 <= len(prompt) <= run.spec.limits.prompt_tokens_max or max(prompt) >= run.spec.vocab_size:
            raise RemoteError(
                ErrorCode.MALFORMED, f"batch {batch.step}, slot {group.slot}: its prompt is none that the run allows"
            )


def open_trained_bundle(parcel: bytes, *, digest: str, worker: str, run: PinnedRun) -> Bundle:
    """Verify a bundle: check (2).

    Bytes with another digest, and a body that cannot be read, are the bundle's `fault`. Raises RemoteError, which names bundle
    and worker, for what intake has checked.
    """
    bounds = run.spec.limits
    if digest_of(parcel) != digest:
        return Bundle(None, None, fault="its bytes are damaged: check the coordinator's disk")
    try:
        opened = open_parcel(parcel, body_bytes_max=bounds.rollout_bytes_max)
        header = parse_json(opened.envelope.verify(PayloadType.ROLLOUT, trusted=(worker,)), RolloutHeader)
        body = opened.check_body(header)
    except RemoteError as error:
        raise RemoteError(error.code, f"bundle {digest[:12]} of worker {worker[:12]}: {error.detail}") from None
    try:
        return Bundle(header, parse_body(header, body, bounds))
    except RemoteError as error:
        return Bundle(header, None, fault=error.detail)


def with_logprobs(bundle: Bundle, parcel: bytes, *, digest: str, logprobs: str, run: PinnedRun) -> Bundle:
    """Replace the claimed logprobs by a validator's: check (2).

    A parcel with another digest than `logprobs`, or with another number of logprobs than tokens, is the bundle's `fault`.
    Raises RemoteError, which names the bundle.
    """
    if digest_of(parcel) != logprobs:
        return replace(bundle, fault="the bytes of its logprobs are damaged: check the coordinator's disk")
    try:
        _, logprobs_T = open_logprobs(
            parcel,
            run=run.digest,
            keys=run.keys,
            bytes_max=run.spec.limits.rollout_bytes_max,
            bundle=digest,
        )
    except RemoteError as error:
        raise RemoteError(error.code, f"logprobs of bundle {digest[:12]}: {error.detail}") from None
    rollouts = bundle.rollouts
    if rollouts is None:
        return bundle
    if len(logprobs_T) != rollouts.num_tokens:
        return replace(bundle, fault=f"a validator gave {len(logprobs_T)} logprobs for {rollouts.num_tokens} tokens")
    return replace(bundle, rollouts=replace(rollouts, logprobs_T=logprobs_T))


def groups_of(batch: TrainBatch, bundles: Mapping[str, Bundle], run: PinnedRun) -> list[Group]:
    """Return the usable groups in the batch's order, after checks (3) to (5).

    Each group that is left out is logged as a warning. Raises RemoteError if the batch contradicts itself.
    """
    found = []
    for entry in batch.groups:
        group = _group(entry, bundles[entry.bundle], batch.step, run)
        if isinstance(group, Group):
            found.append(group)
        else:
            log.warning(
                "step %d trains without slot %d of worker %s: bundle %s was accepted, but %s",
                *(batch.step, entry.slot, entry.worker, entry.bundle[:12], group),
            )
    return found


def _group(entry: BatchGroup, bundle: Bundle, step: int, run: PinnedRun) -> Group | str:
    """Return the group, or why its data cannot be used. Raises RemoteError if the batch contradicts itself."""
    header, rollouts = bundle.header, bundle.rollouts
    if not entry.rewards or any(place >= len(entry.rewards) for place in entry.unscored):
        raise RemoteError(
            ErrorCode.MALFORMED,
            f"slot {entry.slot} in bundle {entry.bundle[:12]} of {entry.worker}: the batch states no rewards, or names a "
            "completion that is not in the group as not scored",
        )
    if header is None:
        return bundle.fault
    claimed = (header.run, header.worker, header.step, header.policy_version)
    if claimed != (run.digest, entry.worker, run.spec.step_of(entry.slot), entry.policy_version):  # (3)
        return "its header names another run, worker, step or policy than the batch"
    if rollouts is None or bundle.fault:  # (4)
        return bundle.fault
    members = range(entry.first, entry.first + len(entry.rewards))
    if members.stop > rollouts.num_rollouts:
        return f"it has {rollouts.num_rollouts} rollouts, and the group is {members.start} to {members.stop}"
    part = part_of(rollouts, members)
    fault = content_fault(entry, part, run.spec)
    if fault is not None:
        return fault
    chosen = [place for place in range(len(members)) if place not in entry.unscored]
    if not chosen:
        return "none of its completions was scored"
    schedule, admission = run.spec.schedule, run.spec.admission
    of_members = versions_of(part, start=entry.policy_version)
    versions = [of_members[place] for place in chosen]
    for each in versions:  # (5)
        for version in (each.end, each.counted_from(schedule.staleness_from)):
            stale = admission.check_trained(step, version)
            if stale is not None:
                return f"policy {version} is {stale} for step {step}"
    try:
        all_episodes = list(episodes_behind(part, [entry.prompt_token_ids] * len(members)))
    except RemoteError as error:
        return error.detail
    fault = prompts_fault(entry, all_episodes, run.spec)
    if fault is not None:
        return fault
    episodes = [all_episodes[place] for place in chosen]
    return Group(
        slot=entry.slot,
        prompt_token_ids=entry.prompt_token_ids,
        completions=tuple(joined(turns) for turns in episodes),
        rewards=tuple(entry.rewards[place] for place in chosen),
        policy_versions=tuple(each.counted_from(schedule.staleness_from) for each in versions),
        worker=entry.worker,
        environment=entry.problem.environment,
        problem_index=entry.problem.index,
        masked=masked(versions, schedule, step=step),
        policies_spanned=tuple(each.end - each.oldest for each in versions) if schedule.swap.spans_policies else (),
        turns=() if part.turns_N3 is None else tuple(map(tuple, episodes)),
        claimed=entry.logprobs is None,
    )
