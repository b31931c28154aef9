"""What a re-execution finds of each step, and the exit codes: none of them is one of cli/outcome.py with another meaning.

Evidence is a copy, in the layout of a published folder, of all that a re-execution read of a source. A third party gives the
folder to `prime-node replay` or `prime-node evidence verify`, and repeats the step offline.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from prime_node.files import write_durably
from prime_node.inside import place
from prime_node.ports.documents import (
    HEAD_NAME,
    RUN_NAME,
    TIMESTAMP_NAME,
    amendment_name,
    batch_name,
    blob_name,
    key_ring_name,
    manifest_name,
)
from prime_node.ports.transport import ReplaySource
from prime_protocol.envelope import Envelope
from prime_protocol.errors import PrimeError
from prime_protocol.requests import BundleRequest

FINDING = "replay-finding.json"
"""File of what was found, in the folder of the evidence."""


@dataclass
class RecordedSource:
    """Implementation of ports.transport.ReplaySource over another one, of which it keeps every answer in `folder`."""

    source: ReplaySource
    folder: Path
    _written: set[str] = field(default_factory=set)

    async def run_spec(self) -> Envelope:
        """Return and keep the RunSpec."""
        return self._kept(RUN_NAME, await self.source.run_spec())

    async def head(self, *, wait_s: float = 0.0) -> Envelope | None:
        """Return and keep the newest manifest."""
        envelope = await self.source.head(wait_s=wait_s)
        return None if envelope is None else self._kept(HEAD_NAME, envelope)

    async def manifest(self, policy_version: int) -> Envelope:
        """Return and keep a manifest."""
        return self._kept(manifest_name(policy_version), await self.source.manifest(policy_version))

    async def public_batch(self, step: int, part: int) -> Envelope:
        """Return and keep a batch."""
        return self._kept(batch_name(step, part), await self.source.public_batch(step, part))

    async def key_ring(self, version: int) -> Envelope:
        """Return and keep a key ring."""
        return self._kept(key_ring_name(version), await self.source.key_ring(version))

    async def calibration(self, version: int) -> Envelope:
        """Return and keep an amendment of the calibration."""
        return self._kept(amendment_name(version), await self.source.calibration(version))

    async def timestamp(self) -> Envelope:
        """Return and keep the timestamp."""
        return self._kept(TIMESTAMP_NAME, await self.source.timestamp())

    async def blob(self, digest: str, *, start: int = 0, end: int | None = None) -> bytes:
        """Return and keep a blob; a range that does not begin at its first byte is not kept."""
        data = await self.source.blob(digest, start=start, end=end)
        if start == 0:
            self._write(blob_name(digest), data)
        return data

    async def bundle(self, request: BundleRequest) -> bytes:
        """Return and keep a bundle that only auditors may read, where a published folder has public ones."""
        data = await self.source.bundle(request)
        self._write(blob_name(request.bundle), data)
        return data

    def finish(self, fields: Mapping[str, Any]) -> None:
        """Write what was found."""
        write_durably(place(self.folder, FINDING), json.dumps(fields, indent=1).encode())

    def _kept(self, name: str, envelope: Envelope) -> Envelope:
        self._write(name, envelope.to_bytes())
        return envelope

    def _write(self, name: str, data: bytes) -> None:
        if name not in self._written:
            path = place(self.folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            self._written.add(name)


class ReplayOutcome(StrEnum):
    """Outcome for one step. The worst one of all steps is that of the command."""

    EXACT = "exact"
    """The step, re-executed, gives the published policy bit for bit; or every check asked for holds."""
    TOLERATED = "within tolerance"
    """Other arithmetic moved the weights by the published step, up to the tolerance of its class."""
    OTHER_NUMERICS = "other numerics"
    """The result differs, and so does this machine's arithmetic: nothing follows."""
    WITHHELD = "withheld"
    """The source lacks what the RunSpec promises, or sends other bytes."""
    REFUSED = "refused"
    """The run promises no re-execution, or this machine cannot do it."""
    DIFFERS = "does not follow"
    """The published policy does not follow, or a statement contradicts another."""


class ReplayFault(StrEnum):
    """What does not follow. The names are part of --json, and stay."""

    WEIGHTS = "weights"
    """The policy, or the training state after it: the trainer did something else than it states."""
    REWARD = "reward"
    """A prompt or a reward of a batch."""
    BATCH = "batch"
    """A batch that lacks groups, has one twice, or is not the one that the policy was computed from."""
    LEARNING_RATE = "learning_rate"
    """A stated learning rate, multiplier or number of optimizer steps."""
    STATE = "state"
    """A training state from which the steps are to begin: it is not that of the policy, the run or the recipe."""
    LEDGER = "ledger"
    """The ledger, or a group of a batch that is not in it."""
    STATEMENT = "statement"
    """Another signed statement: a manifest, its date, a bundle."""


EXIT_CODES = {
    ReplayOutcome.EXACT: 0,
    ReplayOutcome.OTHER_NUMERICS: 3,
    ReplayOutcome.REFUSED: 4,
    ReplayOutcome.TOLERATED: 7,
    ReplayOutcome.WITHHELD: 8,
}
FAULT_CODES = {
    ReplayFault.WEIGHTS: 1,
    ReplayFault.STATEMENT: 1,
    ReplayFault.REWARD: 9,
    ReplayFault.BATCH: 10,
    ReplayFault.LEARNING_RATE: 11,
    ReplayFault.STATE: 12,
    ReplayFault.LEDGER: 13,
}
"""Exit codes where something does not follow."""


class Withheld(PrimeError):
    """The source lacks something that the RunSpec promises."""


class Unfaithful(PrimeError):
    """Signed statements contradict each other, or what they must follow from."""

    def __init__(self, detail: str, fault: ReplayFault = ReplayFault.STATEMENT) -> None:
        super().__init__(detail)
        self.fault = fault


@dataclass(slots=True)
class StepFinding:
    """What was found of one step."""

    step: int
    outcome: ReplayOutcome = ReplayOutcome.EXACT
    fault: ReplayFault | None = None
    """What does not follow; None unless the outcome is DIFFERS."""
    detail: str = ""
    established: list[str] = field(default_factory=list)
    """What holds, as text for people."""
    seconds: float = 0.0

    def fail(self, outcome: ReplayOutcome, detail: str, fault: ReplayFault = ReplayFault.WEIGHTS) -> None:
        """Note why the step does not pass. A worse outcome replaces a better one; of equal ones the first counts."""
        if severity(outcome) > severity(self.outcome):
            self.outcome, self.detail = outcome, detail
            self.fault = fault if outcome is ReplayOutcome.DIFFERS else None


@dataclass(slots=True)
class ReplayReport:
    """Result of a re-execution."""

    run: str
    pinned: bool
    """Whether the caller named the run."""
    numerics: dict[str, str] = field(default_factory=dict)
    """Arithmetic that the manifests commit to, and this machine's."""
    steps: list[StepFinding] = field(default_factory=list)
    options: dict[str, bool] = field(default_factory=dict)
    """What was asked for, by the fields of the command's options. A third party repeats the same."""
    notes: list[str] = field(default_factory=list)
    """What was not checked, as text for people."""

    @property
    def outcome(self) -> ReplayOutcome:
        """The worst outcome of all steps."""
        return max((one.outcome for one in self.steps), key=severity, default=ReplayOutcome.EXACT)

    @property
    def fault(self) -> ReplayFault | None:
        """What does not follow in the first step that does not."""
        return next((one.fault for one in self.steps if one.fault is not None), None)

    @property
    def exit_code(self) -> int:
        """The exit code of the command."""
        if self.outcome is ReplayOutcome.DIFFERS:
            return FAULT_CODES[self.fault or ReplayFault.WEIGHTS]
        return EXIT_CODES[self.outcome]

    def end(self, error: Withheld | Unfaithful, step: int) -> StepFinding:
        """Note what ended the re-execution in the step that it was in, or in `step` if it was in none."""
        if not self.steps or self.steps[-1].seconds >= 0.0:
            self.steps.append(StepFinding(step))
        last = self.steps[-1]
        last.seconds = max(0.0, last.seconds)
        if isinstance(error, Unfaithful):
            last.fail(ReplayOutcome.DIFFERS, str(error), error.fault)
        else:
            last.fail(ReplayOutcome.WITHHELD, str(error))
        return last

    def as_fields(self) -> dict[str, Any]:
        """Return the report for --json."""
        ok = self.outcome in (ReplayOutcome.EXACT, ReplayOutcome.TOLERATED)
        return {"ok": ok, "outcome": self.outcome, "fault": self.fault, "exit_code": self.exit_code, **asdict(self)}


def severity(outcome: ReplayOutcome) -> int:
    """Return the rank of an outcome: that of its place in the class, the worst last."""
    return list(ReplayOutcome).index(outcome)


def listed(faults: Sequence[str], shown: int = 3) -> str:
    """Return the first faults as text, and how many more there are."""
    more = f"; and {len(faults) - shown} more" if len(faults) > shown else ""
    return "; ".join(faults[:shown]) + more
