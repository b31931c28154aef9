"""Evaluations by workers: held-out problems, leased, uploaded and judged like any others, and never trained on.

The slots of an evaluation lie beyond those of the run (Rules.slots_end), so no batch, window or curriculum can meet them. They
are leased to workers that hold the policy, before anything else, while it may be leased at all. An evaluation is over when each
slot is answered or was asked in vain often enough; or, once its policy is too old, when nothing of it is held. Its figures are
those of what was answered.

The workers are not trusted: their answers are proven like all others, but which leases they bring back is up to them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

from prime_node.algo.estimates import Mark
from prime_node.coordinator.state import events as ev
from prime_node.coordinator.state.effects import LEASE_NEWS, BundleForgotten, Effect, Evaluated
from prime_node.coordinator.state.records import State
from prime_node.coordinator.state.slot_records import AcceptedGroup, Evaluation, Results

ATTEMPTS_MAX = 3
"""A problem is leased so often at most. One that no validator can score must not hold up the training behind it."""
RESULTS_KEPT_MAX = 4
"""Evaluations whose results are remembered when another begins, the newest; the rows that were written hold all."""


def _evaluation_begun(state: State, event: ev.EvaluationBegun, at_ms: int) -> list[Effect]:
    assert event.policy_version in state.published
    while (
        len(state.results) > RESULTS_KEPT_MAX
    ):  # not in `settle_evaluation`: one event may end several, and all are told then
        del state.results[next(iter(state.results))]
    state.evaluations[event.policy_version] = Evaluation(
        open=sorted(event.slots, reverse=True), num_slots=len(event.slots)
    )
    return [LEASE_NEWS]


HANDLERS: Mapping[type, Callable[[State, Any, int], list[Effect]]] = {ev.EvaluationBegun: _evaluation_begun}


def retire(state: State) -> list[Effect]:
    """After a publication: policies that are leased no more are evaluated no further."""
    effects: list[Effect] = []
    oldest = state.head - state.rules.admission.lag_leased
    for version in [version for version in state.evaluations if version < oldest or state.is_complete]:
        state.evaluations[version].retired = True
        state.evaluations[version].open.clear()
        effects += settle_evaluation(state, version)
    return effects


def is_asked_again(evaluation: Evaluation, slot: int) -> bool:
    """Whether a slot that came back without an answer is open again."""
    return not evaluation.retired and evaluation.attempts[slot] < ATTEMPTS_MAX


def settle_evaluation(state: State, version: int) -> list[Effect]:
    """The results, if nothing of the evaluation is open or held."""
    evaluation = state.evaluations[version]
    if evaluation.open or evaluation.held:
        return []
    del state.evaluations[version]
    marks = {slot: _mark(group) for slot, group in sorted(evaluation.accepted.items())}
    state.results[version] = Results(evaluation.num_slots, marks)
    kept = state.bundles.keys() | set(state.evidence)
    forgotten = [BundleForgotten(bundle) for bundle in evaluation.bundles if bundle not in kept]
    return [Evaluated(version), *forgotten]


def _mark(group: AcceptedGroup) -> Mark:
    rewards = [reward for place, reward in enumerate(group.rewards) if place not in group.unscored]
    right = sum(reward == 1.0 for reward in rewards)
    return Mark(right, len(rewards), statistics.fmean(rewards) if rewards else 0.0, len(group.unscored))
