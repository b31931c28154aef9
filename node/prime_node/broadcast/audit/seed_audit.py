"""Check that a ledger's bundles got the problems and seeds that the run's seed chain requires: step (6) of ledger_audit.py.

The check covers what the receipts say: each accepted bundle was assigned what its step's secret gives. A receipt that differs
from its lease is detected by its worker (worker/receipts.py) and by any holder of the bundle. SPEC.md, section 9, lists what
no ledger shows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from prime_protocol.assigned import Assigned, SeedRule
from prime_protocol.assignment import Problem
from prime_protocol.errors import RemoteError
from prime_protocol.ledger import LedgerHead
from prime_protocol.run_spec import PinnedRun
from prime_protocol.seed_chain import opened_secrets
from prime_protocol.verdict import Receipt

Render = Callable[[Problem], Sequence[int] | None]
"""Function that renders a problem's prompt; None if this machine cannot, or two machines may differ."""


@dataclass(slots=True)
class SeedReport:
    """Bundles of a run with a seed chain, by what could be checked of their seeds."""

    num_checked: int = 0
    """Accepted bundles whose step's secret is open."""
    num_waiting: int = 0
    """Accepted bundles whose step is not over by the head."""
    num_evaluations: int = 0
    """Bundles of held-out problems, whose seeds come from no chain."""
    num_passed_over: int = 0
    """Problems that checked slots skipped: prompts too long, and the curriculum's choice."""
    num_rendered: int = 0
    """Bundles whose prompts were rendered again, and are those of their problems."""


class SeedAudit:
    """Checker that reads one line after another. In a run without a chain it reports nothing."""

    def __init__(self, run: PinnedRun, head: LedgerHead, report: SeedReport, render: Render | None = None) -> None:
        self._run, self._head, self._report, self._render = run, head, report, render
        self._rule = SeedRule(run.digest, run.spec)
        self._secrets: list[bytes] = []
        self._newest_policy = 0
        self._fault = ""
        self._num_wrong, self._first_wrong = 0, ""
        self._num_unlike, self._first_unlike = 0, ""
        chain = run.spec.seed_chain
        if chain is not None and head.secret is not None:
            try:
                self._secrets = opened_secrets(chain, head.secret)
            except RemoteError as error:
                self._fault = error.detail

    def look(self, receipt: Receipt, *, is_first: bool) -> None:
        """Check one line that accepts a bundle, and count the bundle if `is_first`: no earlier line accepts it."""
        chain, assigned = self._run.spec.seed_chain, receipt.assigned
        if chain is None:
            return
        self._newest_policy = max(self._newest_policy, receipt.policy_version)
        number, policy_version = chain.number(receipt.step), receipt.policy_version
        sizes = {"step": receipt.step, "policy_version": policy_version, "num_rollouts": receipt.num_rollouts}
        try:
            if assigned is None:
                self._wrong(receipt, "its receipt lacks the assignment")
                return
            if not any(self._rule.is_trained(slot) for slot, _ in assigned.slots):
                self._rule.check_evaluation(assigned, **sizes)
                self._report.num_evaluations += is_first
                problems = [self._rule.evaluation_problem(slot) for slot, _ in assigned.places()]
                self._look_at_prompts(receipt, assigned, problems, is_first=is_first)
                return
            self._rule.check_slots(assigned, **sizes)  # a false step would choose a secret that is never opened
            if number >= len(self._secrets):
                self._report.num_waiting += is_first
            else:
                self._rule.check_seeds(assigned, self._secrets[number], policy_version=policy_version)
                self._report.num_checked += is_first
                self._report.num_passed_over += sum(assigned.draws) if is_first else 0
                drawn = [self._rule.problem(self._secrets[number], *place) for place in assigned.places()]
                self._look_at_prompts(receipt, assigned, drawn, is_first=is_first)
        except RemoteError as error:
            self._wrong(receipt, error.detail)

    def _look_at_prompts(
        self, receipt: Receipt, assigned: Assigned, problems: Sequence[Problem], *, is_first: bool
    ) -> None:
        """Render the prompts of one line again and compare them with the receipt's, unless one cannot be rendered."""
        if self._render is None or assigned.prompts is None:
            return
        prompts = []
        for problem in problems:
            if (prompt := self._render(problem)) is None:
                return
            prompts.append(prompt)
        try:
            self._rule.check_prompts(assigned, prompts)
        except RemoteError:
            self._num_unlike += 1
            self._first_unlike = self._first_unlike or f"bundle {receipt.bundle[:12]} of step {receipt.step}"
        else:
            self._report.num_rendered += is_first

    def faults(self) -> list[str]:
        """Return what is inconsistent, as text for people."""
        found = [self._fault] if self._fault else []
        chain, spec = self._run.spec.seed_chain, self._run.spec
        if chain is None:
            return found
        # With in-order admission, a policy is published when the trainer has all groups of the steps before it.
        wanted = (
            chain.newest_open(self._newest_policy, max_steps=spec.max_steps) if spec.admission.is_in_order else None
        )
        if wanted is not None and not self._fault and wanted >= len(self._secrets):
            found.append(f"steps before {self._newest_policy} are over, but the head lacks secret number {wanted}")
        if self._num_wrong:
            found.append(
                f"{self._num_wrong} accepted bundles have another assignment than the seed chain gives: {self._first_wrong}"
            )
        if self._num_unlike:
            found.append(
                f"{self._num_unlike} accepted bundles state other prompts than this machine renders for their problems: "
                f"{self._first_unlike}. Another version of an environment or of its data also renders other prompts"
            )
        return found

    def _wrong(self, receipt: Receipt, why: str) -> None:
        self._num_wrong += 1
        self._first_wrong = self._first_wrong or f"bundle {receipt.bundle[:12]} of step {receipt.step}, {why}"
