"""The coordinator's part of evaluations by workers: when they begin, on which problems, and their reports.

The state machine does the rest (state/evaluations.py): leases, verdicts and results.
"""

from __future__ import annotations

import logging
from typing import Any

from prime_node.algo.estimates import Mark, sampled_figures
from prime_node.coordinator.assignments import Assigner
from prime_node.coordinator.config import EvaluationConfig
from prime_node.coordinator.state import events as ev
from prime_node.coordinator.state.records import State
from prime_node.coordinator.state.slot_records import Results
from prime_protocol.errors import LocalError

log = logging.getLogger(__name__)

EVALUATED_BY = "workers"


class Evaluations:
    """Evaluations of policies on held-out problems, which are the same for every policy."""

    def __init__(self, config: EvaluationConfig, assigner: Assigner, *, rollouts_per_group: int) -> None:
        """Raise LocalError if the settings need more completions than the run's groups have."""
        if max(config.pass_at, default=0) > rollouts_per_group:
            raise LocalError(
                f"coordinator.evaluation.pass_at: k is at most the run's rollouts_per_group, {rollouts_per_group}"
            )
        self._config, self._assigner = config, assigner
        self._slots: tuple[int, ...] = ()

    def due(self, state: State) -> ev.EvaluationBegun | None:
        """Return the evaluation of the newest policy, if it is due.

        The run's last policy has none: no work is left for which workers would stay.
        """
        version = state.head
        if not self._config.is_due(version) or version >= state.rules.max_steps:
            return None
        try:
            self._slots = self._slots or self._askable()
        except Exception:  # an environment's code may raise anything; the coordinator continues
            log.exception("policy %d is not evaluated: an environment failed to make held-out problems", version)
        if not self._slots:
            return None
        log.info("evaluating policy %d on %d held-out problems", version, len(self._slots))
        return ev.EvaluationBegun(version, self._slots)

    def row_of(self, results: Results) -> dict[str, Any]:
        """Return the figures of one evaluation, labelled untrusted."""
        marks: dict[str, list[Mark]] = {}
        for slot, mark in results.marks.items():
            if mark.num_completions:
                marks.setdefault(self._assigner.rule.evaluation_problem(slot).environment, []).append(mark)
        return {
            **sampled_figures(marks, pass_at=self._config.pass_at),
            "eval_problems": len(results.marks),
            "eval_unanswered": results.num_slots - len(results.marks),
            "eval_failed": sum(mark.num_failed for mark in results.marks.values()),
            "eval_by": EVALUATED_BY,
            "eval_trusted": False,
        }

    def as_rows(self, state: State) -> list[dict[str, Any]]:
        """Return the rows for the status: completed evaluations, then those in progress."""
        over = [{"policy_version": version, **self.row_of(results)} for version, results in state.results.items()]
        under_way = [
            {
                "policy_version": version,
                "eval_problems": len(one.accepted),
                "eval_missing": len(one.open) + len(one.held),
            }
            for version, one in state.evaluations.items()
        ]
        return over + under_way

    def _askable(self) -> tuple[int, ...]:
        """Return the slots of the available problems whose prompts fit."""
        slots, num_too_long = [], 0
        for slot in self._assigner.held_out_slots(self._config.problems):
            try:
                self._assigner.problem(slot)
            except LocalError:
                num_too_long += 1
            else:
                slots.append(slot)
        if num_too_long or not slots:
            log.warning(
                "evaluation: %d held-out problems; %d more have prompts that are too long", len(slots), num_too_long
            )
        return tuple(slots)
