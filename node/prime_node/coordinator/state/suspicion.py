"""Evidence against workers, accumulated bundle by bundle in the order of the verdicts.

Accepted and rejected bundles both count. To omit either would be a selection by the outcome, and would break the bound on how
often an honest worker is banned (prime_protocol/evidence.py).
"""

from __future__ import annotations

import math

from prime_node.coordinator.state.records import Ban, LeaseRecord, State, WorkerRecord
from prime_node.coordinator.state.rules import SchedulerRules
from prime_protocol.calibration import NEED_NONE, is_calibrated
from prime_protocol.evidence import BundleEvidence, Weighed, folded, log_evidence
from prime_protocol.verdict import BanKind, RejectReason

ALL_TOGETHER = "this bundle and the worker's earlier ones together are too unlikely for an honest worker"


def weigh(rules: SchedulerRules, worker: WorkerRecord, found: BundleEvidence | None) -> Weighed | None:
    """Add a bundle's evidence to its worker's. Return None if there is none."""
    if found is None or not rules.statistics:
        return None
    if _has_calibration(rules) and not is_calibrated(found):
        worker.calibrated = False
    if not found.sums:
        return None
    worker.evidence = folded(worker.evidence, found.sums, statistics=rules.statistics)
    worker.num_weighed += 1
    return Weighed(
        worker=found.worker,
        validator=found.validator,
        sums=found.sums,
        calibration=found.calibration,
        compared=found.compared,
        number=worker.num_weighed,
        log_evidence=log_evidence(worker.evidence),
    )


def note_accepted(rules: SchedulerRules, worker: WorkerRecord, found: BundleEvidence | None) -> None:
    """Record that a bundle with this evidence was accepted. Only such a bundle shows that the calibration knows the engine."""
    if found is not None and _has_calibration(rules) and is_calibrated(found):
        worker.calibrated = True


def log_after(state: State, worker: str, found: BundleEvidence | None) -> float:
    """Return a worker's evidence with a bundle's added, in nats. Changes nothing."""
    rules, known = state.rules, state.workers.get(worker)
    evidence = {} if known is None else known.evidence
    if found is not None and found.sums and rules.statistics:
        evidence = folded(evidence, found.sums, statistics=rules.statistics)
    return log_evidence(evidence)


def is_proven(rules: SchedulerRules, weighed: Weighed | None) -> bool:
    """Return whether the evidence reaches the run's limit."""
    return weighed is not None and weighed.log_evidence >= math.log(rules.evidence_max)


def ban_after(
    state: State, worker: WorkerRecord, bundle: str, reason: RejectReason, weighed: Weighed | None, at_ms: int
) -> Ban | None:
    """Return the ban that follows from a worker's rejected bundle, if any."""
    if worker.banned is not None:
        return None
    if is_proven(state.rules, weighed):
        assert weighed is not None
        why = (
            f"{weighed.number} bundles together give {weighed.log_evidence:.1f} nats of evidence; an honest worker "
            "reaches n nats with a probability of at most e^-n"
        )
        return Ban(at_ms, state.current_step, why, bundle, BanKind.STATISTICAL)
    if reason.is_dishonest and worker.strikes >= state.rules.strikes_max:
        why = f"{worker.strikes} bundles were rejected, the last one for {reason}"
        return Ban(at_ms, state.current_step, why, bundle, BanKind.HARD)
    return None


def forgive(worker: WorkerRecord, at_ms: int) -> None:
    """Reset a worker's evidence; otherwise the next bundle would ban it again."""
    worker.evidence, worker.num_weighed, worker.forgiven_at_ms = {}, 0, at_ms


def still_counts(worker: WorkerRecord, lease: LeaseRecord) -> bool:
    """Return whether the evidence of a lease's bundle is part of its worker's present evidence."""
    return lease.issued_at_ms >= worker.forgiven_at_ms


def _has_calibration(rules: SchedulerRules) -> bool:
    return not NEED_NONE.issuperset(rules.statistics)
