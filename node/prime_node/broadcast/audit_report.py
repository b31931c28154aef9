"""What an audit says: one outcome a check, and all of them together."""

from __future__ import annotations

from dataclasses import dataclass

TITLES = {
    1: "run",
    2: "signatures",
    3: "manifests",
    4: "chain",
    5: "parts",
    6: "chunks",
    7: "tensors",
    8: "model files",
}


@dataclass(frozen=True, slots=True)
class Check:
    """One check's outcome. Example: Check(5, passed=True, detail="3 parts, 4,096 bytes")."""

    number: int
    passed: bool
    detail: str
    """What was established, or why it does not hold."""

    @property
    def title(self) -> str:
        return TITLES[self.number]


@dataclass(frozen=True, slots=True)
class AuditReport:
    """What an audit found."""

    checks: tuple[Check, ...]
    run: str | None
    """Digest of the RunSpec, once it was verified."""
    policy_version: int
    """The head; -1 where none was verified."""
    num_manifests: int
    num_policies: int
    """Policies whose every byte was verified."""
    num_bytes: int
    """Bytes of parts that were hashed."""

    due: tuple[int, ...] = tuple(TITLES)
    """The checks that had to be made; the proof of a single tensor leaves two out."""

    @property
    def passed(self) -> bool:
        return tuple(check.number for check in self.checks if check.passed) == self.due

    @property
    def failure(self) -> Check | None:
        return next((check for check in self.checks if not check.passed), None)
