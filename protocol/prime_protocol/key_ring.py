"""Key rings: which keys may sign what, and who may change that. The root metadata of The Update Framework (TUF 1.0.33, 4.3, 5.3).

The RunSpec's keys are version 0. Version n + 1 names the digest of version n, and is signed by a threshold of version n's root
keys and by a threshold of its own. So whoever holds the join link can follow the chain from the RunSpec on, and whoever holds
fewer root keys than the threshold can add nothing to it.

A ring names the newest manifest of its day, by version and digest, and its trainer keys sign the ones after that. So the
manifests of an outgoing key stay verifiable, and a thief of that key can write neither the future nor another history.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Self

from pydantic import Field, model_validator

from prime_protocol import limits
from prime_protocol.assignment import Count, Step, Text
from prime_protocol.digest import Digest
from prime_protocol.envelope import Envelope, PayloadType, WireModel, parse_json
from prime_protocol.errors import ErrorCode, LimitExceeded, PeerError
from prime_protocol.identity import KeyId

Keys = Annotated[tuple[KeyId, ...], Field(min_length=1, max_length=limits.SIGNATURES_MAX)]


class Role(StrEnum):
    """Whose keys a run names."""

    ROOT = "root"
    COORDINATOR = "coordinator"
    TRAINER = "trainer"
    VALIDATOR = "validator"


class RoleKeys(WireModel):
    """Who may sign what. Key ids, each role at least one; a key may have several roles."""

    root: Keys
    """Sign the RunSpec, all of them, and key rings, as many as the threshold says."""
    coordinator: Keys
    """Signs leases, receipts, batches and timestamps."""
    trainer: Keys
    """Signs manifests."""
    validator: Keys
    """Signs verdicts."""
    root_threshold: int | None = Field(default=None, ge=1, le=limits.SIGNATURES_MAX)
    """How many root keys must sign the next key ring; None: all of them."""
    trainer_threshold: int = Field(default=1, ge=1, le=limits.SIGNATURES_MAX)
    """How many trainer keys must sign a manifest."""

    @model_validator(mode="after")
    def _thresholds_can_be_met(self) -> Self:
        for role in (Role.ROOT, Role.TRAINER):
            if self.threshold(role) > len(set(self.of(role))):
                raise ValueError(f"{role}_threshold is above the number of {role} keys")
        return self

    def of(self, role: Role) -> tuple[str, ...]:
        keys: tuple[str, ...] = getattr(self, role)
        return keys

    def threshold(self, role: Role) -> int:
        """Signatures that a statement of the role needs."""
        if role is Role.ROOT:
            return len(set(self.root)) if self.root_threshold is None else self.root_threshold
        return self.trainer_threshold if role is Role.TRAINER else 1


class ChainPoint(WireModel):
    """A place in the chain of manifests. Example: ChainPoint(policy_version=41, manifest="af13...")."""

    policy_version: Step
    manifest: Digest


class KeyRing(WireModel):
    """The keys of a run from some moment on (envelope type KEY_RING)."""

    run: Digest
    version: int = Field(ge=1, le=limits.KEY_RINGS_MAX)
    previous: Digest
    """Of the ring before; of the RunSpec for version 1."""
    keys: RoleKeys
    """All keys of all roles; one that is missing here has lost its role."""
    published: ChainPoint | None
    """The newest manifest when the ring was made, None before the first. This ring's trainer keys sign the ones after it."""
    created_at_ms: Count
    reason: Text = ""


@dataclass(slots=True)
class KeyChain:
    """A run's rings as far as they are known, each verified. It only grows, and everything that verifies a signature asks it."""

    run: str
    """Digest of the RunSpec."""
    first: RoleKeys
    """The RunSpec's."""
    rings: list[tuple[KeyRing, Envelope]] = field(default_factory=list)

    @property
    def version(self) -> int:
        return len(self.rings)

    @property
    def digest(self) -> str:
        """Of the newest ring; of the RunSpec where there is none."""
        return self.rings[-1][1].digest if self.rings else self.run

    @property
    def current(self) -> RoleKeys:
        return self.rings[-1][0].keys if self.rings else self.first

    @property
    def published(self) -> ChainPoint | None:
        """The newest manifest that the root has named: no honest head is older."""
        return next((ring.published for ring, _ in reversed(self.rings) if ring.published is not None), None)

    def ever(self, role: Role) -> frozenset[str]:
        """Every key that has or had the role."""
        return frozenset(self.first.of(role)).union(*(ring.keys.of(role) for ring, _ in self.rings))

    def is_revoked(self, key_id: str, role: Role) -> bool:
        """It had the role, and has lost it."""
        return key_id in self.ever(role) and key_id not in self.current.of(role)

    def check(self, envelope: Envelope) -> KeyRing:
        """The next ring, if it is one. Raises PeerError.

        (1) size; (2) a threshold of the newest ring's root keys signed it; (3) schema, and this run; (4) it directly follows
        the newest ring; (5) a threshold of its own root keys signed it; (6) its manifest is not older than the last ring's.
        """
        if len(envelope.payload) > limits.KEY_RING_BYTES_MAX:  # (1)
            raise LimitExceeded("KEY_RING_BYTES_MAX", len(envelope.payload), limits.KEY_RING_BYTES_MAX)
        old = self.current
        payload = envelope.verify(PayloadType.KEY_RING, trusted=old.root, threshold=old.threshold(Role.ROOT))  # (2)
        ring = parse_json(payload, KeyRing)  # (3)
        if ring.run != self.run:
            raise PeerError(ErrorCode.WRONG_RUN, f"key ring {ring.version} belongs to run {ring.run[:12]}")
        if (ring.version, ring.previous) != (self.version + 1, self.digest):  # (4)
            raise PeerError(
                ErrorCode.CHAIN_BROKEN,
                f"key ring {ring.version} does not follow ring {self.version} ({self.digest[:12]})",
            )
        envelope.verify(PayloadType.KEY_RING, trusted=ring.keys.root, threshold=ring.keys.threshold(Role.ROOT))  # (5)
        before, named = self.published, ring.published  # (6)
        if before is not None and (
            named is None
            or named.policy_version < before.policy_version
            or (named.policy_version == before.policy_version and named != before)
        ):
            raise PeerError(
                ErrorCode.CHAIN_BROKEN, f"key ring {ring.version} goes back behind policy {before.policy_version}"
            )
        return ring

    def add(self, envelope: Envelope) -> KeyRing:
        """Take the next ring in. Idempotent for the newest one. Raises PeerError."""
        if self.rings and envelope.payload == self.rings[-1][1].payload:
            return self.rings[-1][0]
        ring = self.check(envelope)
        self.rings.append((ring, envelope))
        return ring

    def verify(self, envelope: Envelope, kind: PayloadType, role: Role) -> bytes:
        """The payload, signed by the role's keys of today. Raises PeerError: REVOKED where they were its keys once."""
        return self._verify(envelope, kind, role, self.current)

    def verify_kept(self, envelope: Envelope, kind: PayloadType, role: Role) -> bytes:
        """The payload of something that was verified when it came, and kept: any key that ever had the role. Raises PeerError."""
        return envelope.verify(kind, trusted=self.ever(role))

    def verify_manifest(self, envelope: Envelope, here: ChainPoint) -> None:
        """Signed by those who were to sign the policy at this place of the chain. Raises PeerError: FORK where the root has
        named another manifest for this policy, REVOKED where the signer's time was over or had not begun."""
        keys = self.first
        for ring, _ in self.rings:
            if ring.published is not None and here.policy_version <= ring.published.policy_version:
                if here.policy_version == ring.published.policy_version and here != ring.published:
                    raise PeerError(
                        ErrorCode.FORK,
                        f"policy {here.policy_version} is {here.manifest[:12]}, and the run's root names "
                        f"{ring.published.manifest[:12]}",
                    )
                break
            keys = ring.keys
        self._verify(envelope, PayloadType.MANIFEST, Role.TRAINER, keys)

    def _verify(self, envelope: Envelope, kind: PayloadType, role: Role, keys: RoleKeys) -> bytes:
        trusted = keys.of(role)
        try:
            return envelope.verify(kind, trusted=trusted, threshold=keys.threshold(role))
        except PeerError as error:
            if error.code is not ErrorCode.BAD_SIGNATURE:
                raise
            outdated = self.ever(role).difference(trusted).intersection(one.key_id for one in envelope.signatures)
            if not outdated:
                raise
            raise PeerError(
                ErrorCode.REVOKED, f"signed by {min(outdated)}, which is no {role} key here by key ring {self.version}"
            ) from None
