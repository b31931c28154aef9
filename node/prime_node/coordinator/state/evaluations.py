"""Evaluations by workers: held-out problems that are leased, uploaded and judged like any others, and never trained on.

The slots of an evaluation follow those of the run (Rules.slots_end), so no batch, window or curriculum contains them. They are
leased before other work, to workers that hold the policy, while that policy may be leased. An evaluation ends when each slot
has an answer or has used up its attempts. Once its policy is too old, it ends when no slot is held. Its results cover the
answered slots.

The workers are not trusted: their answers are verified like all others, but they choose which leases they return.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

from prime_node.algo.estimates import Mark
from prime_node.coordinator.state import events as ev
from prime_node.coordinator.state.effects import LEASE_CHANGED, BundleForgotten, Effect, Evaluated
from prime_node.coordinator.state.records import State
from prime_node.coordinator.state.slot_records import AcceptedGroup, Evaluation, Results

ATTEMPTS_MAX = 3
"""Leases per problem. A problem that no validator can score must not block the training behind it."""
RESULTS_KEPT_MAX = 4
"""Newest results kept when another evaluation begins; the written rows hold all."""


def _evaluation_begun(state: State, event: ev.EvaluationBegun, at_ms: int) -> list[Effect]:
    assert event.policy_version in state.published
    while (
        len(state.results) > RESULTS_KEPT_MAX
    ):  # not in `settle_evaluation`: one event may end several evaluations, and all of them are reported
        del state.results[next(iter(state.results))]
    state.evaluations[event.policy_version] = Evaluation(
        open=sorted(event.slots, reverse=True), num_slots=len(event.slots)
    )
    return [LEASE_CHANGED]


HANDLERS: Mapping[type, Callable[[State, Any, int], list[Effect]]] = {ev.EvaluationBegun: _evaluation_begun}


def retire(state: State) -> list[Effect]:
    """After a publication, end the evaluations of policies that are not leased any more."""
    effects: list[Effect] = []
    oldest = state.head - state.rules.admission.lag_leased
    for version in [version for version in state.evaluations if version < oldest or state.is_complete]:
        state.evaluations[version].retired = True
        state.evaluations[version].open.clear()
        effects += settle_evaluation(state, version)
    return effects


def is_asked_again(evaluation: Evaluation, slot: int) -> bool:
    """Return whether a slot without an answer is open again."""
    return not evaluation.retired and evaluation.attempts[slot] < ATTEMPTS_MAX


def settle_evaluation(state: State, version: int) -> list[Effect]:
    """Store the results if no slot of the evaluation is open or held."""
    evaluation = state.evaluations[version]
    if evaluation.open or evaluation.held:
        return []
    del state.evaluations[version]
    marks = {slot: mark_of(group) for slot, group in sorted(evaluation.accepted.items())}
    state.results[version] = Results(evaluation.num_slots, marks)
    kept = state.bundles.keys() | set(state.evidence)
    forgotten = [BundleForgotten(bundle) for bundle in evaluation.bundles if bundle not in kept]
    return [Evaluated(version), *forgotten]


def mark_of(group: AcceptedGroup) -> Mark:
    """Return how an accepted group answered its problem."""
    rewards = [reward for place, reward in enumerate(group.rewards) if place not in group.unscored]
    right = sum(reward == 1.0 for reward in rewards)
    return Mark(right, len(rewards), statistics.fmean(rewards) if rewards else 0.0, len(group.unscored))
