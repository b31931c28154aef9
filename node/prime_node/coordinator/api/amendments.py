"""Amendments of the run's calibration: their intake, and what they change in a running coordinator.

Anyone may upload one: its signatures count. An amendment is on disk before its event, and its event is durable before the
answer. After a restart, each one that the journal names must be on disk. One that is on disk alone was uploaded just before
a crash, or written by `prime-node operate amend` while the coordinator did not run; it is in force from the restart on, if the
present root has signed it.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

from prime_node.coordinator.agreement import Agreement
from prime_node.coordinator.api.requests import RequestGate
from prime_node.coordinator.api.statements import TimestampSigner
from prime_node.coordinator.decisions import Decisions
from prime_node.coordinator.state import events as ev
from prime_node.coordinator.state.records import State
from prime_node.ports.clock import Clock
from prime_node.ports.documents import Documents, amendment_name
from prime_protocol import limits
from prime_protocol.amendment import CalibrationAmendment
from prime_protocol.envelope import Envelope, PayloadType, open_envelope
from prime_protocol.errors import ErrorCode, LocalError, RemoteError
from prime_protocol.key_ring import Role
from prime_protocol.run_spec import PinnedRun

log = logging.getLogger(__name__)


async def restore_amendments(run: PinnedRun, published: Documents, state: State) -> None:
    """Read every amendment after a restart. Raise LocalError if one that the journal names is missing or another one."""
    for version in range(run.calibrations.version + 1, limits.CALIBRATIONS_MAX + 1):
        name, is_recorded = amendment_name(version), version <= len(state.calibrations)
        try:
            envelope = open_envelope(await published.read(name))
            if is_recorded and envelope.digest != state.calibrations[version - 1]:
                raise LocalError(f"{name} in the published folder is not the recorded one; restore it from a copy")
            if not is_recorded:
                check_new(envelope, run)
            run.calibrations.add(envelope)
        except KeyError:
            if is_recorded:
                raise LocalError(f"{name} is missing in the published folder; restore it from a copy") from None
            return
        except RemoteError as error:
            raise LocalError(f"{name} in the published folder: {error}; restore it from a copy") from None


@dataclass(slots=True)
class CalibrationIntake:
    """The accepted amendments, and the intake of new ones."""

    run: PinnedRun
    clock: Clock
    decisions: Decisions
    gate: RequestGate
    timestamps: TimestampSigner
    agreement: Agreement
    published: Documents
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Lock held while an amendment is checked and stored."""

    async def take_amendment(self, body: bytes, *, address: str) -> None:
        """Accept the next amendment, signed by the present root. Idempotent for the newest one. Raise RemoteError."""
        now_s, known = self.clock.monotonic_s(), self.run.calibrations
        with self.gate.blame(address, now_s):
            envelope = open_envelope(body)
            if not any(one.key_id in self.run.keys.current.root for one in envelope.signatures):
                self.gate.limiter.by_address.require(address, now_s)
            async with self.turn:
                if known.version and envelope.digest == known.digest:
                    return
                amendment = check_new(envelope, self.run)
                await self.published.write(amendment_name(amendment.version), envelope.to_bytes())
                known.add(envelope)
                self.record_amendments()
        log.warning("calibration %d is in force: %s", amendment.version, pairs_of(amendment))
        await self.timestamps.renew_timestamp()

    def record_amendments(self) -> None:
        """Write the events of amendments that have none, and let the comparison of validators use their classes."""
        recorded = len(self.decisions.state.calibrations)
        for amendment, envelope in self.run.calibrations.amendments[recorded:]:
            self.decisions.decide(ev.CalibrationAdded(version=amendment.version, digest=envelope.digest))
        self.agreement.known_classes = self.run.checks.validator_classes

    def read_amendment(self, version: int) -> Envelope:
        """Return an accepted amendment. Raise RemoteError(NOT_FOUND)."""
        if not 1 <= version <= self.run.calibrations.version:
            newest = self.run.calibrations.version
            raise RemoteError(ErrorCode.NOT_FOUND, f"the newest calibration is {newest}; version 0 is the RunSpec")
        return self.run.calibrations.amendments[version - 1][1]


def check_new(envelope: Envelope, run: PinnedRun) -> CalibrationAmendment:
    """Return a run's next amendment if the present root has signed it. Raise RemoteError."""
    amendment = run.calibrations.check(envelope)
    run.keys.verify(envelope, PayloadType.CALIBRATION, Role.ROOT)  # `check` allows a former root, for newcomers
    return amendment


def pairs_of(amendment: CalibrationAmendment) -> str:
    """Return the pairs that an amendment adds, as text."""
    return ", ".join(f"{pair.worker} judged by {pair.validator}" for pair in amendment.pairs)
