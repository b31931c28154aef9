"""From signed bytes to groups. Pure: the coordinator's accepted data is verified again before training.

(1) the coordinator signed the batch, for this run and step, and it names each slot of the step at most once;
(2) a bundle has the digest that the batch names, is signed by the group's worker, and its body parses;
    if the batch names a validator's logprobs of it, they are signed by a validator, for this bundle, one for each token,
    and replace the claimed ones;
(3) header and batch agree on run, worker, step and policy;
(4) the group is in the bundle: its slot, its number of completions, one reward each, finite;
(5) every policy that sampled a token is admitted at this step, by step.py.

Intake has checked all of it, so a fault here is a bug or an intruder on the trusted side: it ends the trainer with an
error that names the cause.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isfinite

from prime_node.ports.train_backend import Group
from prime_node.training_data.staleness import masked, versions_of
from prime_protocol.digest import digest_of
from prime_protocol.envelope import Envelope, PayloadType, parse_json
from prime_protocol.errors import ErrorCode, PeerError
from prime_protocol.judged_logprobs import open_logprobs
from prime_protocol.key_ring import Role
from prime_protocol.messages import BatchGroup, TrainBatch
from prime_protocol.parcel import open_parcel
from prime_protocol.rollout import RolloutHeader, Rollouts, parse_body
from prime_protocol.run_spec import PinnedRun
from prime_protocol.schedule import Selection
from prime_protocol.turns import episodes_behind, joined


@dataclass(frozen=True, slots=True)
class Bundle:
    """An opened bundle."""

    header: RolloutHeader
    rollouts: Rollouts


def open_batch(envelope: Envelope, run: PinnedRun, *, step: int, part: int = 0) -> TrainBatch:
    """Verify a batch: check (1). Raises PeerError."""
    batch = parse_json(run.keys.verify(envelope, PayloadType.BATCH, Role.COORDINATOR), TrainBatch)
    if batch.run != run.digest:
        raise PeerError(
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
        raise PeerError(ErrorCode.MALFORMED, f"batch {batch.step} is not one of step {step}: slots {slots[:4]}...")
    return batch


def open_trained_bundle(parcel: bytes, *, digest: str, worker: str, run: PinnedRun) -> Bundle:
    """Verify a bundle: check (2).

    Raises PeerError, which names bundle and worker. After intake only a bug of ours can cause it.
    """
    bounds = run.spec.limits
    try:
        if digest_of(parcel) != digest:
            raise PeerError(ErrorCode.DIGEST_MISMATCH, "the coordinator sent other bytes")
        opened = open_parcel(parcel, body_bytes_max=bounds.rollout_bytes_max)
        header = parse_json(opened.envelope.verify(PayloadType.ROLLOUT, trusted=(worker,)), RolloutHeader)
        return Bundle(header, parse_body(header, opened.check_body(header), bounds))
    except PeerError as error:
        raise PeerError(error.code, f"bundle {digest[:12]} of worker {worker[:12]}: {error.detail}") from None


def with_logprobs(bundle: Bundle, parcel: bytes, *, digest: str, logprobs: str, run: PinnedRun) -> Bundle:
    """Replace the claimed logprobs by a validator's: check (2).

    `parcel` must have the digest `logprobs`. Raises PeerError, which names the bundle.
    """
    try:
        if digest_of(parcel) != logprobs:
            raise PeerError(ErrorCode.DIGEST_MISMATCH, "the coordinator sent other bytes")
        _, logprobs_T = open_logprobs(
            parcel,
            run=run.digest,
            keys=run.keys,
            bytes_max=run.spec.limits.rollout_bytes_max,
            bundle=digest,
            num_tokens=bundle.rollouts.num_tokens,
        )
    except PeerError as error:
        raise PeerError(error.code, f"logprobs of bundle {digest[:12]}: {error.detail}") from None
    return replace(bundle, rollouts=replace(bundle.rollouts, logprobs_T=logprobs_T))


def groups_of(batch: TrainBatch, bundles: Mapping[str, Bundle], run: PinnedRun) -> list[Group]:
    """Return the groups in the batch's order, after checks (3) to (5). Raises PeerError."""
    return [_group(group, bundles[group.bundle], batch.step, run) for group in batch.groups]


def _group(entry: BatchGroup, bundle: Bundle, step: int, run: PinnedRun) -> Group:
    header, rollouts = bundle.header, bundle.rollouts
    said = (header.run, header.worker, header.step, header.policy_version)
    if said != (run.digest, entry.worker, run.spec.step_of(entry.slot), entry.policy_version):  # (3)
        raise _fault(entry, "its header names another run, worker, step or policy than the batch")
    members = range(entry.first, entry.first + len(entry.rewards))
    if not entry.rewards or members.stop > rollouts.num_rollouts or not _are_of_slot(rollouts, members, entry.slot):
        raise _fault(entry, f"completions {members.start} to {members.stop} are not all of this slot")  # (4)
    if not all(isfinite(reward) for reward in entry.rewards):
        raise _fault(entry, "a reward is not finite")
    if any(place >= len(entry.rewards) for place in entry.unscored):
        raise _fault(entry, "a completion that was not scored is not in the group")
    unscored = {members[place] for place in entry.unscored}
    chosen = [index for index in members if index not in unscored]
    if not chosen:
        raise _fault(entry, "none of its completions was scored")
    schedule, admission = run.spec.schedule, run.spec.admission
    of_bundle = versions_of(rollouts, start=entry.policy_version)
    versions = [of_bundle[index] for index in chosen]
    for each in versions:  # (5)
        for version in (each.end, each.counted_from(schedule.staleness_from)):
            fault = admission.check_trained(step, version)
            if fault is not None:
                raise _fault(entry, f"policy {version} is {fault} for step {step}")
    prompts = [entry.prompt_token_ids] * len(members)
    of_members = dict(zip(members, episodes_behind(rollouts, prompts, first=members.start), strict=True))
    episodes = [of_members[index] for index in chosen]
    return Group(
        slot=entry.slot,
        prompt_token_ids=entry.prompt_token_ids,
        completions=tuple(joined(turns) for turns in episodes),
        rewards=tuple(entry.rewards[index - entry.first] for index in chosen),
        policy_versions=tuple(each.counted_from(schedule.staleness_from) for each in versions),
        worker=entry.worker,
        environment=entry.problem.environment,
        masked=masked(versions, schedule, step=step),
        policies_spanned=tuple(each.end - each.oldest for each in versions) if schedule.swap.spans_policies else (),
        turns=() if rollouts.turns_N3 is None else tuple(map(tuple, episodes)),
        claimed=entry.logprobs is None,
    )


def _are_of_slot(rollouts: Rollouts, members: range, slot: int) -> bool:
    numbers = rollouts.rollout_numbers
    return bool((rollouts.slots_N[(numbers >= members.start) & (numbers < members.stop)] == slot).all())


def _fault(entry: BatchGroup, what: str) -> PeerError:
    return PeerError(ErrorCode.MALFORMED, f"slot {entry.slot} in bundle {entry.bundle[:12]} of {entry.worker}: {what}")
