"""Which validators can weigh an audited bundle: those whose engine class makes a calibrated pair with the bundle's.

A worker names its engine class in each bundle. If no pair is calibrated, errors beyond the run's thresholds are no strike
(prime_protocol/verify.py). So a cheat could name such a class, and keep what is not audited. Hence:

- A bundle that no active validator can weigh is audited, whatever the worker's share is.
- An audited bundle goes only to validators that can weigh it, or whose class is unknown yet, if one is active. If another one
  has found it unverifiable, it is handed out again.

A validator's class is known from its first evidence (agreement.py). Until then, and if it has claimed two classes, it counts as
one that may be able to weigh the bundle.
"""

from __future__ import annotations

from dataclasses import dataclass

from prime_node.coordinator.agreement import Agreement
from prime_node.coordinator.state.records import PendingBundle
from prime_protocol.calibration import is_calibrated
from prime_protocol.requests import CheckResultRequest
from prime_protocol.run_spec import PinnedRun
from prime_protocol.verdict import RejectReason


@dataclass(slots=True)
class CalibratedPairs:
    """The calibrated pairs of a run's engine classes, applied to its validators. Times are monotonic."""

    run: PinnedRun
    agreement: Agreement

    def knows(self, engine_class: str) -> bool:
        """Return whether the calibration has a pair for a worker's class; True in a run without a calibration."""
        return self.run.checks.calibration is None or engine_class in self.run.checks.worker_classes

    def is_weighable(self, engine_class: str, now_s: float) -> bool:
        """Return whether an active validator may be able to weigh bundles of this class."""
        if self.run.checks.calibration is None:
            return True
        active = self.agreement.active_others("", now_s)
        return self.knows(engine_class) and any(self._weighs(one, engine_class) is not False for one in active)

    def may_take(self, validator: str, pending: PendingBundle, now_s: float) -> bool:
        """Return whether a validator may judge a bundle, instead of leaving it to one that can weigh it."""
        if not pending.audited or self._can_try(validator, pending.engine_class):
            return True
        return not self.has_better(validator, pending, now_s)

    def has_better(self, validator: str, pending: PendingBundle, now_s: float) -> bool:
        """Return whether another active validator can weigh a bundle, or may be able to because its class is unknown."""
        others = self.agreement.active_others(validator, now_s)
        return any(self._can_try(one, pending.engine_class) for one in others)

    def _can_try(self, validator: str, engine_class: str) -> bool:
        return self.knows(engine_class) and (
            self.agreement.class_of(validator) is None or self._weighs(validator, engine_class) is True
        )

    def _weighs(self, validator: str, engine_class: str) -> bool | None:
        """Return whether a validator's class and this one are a calibrated pair; None if its class is not known."""
        judge, calibration = self.agreement.class_of(validator), self.run.checks.calibration
        if calibration is None:
            return True
        if not judge:
            return None
        return bool(calibration.moments_of(worker=engine_class, validator=judge))


def is_uncalibrated(pending: PendingBundle, result: CheckResultRequest) -> bool:
    """Return whether a validator found a bundle unverifiable because its pair of engine classes is not calibrated."""
    evidence = result.evidence
    return (
        pending.audited
        and result.verdict.reason is RejectReason.UNVERIFIABLE
        and not result.unscored
        and evidence is not None
        and not is_calibrated(evidence)
    )
