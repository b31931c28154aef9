"""Amendments: pairs of engine classes that a run's root adds to the run's calibration during the run.

The RunSpec's calibration is version 0. Version n + 1 names the digest of version n. A threshold of root keys signs it. An
amendment only adds pairs that no earlier version has. So the moments of a pair never change, and a bundle that was judged
under version n is judged alike under version n again, whatever is added later.

The set of statistics and their numbers of lambdas stay those of the RunSpec, because a worker's evidence continues. So a
run whose RunSpec has no calibration stays without one. The moments must be measured on trusted samples: an honest
worker's evidence has its bound only if they do not depend on the worker's own tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from pydantic import Field, ValidationError

from prime_protocol import limits
from prime_protocol.assignment import Count, Text
from prime_protocol.calibration import Calibration, PairMoments
from prime_protocol.digest import Digest
from prime_protocol.envelope import Envelope, PayloadType, WireModel, parse_json
from prime_protocol.errors import ErrorCode, LimitExceeded, RemoteError
from prime_protocol.key_ring import KeyChain, Role


class CalibrationAmendment(WireModel):
    """Pairs of engine classes that are added to a run's calibration (envelope type CALIBRATION)."""

    run: Digest
    version: int = Field(ge=1, le=limits.CALIBRATIONS_MAX)
    previous: Digest
    """Digest of the previous amendment; of the RunSpec for version 1."""
    pairs: tuple[PairMoments, ...] = Field(min_length=1, max_length=limits.CALIBRATION_PAIRS_MAX)
    """Pairs that no earlier version has."""
    created_at_ms: Count
    note: Text = ""
    """Note on how and where they were measured."""


@dataclass(slots=True)
class CalibrationChain:
    """Chain of a run's known amendments, each verified. It only grows."""

    keys: KeyChain
    first: Calibration | None
    """Calibration of the RunSpec."""
    amendments: list[tuple[CalibrationAmendment, Envelope]] = field(default_factory=list)
    _extended: list[Calibration] = field(default_factory=list)
    """Calibration after each amendment."""

    @property
    def version(self) -> int:
        """Version of the newest amendment; 0 is the RunSpec's calibration."""
        return len(self.amendments)

    @property
    def digest(self) -> str:
        """Digest of the newest amendment; of the RunSpec if there is none."""
        return self.amendments[-1][1].digest if self.amendments else self.keys.run

    def at(self, version: int) -> Calibration | None:
        """Return the calibration of a version; None if the run has none. Raises RemoteError for an unknown version."""
        if not 0 <= version <= self.version:
            raise RemoteError(
                ErrorCode.MALFORMED, f"calibration {version} is not known; the newest one is {self.version}"
            )
        return self._extended[version - 1] if version else self.first

    def check(self, envelope: Envelope) -> CalibrationAmendment:
        """Return the next amendment, if the envelope holds it. Raises RemoteError.

        (1) size; (2) a threshold of one key ring's root keys signed it, and this ring is not older than the one of the
        previous amendment; (3) schema and run; (4) it directly follows the newest amendment; (5) the run has a
        calibration, and the calibration has all its statistics; (6) no pair is known already, and together the pairs are
        a valid calibration.
        """
        if len(envelope.payload) > limits.CALIBRATION_BYTES_MAX:  # (1)
            raise LimitExceeded("CALIBRATION_BYTES_MAX", len(envelope.payload), limits.CALIBRATION_BYTES_MAX)
        oldest = self._ring_of(self.amendments[-1][1]) if self.amendments else 0
        self._ring_of(envelope, oldest)  # (2)
        amendment = parse_json(envelope.payload, CalibrationAmendment)  # (3)
        if amendment.run != self.keys.run:
            raise RemoteError(
                ErrorCode.WRONG_RUN, f"calibration {amendment.version} belongs to run {amendment.run[:12]}"
            )
        if (amendment.version, amendment.previous) != (self.version + 1, self.digest):  # (4)
            raise RemoteError(
                ErrorCode.CHAIN_BROKEN,
                f"calibration {amendment.version} does not follow calibration {self.version} ({self.digest[:12]})",
            )
        self._with(amendment)  # (5), (6)
        return amendment

    def add(self, envelope: Envelope) -> CalibrationAmendment:
        """Add the next amendment. Idempotent for the newest one. Raises RemoteError."""
        if self.amendments and envelope.payload == self.amendments[-1][1].payload:
            return self.amendments[-1][0]
        amendment = self.check(envelope)
        self._extended.append(self._with(amendment))
        self.amendments.append((amendment, envelope))
        return amendment

    def copy(self) -> CalibrationChain:
        """Return a chain that grows apart from this one."""
        return replace(self, amendments=[*self.amendments], _extended=[*self._extended])

    def _ring_of(self, envelope: Envelope, oldest: int = 0) -> int:
        """Return the newest key ring whose root keys signed an amendment, from version `oldest` on. Raises RemoteError."""
        rings = [self.keys.first, *(ring.keys for ring, _ in self.keys.rings)]
        for version in range(len(rings) - 1, oldest, -1):
            try:
                envelope.verify(
                    PayloadType.CALIBRATION, trusted=rings[version].root, threshold=rings[version].threshold(Role.ROOT)
                )
            except RemoteError as error:
                if error.code is not ErrorCode.BAD_SIGNATURE:
                    raise
            else:
                return version
        envelope.verify(
            PayloadType.CALIBRATION, trusted=rings[oldest].root, threshold=rings[oldest].threshold(Role.ROOT)
        )
        return oldest

    def _with(self, amendment: CalibrationAmendment) -> Calibration:
        """Return the calibration with an amendment's pairs. Raises RemoteError(MALFORMED)."""
        known = self.at(self.version)
        if known is None:
            raise RemoteError(ErrorCode.MALFORMED, "the run has no calibration that could be amended")
        others = {name for pair in amendment.pairs for name in pair.moments}.difference(known.statistics)
        if others:
            raise RemoteError(
                ErrorCode.MALFORMED,
                f"calibration {amendment.version} has the statistic {min(others)}, which the run does not use",
            )
        try:
            return Calibration.model_validate(dict(known) | {"pairs": (*known.pairs, *amendment.pairs)})
        except ValidationError as error:
            raise RemoteError(
                ErrorCode.MALFORMED, f"calibration {amendment.version}: {error.errors()[0]['msg']}"
            ) from None
