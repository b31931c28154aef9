"""The result of an audit: one outcome for each check, and all of them together."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from prime_protocol.envelope import Envelope
from prime_protocol.timestamp import Timestamp

TITLES = {
    1: "run",
    2: "signatures",
    3: "manifests",
    4: "chain",
    5: "parts",
    6: "chunks",
    7: "tensors",
    8: "model files",
    9: "freshness",
}


@dataclass(frozen=True, slots=True)
class Check:
    """One check's outcome. Example: Check(5, passed=True, detail="3 parts, 4,096 bytes")."""

    number: int
    passed: bool
    detail: str
    """Finding of the check, or the reason why it failed."""

    @property
    def title(self) -> str:
        """Short name of the check."""
        return TITLES[self.number]


@dataclass(frozen=True, slots=True)
class AuditReport:
    """Findings of an audit."""

    checks: tuple[Check, ...]
    run: str | None
    """Digest of the RunSpec, once it was verified."""
    policy_version: int
    """Version of the head; -1 if none was verified."""
    num_manifests: int
    num_policies: int
    """Policies whose every byte was verified."""
    num_bytes: int
    """Bytes of parts that were hashed."""

    due: tuple[int, ...] = tuple(TITLES)
    """Checks that had to be made; the proof of a single tensor omits two."""
    key_ring: int = 0
    """Version of the newest key ring that was verified; 0 is the RunSpec."""
    timestamp: Timestamp | None = None
    """Coordinator's statement of the newest policy, if there is one."""
    evidence: tuple[Envelope, ...] = ()
    """Signed statements that contradict each other, if that is why the audit failed."""

    @property
    def passed(self) -> bool:
        """Whether every check that was due has passed."""
        return tuple(check.number for check in self.checks if check.passed) == self.due

    @property
    def failure(self) -> Check | None:
        """The check that failed, if any."""
        return next((check for check in self.checks if not check.passed), None)


def date_of(at_ms: int) -> str:
    """Return a claimed signing time as a date. A number that is no date is shown as it is."""
    try:
        return f"{datetime.fromtimestamp(at_ms / 1_000, UTC):%Y-%m-%d %H:%M} UTC"
    except (ValueError, OverflowError, OSError):
        return f"{at_ms} ms"
